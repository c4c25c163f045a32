"""Log-probability and entropy of the tempered distribution, straight from hidden states.

Shape suffixes: T = tokens, H = hidden size, V = rows of this rank's vocabulary shard, B = tokens of one block.

The logits are never held for all tokens: the forward and the backward pass walk over blocks of tokens whose fp32
logits fit ``workspace_bytes``, and the backward pass computes them again. Every statistic is fp32. Under tensor
parallelism the weight is one shard of the vocabulary; a block costs one MAX all-reduce and one packed SUM all-reduce.

With ``u = z / temperature`` and ``logZ = logsumexp(u)``: ``logprob = u[target] - logZ`` and
``entropy = logZ - sum_v softmax(u)_v u_v`` (shared reference for all algorithms that weight tokens by entropy).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

_FP32_BYTES = 4
_LOGIT_COPIES = 3  # logits, their exponentials and one product live at once


class HeadOutput(NamedTuple):
    """fp32 log-probability of the target and entropy (nats) of each token's distribution, both of shape (T,)."""

    logprob_T: Tensor
    entropy_T: Tensor


def linear_logprob_entropy(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    workspace_bytes: int = 256 << 20,
    entropy_grad: bool = False,
) -> HeadOutput:
    """Log-probability of ``target_T`` and entropy under ``softmax(hidden @ weight.T / temperature)``.

    Args:
        hidden_TH: (T, H) hidden states, the same on every rank of ``process_group``; bf16, fp16, fp32 or fp64.
        weight_VH: (V, H) this rank's rows of the output embedding; rank r holds rows ``[r * V, (r + 1) * V)``.
        target_T: (T,) int64 token ids in ``[0, vocab_size)``.
        temperature: divides the logits first; > 0.
        vocab_size: the true size of the vocabulary; rows beyond it are padding and never take part.
        process_group: the tensor-parallel group; None for an unsharded weight.
        workspace_bytes: upper bound of the memory for a block's logits.
        entropy_grad: let gradients flow through the entropy (off: it is a constant).

    Returns:
        ``HeadOutput``; ``logprob_T`` is differentiable in ``hidden_TH`` and ``weight_VH``. The gradient of the hidden
        states is summed over the group, so that every rank gets the full one.

    Raises:
        ValueError: shapes, temperature, vocabulary size or target ids are out of range.
    """
    shard = _Shard.of(weight_VH, vocab_size, process_group)
    _check(hidden_TH, weight_VH, target_T, temperature, shard)
    logprob_T, entropy_T = _LinearLogprobEntropy.apply(
        hidden_TH, weight_VH, target_T, float(temperature), shard, workspace_bytes, entropy_grad
    )
    return HeadOutput(logprob_T, entropy_T if entropy_grad else entropy_T.detach())


class _Shard(NamedTuple):
    """Where this rank's vocabulary rows stand."""

    group: dist.ProcessGroup | None
    first: int
    true_rows: int
    vocab_size: int

    @classmethod
    def of(cls, weight_VH: Tensor, vocab_size: int | None, group: dist.ProcessGroup | None) -> _Shard:
        size = group.size() if group is not None else 1
        rank = group.rank() if group is not None else 0
        rows = weight_VH.shape[0]
        total = rows * size if vocab_size is None else vocab_size
        if not 0 < total <= rows * size:
            raise ValueError(f"vocab_size must be in [1, shard rows * group size]: got {total}, {rows} * {size}")
        true_rows = min(max(total - rank * rows, 0), rows)
        return cls(group if size > 1 else None, rank * rows, true_rows, total)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        if self.group is not None:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor


def _check(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, temperature: float, shard: _Shard) -> None:
    if hidden_TH.dim() != 2 or weight_VH.dim() != 2 or hidden_TH.shape[1] != weight_VH.shape[1]:
        raise ValueError(f"expected hidden (T, H) and weight (V, H), got {hidden_TH.shape} and {weight_VH.shape}")
    if target_T.shape != hidden_TH.shape[:1]:
        raise ValueError(f"expected one target per token: {hidden_TH.shape[0]} tokens, targets {tuple(target_T.shape)}")
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    if target_T.numel() and not target_T.is_cuda:  # on a GPU this check would stall the stream
        low, high = int(target_T.min()), int(target_T.max())
        if low < 0 or high >= shard.vocab_size:
            raise ValueError(f"target ids must be in [0, {shard.vocab_size}), got {low}..{high}")


def _block_logits(hidden_BH: Tensor, weight_VH: Tensor, temperature: float, shard: _Shard) -> Tensor:
    """(B, V) tempered logits in at least fp32; padding rows are -inf."""
    logits_BV = hidden_BH @ weight_VH.t()
    logits_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32)) / temperature
    if shard.true_rows < weight_VH.shape[0]:
        logits_BV[:, shard.true_rows :] = float("-inf")
    return logits_BV


