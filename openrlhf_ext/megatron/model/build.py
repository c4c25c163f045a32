"""Builds the policy's decoder as a megatron-core GPTModel that ends in hidden states instead of
logits."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Collection, Sequence
from copy import copy
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from openrlhf_ext.megatron.attentions import Attention
from openrlhf_ext.megatron.attentions.full import FullAttention
from openrlhf_ext.megatron.layers import LayerConverter
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.mlps import MLP
from openrlhf_ext.megatron.model import positions
from openrlhf_ext.megatron.model.shape import ModelShape
from openrlhf_ext.megatron.model.spec import PackedSequences, block_spec
from openrlhf_ext.megatron.step.batch import PackedBatch
from openrlhf_ext.options.sections import Megatron

logger = logging.getLogger(__name__)
logging.getLogger(GPTModel.__module__).addFilter(
    lambda record: "GPTModel IS DEPRECATED" not in record.getMessage()
)


class HiddenStateGPTModel(GPTModel):
    """GPTModel whose last stage returns the final hidden states, so that the head sees only the
    positions it needs.
    ``frequencies_D``: of its rotary embedding (``positions.rotary``)."""

    frequencies_D: Tensor

    def _preprocess(
        self, *, position_ids: Tensor, packed_seq_params: PackedSequences, **kwargs
    ) -> tuple:
        """The angles of the rotary embedding for every token of a pack that has no boundaries yet:
        from boundaries Megatron would put them together twice in every layer
        (models/common/embeddings/rope_utils.py:198). Computed
        anew: its own module keeps 32 tables of the longest sequences, 64 MiB each at 128k
        tokens."""
        made = super()._preprocess(
            position_ids=position_ids, packed_seq_params=packed_seq_params, **kwargs
        )
        decoder_input, _, *others = made
        # a buffer would be made bf16
        self.frequencies_D = self.frequencies_D.to(position_ids.device)
        if packed_seq_params.cu_seqlens_q is None:
            return decoder_input, self._angles(position_ids[0])[:, None], *others
        table = torch.arange(packed_seq_params.max_seqlen_q, device=position_ids.device)
        return decoder_input, self._angles(table)[:, None, None], *others

    def _angles(self, positions_L: Tensor) -> Tensor:
        """fp32 (L, rotated dimensions)."""
        angles_LD = positions_L.float()[:, None] * self.frequencies_D
        return torch.cat((angles_LD, angles_LD), dim=-1)

    def _postprocess(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
        """(L, 1, H) final hidden states of this rank's tokens on the last stage, activations for
        the next elsewhere."""
        return hidden_states

    def _is_in_embd_group(self) -> bool:
        """Whether the constructor copies the tied embedding between stages; not on the meta device,
        without values."""
        return not next(self.parameters()).is_meta and super()._is_in_embd_group()

    def output_embedding(self) -> Tensor:
        """(padded vocabulary / tp, H) this rank's shard of the output embedding (last stage
        only)."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


class ValueModel(HiddenStateGPTModel):
    """The same decoder with a value head, (1, H) and the same on every tensor-parallel rank, in the
    place of the vocabulary projection, and under its name, which Megatron's checkpoint code expects
    on the last stage."""

    def __init__(self, config: TransformerConfig, *args, **kwargs) -> None:
        super().__init__(config, *args, **kwargs)
        if self.post_process:
            self.output_layer = torch.nn.Linear(
                config.hidden_size, 1, bias=False, dtype=config.params_dtype
            )


def transformer_config(
    shape: ModelShape,
    layout: ParallelLayout,
    dtype: torch.dtype,
    megatron: Megatron,
    converters: Sequence[LayerConverter] = (),
) -> TransformerConfig:
    on_gpu = torch.cuda.is_available()
    layers = layout.stage_layers(shape.num_layers)
    is_uneven = len(set(layers)) > 1
    arguments: dict[str, Any] = dict(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        # layers' numbers are then in the names of a checkpoint's tensors, not an axis of them
        linear_attention_freq=_marks(_of_other_kinds(shape), shape.num_layers),
        add_bias_linear=False,
        no_rope_freq=_marks(shape.layers_without_rope, shape.num_layers),
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        layernorm_zero_centered_gamma=shape.family.zero_centered,
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
        num_layers_in_first_pipeline_stage=layers[0] if is_uneven else None,
        # of two stages it follows, and Megatron divides by the stages between
        # (transformer_layer.py:172)
        num_layers_in_last_pipeline_stage=layers[-1] if is_uneven and len(layers) > 2 else None,
        context_parallel_size=layout.context_parallel_size,
        sequence_parallel=layout.sequence_parallel,
        # the loss shares already carry their denominators: Megatron must only add them up
        calculate_per_token_loss=True,
        deallocate_pipeline_outputs=True,
        batch_p2p_sync=False,
        use_cpu_initialization=not on_gpu,
        # not perform_initialization=False, with which no weight is marked as a tensor-parallel
        # shard (layers.py:978)
        init_method=_filled_later,
        output_layer_init_method=_filled_later,
        cuda_graph_modules=[],
        # of apex
        gradient_accumulation_fusion=on_gpu
        and find_spec("fused_weight_gradient_mlp_cuda") is not None,
        masked_softmax_fusion=False,
        persist_layer_norm=on_gpu,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=False,
        apply_rope_fusion=megatron.rope_fusion and uses_transformer_engine(dtype, converters),
        **{
            name: value
            for attention in shape.kinds.values()
            for name, value in attention.megatron_arguments().items()
        },
        **shape.mlp.megatron_arguments(),
        **_expert_arguments(shape, layout, uses_transformer_engine(dtype, converters)),
        **recompute_arguments(megatron),
    )
    for converter in converters:
        arguments |= converter.megatron_arguments()
    return TransformerConfig(**arguments)


