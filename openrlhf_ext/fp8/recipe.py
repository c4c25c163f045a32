"""What of a model is computed in FP8, and by which recipe: plain values, which travel to Ray workers."""

from __future__ import annotations

from dataclasses import dataclass

RECIPES = ("blockwise", "current", "delayed")
FORMATS = ("e4m3", "hybrid")
SCALES = ("fp32", "pow2")
AMAX_ALGORITHMS = ("max", "most_recent")
BLOCK = 128  # entries along a side of a block, 'blockwise'
WEIGHT_COPY_BYTES = 2
"""Hopper's FP8 products read both operands row by row, so TransformerEngine keeps a weight and its transpose."""


@dataclass(frozen=True)
class BF16Layers:
    """Decoder layers at both ends of a model that stay in the model's own precision."""

    start: int = 0
    end: int = 0

    def has(self, number: int, layers: int) -> bool:
        """Whether layer ``number`` of a model of ``layers``, counted from 0, is one of them."""
        return number < self.start or number >= layers - self.end

    def numbers(self, layers: int) -> list[int]:
        """Which of a model's ``layers``, counted from 0, they are."""
        return [number for number in range(layers) if self.has(number, layers)]


@dataclass(frozen=True)
class Recipe:
    """How the linear layers of a decoder (q, k, v, output of attention, MLP) multiply in FP8.

    Embedding, head, norms and attention itself stay as they are. Accumulation is in fp32.

    Attributes:
        name: 'blockwise': a scale for 1x128 entries of activations and gradients and for 128x128 of a weight (DeepSeek-
            V3, arXiv 2412.19437 section 3.3); 'current': one for a tensor, from the tensor itself; 'delayed': one for a
            tensor, from the largest entries of earlier micro-batches.
        format: 'e4m3' everywhere, or 'hybrid': E5M2 for the gradients of outputs.
        scales: 'fp32', or 'pow2': rounded down to powers of two.
        margin: delayed: scales are 2^margin smaller than would fit.
        amax_history_len: delayed: micro-batches that are remembered.
        amax_compute_algo: delayed: the 'max' of them, or the 'most_recent'.
        bf16_layers: decoder layers that are left out.
        emulate: round as FP8 does and multiply in fp32, in plain torch on any machine; else TransformerEngine.
    """

    name: str = "blockwise"
    format: str = "e4m3"
    scales: str = "fp32"
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    bf16_layers: BF16Layers = BF16Layers()
    emulate: bool = False

    def __post_init__(self) -> None:
        for field, choices in (
            ("name", RECIPES), ("format", FORMATS), ("scales", SCALES), ("amax_compute_algo", AMAX_ALGORITHMS),
        ):  # fmt: skip
            if getattr(self, field) not in choices:
                raise ValueError(f"{field} must be one of {', '.join(choices)}, got {getattr(self, field)!r}")

    @property
    def blockwise(self) -> bool:
        """Whether scales belong to blocks, so that a token's result does not depend on the others of its pack."""
        return self.name == "blockwise"

    @property
    def delayed(self) -> bool:
        """Whether scales are state that has to be kept."""
        return self.name == "delayed"

    @property
    def pow2(self) -> bool:
        """Whether scales are powers of two."""
        return self.scales == "pow2"

    @property
    def environment(self) -> dict[str, str]:
        """Variables that TransformerEngine reads when it is imported, once, into class attributes.

        What its constructors take changes nothing (TransformerEngine 2.11.0 common/recipe/__init__.py:235, 332).
        """
        return {
            "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": str(int(not self.pow2)),
            "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": str(int(self.pow2)),
        }

    @property
    def label(self) -> str:
        """For progress lines and records: 'blockwise e4m3 fp32, EMULATED'."""
        return f"{self.name} {self.format} {self.scales}" + (", EMULATED" if self.emulate else "")
