"""Transformer layers for machines without TransformerEngine.

Plug-in modules of an ordinary Megatron ``ModuleSpec``, with TransformerEngine's parameter names, so that checkpoints
and the weight map are the same with and without it.
They lift three limits of megatron-core 0.16.1's own local spec:
``WrappedTorchNorm`` refuses sequence parallelism (transformer/torch_norm.py:32), ``DotProductAttention`` materialises
the scores, and the final norm cannot be chosen by a plain layer spec.

Shape suffixes: S = sequence, B = micro-batch, N = heads, D = head dimension.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, in fp32, scaled in the input's dtype (as transformers does)."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


class RMSNorm(torch.nn.Module):
    """RMS norm whose weight carries Megatron's ``sequence_parallel`` mark."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class NormColumnParallelLinear(ColumnParallelLinear):
    """RMS norm followed by a column-parallel linear; parameter names of TELayerNormColumnParallelLinear."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor, *args, **kwargs):
        return super().forward(rms_norm(x, self.layer_norm_weight, self.eps), *args, **kwargs)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state, prefix, {"weight": 0, "bias": 0}, sharded_offsets,
            tp_group=self.tp_group, dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )  # fmt: skip


class CausalAttention(torch.nn.Module):
    """Causal scaled-dot-product attention, grouped-query heads included; sequences are padded on the right.

    Right padding needs no mask: a real position never attends to a later one, and what padding positions compute is
    never read.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, attn_mask_type, attention_type,
        attention_dropout: float | None = None, softmax_scale: float | None = None, **_,
    ) -> None:  # fmt: skip
        super().__init__()
        if config.context_parallel_size != 1:
            raise NotImplementedError(
                "context parallelism needs TransformerEngine's attention; set context_parallel_size 1"
            )
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return {}

    def forward(
        self, query_SBND: Tensor, key_SBND: Tensor, value_SBND: Tensor, attention_mask=None, attn_mask_type=None,
        attention_bias=None, packed_seq_params=None,
    ) -> Tensor:  # fmt: skip
        if attention_mask is not None or packed_seq_params is not None:
            raise ValueError("CausalAttention takes right-padded sequences without a mask or packing")
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query_SBND, key_SBND, value_SBND))
        out_BNSD = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        return out_BNSD.permute(2, 0, 1, 3).flatten(2).contiguous()


def layer_spec(config: TransformerConfig) -> ModuleSpec:
    """One decoder layer with TransformerEngine's module tree."""
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=NormColumnParallelLinear, core_attention=CausalAttention, linear_proj=RowParallelLinear,
            q_layernorm=qk_norm, k_layernorm=qk_norm,
        ),
    )  # fmt: skip
    mlp = ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=NormColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=attention, self_attn_bda=get_bias_dropout_add, pre_mlp_layernorm=IdentityOp, mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )  # fmt: skip


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage and the final norm."""
    layers = [layer_spec(config)] * get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)