def _expert_arguments(shape: ModelShape, layout: ParallelLayout, fused: bool) -> dict[str, Any]:
    """``fused``: TransformerEngine's permutation adds the outputs of a token's experts in a fixed
    order, in fp32. Megatron's own is ``scatter_add_``, which adds them in any order on a GPU and
    rounds each time."""
    if not shape.num_experts:
        return {}
    return {
        "expert_model_parallel_size": layout.expert_parallel_size,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "moe_permute_fusion": fused,
    }


def _of_other_kinds(shape: ModelShape) -> list[int]:
    """Layers whose attention is not full."""
    usual = FullAttention.layer_type
    return [n for n, kind in enumerate(shape.attentions) if kind.layer_type != usual]


def _marks(chosen: Collection[int], count: int) -> list[int] | None:
    """A 1 for each chosen one of ``count`` layers, 0 for the others; None if none is chosen."""
    return [int(number in chosen) for number in range(count)] if chosen else None


def _filled_later(weight: Tensor) -> Tensor:
    """Random numbers would only take time: ``load_hf`` fills every parameter, or says which it
    cannot."""
    return weight


def recompute_arguments(megatron: Megatron) -> dict[str, Any]:
    chosen: dict[str, Any] = {"recompute_modules": list(megatron.recompute_modules)}
    if megatron.recompute == "full":
        chosen = {
            "recompute_method": megatron.recompute_method,
            "recompute_num_layers": megatron.recompute_num_layers,
        }
    return {
        "recompute_granularity": None if megatron.recompute == "none" else megatron.recompute,
        **chosen,
    }


class BrokenLibraryError(RuntimeError):
    """A library is installed and cannot be used; without it everything would run, slowly."""


def has_transformer_engine() -> bool:
    """Whether TransformerEngine is installed and there is a GPU. Raises BrokenLibraryError: it
    cannot be used."""
    if not torch.cuda.is_available() or find_spec("transformer_engine") is None:
        return False
    remedy = "mend or uninstall it: openrlhf-ext doctor says what is installed"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # a library that cannot be loaded raises whatever its loader raises
        # megatron-core would take it for absent (extensions/transformer_engine.py:74 catches
        # ImportError)
        raise BrokenLibraryError(
            f"TransformerEngine is installed and cannot be imported ({type(error).__name__}: "
            f"{error}); {remedy}"
        ) from error
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if not HAVE_TE:
        raise BrokenLibraryError(
            f"TransformerEngine can be imported, and megatron-core {version('megatron-core')} "
            f"cannot use it; {remedy}"
        )
    return True


def uses_transformer_engine(dtype: torch.dtype, converters: Sequence[LayerConverter] = ()) -> bool:
    """Whether the layers of a model of this dtype are TransformerEngine's; else they are ours
    (``layer_spec``). Its attention over packed sequences is flash or cuDNN attention, neither of
    which takes fp32."""
    return dtype == torch.bfloat16 and not _must_be_ours(converters) and has_transformer_engine()


def _must_be_ours(converters: Sequence[LayerConverter]) -> bool:
    return any(converter.own_layers for converter in converters)


def packed_sequences(part: PackedBatch, fused_rope: bool) -> PackedSequences:
    """What attention needs to know of a pack. ``fused_rope``: the rotary embedding is
    TransformerEngine's, which reads the boundaries; Megatron's gets the angles of every token
    instead (``HiddenStateGPTModel._preprocess``)."""
    boundaries = part.boundaries if fused_rope else None
    # padding counts as part of its sequence: kernels that skip padding between sequences are few
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=max(part.slots),
        max_seqlen_kv=max(part.slots),
        slots=part.slots,
        boundaries=part.boundaries,
        positions_L=part.positions_L,
        shared=part.shared,
        routing=part.routing,
    )


