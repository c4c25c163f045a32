"""FP8 as a layer converter: TransformerEngine's layers, told by Megatron's configuration, or ours, emulated.

The state of delayed scaling is scales and the largest entries of earlier micro-batches. These are agreed on by all
tensor-, context- and data-parallel ranks of a stage, so that a layer's state is the same on each of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from openrlhf_ext.fp8.recipe import WEIGHT_COPY_BYTES, Recipe
from openrlhf_ext.fp8.toolkit import wheel_folder
from openrlhf_ext.megatron.fp8 import transformer_engine
from openrlhf_ext.megatron.layers.converter import LayerConverter

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.spec_utils import ModuleSpec


@dataclass(frozen=True)
class FP8Layers(LayerConverter):
    """The linear layers of a decoder multiply in FP8 by the recipe."""

    recipe: Recipe

    name = "fp8"
    state_title = "delayed FP8 scaling"
    state_options = "fp8.amax_history_len and fp8.emulate"

    @property
    def own_layers(self) -> bool:  # type: ignore[override]  # depends on the recipe
        return self.recipe.emulate

    def environment(self) -> dict[str, str]:
        env = dict(self.recipe.environment)
        if (toolkit := wheel_folder()) is not None:
            # TransformerEngine 2.11 compiles kernels of quantization while it runs, and looks for CUDA 12's wheels only
            # (its common/__init__.py:239). Not CUDA_HOME: by that it would load other libraries than torch's.
            env["NVTE_CUDA_INCLUDE_DIR"] = os.environ.get("NVTE_CUDA_INCLUDE_DIR", str(toolkit / "include"))
        return env

    def require(self) -> None:
        if not self.recipe.emulate:
            transformer_engine.require(self.recipe)

    def megatron_arguments(self) -> dict[str, Any]:
        return {} if self.recipe.emulate else transformer_engine.megatron_arguments(self.recipe)

    def convert(self, layer: ModuleSpec, number: int, num_layers: int) -> None:
        from openrlhf_ext.megatron.fp8.emulated import emulated_linears

        if self.recipe.emulate and not self.recipe.bf16_layers.has(number, num_layers):
            column, row = emulated_linears(self.recipe)
            attention, mlp = layer.submodules.self_attention.submodules, layer.submodules.mlp.submodules
            attention.linear_qkv = mlp.linear_fc1 = column
            attention.linear_proj = mlp.linear_fc2 = row

    def start(self, chunks: Sequence[GPTModel], compute: Callable[[bool], None]) -> None:
        """Raises FP8Unavailable if a layer computes in another precision."""
        from openrlhf_ext.megatron.fp8.emulated import follow_micro_batches

        for chunk in chunks:
            follow_micro_batches(chunk.decoder)
        self.loaded(chunks, compute)
        if not (self.recipe.delayed or self.recipe.emulate):
            compute(False)
        for chunk in chunks:
            first = chunk.decoder.layers[0].layer_number - 1
            transformer_engine.prove(chunk.decoder, self.recipe, first, chunk.config.num_layers)

    def loaded(self, chunks: Sequence[GPTModel], compute: Callable[[bool], None]) -> None:
        """Sets the delayed scales of inputs and weights by what the present weights make of a fixed sequence.

        Without it the first pass would run at scale 1, where most weights are too small for FP8; forward-only passes,
        of which a probe or a frozen model sees no others, never move a scale. Emulated layers multiply without rounding
        meanwhile; TransformerEngine's cannot, so that only their second pass has scales that fit.
        """
        from openrlhf_ext.megatron.fp8.emulated import scalings

        if not self.recipe.delayed:
            return
        for name, tensor in self.state(chunks).items():
            tensor.fill_(1.0 if name.endswith("scale") else 0.0)
        emulated = [scaling for chunk in chunks for scaling in scalings(chunk).values()]
        for scaling in emulated:
            scaling.rounds = False
        with torch.enable_grad():  # TransformerEngine's move only with gradients
            compute(True)
            if not self.recipe.emulate:
                compute(True)
        for scaling in emulated:
            scaling.rounds = True
            scaling.forget_passes()
        for name, tensor in self.state(chunks).items():
            if name.endswith("history"):
                tensor[:-1].zero_()  # the other micro-batches were the same

    def state(self, chunks: Sequence[GPTModel]) -> dict[str, Tensor]:
        """fp32 scales and histories by ``layers.<number in the whole model>.<layer>.<what>``, of 'delayed' only.

        TransformerEngine's exist from the first forward pass on.
        """
        found: dict[str, Tensor] = {}
        for chunk in chunks:
            for path, layer in transformer_engine.linear_layers(chunk.decoder).items():
                _, index, rest = path.split(".", 2)
                number = chunk.decoder.layers[int(index)].layer_number - 1
                found |= {f"layers.{number}.{rest}.{name}": tensor for name, tensor in _held(layer)}
        return found

    def piece_unit(self, pieces: int) -> int:
        """For TransformerEngine 2.11, and for the emulation, so that the packs are the same.

        Its products take multiples of 8 rows, and of 16 where rows are summed over (the gradient of a weight). Blocks
        of 128 rows that sequence parallelism gathers must be whole (``assert_dim_for_all_gather``,
        float8_blockwise_tensor.py:216).
        """
        return 128 if self.recipe.blockwise and pieces > 1 else 16

    def kept_per_weight(self, number: int, num_layers: int) -> int:
        return 0 if self.recipe.emulate or self.recipe.bf16_layers.has(number, num_layers) else WEIGHT_COPY_BYTES

    def drop_kept(self, model: torch.nn.Module) -> None:
        for module in model.modules():
            getattr(module, "_fp8_workspaces", {}).clear()

    def hf_config(self) -> dict[str, Any]:
        return {"trained_in_fp8": self.recipe.label}


def _held(layer: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    if (scaling := getattr(layer, "scaling", None)) is not None:  # an emulated layer's
        for operand, scale in scaling.scales.items():
            yield f"{operand}.scale", scale.scale
            yield f"{operand}.history", scale.history_A
        return
    for direction in ("scaling_fwd", "scaling_bwd"):  # TransformerEngine's
        meta = getattr(layer, "fp8_meta", {}).get(direction)
        if meta is not None and hasattr(meta, "amax_history"):
            yield f"{direction}.scale", meta.scale
            yield f"{direction}.history", meta.amax_history
