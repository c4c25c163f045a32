"""The models that are trained or consulted: actor, critic, reference, guide, their layout and their
precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from openrlhf_ext.fp8.recipe import BF16Layers, Recipe
from openrlhf_ext.options import (
    Float,
    Int,
    Reason,
    Section,
    Violation,
    added,
    no_meaning,
    not_yet,
    option,
    value_text,
)

# ---- FP8 in the policy's linear layers and in the engines'

_BF16_LAYERS = ("layers_in_bf16_start", "layers_in_bf16_end")
_DELAYED_ONLY = ("margin", "amax_history_len", "amax_compute_algo")


# an option has its default, its meaning and its bounds, as in a table


class FP8(Section):
    """FP8 in the linear layers of the decoder; embedding, head, norms, attention and the critic do
    not change."""

    needs = {
        "fp8.enable | fp8.rollout_enable": _BF16_LAYERS,
        "fp8.enable": ("emulate", "recipe", "format", "scales", "modules", *_DELAYED_ONLY),
    }

    enable: bool = added(
        False, "train with FP8 linear layers (TransformerEngine's, or emulated with fp8.emulate)"
    )
    emulate: bool = added(
        False,
        "round to FP8 and multiply in fp32, on any machine: for accuracy studies, slower than "
        "without FP8",
    )
    recipe: Literal["blockwise", "current", "delayed"] = added(
        "blockwise",
        "what shares a scale: blockwise = blocks of 1x128 in activations and gradients, 128x128 "
        "in weights; current = a tensor, scaled from its own values; delayed = a tensor, scaled "
        "from earlier micro-batches",
    )
    format: Literal["e4m3", "hybrid"] | None = added(
        None,
        "e4m3 everywhere, or hybrid: E5M2 for output gradients",
        default_text="e4m3 with fp8.recipe blockwise, else hybrid",
    )
    scales: Literal["fp32", "pow2"] | None = added(
        None, "scales in fp32, or rounded down to powers of two", default_text="fp32"
    )
    layers_in_bf16_start: Int = added(
        0, "decoder layers at the start that stay in BF16, in training and rollout", ge=0
    )
    layers_in_bf16_end: Int = added(
        0, "decoder layers at the end that stay in BF16, in training and rollout", ge=0
    )
    modules: Literal["all", "mlp"] = added(
        "all",
        "linear layers in FP8: all, or mlp = without those of attention, whose shards tensor "
        "parallelism makes narrow",
    )
    margin: Int | None = added(
        None,
        "with fp8.recipe delayed: scales are smaller by a factor of 2^margin than would fit",
        ge=0,
        default_text="0",
    )
    amax_history_len: Int | None = added(
        None,
        "with fp8.recipe delayed: micro-batches in the amax history",
        ge=1,
        default_text="1024",
    )
    amax_compute_algo: Literal["max", "most_recent"] | None = added(
        None,
        "with fp8.recipe delayed: scale from the largest entry in the history, or in the last "
        "micro-batch",
        default_text="max",
    )
    rollout_enable: bool = added(
        False,
        "FP8 linear layers in the rollout engines: vLLM's fp8_per_block with fp32 scales; "
        "emulated on CPU",
    )

    @property
    def bf16_layers(self) -> BF16Layers:
        """Layers that training and rollout leave out."""
        return BF16Layers(self.layers_in_bf16_start, self.layers_in_bf16_end)

    @property
    def training_recipe(self) -> Recipe | None:
        """How the policy is trained in FP8; None: it is not."""
        if not self.enable:
            return None
        own = {
            "scales": self.scales,
            "margin": self.margin,
            "amax_history_len": self.amax_history_len,
            "amax_compute_algo": self.amax_compute_algo,
        }
        return Recipe(
            self.recipe,
            self.format or ("e4m3" if self.recipe == "blockwise" else "hybrid"),
            bf16_layers=self.bf16_layers,
            modules=self.modules,
            emulate=self.emulate,
            **{name: value for name, value in own.items() if value is not None},  # type: ignore[arg-type]
        )

    @property
    def training_label(self) -> str:
        """For progress lines, records and checkpoints, which must not hide an emulation; empty
        without FP8."""
        recipe = self.training_recipe
        return "" if recipe is None else f"FP8 {recipe.label}"

    def violations(self) -> Iterator[Violation]:
        if self.enable:
            if self.modules == "mlp" and self.rollout_enable:
                yield Violation(
                    ("fp8.modules", "fp8.rollout_enable"),
                    "fp8.modules mlp needs engines without FP8, because theirs includes "
                    "attention: got fp8.rollout_enable true; leave it out, or use fp8.modules all",
                )
            yield from self._delayed_violations()
            yield from self._foreign_violations()

    def _delayed_violations(self) -> Iterator[Violation]:
        """Megatron's rule (megatron-core 0.19.2 transformer_config.py:1402), and so that of the
        emulation."""
        leaves = [leaf for leaf in _BF16_LAYERS if getattr(self, leaf)]
        if self.recipe == "delayed" and leaves:
            got = " and ".join(f"fp8.{leaf} {getattr(self, leaf)}" for leaf in leaves)
            yield Violation(
                ("fp8.recipe", *(f"fp8.{leaf}" for leaf in leaves)),
                f"fp8.recipe delayed cannot keep layers in BF16 (a limit of Megatron): got {got}; "
                "leave them out, or use fp8.recipe blockwise or current",
            )

    def _foreign_violations(self) -> Iterator[Violation]:
        """Options of another recipe."""
        foreign = ("scales",) if self.recipe == "delayed" else _DELAYED_ONLY
        owner = "blockwise or current" if self.recipe == "delayed" else "delayed"
        for leaf in foreign:
            if (value := getattr(self, leaf)) is not None:
                yield Violation(
                    (f"fp8.{leaf}", "fp8.recipe"),
                    f"fp8.{leaf} applies only to fp8.recipe {owner}: got {value_text(value)} and "
                    f"fp8.recipe {self.recipe}; leave it out, or change the recipe",
                )

    def cautions(self) -> Iterator[str]:
        recipe = self.training_recipe
        if recipe is None:
            return
        if not recipe.blockwise:
            yield (
                f"fp8.recipe {recipe.name}: a tensor has one scale, so a log-prob depends on the "
                "other sequences in its pack, and the ratio of the first update is not 1 "
                "(docs/fp8.md); fp8.recipe blockwise has no such noise"
            )
        if self.rollout_enable and (not recipe.blockwise or recipe.pow2):
            yield (
                f"fp8.enable with fp8.recipe {recipe.name} and fp8.scales {recipe.scales} with "
                "fp8.rollout_enable: the engines quantize blockwise with fp32 scales, and the "
                "errors of two quantizers add up, so trainer and engines differ more than with "
                "either alone; use fp8.recipe blockwise and fp8.scales fp32"
            )


# ---- models

Beta = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[Float, Field(ge=0)]
LrScheduler = Literal["cosine_with_min_lr", "cosine", "linear", "constant", "constant_with_warmup"]

_MUON: Reason = {
    "why": "only Adam is supported with Megatron's optimizer",
    "instead": "use adam.* with optim adam",
}


class Adam(Section):
    """Adam with decoupled weight decay."""

    lr: Float = option(1e-6, "peak learning rate", ge=0)
    betas: tuple[Beta, Beta] = option((0.9, 0.95), "decay rates of the first and second moment")
    eps: Float = option(1e-8, "added to the root of the second moment", gt=0)
    weight_decay: Float = option(
        0.0, "decoupled weight decay (not applied to biases and norms)", ge=0
    )


class Muon(Section):
    """Muon, which DeepSpeed offers and Megatron's optimizer does not."""

    lr: Float = not_yet(0.02, "learning rate of Muon's 2D weights", **_MUON)
    momentum: Float = not_yet(0.95, "momentum of Muon", **_MUON)
    ns_steps: Int = not_yet(5, "Newton-Schulz steps of Muon", **_MUON)
    nesterov: bool = not_yet(True, "Nesterov momentum in Muon", **_MUON)
    no_nesterov: bool = not_yet(False, "switch Muon's Nesterov momentum off", **_MUON)


