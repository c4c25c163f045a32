"""Which number formats a call of the head computes in, and the matrix products between them.

bf16 and fp16 operands give fp32 logits: on a GPU the tensor cores accumulate in fp32 and hand that out; a CPU has no
such product, so tiles of the operands are widened first (exact, and the CPU is where small models are tested).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
