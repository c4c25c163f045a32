"""The text model of Qwen3.5 and Qwen3.6 with a mixture of experts and one more that sees every token
(Qwen3.5-35B-A3B)."""

from openrlhf_ext.megatron.attentions.delta_net import DeltaNet
from openrlhf_ext.megatron.attentions.full import GatedAttention
from openrlhf_ext.megatron.families.qwen3_5_text import (
    ATTENTIONS,
    CONFIG_DEFAULTS,
    GATED,
    OF_IMAGES,
)
from openrlhf_ext.megatron.mlps.moe import SharedMoE
from openrlhf_ext.megatron.model.family import NO_BIAS, Family

FAMILY = Family(
    model_type="qwen3_5_moe_text",
    critic_class="",  # transformers has none
    attentions=(DeltaNet, GatedAttention),
    mlp=SharedMoE,
    layer={**ATTENTIONS, **SharedMoE.names},
    config_defaults={**CONFIG_DEFAULTS, "norm_topk_prob": True},
    refused={"attention_bias": NO_BIAS},
    required={
        "attn_output_gate": GATED,
        "norm_topk_prob": "the weights of a token's experts always add up to 1 in this family",
    },
    rope_ignored=OF_IMAGES,
    rotates_part=True,
    zero_centered=True,
)
