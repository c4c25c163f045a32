"""The three walks over tiles of logits: statistics; gradients from recomputed logits; both at once.
Nothing here knows of autograd. Shape suffixes: N = tokens of the call, B = tokens of a block, V =
rows of this rank's vocabulary shard, S = columns of a slice of it, H = hidden size; 4 as in
``statistics``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from openrlhf_ext.head.kernels import Kernels, Precision, accumulate, multiply
from openrlhf_ext.head.rows import Block, Rows, TileCosts, TilePlan
from openrlhf_ext.head.statistics import (
    TokenGradient,
    TokenStatistics,
    VocabularyShard,
    combine,
    empty_part,
    merge,
)

# loss(logprob_B, rows) -> loss_B: the terms of the tokens at these places of the call, already
# divided by the global denominators. Term b may depend on log-probability b only.
TokenLoss = Callable[[Tensor, "slice | Tensor"], Tensor]

# coefficients(rows, statistics of these tokens) -> d loss / d log-prob and (or None) d loss / d
# entropy, both (B,)
Coefficients = Callable[[slice, TokenStatistics], tuple[Tensor, Tensor | None]]


class WholeRows(Protocol):
    """Another way to compute logits and log-probs, which needs the whole vocabulary of a token at
    once. Entropies and gradients stay the head's own, from these logits."""

    def logits(self, hidden_BH: Tensor) -> Tensor:
        """(B, V) fp32 logits of this rank's rows of the weight, padding included."""

    def logprobs(self, logits_BV: Tensor, temperature: float) -> Tensor:
        """(B, V) fp32 log-probs from the logits of the true vocabulary."""


# Statistics of slices that wait to be merged: few operations on a GPU, and memory that the
# vocabulary does not move.
_PARTS = 8
# Of whole rows that are normalized together; 150,000 entries of each are 75 MiB.
_WHOLE_ROWS = 128


def loss_and_slope(
    token_loss: TokenLoss, logprob_B: Tensor, rows: slice | Tensor
) -> tuple[Tensor, Tensor]:
    """Sum of the terms, and the derivative of each by its log-probability, (B,)."""
    with torch.enable_grad():
        variable_B = logprob_B.detach().requires_grad_()
        loss_B = token_loss(variable_B, rows)
        if loss_B.shape != variable_B.shape:
            raise ValueError(
                "token_loss must return one term per token, elementwise: got "
                f"{tuple(loss_B.shape)} for {tuple(variable_B.shape)} log-probabilities"
            )
        total = loss_B.sum()
        if not total.requires_grad:  # constant terms, of tokens without loss
            return total, torch.zeros_like(variable_B)
        (slope_B,) = torch.autograd.grad(
            total, variable_B, allow_unused=True, materialize_grads=True
        )
    return total.detach(), slope_B


class WeightGradient:
    """Sum of a call's contributions to the gradient of its (V, H) weight: in ``main_grad`` in place
    if there is one.

    Megatron's DDP gives a parameter a view of its gradient buffer (``main_grad``) and, for kernels
    that add to it themselves, a flag ``grad_added_to_main_grad`` that keeps its hook from adding
    ``grad`` a second time. Autograd then gets no gradient: the hook runs all the same, and a
    parameter that is used a second time (tied embeddings, marked by ``zero_out_wgrad``) has that
    gradient alone in ``grad``, which DDP adds. (Protocol: megatron.core.tensor_parallel.layers,
    distributed.distributed_data_parallel.)
    """

    def __init__(self, weight_VH: Tensor, compute: torch.dtype) -> None:
        self._weight_VH = weight_VH
        main_grad: Tensor | None = getattr(weight_VH, "main_grad", None)
        # a low-precision main_grad would round every block's contribution: sum those in a buffer,
        # and let DDP add it
        if main_grad is not None and (
            main_grad.dtype != compute or not hasattr(weight_VH, "grad_added_to_main_grad")
        ):
            main_grad = None
        self.in_main_grad = main_grad is not None
        self.total_VH = (
            torch.zeros_like(weight_VH, dtype=compute) if main_grad is None else main_grad
        )

    def for_autograd(self) -> Tensor | None:
        """The gradient for autograd; None where ``main_grad`` has it. To be asked for in the
        backward pass then."""
        if not self.in_main_grad:
            return self.total_VH.to(self._weight_VH.dtype)
        self._weight_VH.grad_added_to_main_grad = True  # type: ignore[attr-defined]  # of Megatron's DDP
        return None


