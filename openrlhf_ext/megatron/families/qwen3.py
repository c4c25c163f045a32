"""Qwen3: query and key are normalized per head."""

from openrlhf_ext.megatron.model.family import LAYER, NO_BIAS, QK_NORM, Family

FAMILY = Family(
    model_type="qwen3",
    critic_class="Qwen3ForSequenceClassification",
    layer={**LAYER, **QK_NORM},
    config_defaults={"head_dim": 128, "sliding_window": 4096},
    refused={"attention_bias": NO_BIAS},
    window_switch=True,
)
