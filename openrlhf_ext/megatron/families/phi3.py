"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: stacked projections, in some of them a window, and rotary
embedding of a part of each head."""

from openrlhf_ext.megatron.model.family import LAYER, NO_BIAS, Family

FAMILY = Family(
    model_type="phi3",
    critic_class="Phi3ForSequenceClassification",
    layer={
        **LAYER,
        "self_attention.linear_qkv.weight": ("self_attn.qkv_proj.weight",),
        "mlp.linear_fc1.weight": ("mlp.gate_up_proj.weight",),
    },
    config_defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    refused={"attention_bias": NO_BIAS},
    rotates_part=True,
)
