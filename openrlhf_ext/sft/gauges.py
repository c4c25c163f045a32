"""What a step says besides its loss: numbers that are not what they were when a mask, an order or a scale is another.

Shape suffixes as in ``megatron.step.batch``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from itertools import pairwise

import numpy as np

from openrlhf_ext.checkpoints import CheckpointError
from openrlhf_ext.megatron.step.batch import SequenceBatch


class ExampleGauges:
    """Of the examples of a run, on its rank 0. ``trained``: how often each of them was trained in this pass, which a
    checkpoint keeps: the order is computed anew when a run goes on, so that a wrong place in it shows."""

    def __init__(self, examples: SequenceBatch, per_epoch: int, ends: Collection[int]) -> None:
        self._examples, self._per_epoch, self._ends = examples, per_epoch, list(ends)
        self.trained = np.zeros(len(examples), np.uint8)
        # the same in every step, and with any seed: what the template, the cut or the masks made of the records
        self._sizes = {
            "examples/length_mean": float(examples.lengths_B.double().mean()),
            "examples/trained_mean": float(examples.counts_B.double().mean()),
        }

    def restore(self, trained: np.ndarray | None) -> None:
        """None: of a checkpoint that does not have it; what is trained again is not counted in its pass. Raises
        CheckpointError: it is of other examples."""
        if trained is not None and trained.shape != self.trained.shape:
            raise CheckpointError(f"a checkpoint tells of {len(trained)} examples, there are {len(self.trained)}")
        if trained is not None:
            self.trained = trained.copy()

    def step(self, step: int, rows: list[int]) -> dict[str, float]:
        """Of the examples that are trained after so many steps."""
        if step % self._per_epoch == 0:
            self.trained[:] = 0
        again = int(np.count_nonzero(self.trained[rows])) + len(rows) - len({*rows})
        self.trained[rows] = 1
        return {**self._sizes, "examples/repeated": float(again)} | _ended(self._examples.select(rows), self._ends)


def _ended(of: SequenceBatch, ends: list[int]) -> dict[str, float]:
    """A template may write something behind an end token, which belongs to an answer that is not the last."""
    starts_R, stops_R = np.split(of.ranges_R2.numpy(), 2, axis=1)
    lengths_R = (stops_R - starts_R).ravel()
    lengths_R = lengths_R[lengths_R > 0]
    if not len(lengths_R):
        return {}
    ends_N = np.isin(of.targets_N.numpy(), ends)
    return {"answers/ended": float(np.logical_or.reduceat(ends_N, np.cumsum(lengths_R) - lengths_R).mean())}


def known_fraction(held_out: SequenceBatch, examples: SequenceBatch) -> float:
    """Share of the held-out examples that are among those that are trained on."""
    trained = {*_digests(examples)}
    return sum(digest in trained for digest in _digests(held_out)) / len(held_out)


def _digests(of: SequenceBatch) -> Iterator[bytes]:
    tokens = of.tokens_M.numpy()
    return (hashlib.sha256(tokens[start:stop]).digest()[:16] for start, stop in pairwise(of.sequences.bounds.tolist()))