def _spec(
    config: TransformerConfig,
    shape: ModelShape,
    vp_stage: int | None,
    converters: Sequence[LayerConverter] = (),
) -> TransformerBlockSubmodules:
    if uses_transformer_engine(config.params_dtype, converters):
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_layer_with_transformer_engine_spec,
        )

        def theirs(attention: Attention, mlp: type[MLP]) -> ModuleSpec:
            dense = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
            return mlp.transformer_engine_layer(attention.transformer_engine_layer(dense))

        logger.info("layers: TransformerEngine's")
        return block_spec(config, shape, vp_stage, converters, theirs, LayerNormImpl)
    if torch.cuda.is_available() and not _must_be_ours(converters):
        why = "is not installed"
        if has_transformer_engine():
            why = (
                f"has no attention over packed sequences in {config.params_dtype} "
                "(megatron.param_dtype bf16 has)"
            )
        what = "slower on a GPU"
        if config.num_moe_experts and config.moe_router_topk > 2:
            what += (
                ", and two passes of the same weights differ, since a token's experts are added up "
                "in any order"
            )
        logger.warning("layers: plain torch, %s, because TransformerEngine %s", what, why)
    return block_spec(config, shape, vp_stage, converters)


def give_whole_sequences(decoder: torch.nn.Module) -> None:
    """Gives TransformerEngine's attention cores the boundaries of a pack, as their kernels need
    them (Megatron's rotary embedding before them has none, see ``packed_sequences``), and whole
    sequences where these share prompts."""

    def enter(_module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        pack: PackedSequences = kwargs["packed_seq_params"]
        moved, whole = copy(pack), pack.whole
        moved.cu_seqlens_q = moved.cu_seqlens_kv = pack.boundaries
        if whole is not None:
            query, key, value, *others = args
            args = (whole.gather(query), whole.gather(key), whole.gather(value), *others)
        return args, kwargs | {"packed_seq_params": moved}

    def leave(_module: torch.nn.Module, _args: tuple, kwargs: dict, output: Tensor) -> Tensor:
        whole = kwargs["packed_seq_params"].whole
        return output if whole is None else whole.take(output)

    for name, module in decoder.named_modules():
        if name.endswith("core_attention"):
            module.register_forward_pre_hook(enter, with_kwargs=True)
            module.register_forward_hook(leave, with_kwargs=True)


def fuse_weight_gradients(decoder: torch.nn.Module) -> None:
    """Lets TransformerEngine's layers add the gradients of their weights to ``main_grad`` within
    the product. Not by
    ``gradient_accumulation_fusion``: with that Megatron's own output layer refuses to be built
    without apex (tensor_parallel/layers.py:1070)."""
    for module in decoder.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True  # type: ignore[assignment]  # torch types attributes as modules


def scale_states(model: HiddenStateGPTModel, shape: ModelShape) -> None:
    """The factors of embeddings and of what attention and MLP add to a layer's hidden states, where
    they are not 1."""
    embedding, branch = shape.embedding_factor, shape.residual_factor
    if embedding != 1.0 and model.pre_process:
        model.embedding.register_forward_hook(
            lambda _module, _args, embedded_LBH: embedded_LBH * embedding
        )
    if branch != 1.0:

        def add(
            output_with_bias: tuple[Tensor, None], residual_LBH: Tensor, _dropout: float
        ) -> Tensor:
            return residual_LBH + output_with_bias[0] * branch

        for layer in model.decoder.layers:
            layer.self_attn_bda = layer.mlp_bda = lambda training, fused: add


def set_positions(model: HiddenStateGPTModel, shape: ModelShape, longest: int | None) -> None:
    """The frequencies of the rotary embedding, and the factor of its cosines and sines, which
    Megatron computes by YaRN's formula when it builds an attention
    (transformer/attention.py:326)."""
    with torch.device("cpu"):
        model.frequencies_D, factor = positions.rotary(shape.rotary, shape.head_dim, longest)
    for layer in model.decoder.layers:
        layer.self_attention._yarn_concentration_factor = factor


def build_model(
    shape: ModelShape,
    config: TransformerConfig,
    vp_stage: int | None = None,
    meta: bool = False,
    converters: Sequence[LayerConverter] = (),
    longest: int | None = None,
) -> HiddenStateGPTModel:
    """This rank's (virtual) stage of the model, parameters not yet loaded, on this rank's device.
    ``meta``: on the default device instead, with our layer spec on every machine (``planning``);
    ``longest``: as of
    ``positions.rotary``."""
    where = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    model_class = HiddenStateGPTModel if shape.value_head is None else ValueModel
    model = model_class(
        config,
        (block_spec if meta else _spec)(config, shape, vp_stage, converters),
        vocab_size=shape.padded_vocab_size(config.tensor_model_parallel_size),
        max_sequence_length=shape.max_positions or 0,  # read by learned positions only
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="none",  # see ``_preprocess``
        parallel_output=True,
        vp_stage=vp_stage,
    )
    scale_states(model, shape)
    set_positions(model, shape, longest)
    if meta:
        return model
    fuse_weight_gradients(model.decoder)
    if uses_transformer_engine(config.params_dtype, converters) and not config.apply_rope_fusion:
        give_whole_sequences(model.decoder)
    return model.cuda() if torch.cuda.is_available() else model
