"""What is done to a tile of logits: statistics, and the gradient of the logits. Chosen by device, or by name.

Shape suffixes: B = tokens of a block, S = columns of a slice of the vocabulary; 4 = (m, s, w, t) of ``statistics``.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from functools import cache
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Implementation = Literal["auto", "torch", "triton"]


class TokenGradient(NamedTuple):
    """What the gradient of a tile's logits takes from each of its tokens; all of shape (B,).

    Attributes:
        maximum_B, log_sum_B: of the token's whole distribution (``statistics.TokenStatistics``).
        coefficient_B: d loss / d log-probability.
        column_B: column of the target in the tile; outside of ``[0, S)`` where it lies elsewhere.
        scale_B: factor of the logits (1 / temperature); None where they are scaled already.
        entropy_coefficient_B, entropy_B: d loss / d entropy, and the entropy; None for a constant entropy.
    """

    maximum_B: Tensor
    log_sum_B: Tensor
    coefficient_B: Tensor
    column_B: Tensor
    scale_B: Tensor | None = None
    entropy_coefficient_B: Tensor | None = None
    entropy_B: Tensor | None = None


class Kernels(Protocol):
    """The passes over a tile. A one-pass head keeps every tile of a block between the two passes.

    Attributes:
        keeps_logits: what is kept is the logits; otherwise it is what ``statistics`` leaves in ``spare_BS``.
    """

    keeps_logits: bool

    def statistics(
        self, logits_BS: Tensor, spare_BS: Tensor | None, column_B: Tensor, scale_B: Tensor | None
    ) -> Tensor:
        """(4, B) of a tile. Without ``keeps_logits`` the logits are overwritten and ``spare_BS`` is needed."""

    def gradient(self, logits_BS: Tensor, token: TokenGradient, out_BS: Tensor) -> None:
        """Writes d loss / d unscaled logits to ``out_BS``, which may be the logits; overwrites the logits."""

    def kept_gradient(self, kept_BS: Tensor, part_4B: Tensor, token: TokenGradient, out_BS: Tensor) -> None:
        """The same from a kept tile and the statistics it gave."""


def choose_kernels(implementation: Implementation, compute: torch.dtype, device: torch.device) -> Kernels:
    """Triton on CUDA devices where it is installed, torch elsewhere, unless asked for by name.

    Raises:
        ValueError: the implementation is unknown, or cannot run here; the message says why.
    """
    from openrlhf_ext.head.torch_kernels import TorchKernels

    if implementation not in ("auto", "torch", "triton"):
        raise ValueError(f"implementation must be 'auto', 'torch' or 'triton', got {implementation!r}")
    obstacle = triton_obstacle(compute, device)
    if implementation == "triton" and obstacle:
        raise ValueError(f"implementation 'triton' cannot run here: {obstacle}; use 'auto' or 'torch'")
    if implementation == "auto" and obstacle and device.type == "cuda":
        _warn_once(obstacle)
    if implementation == "torch" or obstacle or (implementation == "auto" and device.type != "cuda"):
        return TorchKernels()
    from openrlhf_ext.head.triton_kernels import TritonKernels

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
