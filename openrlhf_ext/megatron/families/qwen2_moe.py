"""Qwen2 with a mixture of experts and one more that sees every token (Qwen1.5-MoE-A2.7B,
Qwen2-57B-A14B)."""

from openrlhf_ext.megatron.mlps.moe import SharedMoE
from openrlhf_ext.megatron.model.family import ALWAYS_BIAS, ATTENTION, QKV_BIAS, Family

FAMILY = Family(
    model_type="qwen2_moe",
    critic_class="Qwen2MoeForSequenceClassification",
    mlp=SharedMoE,
    layer={**ATTENTION, **QKV_BIAS, **SharedMoE.names},
    config_defaults={"norm_topk_prob": False, "sliding_window": 4096},
    required={"qkv_bias": ALWAYS_BIAS},
    window_switch=True,
)
