"""How a call is cut into tiles of logits that fit the workspace, and its hidden states block by
block.

A block of tokens meets one slice of the vocabulary after the other, so that the workspace neither
grows with the number of tokens nor with the vocabulary, and the products keep shapes that run at
full speed. Under sequence parallelism only the wanted hidden states travel, one block ahead of the
computation; their gradients are summed over the vocabulary shards and go back to their owners one
block behind it. A block takes from every rank in proportion to what that rank holds, so that little
is padded, and the order of processing differs from the caller's.

Shape suffixes: N = tokens of the call, L = tokens that a rank holds, B = tokens of a block, R =
ranks times the most tokens that one of them has in a block, H = hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf_ext.head.statistics import VocabularyShard

# Larger blocks win nothing measurable on a CPU; on a GPU they cost memory for each block's hidden
# states.
_MOST_TOKENS = 2048
# On a CPU a tile of the statistics, which go over it several times, should stay in the cache: 2^21
# fp32 logits are
# 8 MiB. Gradients go over it less often, and their three products are faster on wider slices.
_CPU_TILE_ELEMENTS = 1 << 21
_CPU_GRADIENT_TILE_ELEMENTS = 1 << 23
# A narrower slice, a smaller block, or a one-pass head on fewer tokens would make the products
# slow. A block's gradient of the weight reads and writes V H fp32 numbers, which on a GPU takes
# longer than the product below ~1,000 tokens.
_FEWEST_COLUMNS = 128
_FEWEST_TOKENS = 16
_FEWEST_ONE_PASS_TOKENS = {"cpu": 128, "cuda": 1024}
_ONE_PASS_COLUMNS = {"cpu": 4096, "cuda": 8192}


@dataclass(frozen=True)
class TileCosts:
    """Bytes of workspace that a tile takes."""

    logit: int  # for each logit of a tile
    kept: int  # for each logit of a block that is kept for all slices (one-pass heads)
    token: int  # for each token of a block (copies of its hidden state, its gradient)
    column: int  # for each column of a slice (a widened copy of the weight)
    part: int = 0  # for each slice of a block that is kept, and token (its statistics)


@dataclass(frozen=True)
class TilePlan:
    """Tokens of a block (at most) and columns of a slice (at most); ``keeps``: all slices of a
    block are kept."""

    tokens: int
    columns: int
    keeps: bool = False

    def slices(self, true_rows: int) -> list[slice]:
        return [
            slice(first, min(first + self.columns, true_rows))
            for first in range(0, true_rows, self.columns)
        ]


def tile_plan(
    tokens: int,
    rows: int,
    costs: TileCosts,
    workspace_bytes: int,
    device_type: str,
    *,
    statistics: bool = True,
) -> TilePlan:
    """Blocks and slices for a head that forgets a tile before it makes the next, bounded by the
    workspace down to 16 tokens times 128 columns. ``tokens`` and ``rows`` are of the whole call and
    of a shard, padding included, so that every rank makes the same plan. ``statistics``: the tiles
    are not for gradients alone."""
    block = min(
        tokens, _MOST_TOKENS, max(_FEWEST_TOKENS, workspace_bytes // (2 * max(1, costs.token)))
    )
    block = _even(tokens, block)
    columns = (workspace_bytes - block * costs.token) // (block * costs.logit + costs.column)
    if device_type == "cpu":
        most = _CPU_TILE_ELEMENTS if statistics else _CPU_GRADIENT_TILE_ELEMENTS
        columns = min(columns, max(most // block, _FEWEST_COLUMNS))
    while columns < min(rows, _FEWEST_COLUMNS) and block > _FEWEST_TOKENS:
        block = max(_FEWEST_TOKENS, block // 2)
        columns = (workspace_bytes - block * costs.token) // (block * costs.logit + costs.column)
    columns = max(columns - columns % _FEWEST_COLUMNS, _FEWEST_COLUMNS)
    return TilePlan(block, max(1, min(columns, rows)))


def one_pass_plan(
    tokens: int, rows: int, costs: TileCosts, workspace_bytes: int, device_type: str, *, force: bool
) -> TilePlan | None:
    """The same for a head that keeps a block's tiles until their gradient; None if blocks get too
    small, unless ``force``d."""
    columns = max(1, min(rows, _ONE_PASS_COLUMNS.get(device_type, _ONE_PASS_COLUMNS["cuda"])))
    token = (
        rows * costs.kept + columns * costs.logit + costs.token + -(-rows // columns) * costs.part
    )
    block = (workspace_bytes - columns * costs.column) // token
    fewest = _FEWEST_ONE_PASS_TOKENS.get(device_type, _FEWEST_ONE_PASS_TOKENS["cuda"])
    if block < min(tokens, fewest) and not force:
        return None
    return TilePlan(_even(tokens, max(1, min(tokens, block, _MOST_TOKENS))), columns, keeps=True)


def whole_rows_plan(
    tokens: int, rows: int, costs: TileCosts, workspace_bytes: int, *, keeps: bool
) -> TilePlan:
    """Blocks of whole rows, down to 16 tokens whatever the workspace. ``keeps``: until their
    gradient."""
    token = rows * (2 * costs.logit + (costs.kept if keeps else 0)) + costs.token + costs.part
    block = (workspace_bytes - rows * costs.column) // token
    block = _even(tokens, max(_FEWEST_TOKENS, min(block, _MOST_TOKENS)))
    return TilePlan(block, max(1, rows), keeps=keeps)


def _even(total: int, most: int) -> int:
    """Size of equal pieces of ``total`` that are at most ``most``; 1 for nothing."""
    pieces = -(-total // most) if total else 1
    return max(1, -(-total // pieces))


class Block(NamedTuple):
    """Tokens that are computed together; ``rows``: their places in the order of processing."""

    number: int
    rows: slice
    hidden_BH: Tensor


class ReplicatedRows:
    """Hidden states (N, H) that every rank of the group holds. ``longest``: tokens of the largest
    block. ``order_N``:
    the caller's place of each token in the order of processing; None: the same. A ``sink`` takes
    this rank's part of the gradients of all blocks, in their order; each may be overwritten, and is
    summed over the ranks."""

    order_N = None

    def __init__(self, hidden_NH: Tensor, shard: VocabularyShard, tokens: int) -> None:
        self.count = hidden_NH.shape[0]
        self.longest = min(self.count, tokens)
        self._hidden_NH, self._shard, self._tokens = hidden_NH, shard, tokens

    def blocks(self) -> Iterator[Block]:
        for number, first in enumerate(range(0, self.count, self._tokens)):
            rows = slice(first, min(first + self._tokens, self.count))
            yield Block(number, rows, self._hidden_NH[rows])

    def sink(self) -> _ReplicatedSink:
        return _ReplicatedSink(torch.empty_like(self._hidden_NH), self._shard)


class _ReplicatedSink:
    def __init__(self, total_NH: Tensor, shard: VocabularyShard) -> None:
        self._total_NH, self._shard = total_NH, shard
        self._pending: tuple[slice, Tensor, dist.Work] | None = None

    def add(self, block: Block, grad_BH: Tensor) -> None:
        self._settle()
        work = self._shard.start_sum(grad_BH)
        if work is None:
            self._total_NH[block.rows] = grad_BH
        else:
            self._pending = (block.rows, grad_BH, work)

    def _settle(self) -> None:
        if self._pending is not None:
            rows, grad_BH, work = self._pending
            work.wait()
            self._total_NH[rows] = grad_BH
            self._pending = None

    def finish(self) -> Tensor:
        self._settle()
        return self._total_NH


def count_rows(rows_N: Tensor, length: int, ranks: int) -> list[int]:
    """How many of the rows each rank holds, ``length`` tokens a rank. The host waits for the
    device."""
    owner_N = torch.div(rows_N, max(1, length), rounding_mode="floor")
    counts = torch.bincount(owner_N.clamp(0, ranks), minlength=ranks).tolist()
    if len(counts) > ranks or (rows_N.numel() and int(rows_N.min()) < 0):
        raise ValueError(
            f"sequence_rows must be in [0, {ranks} ranks * {length} tokens): "
            f"got {int(rows_N.min())}..{int(rows_N.max())}"
        )
    return counts


def gathered_rows(counts: Sequence[int], group: dist.ProcessGroup) -> float:
    """Rows that a collective holds for each token of a block: R, to which the fullest rank pads all
    others, and the share of one rank; gloo works on copies of them."""
    rows = max(counts) * (len(counts) + 1) / max(1, sum(counts))
    return 2 * rows if dist.get_backend(group) == "gloo" else rows


class SequenceShardedRows:
    """Rows ``rows_N`` of the hidden states that the ranks of a group hold one after the other,
    ``hidden_LH`` each."""

    def __init__(
        self,
        hidden_LH: Tensor,
        rows_N: Tensor,
        counts: Sequence[int],
        group: dist.ProcessGroup,
        tokens: int,
    ) -> None:
        """``counts`` as from ``count_rows``; ``tokens`` of a block at most. The host waits for
        nothing."""
        self.count = rows_N.numel()
        self._hidden_LH, self._group = hidden_LH, group
        self._size, self._rank = group.size(), group.rank()
        self._shares = _shares(counts, tokens)  # [block][rank] -> how many rows
        self.longest = max(map(sum, self._shares), default=0)
        sorted_N, self._places_N = _indices(counts, self._shares, rows_N.device)
        owner_N = torch.div(rows_N, max(1, hidden_LH.shape[0]), rounding_mode="floor")
        by_owner_N = torch.argsort(owner_N, stable=True)
        self.order_N = by_owner_N[sorted_N]
        self._mine = (
            rows_N[by_owner_N].split(list(counts))[self._rank] - self._rank * hidden_LH.shape[0]
        )

    def blocks(self) -> Iterator[Block]:
        under_way = [self._gather(0)] if self._shares else []
        for number in range(len(self._shares)):
            hidden_BH = under_way.pop().wait()
            if number + 1 < len(self._shares):
                under_way.append(self._gather(number + 1))
            yield Block(number, self._block(number), hidden_BH)

    def _block(self, number: int) -> slice:
        first = sum(map(sum, self._shares[:number]))
        return slice(first, first + sum(self._shares[number]))

    def sink(self) -> _ShardedSink:
        return _ShardedSink(self)

    def _gather(self, number: int) -> _Gathered:
        padded = self._hidden_LH.new_zeros(max(self._shares[number]), self._hidden_LH.shape[1])
        mine = self.mine(number)
        padded[: mine.numel()] = self._hidden_LH[mine]
        return _Gathered(padded, self._places(number), self._group)

    def mine(self, number: int) -> Tensor:
        first = sum(shares[self._rank] for shares in self._shares[:number])
        return self._mine[first : first + self._shares[number][self._rank]]

    def _places(self, number: int) -> Tensor | None:
        """(B,) places of a block's tokens in the gathered (R, H); None where nothing is padded."""
        shares = self._shares[number]
        return None if min(shares) == max(shares) else self._places_N[self._block(number)]

    def start_scatter(self, number: int, grad_BH: Tensor) -> tuple[Tensor, dist.Work, Tensor]:
        """Begins to sum a block's gradients over the ranks; returns what will hold this rank's
        rows."""
        longest, places = max(self._shares[number]), self._places(number)
        padded_RH = grad_BH
        if places is not None:
            padded_RH = grad_BH.new_zeros(longest * self._size, grad_BH.shape[1])
            padded_RH[places] = grad_BH
        out = grad_BH.new_empty(longest, grad_BH.shape[1])
        work = dist.reduce_scatter_tensor(out, padded_RH, group=self._group, async_op=True)
        return out, work, padded_RH

    def empty_gradient(self) -> Tensor:
        return torch.zeros_like(self._hidden_LH)


