"""FP8 in the policy's linear layers and in the engines'."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from openrlhf_ext.fp8.recipe import BF16Layers, Recipe
from openrlhf_ext.options import Int, Section, Violation, added, value_text

_BF16_LAYERS = ("layers_in_bf16_start", "layers_in_bf16_end")
_DELAYED_ONLY = ("margin", "amax_history_len", "amax_compute_algo")


class FP8(Section):
    """FP8 in the linear layers of the decoder; embedding, head, norms, attention and the critic stay as they are."""

    needs = {
        "fp8.enable": ("emulate", "recipe", "format", "scales", "margin", "amax_history_len", "amax_compute_algo"),
        "fp8.enable | fp8.rollout_enable": ("layers_in_bf16_start", "layers_in_bf16_end"),
    }

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

    @property
    def training_label(self) -> str:
        """For progress lines, records and checkpoints, which must not hide an emulation; empty without FP8."""
        recipe = self.training_recipe
        return "" if recipe is None else f"FP8 {recipe.label}"

    def violations(self) -> Iterator[Violation]:
        if self.enable:
            yield from self._delayed_violations()
            yield from self._foreign_violations()

    def _delayed_violations(self) -> Iterator[Violation]:
        """Megatron's rule (megatron-core 0.16.1 transformer_config.py:990), and so that of the emulation."""
        leaves = [leaf for leaf in _BF16_LAYERS if getattr(self, leaf)]
        if self.recipe == "delayed" and leaves:
            got = " and ".join(f"fp8.{leaf} {getattr(self, leaf)}" for leaf in leaves)
            yield Violation(
                ("fp8.recipe", *(f"fp8.{leaf}" for leaf in leaves)),
                f"fp8.recipe delayed leaves no layers in BF16, Megatron refuses it: got {got}; leave them out, or use "
                "fp8.recipe blockwise or current",
            )

    def _foreign_violations(self) -> Iterator[Violation]:
        """Options of another recipe."""
        foreign = ("scales",) if self.recipe == "delayed" else _DELAYED_ONLY
        owner = "blockwise or current" if self.recipe == "delayed" else "delayed"
        for leaf in foreign:
            if (value := getattr(self, leaf)) is not None:
                yield Violation(
                    (f"fp8.{leaf}", "fp8.recipe"),
                    f"fp8.{leaf} is an option of fp8.recipe {owner}: got {value_text(value)} and fp8.recipe "
                    f"{self.recipe}; leave it out, or change the recipe",
                )

    def cautions(self) -> Iterator[str]:
        recipe = self.training_recipe
        if recipe is None:
            return
        if not recipe.blockwise:
            yield (
                f"fp8.recipe {recipe.name}: a tensor has one scale, so a log-prob depends on what shares its pack, and "
                "the ratio of the first update is not 1 (docs/fp8.md); fp8.recipe blockwise has no such noise"
            )
        if self.rollout_enable and (not recipe.blockwise or recipe.pow2):
            yield (
                f"fp8.enable with fp8.recipe {recipe.name} and fp8.scales {recipe.scales} beside fp8.rollout_enable: "
                "the engines quantize blockwise with fp32 scales, and the errors of two quantizers add up, so that "
                "trainer and engines differ more than with either alone; use fp8.recipe blockwise and fp8.scales fp32"
            )
