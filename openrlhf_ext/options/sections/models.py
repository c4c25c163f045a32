"""The models that are trained or consulted: actor, critic, reference, guide, and the Megatron layout of the actor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from openrlhf_ext.options import Float, Int, Reason, Section, Violation, added, no_meaning, not_yet, option

Beta = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[Float, Field(ge=0)]
LrScheduler = Literal["cosine_with_min_lr", "cosine", "linear", "constant", "constant_with_warmup"]

_MUON: Reason = {"why": "only Adam is built on Megatron's optimizer", "instead": "use adam.* with optim adam"}


class Adam(Section):
    """Adam with decoupled weight decay."""

    lr: Float = option(1e-6, "peak learning rate", ge=0)
    betas: tuple[Beta, Beta] = option((0.9, 0.95), "decay rates of the first and second moment")
    eps: Float = option(1e-8, "added to the root of the second moment", gt=0)
    weight_decay: Float = option(0.0, "decoupled weight decay (not applied to biases and norms)", ge=0)


class Muon(Section):
    """Muon, which DeepSpeed offers and Megatron's optimizer does not."""

    lr: Float = not_yet(0.02, "learning rate of Muon's 2D weights", **_MUON)
    momentum: Float = not_yet(0.95, "momentum of Muon", **_MUON)
    ns_steps: Int = not_yet(5, "Newton-Schulz steps of Muon", **_MUON)
    nesterov: bool = not_yet(True, "Nesterov momentum in Muon", **_MUON)
    no_nesterov: bool = not_yet(False, "switch Muon's Nesterov momentum off", **_MUON)


class Actor(Section):
    """The policy under training."""

    needs = {
        "actor.lr_scheduler!=constant": ("lr_warmup_ratio", "lr_warmup_steps"),
        "actor.lr_warmup_steps=null": ("lr_warmup_ratio",),
        "actor.lr_scheduler=cosine_with_min_lr": ("min_lr_ratio",),
    }

    num_nodes: Int = option(1, "nodes the policy runs on", ge=1, le=2**13)
    num_gpus_per_node: Int = option(
        8, "policy ranks per node: one per GPU, or one per process when the policy runs on CPU", ge=1, le=2**8
    )
    gradient_checkpointing_enable: bool = option(
        False, "recompute activations in the backward pass; the same as megatron.recompute full"
    )
    gradient_checkpointing_reentrant: bool = no_meaning(
        False,
        "re-entrant form of torch's checkpointing",
        why="Megatron brings its own recomputation",
        instead="use megatron.recompute full",
    )
    eps_clip: Float = option(
        0.2,
        "half-width of the clip interval of the ratio; sets clip_low and clip_high of the estimator",
        gt=0,
        default_text="that of the estimator",
    )
    eps_clip_low_high: tuple[NotNegative, NotNegative] | None = option(
        None,
        "clip_low and clip_high of the estimator: the ratio is kept in [1 - low, 1 + high]",
        default_text="those of the estimator",
    )
    dual_clip: Float | None = option(
        None,
        "bound of the surrogate for negative advantages, as a multiple of the advantage",
        gt=1,
        default_text="that of the estimator",
    )
    policy_loss_type: Literal["ppo", "gspo"] = no_meaning(
        "ppo",
        "ratio of the policy loss",
        why="the estimator decides the loss here",
        instead="use algo.advantage.estimator gspo for the sequence-level ratio",
    )
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean"] = option(
        "token-mean",
        "how token losses are averaged: over all tokens, or per sequence first; sets agg of the estimator",
        default_text="that of the estimator",
    )
    aux_loss_coef: Float = not_yet(
        0,
        "weight of the load-balancing loss of mixture-of-experts models",
        why="only dense models are built",
        instead="set it to 0",
    )
    entropy_coef: Float | None = not_yet(
        None,
        "weight of an entropy bonus in the loss",
        why="entropy never receives a gradient here, it shapes advantages (and is always logged)",
        instead="use the estimator gtpo_entropy, grpo_s or entropy_advantage",
        inert=(0.0,),
    )
    optim: Literal["adam", "muon"] = not_yet("adam", "optimizer", **_MUON)
    muon: Muon = Muon()
    adam: Adam = Adam()
    lr_scheduler: LrScheduler = option(
        "cosine_with_min_lr",
        "learning rate over the optimizer steps; constant has no warm-up, only cosine_with_min_lr stays above 0",
    )
    lr_warmup_ratio: Float = option(0.03, "share of the optimizer steps with a linear warm-up", ge=0, le=1)
    lr_warmup_steps: Int | None = added(
        None, "optimizer steps with a linear warm-up, where they are counted instead", ge=0,
        default_text="actor.lr_warmup_ratio of all",
    )  # fmt: skip
    min_lr_ratio: Float = option(0.1, "final learning rate of cosine_with_min_lr, as a share of the peak", ge=0, le=1)
    max_norm: Float = option(1.0, "global gradient norm is clipped to this; 0 = no clipping", ge=0)
    model_name_or_path: str | None = option(
        None, "folder of the Hugging Face checkpoint (qwen2, qwen3, llama), or its hub name; required", path="input"
    )
    freeze_visual_encoder: bool = not_yet(
        False,
        "leave a vision encoder untrained",
        why="only text models are built",
        instead="leave it out",
    )