class _Gathered:
    def __init__(self, padded: Tensor, places: Tensor | None, group: dist.ProcessGroup) -> None:
        self._places = places
        self._all = padded.new_empty(padded.shape[0] * group.size(), padded.shape[1])
        # the source has to live as long as the work
        self._under_way = (
            dist.all_gather_into_tensor(self._all, padded, group=group, async_op=True),
            padded,
        )

    def wait(self) -> Tensor:
        work, _ = self._under_way
        work.wait()
        return self._all if self._places is None else self._all[self._places]


class _ShardedSink:
    """Sums each block over the ranks, and sends its rows home, while the next one is computed."""

    def __init__(self, rows: SequenceShardedRows) -> None:
        self._rows, self._total_LH = rows, rows.empty_gradient()
        self._pending: tuple[int, tuple[Tensor, dist.Work, Tensor]] | None = None

    def add(self, block: Block, grad_BH: Tensor) -> None:
        self._settle()
        self._pending = (block.number, self._rows.start_scatter(block.number, grad_BH))

    def _settle(self) -> None:
        if self._pending is not None:
            number, (out, work, _) = self._pending
            work.wait()
            mine = self._rows.mine(number)
            # a token may be wanted more than once
            self._total_LH.index_add_(0, mine, out[: mine.numel()].to(self._total_LH.dtype))
            self._pending = None

    def finish(self) -> Tensor:
        self._settle()
        return self._total_LH


