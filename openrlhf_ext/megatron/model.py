"""Builds the policy's decoder as a megatron-core GPTModel that ends in hidden states instead of logits."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from openrlhf_ext.megatron.hf_config import ModelShape
from openrlhf_ext.megatron.layout import ParallelLayout

logger = logging.getLogger(__name__)


class HiddenStateGPTModel(GPTModel):
    """GPTModel whose last stage returns the final hidden states, so that the head sees only the positions it needs."""

    def _postprocess(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
        """(L, 1, H) final hidden states of this rank's tokens on the last stage, activations for the next elsewhere."""
        return hidden_states

    def _is_in_embd_group(self) -> bool:
        """Whether the constructor copies the tied embedding between stages; not on the meta device, without values."""
        return not next(self.parameters()).is_meta and super()._is_in_embd_group()

    def output_embedding(self) -> Tensor:
        """(padded vocabulary / tp, H) this rank's shard of the output embedding (last stage only)."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


class ValueModel(HiddenStateGPTModel):
    """The same decoder with a value head in the place of the vocabulary projection.

    The head, (1, H) and the same on every tensor-parallel rank, keeps the name ``output_layer``, which Megatron's
    checkpoint code expects on the last stage. It is trained like any replicated parameter.
    """

    def __init__(self, config: TransformerConfig, *args, **kwargs) -> None:
        super().__init__(config, *args, **kwargs)
        if self.post_process:
            self.output_layer = torch.nn.Linear(config.hidden_size, 1, bias=False, dtype=config.params_dtype)


def transformer_config(
    shape: ModelShape, layout: ParallelLayout, dtype: torch.dtype, recompute: str
) -> TransformerConfig:
    """Megatron's configuration for a Hugging Face model in a layout.

    Args:
        recompute: activations computed again in the backward pass: 'none', 'selective' (core attention only) or 'full'
            (every layer).
    """
    on_gpu = torch.cuda.is_available()
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tensor_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=(
            layout.virtual_pipeline_size if layout.virtual_pipeline_size > 1 else None
        ),
        context_parallel_size=layout.context_parallel_size,
        sequence_parallel=layout.sequence_parallel,
        # the loss shares already carry their denominators: Megatron must only add them up
        calculate_per_token_loss=True,
        deallocate_pipeline_outputs=True,
        batch_p2p_sync=False,
        use_cpu_initialization=not on_gpu,
        gradient_accumulation_fusion=on_gpu and find_spec("fused_weight_gradient_mlp_cuda") is not None,  # of apex
        masked_softmax_fusion=False,
        persist_layer_norm=on_gpu,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=False,
        apply_rope_fusion=has_transformer_engine(),
        recompute_granularity=None if recompute == "none" else recompute,
        recompute_method="uniform" if recompute == "full" else None,
        recompute_num_layers=1 if recompute == "full" else None,
    )


def has_transformer_engine() -> bool:
    """True where TransformerEngine can be used: it is installed and there is a GPU."""
    if not torch.cuda.is_available():
        return False
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return bool(HAVE_TE)


def packed_sequences(slots: Sequence[int]) -> PackedSeqParams:
    """What attention needs to know of a pack of sequences with these slot lengths (see ``packing``)."""
    from openrlhf_ext.megatron.layer_spec import PackedSequences

    host = torch.tensor([0, *itertools.accumulate(slots)], dtype=torch.int32)
    device = host.cuda() if torch.cuda.is_available() else host
    # TransformerEngine's kernels read the boundaries on the GPU; without them Megatron's rotary embedding on the host
    boundaries = device if has_transformer_engine() else host
    # padding counts as part of its sequence: kernels that skip padding between sequences are few
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=max(slots),
        max_seqlen_kv=max(slots),
        slots=tuple(slots),
        boundaries=device,
    )


def _spec(config: TransformerConfig, vp_stage: int | None, plain: bool = False):
    if has_transformer_engine() and not plain:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    from openrlhf_ext.megatron.layer_spec import block_spec

    if torch.cuda.is_available() and not plain:
        logger.warning("TransformerEngine is not installed: the layers are plain torch, slower on a GPU")
    return block_spec(config, vp_stage)


def build_model(
    shape: ModelShape, config: TransformerConfig, vp_stage: int | None = None, meta: bool = False
) -> HiddenStateGPTModel:
    """This rank's (virtual) stage of the model, parameters not yet loaded, on this rank's device.

    ``meta``: on the default device instead, with our layer spec on every machine (``megatron.meta``).
    """
    where = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    model_class = HiddenStateGPTModel if shape.value_head is None else ValueModel
    model = model_class(
        config,
        _spec(config, vp_stage, plain=meta),
        vocab_size=shape.padded_vocab_size(config.tensor_model_parallel_size),
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        rope_scaling=shape.rope_scaling_factor is not None,
        rope_scaling_factor=shape.rope_scaling_factor or 8.0,
        parallel_output=True,
        vp_stage=vp_stage,
    )
    return model.cuda() if torch.cuda.is_available() and not meta else model
