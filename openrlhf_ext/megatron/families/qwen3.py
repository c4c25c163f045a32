"""Qwen3: query and key are normalized per head."""

from openrlhf_ext.megatron.model.family import LAYER, QK_NORM, Family

FAMILY = Family(
    model_type="qwen3",
    critic_class="Qwen3ForSequenceClassification",
    layer={**LAYER, **QK_NORM},
    refused={"attention_bias": "projections of this family have no bias here"},
)
