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
        of = self._examples.select(rows)
        last = of.responses.bounds[1:][of.counts_B.numpy() > 0] - 1
        ended = np.isin(of.targets_N.numpy()[last], self._ends)
        again = int(np.count_nonzero(self.trained[rows])) + len(rows) - len({*rows})
        self.trained[rows] = 1
        gauges = {"examples/repeated": float(again)}
        return gauges | ({"examples/ended": float(ended.mean())} if len(ended) else {})


def known_fraction(held_out: SequenceBatch, examples: SequenceBatch) -> float:
    """Share of the held-out examples that are among those that are trained on."""
    trained = {*_digests(examples)}
    return sum(digest in trained for digest in _digests(held_out)) / len(held_out)


def _digests(of: SequenceBatch) -> Iterator[bytes]:
    tokens = of.tokens_M.numpy()
    return (hashlib.sha256(tokens[start:stop]).digest()[:16] for start, stop in pairwise(of.sequences.bounds.tolist()))
