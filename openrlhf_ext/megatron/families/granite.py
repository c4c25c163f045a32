"""Granite 3: Llama's layer with factors of embeddings, scores, what each branch adds, and
logits."""

from openrlhf_ext.megatron.model.family import LAYER, NO_BIAS, Family

_FACTORS = {
    "embedding_factor": "embedding_multiplier",
    "attention_scale": "attention_multiplier",
    "residual_factor": "residual_multiplier",
    "logits_divisor": "logits_scaling",
}

FAMILY = Family(
    model_type="granite",
    critic_class="GraniteModel",  # no sequence classifier of it is known; what reads the decoder
    layer=LAYER,
    config_defaults=dict.fromkeys(_FACTORS.values(), 1.0),
    refused={
        "attention_bias": NO_BIAS,
        "mlp_bias": NO_BIAS,
        "layer_types": "vLLM takes layers of named kinds for ones with attention sinks, transformers does not",
    },
    factors=_FACTORS,
)