@dataclass(frozen=True)
class LinearHead:
    """The operands of one call; every (N,) tensor is in the order of processing."""

    weight_VH: Tensor
    rows: Rows
    # row of each target in this shard; outside of ``[0, true_rows)`` where another rank holds it
    target_N: Tensor
    scale_N: Tensor | None  # 1 / temperature in the compute format; None for 1
    shard: VocabularyShard
    precision: Precision
    kernels: Kernels
    plan: TilePlan
    check: Callable[[Block], None] | None = None  # called with each block before it is used
    whole_rows: WholeRows | None = None
    temperature: float = 1.0  # of ``whole_rows``

    def blocks(self) -> Iterator[Block]:
        for block in self.rows.blocks():
            if self.check is not None:
                self.check(block)
            yield block

    @property
    def slices(self) -> list[slice]:
        return self.plan.slices(self.shard.true_rows)

    def operand(self, block: Block) -> Tensor:
        """(B, H) left operand of the logits' product, scaled by the temperature where that loses
        nothing."""
        hidden_BH = block.hidden_BH.to(self.precision.logits)
        if self.scale_N is not None and self.scales_operands:
            return hidden_BH * self.scale_N[block.rows, None]
        return hidden_BH

    @property
    def scales_operands(self) -> bool:
        """Whether the temperature divides the hidden states, instead of the logits."""
        return self.precision.operands_are_exact and self.whole_rows is None

    def tile_scale(self, rows: slice) -> Tensor | None:
        if self.scale_N is None or self.scales_operands:
            return None
        return self.scale_N[rows]


def tile_costs(
    hidden: int,
    dtype: torch.dtype,
    precision: Precision,
    kernels: Kernels,
    *,
    statistics: bool = True,
    gradients: bool,
    gathered: float = 0.0,
) -> TileCosts:
    """Bytes that a tile takes of the workspace. ``gathered``: ``rows.gathered_rows``; 0 where no
    hidden states travel."""
    compute, item = precision.compute.itemsize, dtype.itemsize
    part = 4 * compute
    token = 4 * _PARTS * part + hidden * (compute if precision.operands_are_exact else 0)
    if gradients:
        token += 2 * hidden * compute  # of this block, and of the one before, which is on its way
        token += (
            hidden * precision.gradient.itemsize if precision.gradient != precision.logits else 0
        )
    # this block, the one before, the one on its way; and the gradients that are on theirs
    if gathered:
        token += math.ceil(
            hidden * (item * (2 + gathered) + (compute * gathered if gradients else 0))
        )
    narrow = (
        precision.gradient.itemsize if gradients and precision.gradient != precision.compute else 0
    )
    spare = compute if statistics and not kernels.keeps_logits else 0
    widened = precision.logits != dtype or (gradients and precision.gradient != dtype)
    return TileCosts(
        logit=compute + narrow + spare,
        kept=compute,
        token=token,
        column=hidden * compute if widened else 0,
        part=part,
    )


