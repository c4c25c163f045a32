"""Llama 3.x."""

from openrlhf_ext.megatron.model.family import LAYER, Family

_NO_BIAS = "projections of this family have no bias here"

FAMILY = Family(
    model_type="llama",
    critic_class="LlamaForSequenceClassification",
    layer=LAYER,
    refused={"attention_bias": _NO_BIAS, "mlp_bias": _NO_BIAS},
)
