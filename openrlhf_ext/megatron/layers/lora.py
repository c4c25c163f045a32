"""Low-rank adapters (``layers.adapted``) as a layer converter, which the driver can name:
megatron-core is imported late."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from openrlhf_ext.megatron.layers import LayerConverter, linears
from openrlhf_ext.megatron.model.adapter import Adapter
from openrlhf_ext.megatron.model.weight_map import adapter_shape

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from openrlhf_ext.megatron.model.shape import ModelShape


@dataclass(frozen=True)
class LoRALayers(LayerConverter):
    """The base's weights are frozen, what is trained are adapters of its linear layers. New ones
    are drawn with the ``seed``, if there is no ``path`` of a peft adapter to start from."""

    adapter: Adapter
    seed: int = 0
    path: str | None = None

    name = "lora"

    def shape(self, base: ModelShape) -> ModelShape:
        """Of the adapters, as a model of its own in the weight map."""
        return adapter_shape(base, self.adapter)

    def convert(self, layer: ModuleSpec, number: int, num_layers: int) -> None:
        from openrlhf_ext.megatron.layers.adapted import adapted

        for path, owner in linears(layer):
            if "experts" in path:  # no engine computes their adapters
                continue
            name = path.rpartition(".")[2]
            setattr(owner, name, adapted(getattr(owner, name)))


def adapters_of(converters: Iterable[LayerConverter]) -> LoRALayers | None:
    """The one that gives a model adapters, if there is one."""
    return next((each for each in converters if isinstance(each, LoRALayers)), None)
