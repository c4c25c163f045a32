"""What torch 2.11 lacks of what our code, written for 2.13, asks for: a machine lent for the checks may have it."""

from __future__ import annotations

import inspect
from typing import Any


def adapt() -> None:
    """``varlen_attn`` takes ``enable_gqa`` too, and an NCCL transfer can be asked for its error.

    In 2.11 ``Work.exception`` raises TypeError, whatever there is to say (seen on an H200); in 2.13 it answers. A check
    with a lost peer would need that answer, and two GPUs. In 2.11 ``varlen_attn`` has no such argument
    (torch/nn/attention/varlen.py:159) and hands fewer key-value heads on to the flash kernels, which take them; in 2.13
    the argument only lets them pass (varlen.py:295).
    """
    import torch
    import torch.distributed as dist
    from torch.nn.attention import varlen

    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13):
        dist.Work.exception = lambda work: None  # type: ignore[assignment, method-assign]

    given = varlen.varlen_attn
    if "enable_gqa" in inspect.signature(given).parameters:
        return

    def varlen_attn(*args: Any, enable_gqa: bool = False, **named: Any) -> Any:
        return given(*args, **named)

    varlen.varlen_attn = varlen_attn