class CriticAdam(Adam):
    """Adam of the critic."""

    lr: Float = option(9e-6, "peak learning rate of the critic", ge=0)


class CriticMegatron(Section):
    """The critic's own layout."""

    tensor_parallel_size: Int | None = added(
        None, "tensor-parallel ranks of the critic; null = as many as the policy's", ge=1
    )
    pipeline_parallel_size: Int | None = added(
        None, "pipeline stages of the critic; null = as many as the policy's", ge=1
    )
    context_parallel_size: Int | None = added(
        None, "context-parallel ranks of the critic; null = as many as the policy's", ge=1
    )
    virtual_pipeline_size: Int | None = added(
        None, "model chunks per pipeline stage of the critic; null = as many as the policy's", ge=1
    )
    sequence_parallel_enable: bool | None = added(
        None, "sequence parallelism of the critic; null = the policy's if the critic has tensor parallelism"
    )


class Critic(Section):
    """The value model of PPO with GAE; on ranks of its own, used only with algo.advantage.estimator gae."""

    needs = {
        "algo.advantage.estimator=gae": ("*",),
        "critic.lr_scheduler!=constant": ("lr_warmup_ratio",),
        "critic.lr_scheduler=cosine_with_min_lr": ("min_lr_ratio",),
    }

    num_nodes: Int = option(1, "nodes of the critic", ge=1, le=2**13)
    num_gpus_per_node: Int = option(8, "critic ranks per node: one per GPU, or one per process on CPU", ge=1, le=2**8)
    megatron: CriticMegatron = CriticMegatron()
    value_clip: Float | None = option(
        0.5, "half-width of the interval around the old value in the value loss; null = no clipping", gt=0
    )
    freezing_steps: Int = option(
        -1,
        "the policy is not trained in the first N + 1 training steps, only the critic is; -1 = it always is",
        ge=-1,
    )
    save_value_network: bool = option(
        False, "write the critic at the end, in Hugging Face form, to <ckpt.output_dir>_critic"
    )
    optim: Literal["adam", "muon"] = not_yet("adam", "optimizer of the critic", **_MUON)
    muon: Muon = Muon()
    adam: CriticAdam = CriticAdam()
    lr_scheduler: LrScheduler = option("cosine_with_min_lr", "learning rate of the critic over its optimizer steps")
    lr_warmup_ratio: Float = option(0.03, "share of the critic's optimizer steps with a linear warm-up", ge=0, le=1)
    min_lr_ratio: Float = option(
        0.1, "final learning rate of the critic with cosine_with_min_lr, as a share of the peak", ge=0, le=1
    )
    max_norm: Float = option(1.0, "global gradient norm of the critic is clipped to this; 0 = no clipping", ge=0)
    model_name_or_path: str | None = option(
        None,
        "folder or hub name of the critic's checkpoint, with a value head (ds.value_head_prefix) or without; null = "
        "actor.model_name_or_path",
        path="input",
    )


class Ref(Section):
    """The frozen reference model of a KL penalty: the policy as it was at the start.

    Without ranks of its own it is a copy in the host memory of the policy's ranks, swapped in for one forward pass.
    """

    num_nodes: Int = option(
        1,
        "nodes of a reference with ranks of its own; it has none unless this or ref.num_gpus_per_node is set",
        ge=1,
        le=2**13,
    )
    num_gpus_per_node: Int = option(8, "ranks per node of a reference with ranks of its own", ge=1, le=2**8)
    offload: bool = option(
        False, "keep the reference in the policy's host memory, which is the default without ranks of its own"
    )


class Guide(Section):
    """The frozen guiding policy of mixed_policy_dapo: it samples a part of every group and scores all completions.

    Without ranks of its own its weights are a copy in the host memory of the policy's ranks, swapped in for one forward
    pass, which takes a guide of the policy's architecture. Its engines take the options of vllm.* and
    fp8.rollout_enable.
    """

    needs = {
        "guide.model_name_or_path": ("*",),
        "algo.advantage.estimator=mixed_policy_dapo": ("*",),
    }

    model_name_or_path: str | None = added(
        None,
        "folder or hub name of the guide's checkpoint, with the policy's tokenizer; null = there is no guide",
        path="input",
    )
    samples_per_prompt: Int = added(
        1,
        "completions of each group that the guide's engines sample; the policy's engines sample the others",
        ge=1,
        le=2**16,
    )
    num_engines: Int = added(1, "vLLM engines of the guide; their weights never change", ge=1, le=2**13)
    num_nodes: Int = added(
        1,
        "nodes of a guide with ranks of its own; it has none unless this or guide.num_gpus_per_node is set",
        ge=1,
        le=2**13,
    )
    num_gpus_per_node: Int = added(
        8, "ranks per node of a guide with ranks of its own, which are laid out as the policy's", ge=1, le=2**8
    )


