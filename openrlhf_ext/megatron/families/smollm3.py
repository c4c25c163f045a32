"""SmolLM3: Llama's layer; every fourth has no rotary embedding."""

from openrlhf_ext.megatron.model.family import LAYER, NO_BIAS, Family

FAMILY = Family(
    model_type="smollm3",
    critic_class="SmolLM3ForSequenceClassification",
    layer=LAYER,
    config_defaults={
        "no_rope_layer_interval": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
    },
    refused={"attention_bias": NO_BIAS, "mlp_bias": NO_BIAS},
    window_switch=True,
    skips_rope=True,
)