def _local_targets(target_B: Tensor, shard: _Shard, rows: int) -> tuple[Tensor, Tensor]:
    """Row index of each target in this shard (0 where it lives elsewhere) and whether it lives here."""
    local_B = target_B - shard.first
    here_B = (local_B >= 0) & (local_B < rows)
    return local_B.masked_fill(~here_B, 0), here_B


class _LinearLogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TH, weight_VH, target_T, temperature, shard, workspace_bytes, entropy_grad):
        dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
        logprob_T, entropy_T, log_z_T = (hidden_TH.new_empty(hidden_TH.shape[0], dtype=dtype) for _ in range(3))
        block = max(1, workspace_bytes // (_FP32_BYTES * _LOGIT_COPIES * weight_VH.shape[0]))
        for start in range(0, hidden_TH.shape[0], block):
            rows = slice(start, start + block)
            logits_BV = _block_logits(hidden_TH[rows], weight_VH, temperature, shard)
            logprob_T[rows], entropy_T[rows], log_z_T[rows] = _statistics(logits_BV, target_T[rows], shard)
        ctx.save_for_backward(hidden_TH, weight_VH, target_T, log_z_T, entropy_T)
        ctx.settings = (temperature, shard, block, entropy_grad)
        return logprob_T, entropy_T

    @staticmethod
    def backward(ctx, grad_logprob_T, grad_entropy_T):
        hidden_TH, weight_VH, target_T, log_z_T, entropy_T = ctx.saved_tensors
        temperature, shard, block, entropy_grad = ctx.settings
        grad_hidden_TH = torch.zeros_like(hidden_TH, dtype=log_z_T.dtype)
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=log_z_T.dtype)
        for start in range(0, hidden_TH.shape[0], block):
            rows = slice(start, start + block)
            logits_BV = _block_logits(hidden_TH[rows], weight_VH, temperature, shard)
            grad_BV = _grad_logits(
                logits_BV, target_T[rows], log_z_T[rows], entropy_T[rows], grad_logprob_T[rows],
                grad_entropy_T[rows] if entropy_grad else None, shard,
            ).div_(temperature).to(hidden_TH.dtype)  # fmt: skip
            grad_hidden_TH[rows] = grad_BV @ weight_VH
            grad_weight_VH += grad_BV.t() @ hidden_TH[rows]
        shard.all_reduce(grad_hidden_TH)
        return grad_hidden_TH.to(hidden_TH.dtype), grad_weight_VH.to(weight_VH.dtype), None, None, None, None, None


def _statistics(logits_BV: Tensor, target_B: Tensor, shard: _Shard) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability, entropy and log-partition of each row; clamped to logprob <= 0 <= entropy <= ln(vocab_size)."""
    max_B = shard.all_reduce(logits_BV.amax(-1), dist.ReduceOp.MAX)
    shifted_BV = logits_BV.sub_(max_B[:, None])
    local_B, here_B = _local_targets(target_B, shard, logits_BV.shape[1])
    target_logit_B = shifted_BV.gather(1, local_B[:, None])[:, 0].masked_fill(~here_B, 0.0)
    exp_BV = shifted_BV.exp()
    total_B = exp_BV.sum(-1)
    # a padding row has exponential 0 and logit -inf: the clamp makes their product 0 instead of NaN
    weighted_B = exp_BV.mul_(shifted_BV.clamp_min_(torch.finfo(shifted_BV.dtype).min)).sum(-1)
    target_logit_B, total_B, weighted_B = shard.all_reduce(torch.stack([target_logit_B, total_B, weighted_B]))
    log_total_B = total_B.log()
    entropy_B = (log_total_B - weighted_B / total_B).clamp_(0.0, torch.tensor(float(shard.vocab_size)).log().item())
    return (target_logit_B - log_total_B).clamp_max_(0.0), entropy_B, max_B + log_total_B


def _grad_logits(
    logits_BV: Tensor,
    target_B: Tensor,
    log_z_B: Tensor,
    entropy_B: Tensor,
    grad_logprob_B: Tensor,
    grad_entropy_B: Tensor | None,
    shard: _Shard,
) -> Tensor:
    """d loss / d tempered logits: ``g (onehot - p)``, and ``-g_H p (log p + H)`` with a differentiable entropy."""
    log_p_BV = logits_BV.sub_(log_z_B[:, None])
    p_BV = log_p_BV.exp()
    grad_BV = -grad_logprob_B[:, None] * p_BV
    local_B, here_B = _local_targets(target_B, shard, logits_BV.shape[1])
    grad_BV.scatter_add_(1, local_B[:, None], (grad_logprob_B * here_B)[:, None])
    if grad_entropy_B is not None:
        log_p_BV = log_p_BV.clamp_min_(torch.finfo(log_p_BV.dtype).min)
        grad_BV -= grad_entropy_B[:, None] * p_BV * (log_p_BV + entropy_B[:, None])
    return grad_BV
