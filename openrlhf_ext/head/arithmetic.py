"""How a call of the head computes: number formats, the matrix products between them, and whose kernels.

bf16 and fp16 operands give fp32 logits: on a GPU the tensor cores accumulate in fp32 and hand that out; a CPU has no
such product, so tiles of the operands are widened first (exact, and the CPU is where small models are tested).
"""

from __future__ import annotations

import importlib.util
import logging
import os
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from openrlhf_ext.head.kernels import Kernels, TorchKernels

logger = logging.getLogger(__name__)

Implementation = Literal["auto", "torch", "triton"]


@dataclass(frozen=True)
class Precision:
    """Formats of one call.

    Attributes:
        compute: logits, statistics and accumulators of gradients; at least fp32.
        logits: operands of the product that makes the logits.
        gradient: operands of the two products that make the gradients.
    """

    compute: torch.dtype
    logits: torch.dtype
    gradient: torch.dtype

    @classmethod
    def of(cls, dtype: torch.dtype, device: torch.device) -> Precision:
        compute = torch.promote_types(dtype, torch.float32)
        if device.type != "cuda":
            return cls(compute, compute, compute)
        # the gradient of a logit is p times a loss weight of about 1 / tokens, which fp16 rounds to zero
        return cls(compute, dtype, torch.float32 if dtype == torch.float16 else dtype)

    @property
    def operands_are_exact(self) -> bool:
        """The operands of the logits are already in the compute format, so that scaling them loses nothing."""
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
    # an fp32 summand with bf16 operands is accepted by torch from 2.10 on (pytorch pull request 167931)
    return torch.addmm(out, left, right, out_dtype=out.dtype, out=out)


# ---- kernels: chosen by device, or by name -------------------------------------------------------------------------


def choose_kernels(implementation: Implementation, compute: torch.dtype, device: torch.device) -> Kernels:
    """Triton on CUDA devices where it is installed, torch elsewhere, unless asked for by name.

    Raises:
        ValueError: the implementation is unknown, or cannot run here; the message says why.
    """
    if implementation not in ("auto", "torch", "triton"):
        raise ValueError(f"implementation must be 'auto', 'torch' or 'triton', got {implementation!r}")
    obstacle = triton_obstacle(compute, device)
    if implementation == "triton" and obstacle:
        raise ValueError(f"implementation 'triton' cannot run here: {obstacle}; use 'auto' or 'torch'")
    if implementation == "auto" and obstacle and device.type == "cuda":
        _warn_once(obstacle)
    if implementation == "torch" or obstacle or (implementation == "auto" and device.type != "cuda"):
        return TorchKernels()
    from openrlhf_ext.head.triton_kernels import TritonKernels  # needs the package triton

    return TritonKernels()


@cache
def _warn_once(obstacle: str) -> None:
    logger.warning("the head uses torch kernels, which are slower on a GPU than Triton's: %s", obstacle)


def triton_obstacle(compute: torch.dtype, device: torch.device) -> str | None:
    """Why the Triton kernels cannot take these tensors; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "the package 'triton' is not installed"
    if compute != torch.float32:
        return f"its statistics are fp32, these inputs need {compute}"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the tensors are on {device.type}, and Triton's interpreter (TRITON_INTERPRET=1) is off"
    return None