class Megatron(Section):
    """How the policy is laid out over its ranks; rank order tp-cp-ep-pp-dp, tensor-parallel ranks adjacent."""

    needs = {
        "megatron.overlap_grad_reduce": ("ddp_bucket_size",),
        "megatron.recompute=selective": ("recompute_modules",),
        "megatron.recompute=full": ("recompute_method", "recompute_num_layers"),
    }

    tensor_parallel_size: Int = added(1, "ranks that share every layer (attention heads, MLP, vocabulary)", ge=1)
    pipeline_parallel_size: Int = added(1, "pipeline stages; layers are spread evenly over them", ge=1)
    context_parallel_size: Int = added(
        1, "ranks that share every sequence; each holds two pieces of it (equal work under a causal mask)", ge=1
    )
    virtual_pipeline_size: Int = added(
        1, "model chunks per pipeline stage (interleaved schedule: a smaller bubble, more messages)", ge=1
    )
    sequence_parallel_enable: bool = added(
        False, "split activations between tensor-parallel regions along the sequence; needs tensor parallelism"
    )
    distributed_optimizer_enable: bool = added(True, "shard optimizer states over the data-parallel ranks")
    overlap_grad_reduce: bool = added(
        False,
        "reduce gradients over the data-parallel ranks while the backward pass goes on, bucket by bucket "
        "(docs/performance.md)",
    )
    overlap_param_gather: bool = added(
        False,
        "gather updated parameters while the forward pass of the next optimizer step of the same batch goes on; needs "
        "megatron.overlap_grad_reduce and megatron.distributed_optimizer_enable (docs/performance.md)",
    )
    ddp_bucket_size: Int | None = added(
        None,
        "with megatron.overlap_grad_reduce: parameters of a bucket",
        ge=1,
        default_text="40,000,000, or 1,000,000 for each data-parallel rank if that is more",
    )
    param_dtype: Literal["bf16", "fp32"] = added(
        "bf16", "data type of parameters and activations; optimizer states and gradients are kept in fp32"
    )
    recompute: Literal["none", "selective", "full"] = added(
        "none",
        "activations recomputed in the backward pass: none, selective (those of megatron.recompute_modules), or full "
        "(those of whole layers: least memory, about 1/3 more compute)",
    )
    recompute_modules: tuple[Literal["core_attn", "mlp"], ...] = added(
        ("core_attn",),
        "parts of a layer recomputed with megatron.recompute selective: core_attn (saves memory only where attention "
        "keeps its scores, which flash and cuDNN attention do not), mlp",
    )
    recompute_method: Literal["uniform", "block"] = added(
        "uniform",
        "with megatron.recompute full: uniform = keep only the input of every megatron.recompute_num_layers layers, "
        "block = recompute the first megatron.recompute_num_layers layers of each model chunk, keep all of the others",
    )
    recompute_num_layers: Int = added(1, "layers, see megatron.recompute_method", ge=1)
    head: Literal["fused", "two_pass"] = added(
        "fused",
        "how log-probs come from hidden states: fused = loss and gradient in one pass over blocks of logits where the "
        "estimator's loss allows, two_pass = log-probs first, logits again in the backward pass",
    )
    head_kernels: Literal["auto", "torch", "triton"] = added(
        "auto", "kernels of the head: auto = Triton on GPUs where it is installed, torch elsewhere"
    )
    head_workspace_mib: Int = added(
        256,
        "memory for the blocks of logits that the head works on, MiB on every rank; more makes larger products",
        ge=1,
        le=2**20,
    )
    rope_fusion: bool = added(
        False,
        "TransformerEngine's rotary embedding (one kernel, fp32 tables) instead of Megatron's (tables in "
        "megatron.param_dtype, as the engines have them); kl/rollout shows which agrees better with the engines; "
        "without effect where layers are not TransformerEngine's",
    )
    start_timeout_s: Float = added(600, "longest wait for the ranks of one model to load it and to meet, seconds", gt=0)
    collective_timeout_s: Float = added(600, "longest wait in one collective call before the run fails, seconds", gt=0)

    def violations(self) -> Iterator[Violation]:
        if self.recompute == "selective" and not self.recompute_modules:
            yield Violation(
                ("megatron.recompute_modules", "megatron.recompute"),
                "megatron.recompute selective needs megatron.recompute_modules: got none; name core_attn, mlp or both, "
                "or set megatron.recompute none",
            )
        yield from self._overlap_violations()

    def _overlap_violations(self) -> Iterator[Violation]:
        """Without buckets there is nothing to gather early, and without shards nothing to gather."""
        needed = ("overlap_grad_reduce", "distributed_optimizer_enable")
        missing = [f"megatron.{leaf}" for leaf in needed if not getattr(self, leaf)]
        if self.overlap_param_gather and missing:
            yield Violation(
                ("megatron.overlap_param_gather", *missing),
                f"megatron.overlap_param_gather needs {' and '.join(f'megatron.{leaf}' for leaf in needed)}: got "
                f"{' and '.join(f'{name} false' for name in missing)}; switch on what is missing, or leave "
                "megatron.overlap_param_gather out",
            )