Rows = ReplicatedRows | SequenceShardedRows


def _shares(counts: Sequence[int], tokens: int) -> list[list[int]]:
    """How many rows each block takes from each rank: about ``tokens`` a block, never more,
    proportional to ``counts``. With fewer tokens a block than ranks it may be more: every rank
    gives at most one then."""
    blocks = -(-sum(counts) // tokens)
    while True:
        shares = [
            [count * (k + 1) // blocks - count * k // blocks for count in counts]
            for k in range(blocks)
        ]
        if max(map(sum, shares), default=0) <= max(tokens, len(counts)):
            return shares
        blocks += 1


def _indices(counts: Sequence[int], shares: list[list[int]], device: torch.device) -> Tensor:
    """(2, N) in the order of processing (block by block, rank by rank): places in the rows sorted
    by owner, and in the gathered (R, H) of the block."""
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    pieces = [torch.zeros(2, 0, dtype=torch.long)]
    for block in shares:
        for rank, count in enumerate(block):
            first = torch.tensor([[starts[rank]], [rank * max(block)]])
            pieces.append(first + torch.arange(count))
            starts[rank] += count
    indices_2N = torch.cat(pieces, 1)
    # a copy from pageable memory would wait for all work that the device has been given
    return (
        indices_2N.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else indices_2N
    )
