"""Linear layers that round as FP8 does and multiply in fp32: Megatron's own, with other products.

TransformerConfig.fp8 stays None: with it megatron-core would take TransformerEngine's checkpointing
for recomputation (transformer_block.py:612). Shape suffixes: L = tokens of the pack on this rank
(of a column-parallel layer's input under sequence parallelism a piece of them), K = input features,
N = output features.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from openrlhf_ext.fp8.quantize import DelayedScale, Products
from openrlhf_ext.fp8.recipe import Recipe
from openrlhf_ext.megatron.layers.products import OwnProductLinear
from openrlhf_ext.megatron.model.spec import NormColumnParallelLinear


class Scaling:
    """The products of one layer and the state of their delayed scales. No module, and its tensors
    are no buffers:
    Float16Module would round those to bf16. ``rounds``: whether forward passes round."""

    def __init__(self, recipe: Recipe) -> None:
        self.products = Products(recipe)
        self.scales = self.products.scales(
            torch.device("cuda", torch.cuda.current_device())
            if torch.cuda.is_available()
            else "cpu"
        )
        # scales of the forward passes that will be recomputed: by then later micro-batches have
        # moved them
        self._to_recompute: deque[dict[str, Tensor]] = deque()
        self.rounds = True

    def of_forward(self, x_LK: Tensor, w_NK: Tensor, training: bool) -> dict[str, Tensor]:
        """The scales of x and w for this pass. One in training moves them (``update``), a
        recomputation does not."""
        if not self.scales:
            return {}
        if training and torch.is_grad_enabled() and self._to_recompute:
            return self._to_recompute.popleft()
        now = {operand: self.scales[operand].scale.clone() for operand in ("x", "w")}
        if training:
            self.scales["x"].record(x_LK)
            self.scales["w"].record(w_NK)
            if not torch.is_grad_enabled():  # the first pass of Megatron's checkpointing
                self._to_recompute.append(now)
        return now

    def of_backward(self, dy_LN: Tensor) -> dict[str, Tensor]:
        if not self.scales:
            return {}
        self.scales["dy"].record(dy_LN)
        return {"dy": self.scales["dy"].scale.clone()}

    def forget_passes(self) -> None:
        self._to_recompute.clear()


@dataclass
class _Pass:
    """The products of a pass (``PassProducts``), with its scales."""

    scaling: Scaling
    scales: dict[str, Tensor]

    def output(self, x_LK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        if self.scaling.rounds:
            output_LN = self.scaling.products.output(x_LK, weight_NK, self.scales)
        else:
            output_LN = x_LK @ weight_NK.t()
        return output_LN if bias_N is None else output_LN + bias_N

    def input_gradient(self, dy_LN: Tensor, weight_NK: Tensor) -> Tensor:
        self.scales = self.scales | self.scaling.of_backward(dy_LN)
        return self.scaling.products.input_gradient(dy_LN, weight_NK, self.scales)

    def weight_gradient(self, dy_LN: Tensor, x_LK: Tensor) -> Tensor:
        return self.scaling.products.weight_gradient(dy_LN, x_LK, self.scales)


class EmulatedLinear(OwnProductLinear):
    training: bool

    def __init__(self, *args, recipe: Recipe, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.scaling = Scaling(recipe)

    def products(self, input_L1K: Tensor, weight_NK: Tensor) -> _Pass:
        return _Pass(self.scaling, self.scaling.of_forward(input_L1K, weight_NK, self.training))


class EmulatedNormColumnParallelLinear(EmulatedLinear, NormColumnParallelLinear):
    """The norm is in the model's precision."""


class EmulatedRowParallelLinear(EmulatedLinear, RowParallelLinear):
    """The sum over the ranks is in the model's precision."""


_EMULATED = {
    NormColumnParallelLinear: EmulatedNormColumnParallelLinear,
    RowParallelLinear: EmulatedRowParallelLinear,
}


def emulated(linear: type, recipe: Recipe) -> ModuleSpec:
    return ModuleSpec(module=_EMULATED[linear], params={"recipe": recipe})


def scalings(module: torch.nn.Module) -> dict[str, Scaling]:
    """The scalings of the emulated layers below a module, by path."""
    return {
        name: layer.scaling
        for name, layer in module.named_modules()
        if isinstance(layer, EmulatedLinear)
    }


def follow_micro_batches(decoder: torch.nn.Module) -> None:
    """Lets the delayed scales of a decoder's emulated layers move as TransformerEngine's do: those
    of inputs and weights when its forward pass of a micro-batch in training ends, those of
    gradients when its backward pass does."""
    layers = list(scalings(decoder).values())
    if not layers or not layers[0].scales:
        return

    def after_forward(_module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
        if decoder.training and torch.is_grad_enabled():
            update([layer.scales[operand] for layer in layers for operand in ("x", "w")])

    def before_first_layer(_module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        # not in the first pass of Megatron's checkpointing: the recomputation comes here too
        if decoder.training and torch.is_grad_enabled() and hidden.requires_grad:
            # the gradient of the decoder's input is complete when that of every layer is
            hidden.register_hook(lambda _grad: update([layer.scales["dy"] for layer in layers]))

    decoder.register_forward_hook(after_forward)
    decoder.layers[0].register_forward_pre_hook(before_first_layer, with_kwargs=True)  # type: ignore[union-attr, operator, index]  # torch types attributes as modules


@torch.no_grad()
def update(scales: list[DelayedScale]) -> None:
    """Moves scales by the largest entries that any tensor-, context- or data-parallel rank has
    noted. A collective."""
    largest = torch.stack([scale.history_A[0] for scale in scales])
    dist.all_reduce(
        largest,
        dist.ReduceOp.MAX,
        group=parallel_state.get_amax_reduction_group(with_context_parallel=True),
    )
    for scale, amax in zip(scales, largest, strict=True):
        scale.update(amax)
