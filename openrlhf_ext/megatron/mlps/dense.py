"""The MLP of a dense layer: gate and up in one product behind the norm, SiLU of the gate times up, then down.

What it answers is what the rest of the package asks of any kind. A kind needs neither torch nor Megatron before it is
built: configuration and driver ask it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec


@dataclass(frozen=True)
class DenseMLP:
    """Fields are those of ``ModelShape`` with the same names."""

    hidden_size: int
    ffn_hidden_size: int

    # field of ``ModelShape`` -> its entry of config.json, and the largest that is read
    entries: ClassVar[dict[str, tuple[str, int]]] = {"ffn_hidden_size": ("intermediate_size", 2**20)}
    # how Megatron cuts each parameter, its rows and columns (see ``Rule``), in the order in which it builds them
    parameters: ClassVar[dict[str, tuple[Any, ...]]] = {
        "mlp.linear_fc1.weight": ("gate_up", ("ffn", "ffn"), "hidden"),
        "mlp.linear_fc1.layer_norm_weight": ("replicated", ("hidden",), None),
        "mlp.linear_fc2.weight": ("row", ("hidden",), "ffn"),
    }
    # what most families call the tensors, in the order in which they are exported
    names: ClassVar[dict[str, tuple[str, ...]]] = {
        "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
        "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
    }

    @staticmethod
    def problems(config: Mapping[str, Any]) -> Iterator[str]:
        """What of a ``config.json`` (``Family.usual``) is not built."""
        if config["hidden_act"] != "silu":
            yield f"hidden_act must be 'silu', got {config['hidden_act']!r}"

    @property
    def sizes(self) -> dict[str, int]:
        """Of the dimensions that ``parameters`` name besides the model's own."""
        return {"ffn": self.ffn_hidden_size}

    @property
    def divided(self) -> dict[str, int]:
        """What tensor parallelism divides, by its name in messages."""
        return {"MLP width": self.ffn_hidden_size}

    @property
    def token_weights(self) -> int:
        """Weights that a token is multiplied with."""
        return 3 * self.hidden_size * self.ffn_hidden_size

    def activation_bytes(self, tokens: int, tensor_parallel_size: int, entry: int, linear_input: int) -> int:
        """What autograd keeps behind the norm, of entries of so many bytes; ``linear_input``: those of down's input."""
        return tokens * self.ffn_hidden_size // tensor_parallel_size * (2 * entry + linear_input)

    def megatron_arguments(self) -> dict[str, Any]:
        """Arguments of TransformerConfig."""
        from torch.nn.functional import silu

        return {"ffn_hidden_size": self.ffn_hidden_size, "gated_linear_unit": True, "activation_func": silu}

    @staticmethod
    def submodules(norm_linear: type, row_linear: type) -> dict[str, ModuleSpec | type]:
        """What a layer's spec has of it; ``norm_linear``: column-parallel, behind its own norm."""
        from megatron.core.transformer.identity_op import IdentityOp
        from megatron.core.transformer.mlp import MLP, MLPSubmodules
        from megatron.core.transformer.spec_utils import ModuleSpec

        linears = MLPSubmodules(linear_fc1=norm_linear, linear_fc2=row_linear)
        return {"pre_mlp_layernorm": IdentityOp, "mlp": ModuleSpec(module=MLP, submodules=linears)}