class Optimizer(Section):
    """The optimizer of a model, declared once for all models that are trained."""

    optim: Literal["adam", "muon"] = not_yet("adam", "optimizer", **_MUON)
    muon: Muon = Muon()
    adam: Adam = Adam()
    lr_scheduler: LrScheduler = option(
        "cosine_with_min_lr",
        "learning rate schedule over the optimizer steps; constant has no warm-up; of those that "
        "decay, only cosine_with_min_lr stays above 0",
    )
    lr_warmup_ratio: Float = option(
        0.03, "share of the optimizer steps with linear warm-up", ge=0, le=1
    )
    min_lr_ratio: Float = option(
        0.1, "final learning rate of cosine_with_min_lr, as a share of the peak", ge=0, le=1
    )
    max_norm: Float = option(
        1.0, "largest global gradient norm; larger gradients are clipped; 0 = no clipping", ge=0
    )


class TrainedModel(Section):
    """A model that is trained, by any trainer."""

    model_name_or_path: str | None = option(
        None,
        "folder of the Hugging Face checkpoint (docs/models.md lists the families), or its hub "
        "name; required",
        path="input",
    )
    gradient_checkpointing_enable: bool = option(
        False, "recompute activations in the backward pass; the same as megatron.recompute full"
    )
    gradient_checkpointing_reentrant: bool = no_meaning(
        False,
        "re-entrant form of torch's checkpointing",
        why="Megatron has its own recomputation",
        instead="use megatron.recompute full",
    )
    aux_loss_coef: Float = option(
        0,
        "for mixtures of experts: coefficient of the loss that balances the experts' load "
        "(docs/algorithms.md#the-loss-that-balances-experts)",
        ge=0,
    )


