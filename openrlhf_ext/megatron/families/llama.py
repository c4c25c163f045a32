"""Llama 3.x."""

from openrlhf_ext.megatron.model.family import LAYER, NO_BIAS, Family

FAMILY = Family(
    model_type="llama",
    critic_class="LlamaForSequenceClassification",
    layer=LAYER,
    refused={"attention_bias": NO_BIAS, "mlp_bias": NO_BIAS},
)
