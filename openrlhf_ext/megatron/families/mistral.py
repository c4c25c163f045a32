"""Mistral 7B, Nemo, Small 24B: Llama's layer, in the first version with a window, which may be left
out."""

from openrlhf_ext.megatron.model.family import LAYER, NO_BIAS, Family

FAMILY = Family(
    model_type="mistral",
    critic_class="MistralForSequenceClassification",
    layer=LAYER,
    config_defaults={"sliding_window": 4096},
    refused={"attention_bias": NO_BIAS, "mlp_bias": NO_BIAS},  # which vLLM would build
)
