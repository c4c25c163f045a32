"""What torch 2.11 lacks of what our code, written for 2.13, asks for: a machine lent for the checks may have it."""

from __future__ import annotations

import inspect
from typing import Any


def adapt() -> None:
    """``varlen_attn`` takes ``enable_gqa`` too.

    In 2.11 it has no such argument (torch/nn/attention/varlen.py:159) and hands fewer key-value heads on to the flash
    kernels, which take them; in 2.13 the argument only lets them pass (varlen.py:295).
    """
    from torch.nn.attention import varlen

    given = varlen.varlen_attn
    if "enable_gqa" in inspect.signature(given).parameters:
        return

    def varlen_attn(*args: Any, enable_gqa: bool = False, **named: Any) -> Any:
        return given(*args, **named)

    varlen.varlen_attn = varlen_attn
