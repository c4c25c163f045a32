"""A mixture of experts: of every token's router logits the largest ``experts_per_token`` choose as
many experts, whose outputs are weighted by a softmax. Each expert is a dense MLP of width
``ffn_hidden_size``. ``SharedMoE`` has one more, which sees every token, times the sigmoid of its
gate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from openrlhf_ext.megatron.mlps import MLP

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from openrlhf_ext.megatron.layout import ParallelLayout

FULLEST_RANK = 1.3
"""Tokens of the fullest rank over those of the mean one, where experts are dealt over ranks:
assumed. Nothing balances experts here; if their loads differ by as much as they are on average,
those of a rank with 16 do by a quarter of that, and the fullest of 8 such ranks has 1.36 of the
mean in one layer, 1.05 in 48 together."""
_EXCHANGED = 4
"""Copies of a token's hidden state that a layer holds for a while for each of its experts:
permuted, received, and the expert's result as it was computed and sorted back (megatron-core 0.19.2
transformer/moe/moe_layer.py, whose forward pass has names for them until it returns)."""


@dataclass(frozen=True)
class MoE(MLP):
    ffn_hidden_size: int
    num_experts: int
    experts_per_token: int
    renormalizes: bool  # the weights of the chosen experts add up to 1

    entries = {
        "ffn_hidden_size": ("moe_intermediate_size", 2**20),
        "num_experts": ("num_experts", 2**12),
        "experts_per_token": ("num_experts_per_tok", 2**8),
    }
    is_mixture = True
    recompute_module = "moe"
    flags = {"renormalizes": "norm_topk_prob"}
    parameters = {
        "pre_mlp_layernorm.weight": ("replicated", ("hidden",), None),
        "mlp.router.weight": ("replicated", ("experts",), "hidden"),
        "mlp.experts.linear_fc1.weight{expert}": ("parts", ("ffn", "ffn"), "hidden"),
        "mlp.experts.linear_fc2.weight{expert}": ("row", ("hidden",), "ffn"),
    }
    names = {
        "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
        "mlp.router.weight": ("mlp.gate.weight",),
        "mlp.experts.linear_fc1.weight{expert}": (
            "mlp.experts.{expert}.gate_proj.weight",
            "mlp.experts.{expert}.up_proj.weight",
        ),
        "mlp.experts.linear_fc2.weight{expert}": ("mlp.experts.{expert}.down_proj.weight",),
    }

    @staticmethod
    def problems(config: Mapping[str, Any]) -> Iterator[str]:
        yield from MLP.problems(config)
        if config["num_experts_per_tok"] > config["num_experts"]:
            yield (
                "num_experts_per_tok must not exceed num_experts, got "
                f"{config['num_experts_per_tok']} of {config['num_experts']}"
            )
        if config["num_experts_per_tok"] == 1 and config["norm_topk_prob"]:
            yield (
                "num_experts_per_tok must be at least 2 with norm_topk_prob, whose one weight "
                "is always 1, got 1"
            )
        # transformers: layer i has a dense MLP if it is named here, or if i + 1 is no multiple of
        # the step
        if config.get("mlp_only_layers"):
            yield (
                "mlp_only_layers must be empty, all layers being alike, got "
                f"{config['mlp_only_layers']}"
            )
        if config.get("decoder_sparse_step", 1) != 1:
            yield (
                "decoder_sparse_step must be 1, all layers being alike, got "
                f"{config['decoder_sparse_step']}"
            )

    @property
    def sizes(self) -> dict[str, int]:
        return {"ffn": self.ffn_hidden_size, "experts": self.num_experts}

    @property
    def divided(self) -> dict[str, int]:
        return {}

    @property
    def token_weights(self) -> int:
        return self.hidden_size * (
            self.num_experts + 3 * self.experts_per_token * self.ffn_hidden_size
        )

    @property
    def expert_weights(self) -> int:
        return 3 * self.num_experts * self.hidden_size * self.ffn_hidden_size

    @property
    def idle_weights(self) -> int:
        return (
            3
            * (self.num_experts - self.experts_per_token)
            * self.hidden_size
            * self.ffn_hidden_size
        )

    def activation_bytes(
        self, tokens: int, layout: ParallelLayout, entry: int, linear_input: int
    ) -> int:
        return self._routing_bytes(layout.rows(tokens), entry) + self._computed(tokens, layout) * (
            entry * (self.hidden_size + 1)
            + self.ffn_hidden_size // layout.expert_tensor * (2 * entry + linear_input)
        )  # what goes into an expert, its weight, and what a dense MLP keeps

    def moved_bytes(self, entry: int) -> int:
        return 2 * _EXCHANGED * entry * self.experts_per_token

    def exchange_bytes(self, tokens: int, layout: ParallelLayout, entry: int) -> int:
        return _EXCHANGED * entry * self.hidden_size * self._computed(tokens, layout)

    def _routing_bytes(self, rows: int, entry: int) -> int:
        """The softmax in fp32, of all logits or of the chosen ones; weights and choice as a table
        of all experts; the chosen experts, and the order in which tokens go to them."""
        softmax = self.experts_per_token if self.renormalizes else self.num_experts
        return rows * (4 * softmax + (entry + 1) * self.num_experts + 16 * self.experts_per_token)

    def _computed(self, tokens: int, layout: ParallelLayout) -> int:
        """How many times the fullest rank computes an expert, or its share of one, for a token."""
        mean = layout.rows(tokens) * self.experts_per_token * layout.expert_tensor
        return int(FULLEST_RANK * mean) if layout.expert_parallel_size > 1 else mean

    def megatron_arguments(self) -> dict[str, Any]:
        from torch.nn.functional import silu

        return {
            "gated_linear_unit": True,
            "activation_func": silu,
            "ffn_hidden_size": self.ffn_hidden_size,
            "moe_ffn_hidden_size": self.ffn_hidden_size,
            "num_moe_experts": self.num_experts,
            "moe_router_topk": self.experts_per_token,
            "moe_router_score_function": "softmax",
            # a softmax of the chosen logits is that of all, renormalized
            "moe_router_pre_softmax": not self.renormalizes,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
        }

    @staticmethod
    def submodules(
        norm: type, norm_linear: type, column_linear: type, row_linear: type
    ) -> dict[str, Any]:
        from openrlhf_ext.megatron.model.experts import mixture_spec, plain_linears

        return {
            "pre_mlp_layernorm": norm,
            "mlp": mixture_spec(plain_linears(), column_linear, row_linear),
        }

    @classmethod
    def transformer_engine_layer(cls, layer: ModuleSpec) -> ModuleSpec:
        from openrlhf_ext.megatron.model.experts import with_transformer_engine_mixture

        return with_transformer_engine_mixture(layer)


@dataclass(frozen=True)
class SharedMoE(MoE):
    shared_ffn_hidden_size: int

    entries = {
        **MoE.entries,
        "shared_ffn_hidden_size": ("shared_expert_intermediate_size", 2**20),
    }
    parameters = {
        **MoE.parameters,
        "mlp.shared_experts.gate_weight": ("replicated", ("one",), "hidden"),
        "mlp.shared_experts.linear_fc1.weight": ("parts", ("shared_ffn", "shared_ffn"), "hidden"),
        "mlp.shared_experts.linear_fc2.weight": ("row", ("hidden",), "shared_ffn"),
    }
    names = {
        **MoE.names,
        "mlp.shared_experts.linear_fc1.weight": (
            "mlp.shared_expert.gate_proj.weight",
            "mlp.shared_expert.up_proj.weight",
        ),
        "mlp.shared_experts.linear_fc2.weight": ("mlp.shared_expert.down_proj.weight",),
        "mlp.shared_experts.gate_weight": ("mlp.shared_expert_gate.weight",),
    }

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "shared_ffn": self.shared_ffn_hidden_size}

    @property
    def divided(self) -> dict[str, int]:
        return {"shared expert's width": self.shared_ffn_hidden_size}

    @property
    def token_weights(self) -> int:
        return super().token_weights + self.hidden_size * (1 + 3 * self.shared_ffn_hidden_size)

    def activation_bytes(
        self, tokens: int, layout: ParallelLayout, entry: int, linear_input: int
    ) -> int:
        width = self.shared_ffn_hidden_size // layout.tensor_parallel_size
        shared = tokens * width * (2 * entry + linear_input)
        # the expert's output, and its gate
        gated = layout.rows(tokens) * (self.hidden_size + 1) * entry
        return super().activation_bytes(tokens, layout, entry, linear_input) + shared + gated

    def megatron_arguments(self) -> dict[str, Any]:
        more = {
            "moe_shared_expert_intermediate_size": self.shared_ffn_hidden_size,
            "moe_shared_expert_gate": True,
        }
        return {**super().megatron_arguments(), **more}