class Actor(Optimizer, TrainedModel):
    """The policy being trained."""

    needs = {
        "actor.lr_scheduler!=constant": ("lr_warmup_ratio", "lr_warmup_steps"),
        "actor.lr_warmup_steps=null": ("lr_warmup_ratio",),
        "actor.lr_scheduler=cosine_with_min_lr": ("min_lr_ratio",),
    }

    num_nodes: Int = option(1, "nodes the policy runs on", ge=1, le=2**13)
    num_gpus_per_node: Int = option(
        8,
        "policy ranks per node: one per GPU, or one per process when the policy runs on CPU",
        ge=1,
        le=2**8,
    )
    eps_clip: Float = option(
        0.2,
        "half-width of the clip interval of the ratio; sets clip_low and clip_high of the "
        "estimator",
        gt=0,
        default_text="the estimator's value",
    )
    eps_clip_low_high: tuple[NotNegative, NotNegative] | None = option(
        None,
        "clip_low and clip_high of the estimator: the ratio is kept in [1 - low, 1 + high]",
        default_text="the estimator's values",
    )
    dual_clip: Float | None = option(
        None,
        "bound of the surrogate for negative advantages, as a multiple of the advantage",
        gt=1,
        default_text="the estimator's value",
    )
    policy_loss_type: Literal["ppo", "gspo"] = option(
        "ppo", "loss of OpenRLHF's own estimators: one ratio per token (ppo) or per response (gspo)"
    )
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean"] = option(
        "token-mean",
        "how token losses are averaged: over all tokens, or per sequence first; sets agg of the "
        "estimator",
        default_text="the estimator's value",
    )
    entropy_coef: Float | None = option(
        None,
        "coefficient of an entropy bonus, which is subtracted from the loss: mean entropy of all "
        "loss tokens, whatever actor.loss_agg_mode is; entropy is always logged",
    )
    lr_warmup_steps: Int | None = added(
        None,
        "optimizer steps with linear warm-up, instead of a share",
        ge=0,
        default_text="actor.lr_warmup_ratio of all steps",
    )
    freeze_visual_encoder: bool = not_yet(
        False,
        "leave a vision encoder untrained",
        why="only text models are supported",
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
    expert_parallel_size: Int | None = added(
        None,
        "ranks that the experts of a mixture-of-experts critic are distributed over; null = as "
        "many as the policy's",
        ge=1,
    )
    expert_tensor_parallel_size: Int | None = added(
        None,
        "ranks that each expert of a mixture-of-experts critic is split over; null = as many as "
        "the policy's",
        ge=1,
    )
    virtual_pipeline_size: Int | None = added(
        None, "model chunks per pipeline stage of the critic; null = as many as the policy's", ge=1
    )
    sequence_parallel_enable: bool | None = added(
        None,
        "sequence parallelism of the critic; null = as for the policy if the critic has tensor "
        "parallelism",
    )


class Critic(Optimizer):
    """The value model of PPO with GAE, on its own ranks; used only with algo.advantage.estimator
    gae."""

    needs = {
        "algo.advantage.estimator=gae": ("*",),
        "critic.lr_scheduler!=constant": ("lr_warmup_ratio",),
        "critic.lr_scheduler=cosine_with_min_lr": ("min_lr_ratio",),
    }

    num_nodes: Int = option(1, "nodes of the critic", ge=1, le=2**13)
    num_gpus_per_node: Int = option(
        8, "critic ranks per node: one per GPU, or one per process on CPU", ge=1, le=2**8
    )
    megatron: CriticMegatron = CriticMegatron()
    value_clip: Float | None = option(
        0.5,
        "half-width of the interval around the old value in the value loss; null = no clipping",
        gt=0,
    )
    freezing_steps: Int = option(
        -1,
        "the first N + 1 training steps train only the critic, not the policy; -1 = all steps "
        "train both",
        ge=-1,
    )
    save_value_network: bool = option(
        False, "save the final critic in Hugging Face format in <ckpt.output_dir>_critic"
    )
    adam: CriticAdam = CriticAdam()
    model_name_or_path: str | None = option(
        None,
        "folder or hub name of the critic's checkpoint, with or without a value head "
        "(ds.value_head_prefix); null = the reward model's, or actor.model_name_or_path if there "
        "is none",
        path="input",
    )


class Ref(Section):
    """The frozen reference model of a KL penalty: the initial policy.

    Without its own ranks it is a copy in the host memory of the policy's ranks, swapped in for
    one forward pass.
    """

    num_nodes: Int = option(
        1,
        "nodes of a reference with its own ranks; it has none unless this or "
        "ref.num_gpus_per_node is set",
        ge=1,
        le=2**13,
    )
    num_gpus_per_node: Int = option(
        8, "ranks per node of a reference with its own ranks", ge=1, le=2**8
    )
    offload: bool = option(
        False,
        "keep the reference in the policy's host memory; the default if it has no ranks of its own",
    )


class Guide(Section):
    """The frozen guide, which scores all completions: the teacher of on_policy_distillation; with
    mixed_policy_dapo it also samples a part of every group.

    Without its own ranks its weights are a copy in the host memory of the policy's ranks, swapped
    in for one forward pass; it must then have the policy's architecture. Its engines use the
    options of vllm.* and fp8.rollout_enable.
    """

    needs = {
        "guide.model_name_or_path": ("*",),
        "algo.advantage.estimator=mixed_policy_dapo | "
        "algo.advantage.estimator=on_policy_distillation": ("*",),
        "algo.advantage.estimator=mixed_policy_dapo": ("samples_per_prompt", "num_engines"),
    }

    model_name_or_path: str | None = added(
        None,
        "folder or hub name of the guide's checkpoint, with the policy's tokenizer; null = no "
        "guide",
        path="input",
    )
    samples_per_prompt: Int = added(
        1,
        "completions of each group that the guide's engines sample; the policy's engines sample "
        "the others",
        ge=1,
        le=2**16,
    )
    num_engines: Int = added(
        1, "vLLM engines of the guide; their weights never change", ge=1, le=2**13
    )
    num_nodes: Int = added(
        1,
        "nodes of a guide with its own ranks; it has none unless this or guide.num_gpus_per_node "
        "is set",
        ge=1,
        le=2**13,
    )
    num_gpus_per_node: Int = added(
        8,
        "ranks per node of a guide with its own ranks, in the policy's layout",
        ge=1,
        le=2**8,
    )


class Megatron(Section):
    """The layout of the policy over its ranks; tensor-parallel ranks are adjacent
    (docs/layouts.md has the order)."""

    needs = {
        "megatron.overlap_grad_reduce": ("ddp_bucket_size",),
        "megatron.recompute=selective": ("recompute_modules",),
        "megatron.recompute=full": ("recompute_method", "recompute_num_layers"),
    }

    layout: Literal["auto", "given"] = added(
        "auto",
        "auto = choose tensor, pipeline and context parallelism, and recomputation, where they "
        "are not set, so that all models fit on their GPUs; 1 everywhere if that fits, and on "
        "CPU. given = use the sizes as set",
        default_text="auto, or given if one of these sizes is set",
    )
    gpu_memory_gib: Float | None = added(
        None,
        "memory of one of the run's GPUs, GiB, for megatron.layout auto and the memory estimate "
        "of a dry run",
        gt=0,
        default_text="that of this machine's GPU; a dry run without a GPU assumes an H100",
    )
    tensor_parallel_size: Int = added(
        1, "ranks that each layer is split over (attention heads, MLP, vocabulary)", ge=1
    )
    pipeline_parallel_size: Int = added(
        1,
        "pipeline stages; layers are spread evenly over them unless "
        "megatron.decoder_first_pipeline_num_layers or megatron.decoder_last_pipeline_num_layers "
        "is set",
        ge=1,
    )
    decoder_first_pipeline_num_layers: Int | None = added(
        None,
        "layers of the policy's first pipeline stage, which also holds the embedding; the middle "
        "stages have equally many",
        ge=1,
        default_text="as many as the others",
    )
    decoder_last_pipeline_num_layers: Int | None = added(
        None,
        "layers of the policy's last pipeline stage, which also holds the head and is the slowest "
        "if it has as many as the others; openrlhf-ext plan finds the best number. Critic and "
        "reward model have no such head: their stages are even",
        ge=1,
        default_text="as many as the others",
    )
    context_parallel_size: Int = added(
        1,
        "ranks that each sequence is split over; each holds two pieces (equal work under a causal "
        "mask)",
        ge=1,
    )
    expert_parallel_size: Int = added(
        1,
        "ranks of a pipeline stage that the experts of a mixture are distributed over "
        "(docs/layouts.md)",
        ge=1,
    )
    expert_tensor_parallel_size: Int | None = added(
        None,
        "ranks that each expert is split over",
        ge=1,
        default_text="1 with megatron.expert_parallel_size above 1, else megatron.tensor_parallel_size",
    )
    virtual_pipeline_size: Int = added(
        1,
        "model chunks per pipeline stage (interleaved schedule: a smaller bubble, more messages)",
        ge=1,
    )
    sequence_parallel_enable: bool = added(
        False,
        "split activations between tensor-parallel regions along the sequence; needs tensor "
        "parallelism",
    )
    distributed_optimizer_enable: bool = added(
        True, "shard optimizer states over the data-parallel ranks"
    )
    overlap_grad_reduce: bool = added(
        False,
        "reduce gradients over the data-parallel ranks during the backward pass, bucket by bucket "
        "(docs/performance.md)",
    )
    overlap_param_gather: bool = added(
        False,
        "gather updated parameters during the forward pass of the next optimizer step of the same "
        "batch; needs megatron.overlap_grad_reduce and megatron.distributed_optimizer_enable "
        "(docs/performance.md)",
    )
    ddp_bucket_size: Int | None = added(
        None,
        "with megatron.overlap_grad_reduce: parameters per bucket",
        ge=1,
        default_text="40,000,000, or 1,000,000 per data-parallel rank if that is more",
    )
    param_dtype: Literal["bf16", "fp32"] = added(
        "bf16",
        "data type of parameters and activations; optimizer states and gradients are kept in fp32",
    )
    recompute: Literal["none", "selective", "full"] = added(
        "none",
        "activations recomputed in the backward pass: none, selective (those of "
        "megatron.recompute_modules), or full (those of whole layers: least memory, about 1/3 "
        "more compute)",
    )
    recompute_modules: tuple[Literal["core_attn", "mlp", "moe"], ...] = added(
        ("core_attn",),
        "parts of a layer recomputed with megatron.recompute selective: core_attn (saves memory "
        "only where attention keeps its scores, which flash and cuDNN attention do not), mlp of "
        "a dense model, moe of a mixture of experts",
    )
    recompute_method: Literal["uniform", "block"] = added(
        "uniform",
        "with megatron.recompute full: uniform = keep only the input of every "
        "megatron.recompute_num_layers layers, block = recompute the first "
        "megatron.recompute_num_layers layers of each model chunk, keep all of the others",
    )
    recompute_num_layers: Int = added(1, "layers, see megatron.recompute_method", ge=1)
    head: Literal["fused", "two_pass"] = added(
        "fused",
        "how log-probs are computed from hidden states: fused = loss and gradient in one pass "
        "over blocks of logits where the estimator's loss allows it, two_pass = log-probs first, "
        "logits again in the backward pass",
    )
    head_kernels: Literal["auto", "torch", "triton"] = added(
        "auto", "kernels of the head: auto = Triton on GPUs where it is installed, torch elsewhere"
    )
    head_workspace_mib: Int = added(
        256,
        "memory for blocks of logits in the head, MiB per rank; more memory gives larger matrix "
        "products",
        ge=1,
        le=2**20,
    )
    share_prompts_enable: bool = added(
        True,
        "compute a prompt once for all of its responses in a micro-batch (docs/performance.md); "
        "no effect with context parallelism, where ranks hold pieces of every sequence, or with "
        "megatron.rope_fusion, which counts positions from the start of each",
    )
    rope_fusion: bool = added(
        False,
        "use TransformerEngine's rotary embedding (one kernel, fp32 cosines and sines) instead of "
        "Megatron's (in megatron.param_dtype, as in the engines); kl/rollout shows which agrees "
        "better with the engines; no effect without TransformerEngine's layers; an error where "
        "yarn or longrope have a factor",
    )
    start_timeout_s: Float = added(
        600, "longest wait for the ranks of one model to load it and connect, seconds", gt=0
    )
    collective_timeout_s: Float = added(
        600, "longest wait in one collective call before the run fails, seconds", gt=0
    )

    def violations(self) -> Iterator[Violation]:
        if self.recompute == "selective" and not self.recompute_modules:
            yield Violation(
                ("megatron.recompute_modules", "megatron.recompute"),
                "megatron.recompute selective needs megatron.recompute_modules: got none; name "
                "core_attn, mlp or moe, or set megatron.recompute none",
            )
        yield from self._overlap_violations()

    def _overlap_violations(self) -> Iterator[Violation]:
        """Without buckets there is nothing to gather early, and without shards nothing to
        gather."""
        needed = ("overlap_grad_reduce", "distributed_optimizer_enable")
        missing = [f"megatron.{leaf}" for leaf in needed if not getattr(self, leaf)]
        if self.overlap_param_gather and missing:
            yield Violation(
                ("megatron.overlap_param_gather", *missing),
                "megatron.overlap_param_gather needs "
                f"{' and '.join(f'megatron.{leaf}' for leaf in needed)}: got "
                f"{' and '.join(f'{name} false' for name in missing)}; switch on what is "
                "missing, or leave megatron.overlap_param_gather out",
            )


# ---- DeepSpeed's options: known, so that launch scripts of OpenRLHF get an answer for each, and
# refused when set ----

_NO_DEEPSPEED = "DeepSpeed does not run the policy"


class Lora(Section):
    """Low-rank adapters, which are trained instead of the model's weights."""

    needs = {
        "ds.lora.rank": ("alpha", "target_modules"),
        "ds.lora.rank | ds.lora.path": ("dropout",),
    }

    rank: Int = option(0, "rank of the adapters; 0 = train the weights themselves", ge=0)
    alpha: Int = option(16, "the adapters' product is multiplied by alpha / rank", gt=0)
    target_modules: str | tuple[str, ...] = option(
        "all-linear",
        "modules of the decoder's layers that get adapters: all-linear, or names such as q_proj "
        "v_proj",
    )
    dropout: Float = option(
        0,
        "share of an adapter's inputs set to zero in training; log-probs are computed without "
        "dropout, so ratios are not 1 in the first update",
        ge=0,
        lt=1,
    )
    path: str | None = added(
        None,
        "folder of a PEFT adapter to start from; it sets rank, alpha and target modules; if "
        "ds.lora.rank is set too, they must be the same",
        path="input",
    )

    @property
    def enabled(self) -> bool:
        return self.rank > 0 or self.path is not None


class DeepSpeedTraining(Section):
    """Options of OpenRLHF's DeepSpeed backend that all of its trainers have."""

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
        instead="megatron.distributed_optimizer_enable shards optimizer states, and "
        "megatron.layout auto splits the parameters if they do not fit; both are the "
        "default",
    )
    deepcompile: bool = no_meaning(False, "DeepCompile", why=_NO_DEEPSPEED, instead="leave it out")
    param_dtype: Literal["bf16", "fp16"] = no_meaning(
        "bf16",
        "data type of the parameters",
        why=_NO_DEEPSPEED,
        instead="use megatron.param_dtype (bf16 or fp32)",
    )
    zpg: Int = no_meaning(
        1,
        "ZeRO++ partition size",
        why=_NO_DEEPSPEED,
        instead="use megatron.distributed_optimizer_enable",
    )
    adam_offload: bool = option(
        False,
        "keep Adam's states (moments, fp32 master weights) of policy and critic in host memory "
        "and stream them through the GPU in blocks at an update, with bit-identical results: "
        "saves up to 12 bytes of GPU memory per parameter of a rank, and an update takes seconds "
        "longer",
    )
    attn_implementation: str = no_meaning(
        "flash_attention_2",
        "attention implementation of transformers",
        why="Megatron chooses its attention by device",
        instead="leave it out",
    )
    experts_implementation: Literal["eager", "batched_mm", "grouped_mm", "deepgemm"] | None = (
        no_meaning(
            None,
            "mixture-of-experts computation of transformers",
            why="transformers does not run the policy",
            instead="leave it out",
        )
    )
    use_liger_kernel: bool = no_meaning(
        False,
        "Liger kernels in transformers models",
        why="transformers does not run the policy",
        instead="leave it out; the head here never holds all logits",
    )
    grad_accum_dtype: str | None = no_meaning(
        None,
        "data type in which gradients are accumulated",
        why="gradients are always accumulated in fp32",
        instead="leave it out",
    )
    overlap_comm: bool = no_meaning(
        False,
        "overlap ZeRO's communication with compute",
        why=_NO_DEEPSPEED,
        instead="leave it out",
    )
    tensor_parallel_size: Int = no_meaning(
        1,
        "tensor-parallel ranks under DeepSpeed",
        why=_NO_DEEPSPEED,
        instead="use megatron.tensor_parallel_size",
    )
    packing_samples: bool = no_meaning(
        True,
        "concatenate samples without padding",
        why="micro-batches are always packed without padding",
        instead="leave it out",
    )
    load_in_4bit: bool = not_yet(
        False,
        "load the base model in 4 bit",
        why="the frozen base weights of adapters are in megatron.param_dtype",
        instead="leave it out; megatron.layout auto splits the weights over GPUs",
    )
    lora: Lora = Lora()
    ring_attn_size: Int = no_meaning(
        1, "ring-attention ranks", why=_NO_DEEPSPEED, instead="use megatron.context_parallel_size"
    )
    ring_attn_head_stride: Int = no_meaning(
        1,
        "heads per step of ring attention",
        why=_NO_DEEPSPEED,
        instead="use megatron.context_parallel_size",
    )

    @property
    def optimizer_on_host(self) -> bool:
        return self.adam_offload and not self.lora.enabled

    def cautions(self) -> Iterator[str]:
        if self.adam_offload and self.lora.enabled:
            yield (
                "ds.adam_offload has no effect with ds.lora.*: the optimizer states of adapters "
                "are small and stay on the GPU"
            )


class DeepSpeed(DeepSpeedTraining):
    """Options of OpenRLHF's DeepSpeed backend."""

    needs = {"algo.advantage.estimator=gae | reward.model_name_or_path": ("value_head_prefix",)}

    enable_sleep: bool = option(
        False,
        "with train.colocate_all: keep the policy's parameters, gradients and optimizer states in "
        "host memory while the engines sample",
    )
    value_head_prefix: str = option(
        "score",
        "name of the value head in checkpoints of critic and reward model; value_head_prefix in "
        "their config.json takes precedence",
    )
