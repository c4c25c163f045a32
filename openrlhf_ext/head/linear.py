"""Log-probability, entropy and token losses of the tempered distribution, computed from hidden
states.

The logits of all tokens are never in memory at once: every pass goes over tiles of them (``rows``)
that fit ``workspace_bytes``. With ``u = z / temperature`` and ``logZ = logsumexp(u)``:
``logprob = u[target] - logZ`` and ``entropy = logZ - sum_v softmax(u)_v u_v``, both fp32 whatever
the format of the operands.

docs/head.md shows the passes with their work and memory. Shape suffixes: T = tokens of the call, V
= rows of this rank's vocabulary shard, H = hidden size; N = T in this package's inner modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf_ext.head import passes
from openrlhf_ext.head.kernels import Implementation, Kernels, Precision, choose_kernels
from openrlhf_ext.head.passes import LinearHead, TokenLoss, WeightGradient, WholeRows
from openrlhf_ext.head.rows import (
    Block,
    ReplicatedRows,
    Rows,
    SequenceShardedRows,
    TilePlan,
    count_rows,
    gathered_rows,
    one_pass_plan,
    tile_plan,
    whole_rows_plan,
)
from openrlhf_ext.head.statistics import TokenStatistics, VocabularyShard

_MOST_NAMED = 8


class NonFiniteLogitsError(FloatingPointError):
    """Hidden states or logits are NaN or infinite; ``tokens``: their positions in the call,
    ascending."""

    def __init__(self, what: str, tokens: list[int]) -> None:
        self.tokens = sorted(tokens)
        named = ", ".join(map(str, self.tokens[:_MOST_NAMED]))
        more = f" and {len(tokens) - _MOST_NAMED} more" if len(tokens) > _MOST_NAMED else ""
        super().__init__(f"{what} of {len(tokens)} tokens are NaN or infinite: rows {named}{more}")


def check_call(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    temperature: float | Tensor,
    sequence_rows: Tensor | None,
    workspace_bytes: int,
    shard: VocabularyShard,
    checks: bool,
) -> None:
    """Checks the arguments of ``linear_logprob_entropy``; synchronizes with a device only if
    ``checks``."""
    if hidden_TH.dim() != 2 or weight_VH.dim() != 2 or hidden_TH.shape[1] != weight_VH.shape[1]:
        raise ValueError(
            f"expected hidden (T, H) and weight (V, H), got {tuple(hidden_TH.shape)} and "
            f"{tuple(weight_VH.shape)}"
        )
    if hidden_TH.dtype != weight_VH.dtype:
        raise ValueError(
            f"hidden and weight must have one format, got {hidden_TH.dtype} and {weight_VH.dtype}"
        )
    rows = hidden_TH.shape[:1] if sequence_rows is None else sequence_rows.shape
    if target_T.shape != rows or len(rows) != 1:
        raise ValueError(
            f"expected one target per token: tokens {tuple(rows)}, targets {tuple(target_T.shape)}"
        )
    if workspace_bytes <= 0:
        raise ValueError(f"workspace_bytes must be > 0, got {workspace_bytes}")
    _check_temperature(temperature, target_T, checks)
    if checks and target_T.numel():
        low, high = int(target_T.min()), int(target_T.max())
        if low < 0 or high >= shard.vocab_size:
            raise ValueError(f"target ids must be in [0, {shard.vocab_size}), got {low}..{high}")


def _check_temperature(temperature: float | Tensor, target_T: Tensor, checks: bool) -> None:
    if isinstance(temperature, Tensor):
        if temperature.numel() != 1 and temperature.shape != target_T.shape:
            raise ValueError(
                "temperature must be a number or one per token: "
                f"got {tuple(temperature.shape)} for {tuple(target_T.shape)} tokens"
            )
        if not checks or not temperature.numel():
            return
        temperature = float(temperature.min())
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")


def check_finite_hidden(block: Block, order_N: Tensor | None) -> None:
    # aminmax propagates NaN and needs no memory of the block's size.
    low_B, high_B = block.hidden_BH.aminmax(dim=1)
    finite_B = low_B.isfinite() & high_B.isfinite()
    if not finite_B.all():
        rows = torch.arange(block.rows.start, block.rows.stop, device=finite_B.device)[~finite_B]
        raise NonFiniteLogitsError(
            "the hidden states", (rows if order_N is None else order_N[rows]).tolist()
        )


def check_finite_statistics(stats: TokenStatistics) -> None:
    finite_N = stats.logprob_N.isfinite() & stats.entropy_N.isfinite()
    if not finite_N.all():
        raise NonFiniteLogitsError(
            "the hidden states are finite, but the logits", torch.nonzero(~finite_N)[:, 0].tolist()
        )


class HeadOutput(NamedTuple):
    """fp32 log-probability of the target and entropy (nats) of each token's distribution, both of
    shape (T,)."""

    logprob_T: Tensor
    entropy_T: Tensor


class TokenLossOutput(NamedTuple):
    """The sum of the loss terms (scalar, differentiable), and the detached values of
    ``HeadOutput``."""

    value: Tensor
    logprob_T: Tensor
    entropy_T: Tensor


def linear_logprob_entropy(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    workspace_bytes: int = 256 << 20,
    entropy_grad: bool = False,
    *,
    sequence_rows: Tensor | None = None,
    rows_per_rank: Sequence[int] | None = None,
    implementation: Implementation = "auto",
    checks: bool | None = None,
    whole_rows: WholeRows | None = None,
) -> HeadOutput:
    """Log-probability of ``target_T`` and entropy under
    ``softmax(hidden @ weight.T / temperature)``.

    The forward pass costs one product (2 T H V). The backward pass costs three, because it
    recomputes the logits. ``logprob_T`` is differentiable in ``hidden_TH`` and ``weight_VH``; the
    gradient of the hidden states is summed over the group: every rank gets the gradient of all the
    hidden states it passed.

    Args:
        hidden_TH: (T, H), the same on every rank of ``process_group``; bf16, fp16, fp32 or fp64.
        weight_VH: (V, H) this rank's rows of the output embedding, in the format of the hidden
            states; rank r holds rows ``[r * V, (r + 1) * V)``. Its gradient is added to
            ``weight_VH.main_grad`` in place if Megatron's DDP provides it
            (``passes.WeightGradient``).
        target_T: (T,) int64 token ids in ``[0, vocab_size)``.
        temperature: divides the logits first; > 0. A number, or one per token, (T,).
        vocab_size: the true size of the vocabulary; rows beyond it are padding and are ignored.
        workspace_bytes: upper bound of the memory for tiles, down to tiles of 16 tokens times 128
            columns.
        entropy_grad: let gradients flow through the entropy (False: it is a constant).
        sequence_rows: for sequence parallelism. ``hidden_TH`` is then (L, H), this rank's
            consecutive tokens (the same number on every rank), and ``sequence_rows`` (T,) are the
            tokens to compute, numbered across the ranks of the group and the same on every rank.
            Gathering them and scattering their gradients overlaps with computation.
        rows_per_rank: how many of ``sequence_rows`` each rank of the group holds. None: the call
            counts them, which synchronizes with the device once.
        implementation: 'torch', 'triton', or 'auto': Triton on CUDA devices if it is installed.
        checks: check for NaN, infinities and target ids out of range. This synchronizes with the
            device, so the default is True on the CPU only.
        whole_rows: computes logits and log-probs in another way. ``temperature`` is a number then.

    Raises ValueError: an argument is out of range, or the implementation cannot run here;
    NonFiniteLogitsError: with checks, hidden states or logits are NaN or infinite.
    """
    hidden_TH, call = _Call.of(
        hidden_TH,
        weight_VH,
        target_T,
        temperature,
        vocab_size,
        process_group,
        workspace_bytes,
        sequence_rows,
        rows_per_rank,
        implementation,
        checks,
        whole_rows,
    )
    logprob_T, entropy_T = _LinearLogprobEntropy.apply(hidden_TH, weight_VH, call, entropy_grad)
    return HeadOutput(logprob_T, entropy_T if entropy_grad else entropy_T.detach())


def linear_token_loss(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    token_loss: TokenLoss,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    workspace_bytes: int = 256 << 20,
    *,
    sequence_rows: Tensor | None = None,
    rows_per_rank: Sequence[int] | None = None,
    implementation: Implementation = "auto",
    checks: bool | None = None,
    recompute: bool | None = None,
    grad_scale: float = 1.0,
    entropy_slope_T: Tensor | None = None,
    whole_rows: WholeRows | None = None,
) -> TokenLossOutput:
    """Sum of ``token_loss`` over the tokens; the forward pass computes the gradients, block by
    block.

    A token's loss depends only on its own log-probability, so a block's gradients can be computed
    while its logits are still in memory: three products (6 T H V) instead of four. The backward
    pass only returns them.

    Args:
        token_loss: ``token_loss(logprob_B, rows)`` returns the loss terms (B,) of the tokens at
            ``rows`` of the call (a slice, or with ``sequence_rows`` an index tensor), already
            divided by the global denominators. Elementwise: term b depends on log-probability b
            only. Called once per block, on every rank of the group.
        recompute: compute the logits twice and keep only a tile of them. None: recompute if blocks
            of whole logits in the workspace would be too small for fast products. The result is the
            same.
        grad_scale: the gradient that the backward pass will receive for ``value`` (a loss scale).
            The forward pass needs it if it adds the gradient of the weight to
            ``weight_VH.main_grad``: once, whether or not a backward pass follows.
        entropy_slope_T: constant factor on each token's entropy in the sum; None: no term contains
            the entropy.

    The other arguments and errors are those of ``linear_logprob_entropy``.
    """
    hidden_TH, call = _Call.of(
        hidden_TH,
        weight_VH,
        target_T,
        temperature,
        vocab_size,
        process_group,
        workspace_bytes,
        sequence_rows,
        rows_per_rank,
        implementation,
        checks,
        whole_rows,
    )
    if torch.is_grad_enabled() and (hidden_TH.requires_grad or weight_VH.requires_grad):
        return TokenLossOutput(
            *_LinearTokenLoss.apply(
                hidden_TH, weight_VH, call, token_loss, recompute, grad_scale, entropy_slope_T
            )
        )
    stats = call.statistics(hidden_TH, weight_VH)
    value, _ = passes.loss_and_slope(token_loss, stats.logprob_N, slice(0, target_T.numel()))
    if entropy_slope_T is not None:
        value = value + (stats.entropy_N * entropy_slope_T).sum()
    return TokenLossOutput(value, stats.logprob_N, stats.entropy_N)


class _Sequence(NamedTuple):
    """The selected rows of a sequence that is split over the ranks of a group, and how many each
    rank has."""

    rows_T: Tensor
    counts: Sequence[int]
    group: dist.ProcessGroup


@dataclass(frozen=True)
class _Call:
    """The arguments of a call that are not differentiated; (T,) tensors in the caller's order."""

    target_T: Tensor
    scale_T: Tensor | None
    sequence: _Sequence | None
    shard: VocabularyShard
    precision: Precision
    kernels: Kernels
    workspace_bytes: int
    checks: bool
    whole_rows: WholeRows | None
    temperature: float

    @classmethod
    def of(
        cls,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        target_T: Tensor,
        temperature: float | Tensor,
        vocab_size: int | None,
        process_group: dist.ProcessGroup | None,
        workspace_bytes: int,
        sequence_rows: Tensor | None,
        rows_per_rank: Sequence[int] | None,
        implementation: Implementation,
        checks: bool | None,
        whole_rows: WholeRows | None,
    ) -> tuple[Tensor, _Call]:
        """Returns the hidden states to compute with, and the call."""
        if whole_rows is not None and isinstance(temperature, Tensor):
            raise ValueError("whole_rows takes one temperature for all tokens, a number")
        if sequence_rows is not None and (process_group is None or process_group.size() == 1):
            hidden_TH, sequence_rows = hidden_TH[sequence_rows], None
        shard = VocabularyShard.of(weight_VH, vocab_size, process_group)
        checks = hidden_TH.device.type == "cpu" if checks is None else checks
        check_call(
            hidden_TH,
            weight_VH,
            target_T,
            temperature,
            sequence_rows,
            workspace_bytes,
            shard,
            checks,
        )
        precision = Precision.of(hidden_TH.dtype, hidden_TH.device)
        sequence = None
        if sequence_rows is not None and process_group is not None:
            counts = _counts(
                sequence_rows, rows_per_rank, hidden_TH.shape[0], process_group, checks
            )
            sequence = _Sequence(sequence_rows, counts, process_group)
        call = cls(
            target_T=target_T,
            scale_T=_scale(temperature, target_T, precision.compute),
            sequence=sequence,
            shard=shard,
            precision=precision,
            kernels=choose_kernels(implementation, precision.compute, hidden_TH.device),
            workspace_bytes=workspace_bytes,
            checks=checks,
            whole_rows=whole_rows,
            temperature=1.0 if isinstance(temperature, Tensor) else temperature,
        )
        return hidden_TH, call

    def head(
        self,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        *,
        statistics: bool = True,
        gradients: bool = True,
        one_pass: bool | None = False,
    ) -> LinearHead:
        """Cuts the operands into tiles. ``one_pass``: keep the logits of a block; None: if blocks
        stay large enough."""
        plan = self._plan(hidden_TH, weight_VH.shape[0], statistics, gradients, one_pass)
        rows = self._rows(hidden_TH, plan.tokens)
        check = None
        if self.checks:
            check = lambda block: check_finite_hidden(block, rows.order_N)  # noqa: E731
        return LinearHead(
            weight_VH=weight_VH,
            rows=rows,
            target_N=self.shard.local(_ordered(self.target_T, rows)),
            scale_N=None if self.scale_T is None else _ordered(self.scale_T, rows),
            shard=self.shard,
            precision=self.precision,
            kernels=self.kernels,
            plan=plan,
            check=check,
            whole_rows=self.whole_rows if statistics else None,
            temperature=self.temperature,
        )

    def _plan(
        self,
        hidden_TH: Tensor,
        weight_rows: int,
        statistics: bool,
        gradients: bool,
        one_pass: bool | None,
    ) -> TilePlan:
        costs = passes.tile_costs(
            hidden_TH.shape[1],
            hidden_TH.dtype,
            self.precision,
            self.kernels,
            statistics=statistics,
            gradients=gradients,
            gathered=0.0
            if self.sequence is None
            else gathered_rows(self.sequence.counts, self.sequence.group),
        )
        size = (
            self.target_T.numel(),
            weight_rows,
            costs,
            self.workspace_bytes,
            hidden_TH.device.type,
        )
        if self.whole_rows is not None and statistics:
            return whole_rows_plan(*size[:-1], keeps=gradients)
        if one_pass is False:
            return tile_plan(*size, statistics=statistics)
        return one_pass_plan(*size, force=one_pass is True) or tile_plan(*size)

    def _rows(self, hidden_TH: Tensor, tokens: int) -> Rows:
        if self.sequence is None:
            return ReplicatedRows(hidden_TH, self.shard, tokens)
        return SequenceShardedRows(
            hidden_TH, self.sequence.rows_T, self.sequence.counts, self.sequence.group, tokens
        )

    def statistics(self, hidden_TH: Tensor, weight_VH: Tensor) -> TokenStatistics:
        head = self.head(hidden_TH, weight_VH, gradients=False)
        return self._checked(_restored(passes.statistics(head), head.rows))

    def statistics_and_gradients(
        self,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        token_loss: TokenLoss,
        recompute: bool | None,
        grad_scale: float,
        entropy_slope_T: Tensor | None,
    ) -> tuple[Tensor, TokenStatistics, Tensor, WeightGradient | None]:
        """Returns the value of the loss, the statistics, the gradient of the hidden states, and the
        gradient of the weight."""
        one_pass = None if recompute is None else not recompute
        head = self.head(hidden_TH, weight_VH, one_pass=one_pass)
        weight_gradient = (
            WeightGradient(weight_VH, self.precision.compute) if weight_VH.requires_grad else None
        )
        scale = grad_scale if weight_gradient is not None and weight_gradient.in_main_grad else 1.0
        values: list[Tensor] = []

        def coefficients(rows: slice, stats: TokenStatistics) -> tuple[Tensor, Tensor | None]:
            order_N = head.rows.order_N
            caller_rows = rows if order_N is None else order_N[rows]
            value, slope_B = passes.loss_and_slope(token_loss, stats.logprob_N, caller_rows)
            values.append(value)
            slope_B = slope_B.to(self.precision.compute) * scale
            if entropy_slope_T is None:
                return slope_B, None
            entropy_slope_B = entropy_slope_T[caller_rows]
            values.append((stats.entropy_N * entropy_slope_B).sum())
            return slope_B, entropy_slope_B.to(self.precision.compute) * scale

        stats, grad_hidden_TH = passes.statistics_and_gradients(head, coefficients, weight_gradient)
        value = torch.stack(values).sum() if values else stats.logprob_N.sum()
        return value, self._checked(_restored(stats, head.rows)), grad_hidden_TH, weight_gradient

    def gradients(
        self,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        stats: TokenStatistics,
        grad_logprob_T: Tensor,
        grad_entropy_T: Tensor | None,
    ) -> tuple[Tensor, WeightGradient | None]:
        head = self.head(hidden_TH, weight_VH, statistics=False)
        weight_gradient = (
            WeightGradient(weight_VH, self.precision.compute) if weight_VH.requires_grad else None
        )
        ordered = TokenStatistics(*(_ordered(value, head.rows) for value in stats))
        slope_N = _ordered(grad_logprob_T, head.rows)
        entropy_slope_N = None if grad_entropy_T is None else _ordered(grad_entropy_T, head.rows)

        def coefficients(rows: slice, _: TokenStatistics) -> tuple[Tensor, Tensor | None]:
            return slope_N[rows], None if entropy_slope_N is None else entropy_slope_N[rows]

        return passes.gradients(head, ordered, coefficients, weight_gradient), weight_gradient

    def _checked(self, stats: TokenStatistics) -> TokenStatistics:
        if self.checks:
            check_finite_statistics(stats)
        return stats