class _Buffers:
    """The workspace of one walk: tiles of logits, and what the kernels and the gradients' products
    need beside them."""

    def __init__(
        self, head: LinearHead, *, statistics: bool = True, gradients: bool = True
    ) -> None:
        self._head, precision, kernels = head, head.precision, head.kernels
        tile, block = (
            head.rows.longest * head.plan.columns,
            head.rows.longest * head.shard.true_rows,
        )
        self._kept = self._empty(block if head.plan.keeps else 0)
        keeps_logits = head.plan.keeps and kernels.keeps_logits
        self._logits = None if keeps_logits else self._empty(tile)
        needs_spare = statistics and not (head.plan.keeps or kernels.keeps_logits)
        self._spare = self._empty(tile) if needs_spare else None
        narrow = gradients and precision.gradient != precision.compute
        self._narrow = self._empty(tile, precision.gradient) if narrow else None
        self._weight: Tensor | None = None
        self._widened: slice | None = None
        self.logprob_B: Tensor | None = None  # of the last block, from its whole rows

    def _empty(self, elements: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(
            elements,
            dtype=dtype or self._head.precision.compute,
            device=self._head.weight_VH.device,
        )

    def kept(self, tokens: int, columns: slice) -> Tensor:
        first = tokens * columns.start
        return self._kept[first : first + tokens * (columns.stop - columns.start)].view(tokens, -1)

    def logits(self, tokens: int, columns: slice) -> Tensor:
        if self._logits is None:
            return self.kept(tokens, columns)
        return _view(self._logits, tokens, columns)

    def spare(self, tokens: int, columns: slice) -> Tensor:
        """The second tile of ``Kernels.statistics``; the first again for kernels that do
        without."""
        if self._head.kernels.keeps_logits:
            return self.logits(tokens, columns)
        return (
            self.kept(tokens, columns)
            if self._spare is None
            else _view(self._spare, tokens, columns)
        )

    def gradient(self, tile_BS: Tensor, columns: slice) -> Tensor:
        """Where the gradient of a tile goes: in place, unless the products take another format."""
        return tile_BS if self._narrow is None else _view(self._narrow, tile_BS.shape[0], columns)

    def weight(self, columns: slice, dtype: torch.dtype) -> Tensor:
        """(S, H) rows of the weight in this format, until others are asked for."""
        weight_SH = self._head.weight_VH[columns]
        if weight_SH.dtype == dtype:
            return weight_SH
        if self._weight is None:
            self._weight = self._empty(self._head.plan.columns * weight_SH.shape[1], dtype)
        widened_SH = self._weight[: weight_SH.numel()].view(weight_SH.shape)
        if self._widened != columns:
            widened_SH.copy_(weight_SH)
            self._widened = columns
        return widened_SH


def _view(buffer: Tensor, tokens: int, columns: slice) -> Tensor:
    width = columns.stop - columns.start
    return buffer[: tokens * width].view(tokens, width)


def statistics(head: LinearHead) -> TokenStatistics:
    """Of every token, from one walk over all tiles and, at its end, two all-reduces for the whole
    call."""
    part_4N = _nothing(head, head.rows.count)
    buffers = _Buffers(head, gradients=False)
    logprob_N = torch.empty_like(part_4N[0])
    for block in head.blocks():
        part_4N[:, block.rows] = _merged(
            head, _parts(head, buffers, block, head.operand(block)), block
        )
        if buffers.logprob_B is not None:
            logprob_N[block.rows] = buffers.logprob_B
    found = combine(part_4N, head.shard)
    return found if head.whole_rows is None else found._replace(logprob_N=logprob_N)


def gradients(
    head: LinearHead,
    stats: TokenStatistics,
    coefficients: Coefficients,
    weight_gradient: WeightGradient | None,
) -> Tensor:
    """Gradient of the hidden states from recomputed logits; that of the weight is added to
    ``weight_gradient``."""
    sink, buffers = head.rows.sink(), _Buffers(head, statistics=False)

    def gradient(block: Block) -> Tensor:
        own = stats.select(block.rows)
        grads = _BlockGradient(head, buffers, block, head.operand(block), weight_gradient)
        return grads.recomputed(own, coefficients(block.rows, own))

    for block in head.blocks():
        sink.add(block, gradient(block))
    return sink.finish()


def statistics_and_gradients(
    head: LinearHead, coefficients: Coefficients, weight_gradient: WeightGradient | None
) -> tuple[TokenStatistics, Tensor]:
    """Statistics and gradients block by block: the coefficients of a block are known as soon as its
    statistics are. The logits are computed once where the plan keeps the tiles of a block, and
    twice otherwise."""
    sink, buffers, pieces = head.rows.sink(), _Buffers(head), []

    def gradient(block: Block) -> Tensor:
        operand_BH = head.operand(block)
        parts = _parts(head, buffers, block, operand_BH)
        kept = list(parts) if head.plan.keeps else None
        own = combine(_merged(head, parts if kept is None else kept, block), head.shard)
        if buffers.logprob_B is not None:
            own = own._replace(logprob_N=buffers.logprob_B)
        pieces.append(own)
        grads = _BlockGradient(head, buffers, block, operand_BH, weight_gradient)
        if kept is not None:
            return grads.from_kept(own, coefficients(block.rows, own), kept)
        return grads.recomputed(own, coefficients(block.rows, own))

    for block in head.blocks():
        sink.add(block, gradient(block))
    if not pieces:
        return combine(_nothing(head, 0), head.shard), sink.finish()
    return TokenStatistics(
        *(torch.cat(values) for values in zip(*pieces, strict=True))
    ), sink.finish()


def _nothing(head: LinearHead, tokens: int) -> Tensor:
    return empty_part(tokens, head.precision.compute, head.weight_VH.device)


def _parts(
    head: LinearHead, buffers: _Buffers, block: Block, operand_BH: Tensor
) -> Iterator[Tensor]:
    """(4, B) of each slice of this rank's shard."""
    tokens, target_B, scale_B = (
        operand_BH.shape[0],
        head.target_N[block.rows],
        head.tile_scale(block.rows),
    )
    for columns in head.slices:
        logits_BS = buffers.logits(tokens, columns)
        if head.whole_rows is None:
            multiply(logits_BS, operand_BH, buffers.weight(columns, head.precision.logits).t())
        else:
            buffers.logprob_B = _of_whole_rows(head, head.whole_rows, block, logits_BS)
        spare_BS = buffers.spare(tokens, columns)
        yield head.kernels.statistics(logits_BS, spare_BS, target_B - columns.start, scale_B)


def _of_whole_rows(
    head: LinearHead, whole_rows: WholeRows, block: Block, logits_BS: Tensor
) -> Tensor:
    """(B,) log-probs of the targets of a block; writes this rank's logits of the true vocabulary.
    Takes some rows at a time, for the memory of their log-probs. A collective of the vocabulary's
    ranks."""
    target_B = head.target_N[block.rows] + head.shard.first
    found = []
    for first in range(0, len(logits_BS), _WHOLE_ROWS):
        rows = slice(first, first + _WHOLE_ROWS)
        own_RV = whole_rows.logits(block.hidden_BH[rows])
        logits_BS[rows] = own_RV[:, : head.shard.true_rows]
        logits_RV = head.shard.gathered(own_RV)
        logprobs_RV = whole_rows.logprobs(logits_RV, head.temperature)
        found.append(logprobs_RV.gather(1, target_B[rows, None])[:, 0])
    return torch.cat([logits_BS.new_empty(0), *found])


def _merged(head: LinearHead, parts: Iterable[Tensor], block: Block) -> Tensor:
    whole_4B, parts = _nothing(head, block.rows.stop - block.rows.start), iter(parts)
    while some := list(itertools.islice(parts, _PARTS)):
        whole_4B = merge(torch.stack([whole_4B, *some]))
    return whole_4B


class _BlockGradient:
    def __init__(
        self,
        head: LinearHead,
        buffers: _Buffers,
        block: Block,
        operand_BH: Tensor,
        weight_gradient: WeightGradient | None,
    ) -> None:
        self._head, self._buffers, self._block = head, buffers, block
        self._operand_BH, self._weight_gradient = operand_BH, weight_gradient
        self._right_BH = operand_BH.to(head.precision.gradient)
        self._grad_BH = torch.zeros(
            operand_BH.shape, dtype=head.precision.compute, device=operand_BH.device
        )

    def recomputed(
        self, stats: TokenStatistics, coefficients: tuple[Tensor, Tensor | None]
    ) -> Tensor:
        head, token = self._head, self._token(stats, coefficients)
        for columns in head.slices:
            weight_SH = self._buffers.weight(columns, head.precision.logits)
            logits_BS = self._buffers.logits(self._operand_BH.shape[0], columns)
            multiply(logits_BS, self._operand_BH, weight_SH.t())
            out_BS = self._buffers.gradient(logits_BS, columns)
            head.kernels.gradient(logits_BS, self._in_slice(token, columns), out_BS)
            self._add(out_BS, columns)
        return self._scaled()

    def from_kept(
        self,
        stats: TokenStatistics,
        coefficients: tuple[Tensor, Tensor | None],
        parts: list[Tensor],
    ) -> Tensor:
        head, token = self._head, self._token(stats, coefficients)
        for columns, part_4B in zip(head.slices, parts, strict=True):
            kept_BS = self._buffers.kept(self._operand_BH.shape[0], columns)
            out_BS = self._buffers.gradient(kept_BS, columns)
            head.kernels.kept_gradient(kept_BS, part_4B, self._in_slice(token, columns), out_BS)
            self._add(out_BS, columns)
        return self._scaled()

    def _token(
        self, stats: TokenStatistics, coefficients: tuple[Tensor, Tensor | None]
    ) -> TokenGradient:
        rows, (coefficient_B, entropy_coefficient_B) = self._block.rows, coefficients
        return TokenGradient(
            maximum_B=stats.maximum_N,
            log_sum_B=stats.log_sum_N,
            coefficient_B=coefficient_B,
            column_B=self._head.target_N[rows],
            scale_B=self._head.tile_scale(rows),
            entropy_coefficient_B=entropy_coefficient_B,
            entropy_B=None if entropy_coefficient_B is None else stats.entropy_N,
        )

    @staticmethod
    def _in_slice(token: TokenGradient, columns: slice) -> TokenGradient:
        return token._replace(column_B=token.column_B - columns.start)

    def _add(self, grad_BS: Tensor, columns: slice) -> None:
        accumulate(self._grad_BH, grad_BS, self._buffers.weight(columns, grad_BS.dtype))
        if self._weight_gradient is not None:
            accumulate(self._weight_gradient.total_VH[columns], grad_BS.t(), self._right_BH)

    def _scaled(self) -> Tensor:
        if self._head.scale_N is not None and self._head.scales_operands:
            self._grad_BH.mul_(self._head.scale_N[self._block.rows, None])
        return self._grad_BH
