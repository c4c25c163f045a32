"""DeepSpeed's options: known, so that launch scripts of OpenRLHF get an answer for each, and refused when set."""

from __future__ import annotations

from typing import Literal

from openrlhf_ext.options import Float, Int, Reason, Section, no_meaning, not_yet, option

_NO_DEEPSPEED = "DeepSpeed does not run the policy"
_LORA: Reason = {"why": "only full fine-tuning is built", "instead": "leave ds.lora.* and ds.load_in_4bit out"}


class Lora(Section):
    """Low-rank adapters."""

    rank: Int = not_yet(0, "rank of the adapters; 0 = none", **_LORA)
    alpha: Int = not_yet(16, "scale of the adapters", **_LORA)
    target_modules: str | tuple[str, ...] = not_yet(
        "all-linear", "modules that get adapters", inert=(("all-linear",),), **_LORA
    )
    dropout: Float = not_yet(0, "dropout in the adapters", **_LORA)


class DeepSpeed(Section):
    """Options of OpenRLHF's DeepSpeed backend."""

    needs = {
        "algo.advantage.estimator=gae": ("value_head_prefix",),
    }

    use_universal_ckpt: bool = no_meaning(
        False,
        "DeepSpeed's universal checkpoint",
        why=_NO_DEEPSPEED,
        instead="use ckpt.save_hf for a checkpoint that every layout can load",
    )
    zero_stage: Int = no_meaning(
        2,
        "ZeRO stage",
        why=_NO_DEEPSPEED,
        instead="use megatron.distributed_optimizer_enable to shard optimizer states, and "
        "megatron.tensor_parallel_size / megatron.pipeline_parallel_size to shard parameters",
    )
    deepcompile: bool = no_meaning(False, "DeepCompile", why=_NO_DEEPSPEED, instead="leave it out")
    param_dtype: Literal["bf16", "fp16"] = no_meaning(
        "bf16", "data type of the parameters", why=_NO_DEEPSPEED, instead="use megatron.param_dtype (bf16 or fp32)"
    )
    zpg: Int = no_meaning(
        1, "ZeRO++ partition size", why=_NO_DEEPSPEED, instead="use megatron.distributed_optimizer_enable"
    )
    adam_offload: bool = not_yet(
        False,
        "keep Adam's states in host memory",
        why="optimizer offload is not built",
        instead="use megatron.distributed_optimizer_enable, more ranks, or megatron.recompute full",
    )
    attn_implementation: str = no_meaning(
        "flash_attention_2",
        "attention implementation of transformers",
        why="attention is Megatron's, chosen by device",
        instead="leave it out",
    )
    experts_implementation: Literal["eager", "batched_mm", "grouped_mm", "deepgemm"] | None = no_meaning(
        None,
        "mixture-of-experts computation of transformers",
        why="transformers does not run the policy and only dense models are built",
        instead="leave it out",
    )
    use_liger_kernel: bool = no_meaning(
        False,
        "Liger kernels in transformers models",
        why="transformers does not run the policy",
        instead="leave it out; the log-probability head here never holds all logits",
    )
    grad_accum_dtype: str | None = no_meaning(
        None,
        "data type in which gradients are accumulated",
        why="gradients are always accumulated in fp32",
        instead="leave it out",
    )
    overlap_comm: bool = no_meaning(
        False, "overlap ZeRO's communication with compute", why=_NO_DEEPSPEED, instead="leave it out"
    )
    enable_sleep: bool = option(
        False,
        "with train.colocate_all: the policy's parameters, gradients and optimizer states wait in host memory while "
        "the engines sample",
    )
    tensor_parallel_size: Int = no_meaning(
        1, "tensor-parallel ranks under DeepSpeed", why=_NO_DEEPSPEED, instead="use megatron.tensor_parallel_size"
    )
    packing_samples: bool = no_meaning(
        True,
        "concatenate samples without padding",
        why="micro-batches are always packed without padding",
        instead="leave it out",
    )
    load_in_4bit: bool = not_yet(False, "load the base model in 4 bit", **_LORA)
    lora: Lora = Lora()
    ring_attn_size: Int = no_meaning(
        1, "ring-attention ranks", why=_NO_DEEPSPEED, instead="use megatron.context_parallel_size"
    )
    ring_attn_head_stride: Int = no_meaning(
        1, "heads per step of ring attention", why=_NO_DEEPSPEED, instead="use megatron.context_parallel_size"
    )
    value_head_prefix: str = option(
        "score", "name of the critic's value head in checkpoints; value_head_prefix of its config.json comes first"
    )
