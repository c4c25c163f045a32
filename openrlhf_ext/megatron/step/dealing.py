"""Assigns rows to optimizer steps, data-parallel ranks, and micro-batches.

Rows with the same prompt cost less together, because a pack computes a prompt once
(``step.batch``). They are dealt along their prompts if that takes less time than the best balance
of single rows.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from openrlhf_ext.megatron.step.batch import SequenceBatch


def sequence_costs(lengths: Sequence[int], attention_length: float = math.inf) -> list[float]:
    """Relative computing time: ``length * (1 + length / attention_length)`` (``ModelShape``).

    With an infinite ``attention_length`` only tokens count.
    """
    return [length * (1.0 + length / attention_length) for length in lengths]


@dataclass(frozen=True)
class RowCosts:
    """Cost model of rows: see ``sequence_costs``; ``shares_prompts``: packs compute the prompt of
    several rows once."""

    attention_length: float = math.inf
    shares_prompts: bool = False

    def of(self, batch: SequenceBatch, rows: Sequence[int]) -> np.ndarray:
        """Relative computing time of each of these rows, in this order in one pack."""
        costs = np.array(
            sequence_costs(batch.lengths_B[list(rows)].tolist(), self.attention_length)
        )
        return costs - batch.repeated(rows) if self.shares_prompts else costs

    def along_prompts(self, batch: SequenceBatch) -> list[int] | None:
        """The rows in an order that puts rows of a prompt next to each other; None if that saves
        nothing."""
        tokens_B, first_B = batch.prompts
        again = first_B != np.arange(len(batch))
        if not self.shares_prompts or not tokens_B[again].any():
            return None
        return np.argsort(first_B, kind="stable").tolist()


TOKENS = RowCosts()  # each row costs its tokens


def deal_rows(batch: SequenceBatch, parts: int, costs: RowCosts) -> list[list[int]]:
    """Each data-parallel rank's rows, at about equal cost.

    Rows are dealt along their prompts if the rank with the most work then has less than with
    ``balance_rows``.
    """
    bins = balance_rows(batch.lengths_B, parts, costs.attention_length)
    if (order := costs.along_prompts(batch)) is None:
        return bins
    each = costs.of(batch, order)
    part = ((each.cumsum() - each / 2) * (parts / each.sum())).astype(int)
    along = [
        [row for row, own in zip(order, part, strict=True) if own == number]
        for number in range(parts)
    ]
    return min((along, bins), key=lambda bins: max(costs.of(batch, rows).sum() for rows in bins))


@dataclass(frozen=True)
class Deal:
    """One data-parallel rank's rows of the rollout batch: ``steps[i]`` are its rows in optimizer
    step i."""

    steps: list[list[int]]

    @property
    def rows(self) -> list[int]:
        """All rows, in the rank's order."""
        return [row for step in self.steps for row in step]


def deal(
    batch: SequenceBatch, chunks: Sequence[slice], data_parallel_size: int, costs: RowCosts = TOKENS
) -> list[Deal]:
    """Each data-parallel rank's rows. The rows of every optimizer step are dealt at about equal
    cost (``deal_rows``)."""
    ranks = [Deal([]) for _ in range(data_parallel_size)]
    for chunk in chunks:
        for rank, part in zip(
            ranks, deal_rows(batch.select(chunk), data_parallel_size, costs), strict=True
        ):
            rank.steps.append([chunk.start + row for row in part])
    return ranks