class _LinearLogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden_TH: Tensor, weight_VH: Tensor, call: _Call, entropy_grad: bool
    ) -> tuple[Tensor, Tensor]:
        stats = call.statistics(hidden_TH, weight_VH)
        ctx.save_for_backward(hidden_TH, weight_VH, *stats)
        ctx.call, ctx.entropy_grad = call, entropy_grad
        return stats.logprob_N, stats.entropy_N

    @staticmethod
    def backward(ctx, grad_logprob_T: Tensor, grad_entropy_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, *stats = ctx.saved_tensors
        grad_hidden_TH, weight_gradient = ctx.call.gradients(
            hidden_TH,
            weight_VH,
            TokenStatistics(*stats),
            grad_logprob_T,
            grad_entropy_T if ctx.entropy_grad else None,
        )
        return (
            grad_hidden_TH,
            None if weight_gradient is None else weight_gradient.for_autograd(),
            None,
            None,
        )


class _LinearTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        call: _Call,
        token_loss: TokenLoss,
        recompute: bool | None,
        grad_scale: float,
        entropy_slope_T: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        value, stats, grad_hidden_TH, weight_gradient = call.statistics_and_gradients(
            hidden_TH, weight_VH, token_loss, recompute, grad_scale, entropy_slope_T
        )
        in_place = weight_gradient is not None and weight_gradient.in_main_grad
        own_VH = None if weight_gradient is None or in_place else weight_gradient.for_autograd()
        ctx.save_for_backward(grad_hidden_TH, own_VH)
        ctx.weight_gradient, ctx.grad_scale = (weight_gradient if in_place else None), grad_scale
        ctx.mark_non_differentiable(stats.logprob_N, stats.entropy_N)
        return value, stats.logprob_N, stats.entropy_N

    @staticmethod
    def backward(ctx, grad_value: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_TH, own_VH = ctx.saved_tensors
        if ctx.weight_gradient is not None:
            _expect_scale(grad_value, ctx.grad_scale)
            grad_value = grad_value / ctx.grad_scale
            own_VH = ctx.weight_gradient.for_autograd()
        elif own_VH is not None:
            own_VH = _times(own_VH, grad_value)
        return _times(grad_hidden_TH, grad_value), own_VH, None, None, None, None, None


def _times(grad: Tensor, factor: Tensor) -> Tensor:
    """The product, without a copy if the host can see that the factor is 1."""
    return grad if factor.device.type == "cpu" and float(factor) == 1.0 else grad * factor


def _expect_scale(grad_value: Tensor, scale: float) -> None:
    """Raises ValueError on the CPU if the gradient of ``value`` differs from ``scale``; on CUDA a
    device-side assertion fails, without a synchronization.

    The gradient of the weight is in main_grad already, so the backward pass cannot scale it any
    more.
    """
    if grad_value.device.type != "cpu":
        torch._assert_async(grad_value == scale)
    elif float(grad_value) != scale:
        raise ValueError(
            "linear_token_loss added the gradient of the weight to main_grad in its forward "
            f"pass, for grad_scale = {scale}; the backward pass brings {float(grad_value)}: pass "
            "that as grad_scale"
        )


def _counts(
    rows_T: Tensor, given: Sequence[int] | None, length: int, group: dist.ProcessGroup, checks: bool
) -> Sequence[int]:
    if given is not None and not checks:
        return given
    counts = count_rows(rows_T, length, group.size())
    if given is not None and [*given] != counts:
        raise ValueError(
            f"rows_per_rank must count sequence_rows by rank: got {[*given]}, they are {counts}"
        )
    return counts


def _scale(temperature: float | Tensor, target_T: Tensor, dtype: torch.dtype) -> Tensor | None:
    if isinstance(temperature, Tensor):
        return temperature.to(target_T.device, dtype).expand_as(target_T).reciprocal()
    if temperature == 1.0:
        return None
    return torch.full(target_T.shape, 1.0 / temperature, dtype=dtype, device=target_T.device)


def _ordered(values_T: Tensor, rows: Rows) -> Tensor:
    return values_T if rows.order_N is None else values_T[rows.order_N]


def _restored(stats: TokenStatistics, rows: Rows) -> TokenStatistics:
    if rows.order_N is None:
        return stats
    return TokenStatistics(
        *(torch.empty_like(value).index_copy_(0, rows.order_N, value) for value in stats)
    )
