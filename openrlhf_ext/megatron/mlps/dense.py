"""The MLP of a dense layer: gate and up in one product behind the norm, SiLU of the gate times up,
then down."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from openrlhf_ext.megatron.mlps import MLP

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from openrlhf_ext.megatron.layout import ParallelLayout


@dataclass(frozen=True)
class DenseMLP(MLP):
    ffn_hidden_size: int

    entries = {"ffn_hidden_size": ("intermediate_size", 2**20)}
    parameters = {
        "mlp.linear_fc1.weight": ("parts", ("ffn", "ffn"), "hidden"),
        "mlp.linear_fc1.layer_norm_weight": ("replicated", ("hidden",), None),
        "mlp.linear_fc2.weight": ("row", ("hidden",), "ffn"),
    }
    names = {
        "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
        "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
    }

    @property
    def sizes(self) -> dict[str, int]:
        return {"ffn": self.ffn_hidden_size}

    @property
    def divided(self) -> dict[str, int]:
        return {"MLP width": self.ffn_hidden_size}

    @property
    def token_weights(self) -> int:
        return 3 * self.hidden_size * self.ffn_hidden_size

    def activation_bytes(
        self, tokens: int, layout: ParallelLayout, entry: int, linear_input: int
    ) -> int:
        return (
            tokens
            * self.ffn_hidden_size
            // layout.tensor_parallel_size
            * (2 * entry + linear_input)
        )

    def megatron_arguments(self) -> dict[str, Any]:
        from torch.nn.functional import silu

        return {
            "ffn_hidden_size": self.ffn_hidden_size,
            "gated_linear_unit": True,
            "activation_func": silu,
        }

    @staticmethod
    def submodules(
        norm: type, norm_linear: type, column_linear: type, row_linear: type
    ) -> dict[str, Any]:
        from megatron.core.transformer.identity_op import IdentityOp
        from megatron.core.transformer.mlp import MLP as MegatronMLP
        from megatron.core.transformer.mlp import MLPSubmodules

        linears = MLPSubmodules(linear_fc1=norm_linear, linear_fc2=row_linear)
        return {
            "pre_mlp_layernorm": IdentityOp,
            "mlp": partial(MegatronMLP.as_mlp_submodule, submodules=linears),
        }

    @classmethod
    def transformer_engine_layer(cls, layer: ModuleSpec) -> ModuleSpec:
        if cls.submodules is not DenseMLP.submodules:
            why = (
                f"TransformerEngine's layers have a dense MLP, not {cls.__name__}: "
                "megatron.param_dtype fp32"
            )
            raise ValueError(f"{why} gives plain layers, which have it")
        return layer
