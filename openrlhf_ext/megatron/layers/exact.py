"""Exact mode as a layer converter: a decoder that computes what an engine computes, to the last bit
(docs/exact.md). The driver imports this without Megatron."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from openrlhf_ext.exact.operations import Operations, Product, rotary_table
from openrlhf_ext.exact.table import device_operations
from openrlhf_ext.megatron.layers import LayerConverter, linears

if TYPE_CHECKING:
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.spec_utils import ModuleSpec

_PRODUCTS = ("exact_product", "exact_head")
"""Attributes of linear layers and of a model's last chunk, made of weights as they were."""


@dataclass(frozen=True)
class ExactLayers(LayerConverter):
    """Linear layers, norms, attention, and residual sums use the engine's operations. ``positions``:
    length of the rotary table."""

    positions: int

    name = "exact"
    own_layers = True

    def environment(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": "1"}

    def require(self) -> None:
        """Raises NotExact, with the reason."""
        device_operations()

    def megatron_arguments(self) -> dict[str, Any]:
        stream = device_operations().stream
        between_stages = {} if stream is None else {"pipeline_dtype": stream}
        return {
            "use_te_activation_func": True,  # ours, see ``convert``
            "bias_activation_fusion": False,
            **between_stages,
        }

    def convert(self, layer: ModuleSpec, number: int, num_layers: int) -> None:
        from openrlhf_ext.megatron.layers.exact_modules import exact_layer

        exact_layer(layer, [path for path, _ in linears(layer)], is_first=number == 0)

    def start(self, chunks: Sequence[GPTModel], compute: Callable[[bool], None]) -> None:
        from openrlhf_ext.megatron.layers.exact_modules import set_table, use_exact_norm

        for chunk in chunks:
            dtype = next(chunk.parameters()).dtype
            table = rotary_table(chunk.frequencies_D, self.positions, dtype)
            set_table(chunk.decoder, table.to(next(chunk.parameters()).device))
            if chunk.decoder.final_layernorm is not None:
                use_exact_norm(chunk.decoder.final_layernorm)

    def begin_schedule(self, chunks: Sequence[GPTModel]) -> None:
        # Megatron writes weights through ``.data``, which no version counter sees
        for chunk in chunks:
            self.drop_kept(chunk)

    def drop_kept(self, model: torch.nn.Module) -> None:
        for module in model.modules():
            for name in _PRODUCTS:
                vars(module).pop(name, None)

    def head(self, chunk: GPTModel, weight_VH: Tensor) -> ExactHead:
        if getattr(chunk, "exact_head", None) is None:
            table = device_operations()
            chunk.exact_head = ExactHead(table, table.head_product(weight_VH))
        return chunk.exact_head


@dataclass(frozen=True)
class ExactHead:
    """Logits and log-probs as the engine computes them (``head.linear.WholeRows``)."""

    table: Operations
    product: Product

    def logits(self, hidden_BH: Tensor) -> Tensor:
        return self.table.logits(hidden_BH, self.product)

    def logprobs(self, logits_BV: Tensor, temperature: float) -> Tensor:
        return self.table.logprobs(logits_BV, temperature)
