"""Seed-OSS: query, key and value have a bias."""

from openrlhf_ext.megatron.model.family import ALWAYS_BIAS, LAYER, NO_BIAS, QKV_BIAS, Family

FAMILY = Family(
    model_type="seed_oss",
    critic_class="SeedOssForSequenceClassification",
    layer={**LAYER, **QKV_BIAS},
    config_defaults={"head_dim": 128},
    refused={"attention_out_bias": NO_BIAS, "mlp_bias": NO_BIAS},
    required={"attention_bias": ALWAYS_BIAS},
)
