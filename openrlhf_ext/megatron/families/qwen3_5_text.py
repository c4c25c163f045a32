"""The text model of Qwen3.5 and Qwen3.6: three layers of gated delta net, then one of gated
attention."""

from openrlhf_ext.megatron.attentions.delta_net import DeltaNet
from openrlhf_ext.megatron.attentions.full import GatedAttention
from openrlhf_ext.megatron.mlps.dense import DenseMLP
from openrlhf_ext.megatron.model.family import NO_BIAS, QK_NORM, Family

ATTENTIONS = {**DeltaNet.names, **GatedAttention.names, **QK_NORM}
CONFIG_DEFAULTS = {
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "partial_rotary_factor": 0.25,
}
GATED = "attention of this family has an output gate"
# how positions of images are put together; a token of text has one position
OF_IMAGES = ("mrope_section", "mrope_interleaved")

FAMILY = Family(
    model_type="qwen3_5_text",
    critic_class="Qwen3_5TextForSequenceClassification",
    attentions=(DeltaNet, GatedAttention),
    layer={**ATTENTIONS, **DenseMLP.names},
    config_defaults=CONFIG_DEFAULTS,
    refused={"attention_bias": NO_BIAS},
    required={"attn_output_gate": GATED},
    rope_ignored=OF_IMAGES,
    rotates_part=True,
    zero_centered=True,
)
