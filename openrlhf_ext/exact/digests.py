"""What modules computed for each token of a text, as one number: enough to find where a policy and
an engine part, and small enough to travel. Shape suffixes: T = tokens of the text, F = values of a
token."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

Digests = dict[str, np.ndarray]
"""Name of a module -> (T,) int64, in the order of computation."""
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_SPREAD = 0x9E3779B1  # odd, so that no bit of a value is lost


def digests(states: Mapping[str, Tensor], tokens: int) -> Digests:
    """Of the first ``tokens`` rows of (T, ...) states. Equal bits give equal numbers."""
    return {name: _digest(state[:tokens]) for name, state in states.items()}


def _digest(state: Tensor) -> np.ndarray:
    rows_TF = state.flatten(1).contiguous()
    bits_TF = rows_TF.view(_INTEGERS[rows_TF.element_size()]).long()
    places_F = torch.arange(1, bits_TF.shape[1] + 1) * _SPREAD
    return (bits_TF * places_F).sum(1).numpy()


def first_difference(policy: Mapping[str, np.ndarray], engine: Digests) -> tuple[str, int] | None:
    """The first module, in the engine's order, that computed other bits, and the first token of
    which it did. None if those that both have recorded agree."""
    for name, engine_T in engine.items():
        if name in policy:
            differs_T = policy[name] != engine_T
            if differs_T.any():
                return name, int(differs_T.argmax())
    return None
