"""FP8 in the policy's linear layers and in the engines'."""

from __future__ import annotations

from typing import Literal

from openrlhf_ext.fp8.recipe import BF16Layers, Recipe
from openrlhf_ext.options import Int, Section, added


class FP8(Section):
    """FP8 in the linear layers of the decoder; embedding, head, norms, attention and the critic stay as they are."""

    enable: bool = added(False, "train with FP8 linear layers (TransformerEngine's, or emulated with fp8.emulate)")
    emulate: bool = added(
        False,
        "round as FP8 does and multiply in fp32, on any machine: for studies of accuracy, slower than without FP8",
    )
    recipe: Literal["blockwise", "current", "delayed"] = added(
        "blockwise",
        "what shares a scale: blockwise = 1x128 entries of activations and gradients, 128x128 of a weight; current = a "
        "tensor, from the tensor itself; delayed = a tensor, from earlier micro-batches",
    )
    format: Literal["e4m3", "hybrid"] | None = added(
        None,
        "e4m3 everywhere, or hybrid: E5M2 for gradients of outputs",
        default_text="e4m3 with fp8.recipe blockwise, else hybrid",
    )
    scales: Literal["fp32", "pow2"] | None = added(
        None, "scales in fp32, or rounded down to powers of two", default_text="fp32"
    )
    layers_in_bf16_start: Int = added(0, "decoder layers at the start without FP8, in training and rollout", ge=0)
    layers_in_bf16_end: Int = added(0, "decoder layers at the end without FP8, in training and rollout", ge=0)
    margin: Int | None = added(
        None, "with fp8.recipe delayed: scales are 2^margin smaller than would fit", ge=0, default_text="0"
    )
    amax_history_len: Int | None = added(
        None, "with fp8.recipe delayed: micro-batches that are remembered", ge=1, default_text="1024"
    )
    amax_compute_algo: Literal["max", "most_recent"] | None = added(
        None,
        "with fp8.recipe delayed: scale from the largest entry of the remembered micro-batches, or of the last",
        default_text="max",
    )
    rollout_enable: bool = added(
        False, "FP8 linear layers in the rollout engines: vLLM's fp8_per_block with fp32 scales; on CPU emulated"
    )

    @property
    def bf16_layers(self) -> BF16Layers:
        """Layers that training and rollout leave out."""
        return BF16Layers(self.layers_in_bf16_start, self.layers_in_bf16_end)

    @property
    def training_recipe(self) -> Recipe | None:
        """How the policy is trained in FP8; None: it is not."""
        if not self.enable:
            return None
        own = {
            "scales": self.scales, "margin": self.margin, "amax_history_len": self.amax_history_len,
            "amax_compute_algo": self.amax_compute_algo,
        }  # fmt: skip
        return Recipe(
            self.recipe,
            self.format or ("e4m3" if self.recipe == "blockwise" else "hybrid"),
            bf16_layers=self.bf16_layers,
            emulate=self.emulate,
            **{name: value for name, value in own.items() if value is not None},  # type: ignore[arg-type]
        )
