"""Qwen3 with a mixture of experts (Qwen3-30B-A3B, Qwen3-235B-A22B)."""

from openrlhf_ext.megatron.mlps.moe import MoE
from openrlhf_ext.megatron.model.family import ATTENTION, NO_BIAS, QK_NORM, Family

FAMILY = Family(
    model_type="qwen3_moe",
    critic_class="Qwen3MoeForSequenceClassification",
    mlp=MoE,
    layer={**ATTENTION, **QK_NORM, **MoE.names},
    config_names={"num_experts": "num_local_experts"},  # transformers 5
    config_defaults={"norm_topk_prob": False, "sliding_window": 4096},
    refused={"attention_bias": NO_BIAS},
    window_switch=True,
)
