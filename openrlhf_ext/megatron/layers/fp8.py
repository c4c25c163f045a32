"""FP8 as a layer converter: TransformerEngine's layers, told by Megatron's configuration and
proven, or ours, emulated.

The state of delayed scaling, scales and the largest entries of earlier micro-batches, is agreed on
by all tensor-, context- and data-parallel ranks of a stage. Read in TransformerEngine 2.11.0 and
megatron-core 0.19.2; on a GPU it has run on one rank (docs/fp8.md).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from openrlhf_ext.fp8 import wheel_folder
from openrlhf_ext.fp8.quantize import Products
from openrlhf_ext.fp8.recipe import WEIGHT_COPY_BYTES, Recipe
from openrlhf_ext.megatron.layers import LayerConverter, is_linear, is_of_mlp, linears

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.spec_utils import ModuleSpec

_TESTED_SERIES = ("2.11",)
_MEGATRON_NAMES = {"blockwise": "blockwise", "current": "tensorwise", "delayed": "delayed"}
_CAPABILITY = {"blockwise": (9, 0), "current": (8, 9), "delayed": (8, 9)}
_BLOCKWISE_CUDA = (12, 9)
_CODES_THAT_MAY_DIFFER = 0.005
"""A scale may be rounded in another order, and decides for values of bf16 that lie midway between
two codes: one last bit of all scales changes 0.1 to 0.4 % of the codes; another recipe changes a
quarter."""


class FP8Unavailable(RuntimeError):
    """FP8 was asked for and this rank cannot give it, or does not."""


def _device_problems(recipe: Recipe) -> list[str]:
    if not torch.cuda.is_available():
        return ["there is no GPU; FP8 products need one"]
    problems = []
    capability, needed = torch.cuda.get_device_capability(), _CAPABILITY[recipe.name]
    if capability < needed:
        problems.append(
            f"{torch.cuda.get_device_name()} has compute capability "
            f"{capability[0]}.{capability[1]}, fp8.recipe {recipe.name} needs "
            f"{needed[0]}.{needed[1]}"
        )
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    if recipe.blockwise and cuda < _BLOCKWISE_CUDA:
        problems.append(
            f"torch is built for CUDA {torch.version.cuda}, fp8.recipe blockwise needs 12.9 (or "
            "use fp8.recipe current)"
        )
    return problems


def _library_problems(recipe: Recipe) -> list[str]:
    try:
        found = version("transformer_engine")
    except PackageNotFoundError:
        return ["TransformerEngine is not installed: bash examples/scripts/setup_env.sh gpu"]
    if not any(found == series or found.startswith(f"{series}.") for series in _TESTED_SERIES):
        return [
            f"TransformerEngine is {found}, megatron-core {version('megatron-core')} is used with "
            f"{' or '.join(_TESTED_SERIES)}: bash examples/scripts/setup_env.sh gpu"
        ]
    try:
        import transformer_engine.pytorch  # noqa: F401  # type: ignore[import-not-found]
        from transformer_engine.common import recipe as taken  # type: ignore[import-not-found]
    except Exception as error:  # a library that cannot be loaded raises whatever its loader raises
        return [f"TransformerEngine {found} cannot be imported ({type(error).__name__}: {error})"]
    return _scale_problems(recipe, taken)


def _scale_problems(recipe: Recipe, taken: Any) -> list[str]:
    classes = {"blockwise": "Float8BlockScaling", "current": "Float8CurrentScaling"}
    if recipe.delayed:
        return []
    made = getattr(taken, classes[recipe.name])()
    pow2 = {
        bool(getattr(made, name).power_2_scale)
        for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight")
    }
    if pow2 == {recipe.pow2}:
        return []
    variables = " ".join(f"{name}={os.environ.get(name)!r}" for name in recipe.environment)
    return [
        "TransformerEngine was imported with scales that are "
        f"{'not ' if recipe.pow2 else ''}powers of two, fp8.scales is {recipe.scales} "
        f"({variables}): something imported it before these variables were set"
    ]


def linear_layers(decoder: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return {name: module for name, module in decoder.named_modules() if is_linear(name)}


def prove(decoder: torch.nn.Module, recipe: Recipe, first_layer: int, num_layers: int) -> None:
    """That the layers of a decoder which has computed once did so in FP8, and no others.
    ``first_layer``: its first one's number among ``num_layers``. Raises FP8Unavailable: a layer is
    of another type, or its weight has other codes."""
    proven: set[str] = set()
    problems = []
    for path, module in linear_layers(decoder).items():
        number = first_layer + int(path.split(".")[1])
        kind = path.rpartition(".")[2]
        wanted = not recipe.bf16_layers.has(number, num_layers) and (
            recipe.modules == "all" or is_of_mlp(path)
        )
        problems += _type_problems(path, module, wanted, recipe.emulate)
        if wanted and not recipe.emulate and kind not in proven:
            proven.add(kind)
            problems += _code_problems(path, module, recipe)
    if problems:
        raise FP8Unavailable(
            f"fp8.enable (recipe {recipe.label}) is not what runs on {socket.gethostname()}:\n"
            + "\n".join(f"- {problem}" for problem in problems)
        )


def _type_problems(path: str, module: torch.nn.Module, wanted: bool, emulate: bool) -> list[str]:
    # emulated ones have a scaling; TransformerEngine's say whether their last pass was FP8
    # (base.py: init_fp8_metadata)
    right = (hasattr(module, "scaling") if emulate else getattr(module, "fp8", False)) == wanted
    does = "does not compute" if wanted else "does compute"
    return [] if right else [f"{path} is a {type(module).__name__}, which {does} in FP8"]


def _code_problems(path: str, module: torch.nn.Module, recipe: Recipe) -> list[str]:
    """Whether the FP8 copy of its weight that a layer has kept from its last pass has the recipe's
    codes."""
    kept = getattr(module, "_fp8_workspaces", {}).get("weight")
    if kept is None:
        return [f"{path} has kept no FP8 copy of its weight: it has not computed in FP8"]
    weight = module.weight.detach()  # type: ignore[operator, union-attr]
    got = kept._rowwise_data if recipe.blockwise else kept._data
    scale = module.fp8_meta["scaling_fwd"].scale[1] if recipe.delayed else None  # type: ignore[union-attr, index]
    want = Products(recipe).codes("w", weight, scale=scale).codes_RC.view(torch.uint8)
    share = (got.view(torch.uint8)[: want.shape[0], : want.shape[1]] != want).float().mean().item()
    if share > _CODES_THAT_MAY_DIFFER:
        return [
            f"{path}: {share:.1%} of its weight's FP8 codes are not those of the recipe "
            f"{recipe.label}"
        ]
    return []


@dataclass(frozen=True)
class FP8Layers(LayerConverter):
    """The linear layers of a decoder multiply in FP8 by the recipe."""

    recipe: Recipe

    name = "fp8"
    state_title = "delayed FP8 scaling"
    state_options = "fp8.amax_history_len, fp8.modules and fp8.emulate"

    @property
    def own_layers(self) -> bool:  # type: ignore[override]  # depends on the recipe
        return self.recipe.emulate

    def environment(self) -> dict[str, str]:
        env = dict(self.recipe.environment)
        if (toolkit := wheel_folder()) is not None:
            # TransformerEngine 2.11 compiles kernels of quantization while it runs, and looks for
            # CUDA 12's wheels only
            # (its common/__init__.py:239). Not CUDA_HOME: by that it would load other libraries
            # than torch's.
            env["NVTE_CUDA_INCLUDE_DIR"] = os.environ.get(
                "NVTE_CUDA_INCLUDE_DIR", str(toolkit / "include")
            )
        return env

    def require(self) -> None:
        """Raises FP8Unavailable, with everything that is in the way and the host's name."""
        if self.recipe.emulate:
            return
        if problems := [*_device_problems(self.recipe), *_library_problems(self.recipe)]:
            raise FP8Unavailable(
                f"fp8.enable (recipe {self.recipe.label}) is not possible on "
                f"{socket.gethostname()}:\n"
                + "\n".join(f"- {problem}" for problem in problems)
                + "\nmend that, or study the recipe with --fp8.emulate, or leave fp8.enable out"
            )

    def megatron_arguments(self) -> dict[str, Any]:
        recipe, bf16 = self.recipe, self.recipe.bf16_layers
        if recipe.emulate:
            return {}
        return {
            "fp8": recipe.format,  # given always: 'hybrid' with blockwise would mean E5M2 gradients
            "fp8_recipe": _MEGATRON_NAMES[recipe.name],
            "fp8_param": False,
            "fp8_margin": recipe.margin,
            "fp8_amax_history_len": recipe.amax_history_len,
            "fp8_amax_compute_algo": recipe.amax_compute_algo,
            "fp8_wgrad": True,
            "fp8_dot_product_attention": False,
            "fp8_multi_head_attention": False,
            "tp_only_amax_red": False,
            "first_last_layers_bf16": bool(bf16.start or bf16.end),
            "num_layers_at_start_in_bf16": bf16.start,
            "num_layers_at_end_in_bf16": bf16.end,
        }

    def convert(self, layer: ModuleSpec, number: int, num_layers: int) -> None:
        from openrlhf_ext.megatron.layers.emulated import emulated

        for path, owner in linears(layer):
            name, chosen = path.rpartition(".")[2], self.recipe.modules == "all" or is_of_mlp(path)
            if (
                self.recipe.emulate
                and chosen
                and not self.recipe.bf16_layers.has(number, num_layers)
            ):
                setattr(owner, name, emulated(getattr(owner, name), self.recipe))
            elif not (self.recipe.emulate or chosen):
                setattr(owner, name, without_fp8(getattr(owner, name)))

    def start(self, chunks: Sequence[GPTModel], compute: Callable[[bool], None]) -> None:
        from openrlhf_ext.megatron.layers.emulated import follow_micro_batches

        for chunk in chunks:
            follow_micro_batches(chunk.decoder)
        self.loaded(chunks, compute)
        if not (self.recipe.delayed or self.recipe.emulate):
            compute(False)
        for chunk in chunks:
            first = chunk.decoder.layers[0].layer_number - 1
            prove(chunk.decoder, self.recipe, first, chunk.config.num_layers)

    def loaded(self, chunks: Sequence[GPTModel], compute: Callable[[bool], None]) -> None:
        """Sets the delayed scales of inputs and weights by what the present weights make of a fixed
        sequence: at scale 1 most weights are too small for FP8, and forward-only passes never move
        a scale. Emulated layers multiply without rounding meanwhile; TransformerEngine's cannot, so
        that only their second pass has scales that fit."""
        from openrlhf_ext.megatron.layers.emulated import scalings

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
        """fp32 scales and histories by ``layers.<number in the whole model>.<layer>.<what>``, of
        'delayed' only. TransformerEngine's exist from the first forward pass on."""
        found: dict[str, Tensor] = {}
        for chunk in chunks:
            for path, layer in linear_layers(chunk.decoder).items():
                _, index, rest = path.split(".", 2)
                number = chunk.decoder.layers[int(index)].layer_number - 1
                found |= {f"layers.{number}.{rest}.{name}": tensor for name, tensor in _held(layer)}
        return found

    def piece_unit(self, pieces: int) -> int:
        """TransformerEngine 2.11 takes multiples of 8 rows, of 16 where rows are summed over (the
        gradient of a weight), and whole blocks of 128 rows that sequence parallelism gathers
        (``assert_dim_for_all_gather``, float8_blockwise_tensor.py:216). The emulation takes the
        same, so that the packs are."""
        return 128 if self.recipe.blockwise and pieces > 1 else 16

    def kept_per_weight(self, parameter: str, number: int, num_layers: int) -> int:
        left_out = self.recipe.modules == "mlp" and not is_of_mlp(parameter)
        bf16 = self.recipe.emulate or left_out or self.recipe.bf16_layers.has(number, num_layers)
        return 0 if bf16 else WEIGHT_COPY_BYTES

    def drop_kept(self, model: torch.nn.Module) -> None:
        for module in model.modules():
            getattr(module, "_fp8_workspaces", {}).clear()

    def hf_config(self) -> dict[str, Any]:
        return {"trained_in_fp8": self.recipe.label}


def without_fp8(linear: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """TransformerEngine's layer as it is outside of FP8, within too: Megatron enters FP8 for whole
    layers, or for the whole decoder, where scales are moved by the outermost context alone
    (quantization.py:600 of 2.11)."""

    def forward(self: torch.nn.Module, *args: Any, **named: Any) -> Any:
        from transformer_engine.pytorch import fp8_autocast  # type: ignore[import-not-found]

        with fp8_autocast(enabled=False):
            return linear.forward(self, *args, **named)

    return type(linear.__name__, (linear,), {"forward": forward})


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
