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
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.spec_utils import ModuleSpec

_HEAD = "exact_head"


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
        from openrlhf_ext.megatron.layers.exact_modules import forget_products

        for chunk in chunks:
            forget_products(chunk)
            setattr(chunk, _HEAD, None)

    def head(self, chunk: GPTModel, weight_VH: Tensor) -> ExactHead:
        if getattr(chunk, _HEAD, None) is None:
            table = device_operations()
            setattr(chunk, _HEAD, ExactHead(table, table.head_product(weight_VH)))
        return getattr(chunk, _HEAD)


@dataclass(frozen=True)
class ExactHead:
    """Logits and log-probs as the engine computes them (``head.linear.WholeRows``)."""

    table: Operations
    product: Product

    def logits(self, hidden_BH: Tensor) -> Tensor:
        return self.table.logits(hidden_BH, self.product)

    def logprobs(self, logits_BV: Tensor, temperature: float) -> Tensor:
        return self.table.logprobs(logits_BV, temperature)