def group_chunks(samples: int, group_size: int, mini_batch_size: int) -> Iterator[slice]:
    """Rows of each optimizer step: whole groups, ``mini_batch_size`` samples; the last one may be
    smaller."""
    per_step = max(1, mini_batch_size // group_size) * group_size
    for start in range(0, samples, per_step):
        yield slice(start, min(start + per_step, samples))


def mini_batch_order(groups: int, per_step: int, seed: int, batch: int) -> list[int]:
    """The order in which the sorted groups of the run's ``batch``-th batch are cut into optimizer
    steps of ``per_step`` groups.

    A permutation, so that no step collects the prompts with a similar start; the identity if there
    is only one step.
    """
    order = list(range(groups))
    if groups > per_step:
        random.Random(f"{seed} {batch}").shuffle(order)
    return order


@dataclass(frozen=True)
class Sizes:
    """How much of a micro-batch's capacity each row takes, and how much less if another row in it
    has the same prompt."""

    rows: Sequence[int]
    repeated: Sequence[int]
    capacity: int


def plan_micro_batches(
    batch: SequenceBatch, sizes: Sizes, at_least: int, costs: RowCosts, stages: int
) -> list[list[int]]:
    """``micro_batches``, or ``micro_batches_along`` the prompts if a pipeline of ``stages`` stages
    takes less time with them."""
    each = sequence_costs(batch.lengths_B.tolist(), costs.attention_length)
    plan = micro_batches(each, sizes.rows, sizes.capacity, at_least)
    if (order := costs.along_prompts(batch)) is None:
        return plan
    along = micro_batches_along(order, batch.prompts.first_B.tolist(), sizes, at_least)

    def cost(rows: Sequence[int]) -> float:
        return float(costs.of(batch, rows).sum())

    def seconds(plan: Sequence[Sequence[int]]) -> float:
        each = [cost(rows) for rows in plan]
        return sum(each) + (stages - 1) * max(each)

    best = plan if seconds(plan) <= seconds(along) else along
    return sorted(best, key=cost, reverse=True)


def micro_batches_along(
    order: Sequence[int], prompt_of: Sequence[int], sizes: Sizes, at_least: int = 1
) -> list[list[int]]:
    """Neighbors in ``order``, along the prompts of the rows, in micro-batches that are about
    equally full.

    The number of micro-batches is the smallest possible, or ``at_least`` if that is larger.
    """
    count = max(at_least, len(_runs(order, prompt_of, sizes, sizes.capacity)))
    least, most = 1, sizes.capacity
    while least < most:
        middle = (least + most) // 2
        if len(_runs(order, prompt_of, sizes, middle)) <= count:
            most = middle
        else:
            least = middle + 1
    bins = _runs(order, prompt_of, sizes, most)
    return bins + [[] for _ in range(at_least - len(bins))]


def _runs(
    order: Sequence[int], prompt_of: Sequence[int], sizes: Sizes, capacity: int
) -> list[list[int]]:
    runs: list[list[int]] = []
    filled, prompt = math.inf, -1
    for row in order:
        size = sizes.rows[row] - (sizes.repeated[row] if prompt_of[row] == prompt else 0)
        if filled + size > capacity:
            runs.append([])
            filled, size = 0, sizes.rows[row]
        runs[-1].append(row)
        filled, prompt = filled + size, prompt_of[row]
    return runs


def balance_rows(
    lengths_B: Tensor, parts: int, attention_length: float = math.inf
) -> list[list[int]]:
    """Deals rows to ``parts`` data-parallel ranks so that they compute for about the same time;
    some may stay empty.

    The longest rows go first, each to the rank with the least work so far: never worse than 4/3 of
    the optimum (Graham 1969).
    """
    costs = sequence_costs(lengths_B.tolist(), attention_length)
    bins = _deal(costs, [0] * len(costs), 1, parts)
    assert bins is not None, "rows of size 0 fit everywhere"
    return bins


def micro_batches(
    costs: Sequence[float], sizes: Sequence[int], capacity: int, at_least: int = 1
) -> list[list[int]]:
    """Row indices of each micro-batch: about as few as the capacity allows, of about equal cost,
    the costliest first.

    ``sizes``: how much of a micro-batch's capacity each row takes (tokens, or 1 to count rows); a
    row larger than the capacity gets its own micro-batch. ``at_least``: minimum number of
    micro-batches; some are empty if there are few rows.
    """
    # Lower bound: rows that cannot share a micro-batch with each other, and the total size.
    alone = sum(2 * size > capacity for size in sizes)
    least = max(at_least, alone, -(-sum(min(size, capacity) for size in sizes) // capacity))
    bins, count, step = _deal(costs, sizes, capacity, least), least, 1 + least // 256
    while bins is None:
        least, count, step = count + 1, count + step, 2 * step
        bins = _deal(costs, sizes, capacity, count)
    while least < count:
        middle = (least + count) // 2
        fewer = _deal(costs, sizes, capacity, middle)
        if fewer is None:
            least = middle + 1
        else:
            bins, count = fewer, middle
    return sorted(bins, key=lambda rows: -sum(costs[row] for row in rows))


def _deal(
    costs: Sequence[float], sizes: Sequence[int], capacity: int, count: int
) -> list[list[int]] | None:
    """Rows in descending order of cost, each into the cheapest of ``count`` bins with room; None if
    a row finds no room.

    Bins without room wait in a second heap, by their fill, until a smaller row comes: sizes mostly
    fall with the costs.
    """
    bin_of, loads, filled = [0] * len(costs), [0.0] * count, [0] * count
    open_bins = [(0.0, i) for i in range(count)]  # heap of (cost so far, bin)
    tight: list[tuple[int, int]] = []  # heap of (filled, bin)
    for row in sorted(range(len(costs)), key=lambda row: -costs[row]):
        most = capacity - sizes[row]
        while tight and tight[0][0] <= most:
            _, chosen = heapq.heappop(tight)
            heapq.heappush(open_bins, (loads[chosen], chosen))
        while open_bins and filled[open_bins[0][1]] > max(most, 0):  # an empty bin takes any row
            _, chosen = heapq.heappop(open_bins)
            heapq.heappush(tight, (filled[chosen], chosen))
        if not open_bins:
            return None
        chosen = open_bins[0][1]
        bin_of[row] = chosen
        loads[chosen] += costs[row]
        filled[chosen] += sizes[row]
        heapq.heapreplace(open_bins, (loads[chosen], chosen))
    bins: list[list[int]] = [[] for _ in range(count)]
    for row, chosen in enumerate(bin_of):
        bins[chosen].append(row)
    return bins
