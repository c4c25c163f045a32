"""Qwen2 and Qwen2.5: query, key and value have a bias."""

from openrlhf_ext.megatron.model.family import LAYER, QKV_BIAS, Family

FAMILY = Family(
    model_type="qwen2",
    critic_class="Qwen2ForSequenceClassification",
    layer={**LAYER, **QKV_BIAS},
    config_defaults={"sliding_window": 4096},
    refused={"qk_norm": "query and key are normalized in Qwen3 (model_type qwen3)"},
    window_switch=True,
)
