"""What a step says besides its loss: numbers that are not what they were when a mask, an order or a
scale is another.

Shape suffixes as in ``megatron.step.batch``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator

import numpy as np

from openrlhf_ext.megatron.step.batch import SequenceBatch


class ExampleGauges:
    """Of the examples of a run, on its rank 0. ``trained``: which of them were trained in this
    pass, None: none, or it is not known. A checkpoint keeps it: the order is computed anew when a
    run goes on, so a wrong place in it shows."""

    def __init__(
        self,
        examples: SequenceBatch,
        per_epoch: int,
        ends: Collection[int],
        trained: np.ndarray | None = None,
    ) -> None:
        self._examples, self._per_epoch, self._ends = examples, per_epoch, list(ends)
        self.trained = np.zeros(len(examples), np.uint8) if trained is None else trained.copy()
        # the same in every step, and with any seed: what the template, the cut or the masks made of
        # the records
        self._sizes = {
            "examples/length_mean": float(examples.lengths_B.double().mean()),
            "examples/trained_mean": float(examples.counts_B.double().mean()),
        }

    def step(self, step: int, rows: list[int]) -> dict[str, float]:
        """Of the examples that are trained after so many steps."""
        if step % self._per_epoch == 0:
            self.trained[:] = 0
        again = int(np.count_nonzero(self.trained[rows])) + len(rows) - len({*rows})
        self.trained[rows] = 1
        return {**self._sizes, "examples/repeated": float(again)} | _ended(
            self._examples.select(rows), self._ends
        )


def _ended(of: SequenceBatch, ends: list[int]) -> dict[str, float]:
    """A template may write something behind an end token, which belongs to an answer that is not
    the last."""
    lengths_R = np.diff(of.ranges_R2.numpy()).ravel()
    lengths_R = lengths_R[lengths_R > 0]
    if not len(lengths_R):
        return {}
    ends_N = np.isin(of.targets_N.numpy(), ends)
    return {
        "answers/ended": float(
            np.logical_or.reduceat(ends_N, np.cumsum(lengths_R) - lengths_R).mean()
        )
    }


def known_fraction(held_out: SequenceBatch, examples: SequenceBatch) -> float:
    """Share of the held-out examples that are among those that are trained on."""
    trained = {*_digests(examples)}
    return sum(digest in trained for digest in _digests(held_out)) / len(held_out)


def _digests(of: SequenceBatch) -> Iterator[bytes]:
    rows = np.split(of.tokens_M.numpy(), of.sequences.bounds[1:-1])
    return (hashlib.sha256(row.tobytes()).digest()[:16] for row in rows)
