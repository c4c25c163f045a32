"""The MLP of a dense layer: gate and up in one product behind the norm, SiLU of the gate times up, then down.

The rest of the package asks every kind the same questions. Configuration and driver ask too, so a kind imports neither
torch nor Megatron before a model is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec


@dataclass(frozen=True)
class DenseMLP:
    """Its fields have the names and values of ``ModelShape``'s."""

    hidden_size: int
    ffn_hidden_size: int

    # field of ``ModelShape`` -> its entry of config.json, and the largest value accepted
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
        """Settings of a ``config.json`` (``Family.usual``) that this kind cannot build, one text for each."""
        if config["hidden_act"] != "silu":
            yield f"hidden_act must be 'silu', got {config['hidden_act']!r}"

    @property
    def sizes(self) -> dict[str, int]:
        """Entries of each dimension that only this kind has, by its name in ``parameters``."""
        return {"ffn": self.ffn_hidden_size}

    @property
    def divided(self) -> dict[str, int]:
        """Widths that the tensor-parallel size must divide, by their names in messages."""
        return {"MLP width": self.ffn_hidden_size}

    @property
    def token_weights(self) -> int:
        """Number of weights that each token is multiplied by."""
        return 3 * self.hidden_size * self.ffn_hidden_size

    def activation_bytes(self, tokens: int, tensor_parallel_size: int, entry: int, linear_input: int) -> int:
        """Bytes that autograd keeps after the norm; ``entry``: bytes of an entry, ``linear_input``: of an entry of the
        down projection's input."""
        return tokens * self.ffn_hidden_size // tensor_parallel_size * (2 * entry + linear_input)

    def megatron_arguments(self) -> dict[str, Any]:
        """Arguments of TransformerConfig."""
        from torch.nn.functional import silu

        return {"ffn_hidden_size": self.ffn_hidden_size, "gated_linear_unit": True, "activation_func": silu}

    @staticmethod
    def submodules(norm_linear: type, row_linear: type) -> dict[str, ModuleSpec | type]:
        """The MLP's part of a layer's spec; ``norm_linear``: a column-parallel linear with a norm before it."""
        from megatron.core.transformer.identity_op import IdentityOp
        from megatron.core.transformer.mlp import MLP, MLPSubmodules
        from megatron.core.transformer.spec_utils import ModuleSpec

        linears = MLPSubmodules(linear_fc1=norm_linear, linear_fc2=row_linear)
        return {"pre_mlp_layernorm": IdentityOp, "mlp": ModuleSpec(module=MLP, submodules=linears)}
