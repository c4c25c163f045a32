"""Builds the policy's decoder as a megatron-core GPTModel that ends in hidden states instead of logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from openrlhf_ext.megatron.hf_config import ModelShape
from openrlhf_ext.megatron.layout import ParallelLayout


class HiddenStateGPTModel(GPTModel):
    """GPTModel whose last stage returns the final hidden states, so that the head sees only the positions it needs."""

    def _postprocess(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
        """(S, B, H) final hidden states of whole sequences on the last stage, activations for the next elsewhere."""
        if self.post_process and self.config.sequence_parallel:
            # every rank then runs the same head, which returns the full gradient: the backward pass only splits
            return gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        return hidden_states

    def output_embedding(self) -> Tensor:
        """(padded vocabulary / tp, H) this rank's shard of the output embedding (last stage only)."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def transformer_config(
    shape: ModelShape, layout: ParallelLayout, dtype: torch.dtype, recompute: str
) -> TransformerConfig:
    """Megatron's configuration for a Hugging Face model in a layout; ``recompute`` is 'none' or 'full'."""
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
        context_parallel_size=layout.context_parallel_size,
        sequence_parallel=layout.sequence_parallel,
        # micro-batches are padded to their own longest sequence; the dispatcher is checked even for dense models
        variable_seq_lengths=layout.pipeline_parallel_size > 1,
        moe_token_dispatcher_type="alltoall",
        # the loss shares already carry their denominators: Megatron must only add them up
        calculate_per_token_loss=True,
        deallocate_pipeline_outputs=True,
        batch_p2p_sync=False,
        use_cpu_initialization=not on_gpu,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=on_gpu,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        recompute_granularity="full" if recompute == "full" else None,
        recompute_method="uniform" if recompute == "full" else None,
        recompute_num_layers=1 if recompute == "full" else None,
    )


def has_transformer_engine() -> bool:
    """True where TransformerEngine can be used: it is installed and there is a GPU."""
    if not torch.cuda.is_available():
        return False
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return bool(HAVE_TE)


def _spec(config: TransformerConfig):
    if has_transformer_engine():
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    from openrlhf_ext.megatron.layer_spec import block_spec

    return block_spec(config)


def build_model(shape: ModelShape, config: TransformerConfig) -> HiddenStateGPTModel:
    """This rank's stage of the model, parameters not yet loaded, on this rank's device."""
    model = HiddenStateGPTModel(
        config,
        _spec(config),
        vocab_size=shape.padded_vocab_size(config.tensor_model_parallel_size),
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        rope_scaling=shape.rope_scaling_factor is not None,
        rope_scaling_factor=shape.rope_scaling_factor or 8.0,
        parallel_output=True,
    )
    return model.cuda() if torch.cuda.is_available() else model
