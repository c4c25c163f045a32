"""What is done to a tile of logits, here in torch operations, in which number formats, and whose
kernels do it.

The operations run on any device and in fp64. On a CPU a tile fits the cache; what counts is the
exponential, to which the fused softmax is the fastest way, and its probabilities are all that a
one-pass head must keep. bf16 and fp16 operands give fp32 logits: a GPU's tensor cores hand them
out; a CPU has no such product, so tiles of the operands are widened first (exact).

Shape suffixes: B = tokens of a block, S = columns of a slice of the vocabulary; 4 = (m, s, w, t) of
``statistics``.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol

import torch
from torch import Tensor

from openrlhf_ext.head.statistics import TokenGradient

logger = logging.getLogger(__name__)

Implementation = Literal["auto", "torch", "triton"]


class Kernels(Protocol):
    """The passes over a tile. A one-pass head keeps every tile of a block between the two passes:
    the logits with ``keeps_logits``, otherwise what ``statistics`` leaves in ``spare_BS``."""

    keeps_logits: bool

    def statistics(
        self, logits_BS: Tensor, spare_BS: Tensor, column_B: Tensor, scale_B: Tensor | None
    ) -> Tensor:
        """(4, B) of a tile. Without ``keeps_logits`` the logits and ``spare_BS`` are
        overwritten."""

    def gradient(self, logits_BS: Tensor, token: TokenGradient, out_BS: Tensor) -> None:
        """Writes d loss / d unscaled logits to ``out_BS``, which may be the logits; overwrites the
        logits."""

    def kept_gradient(
        self, kept_BS: Tensor, part_4B: Tensor, token: TokenGradient, out_BS: Tensor
    ) -> None:
        """The same from a kept tile and the statistics it gave."""


class TorchKernels:
    """See ``Kernels``; keeps the softmax of each slice."""

    keeps_logits = False

    def statistics(
        self, logits_BS: Tensor, spare_BS: Tensor, column_B: Tensor, scale_B: Tensor | None
    ) -> Tensor:
        if scale_B is not None:
            logits_BS.mul_(scale_B[:, None])
        index_B1, here_B = _index(column_B, logits_BS)
        target_B = logits_BS.gather(1, index_B1)[:, 0].masked_fill_(~here_B, 0.0)
        maximum_B = logits_BS.amax(1)
        torch.softmax(logits_BS, 1, out=spare_BS)
        sum_B = spare_BS.amax(1).reciprocal_()  # the largest exponential is 1
        weighted_B = logits_BS.sub_(maximum_B[:, None]).mul_(spare_BS).sum(1).mul_(sum_B)
        return torch.stack([maximum_B, sum_B, weighted_B, target_B])

    def gradient(self, logits_BS: Tensor, token: TokenGradient, out_BS: Tensor) -> None:
        if token.scale_B is not None:
            logits_BS.mul_(token.scale_B[:, None])
        log_p_BS = logits_BS.sub_(token.maximum_B[:, None]).sub_(token.log_sum_B[:, None])
        if token.entropy_coefficient_B is None or token.entropy_B is None:
            grad_BS = log_p_BS.exp_().mul_(-token.coefficient_B[:, None])
        else:
            # d entropy / d u_v = -p_v (log p_v + entropy)
            weight_BS = (log_p_BS + token.entropy_B[:, None]).mul_(
                token.entropy_coefficient_B[:, None]
            )
            grad_BS = log_p_BS.exp_().mul_(weight_BS.add_(token.coefficient_B[:, None]).neg_())
        self._finish(grad_BS, token, out_BS)

    def kept_gradient(
        self, kept_BS: Tensor, part_4B: Tensor, token: TokenGradient, out_BS: Tensor
    ) -> None:
        # of the slice in the whole
        share_B = part_4B[1] * (part_4B[0] - token.maximum_B).sub_(token.log_sum_B).exp_()
        if token.entropy_coefficient_B is None or token.entropy_B is None:
            grad_BS = kept_BS.mul_(share_B.mul_(token.coefficient_B).neg_()[:, None])
        else:
            p_BS = kept_BS.mul_(share_B[:, None])
            p_log_p_BS = torch.xlogy(p_BS, p_BS).mul_(token.entropy_coefficient_B[:, None])
            weight_B = torch.addcmul(
                token.coefficient_B, token.entropy_coefficient_B, token.entropy_B
            )
            grad_BS = p_BS.mul_(weight_B[:, None]).add_(p_log_p_BS).neg_()
        self._finish(grad_BS, token, out_BS)

    def _finish(self, grad_BS: Tensor, token: TokenGradient, out_BS: Tensor) -> None:
        index_B1, here_B = _index(token.column_B, grad_BS)
        grad_BS.scatter_add_(1, index_B1, (token.coefficient_B * here_B)[:, None])
        if token.scale_B is not None:
            grad_BS.mul_(token.scale_B[:, None])
        if out_BS is not grad_BS:
            out_BS.copy_(grad_BS)


def _index(column_B: Tensor, tile_BS: Tensor) -> tuple[Tensor, Tensor]:
    """(B, 1) a valid column for each token, and (B,) whether its target is really there."""
    here_B = (column_B >= 0) & (column_B < tile_BS.shape[1])
    return column_B.masked_fill(~here_B, 0)[:, None], here_B


@dataclass(frozen=True)
class Precision:
    """Formats of one call."""

    compute: torch.dtype  # logits, statistics and accumulators of gradients; at least fp32
    logits: torch.dtype  # operands of the product that makes the logits
    gradient: torch.dtype  # operands of the two products that make the gradients

    @classmethod
    def of(cls, dtype: torch.dtype, device: torch.device) -> Precision:
        compute = torch.promote_types(dtype, torch.float32)
        if device.type != "cuda":
            return cls(compute, compute, compute)
        # the gradient of a logit is p times a loss weight of about 1 / tokens, which fp16 rounds to
        # zero
        return cls(compute, dtype, torch.float32 if dtype == torch.float16 else dtype)

    @property
    def operands_are_exact(self) -> bool:
        """Whether the operands of the logits are in the compute format, so that scaling them loses
        nothing."""
        return self.logits == self.compute


def multiply(out: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """``out = left @ right``, accumulated and stored in the format of ``out``."""
    if left.dtype == out.dtype:
        return torch.mm(left, right, out=out)
    return torch.mm(left, right, out_dtype=out.dtype, out=out)


def accumulate(out: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """``out += left @ right``, accumulated and stored in the format of ``out``."""
    if left.dtype == out.dtype:
        return out.addmm_(left, right)
    # an fp32 summand with bf16 operands is accepted by torch from 2.10 on (pytorch pull request
    # 167931)
    return torch.addmm(out, left, right, out_dtype=out.dtype, out=out)


# ---- kernels: chosen by device, or by name


def choose_kernels(
    implementation: Implementation, compute: torch.dtype, device: torch.device
) -> Kernels:
    """Triton on CUDA devices where it is installed, torch elsewhere, unless asked for by name."""
    if implementation not in ("auto", "torch", "triton"):
        raise ValueError(
            f"implementation must be 'auto', 'torch' or 'triton', got {implementation!r}"
        )
    obstacle = triton_obstacle(compute, device)
    if implementation == "triton" and obstacle:
        raise ValueError(
            f"implementation 'triton' cannot run here: {obstacle}; use 'auto' or 'torch'"
        )
    if implementation == "auto" and obstacle and device.type == "cuda":
        _warn_once(obstacle)
    if (
        implementation == "torch"
        or obstacle
        or (implementation == "auto" and device.type != "cuda")
    ):
        return TorchKernels()
    from openrlhf_ext.head.triton_kernels import TritonKernels  # needs the package triton

    return TritonKernels()


@cache
def _warn_once(obstacle: str) -> None:
    logger.warning(
        "the head uses torch kernels, which are slower on a GPU than Triton's: %s", obstacle
    )


def triton_obstacle(compute: torch.dtype, device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package 'triton' is not installed"
    if compute != torch.float32:
        return f"its statistics are fp32, these inputs need {compute}"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the tensors are on {device.type}, and Triton's interpreter (TRITON_INTERPRET=1) is off"
    return None
