"""A layer converter: a capability of a decoder's layers in one place; a model's settings carry
them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlock

    from openrlhf_ext.head import WholeRows


class LayerConverter:
    """All that a model asks of its layers; these answers change nothing. Plain values, which go
    from driver to ranks."""

    name: str  # prefix of its state in checkpoints
    # what messages call the state, and the options that must be those of its writer
    state_title = state_options = ""
    own_layers = False  # needs our layers (``layer_spec``) where TransformerEngine's could be used

    def environment(self) -> dict[str, str]:
        """Variables of every worker, set before it imports anything."""
        return {}

    def require(self) -> None:
        """Raises an error if this process cannot do it; before anything is built."""

    def megatron_arguments(self) -> dict[str, Any]:
        """Arguments of TransformerConfig."""
        return {}

    def convert(self, layer: ModuleSpec, number: int, num_layers: int) -> None:
        """Changes a layer's spec in place, ours or TransformerEngine's, of the same tree;
        ``number`` from 0."""

    def start(self, chunks: Sequence[GPTModel], compute: Callable[[bool], None]) -> None:
        """What there is to do before a loaded model is used, proofs included. A collective.
        ``compute``: a forward pass over a fixed sequence, in training mode or not."""

    def loaded(self, chunks: Sequence[GPTModel], compute: Callable[[bool], None]) -> None:
        """Makes the state that belongs to weights anew, because others were loaded. A
        collective."""

    def begin_schedule(self, chunks: Sequence[GPTModel]) -> None:
        """Forgets what was made of weights, because they may be others now. Before every schedule;
        not a collective."""

    def head(self, chunk: GPTModel, weight_VH: Tensor) -> WholeRows | None:
        """How the head computes logits and log-probs with this weight of the last chunk; None: in
        its own way."""
        return None

    def state(self, chunks: Sequence[GPTModel]) -> dict[str, Tensor]:
        """Contiguous tensors, changed in place, that checkpoints and frozen copies keep; by names
        that are the same in every layout, the same on all ranks of a stage."""
        return {}

    def piece_unit(self, pieces: int) -> int:
        """What ``PackShape.piece_unit`` must be a multiple of."""
        return 1

    def kept_per_weight(self, parameter: str, number: int, num_layers: int) -> int:
        """Bytes that a layer keeps for every entry of a weight of its linears, besides the
        parameter."""
        return 0

    def drop_kept(self, model: torch.nn.Module) -> None:
        """Frees them; the next schedule makes them anew."""

    def hf_config(self) -> dict[str, Any]:
        """Entries of ``config.json`` beside exported weights."""
        return {}


def linears(layer: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path in the layer, submodules that have it) of every linear of a layer's spec, in attention
    and in any kind of MLP."""
    submodules = _submodules(layer)
    for name, module in vars(submodules).items():
        if is_linear(name):
            yield path + name, submodules
        elif _submodules(module) is not None:
            yield from linears(module, f"{path}{name}.")


def _submodules(module: Any) -> Any:
    """Of a part of a spec; Megatron gives a dense MLP as a function that is called with its
    submodules."""
    if isinstance(module, partial):
        return module.keywords.get("submodules")
    return getattr(module, "submodules", None)


def is_linear(path: str) -> bool:
    """Whether a module is a linear: Megatron's names of linears begin with ``linear_``."""
    return path.rpartition(".")[2].startswith("linear_")


def is_of_mlp(path: str) -> bool:
    """Whether a module or parameter belongs to an MLP."""
    return "mlp" in path.split(".")


def kept_bytes(converters: Sequence[LayerConverter], decoder: TransformerBlock) -> int:
    """Bytes that a decoder's layers keep on this rank besides parameters."""
    total = 0
    for layer in decoder.layers:
        number, layers = layer.layer_number - 1, decoder.config.num_layers
        weights = [(name, p.numel()) for name, p in layer.named_parameters() if p.dim() == 2]
        total += sum(
            c.kept_per_weight(name, number, layers) * size
            for c in converters
            for name, size in weights
        )
    return total
