"""A fingerprint of a rank's weights, for proving that nothing changed them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def digest(tensors: Iterable[Tensor]) -> str:
    """Hexadecimal digest of the bits of all tensors in order. Reads everything once through host memory."""
    state = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        state.update(tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy())
    return state.hexdigest()
