"""Bytes that a layout keeps on a GPU, in host memory and on disk, from ``config.json`` alone.

States (parameters, fp32 gradients, Adam's) follow from the weight map and from the layout of
Megatron's DDP gradient buffer; they are exact (tests/planning/test_memory.py compares them with
real ranks). Activations are the tensors that autograd saves, without the weights, for
TransformerEngine's layers and flash or cuDNN attention in bf16: the usual count of 12.8 + 6 f/h
bytes for each token and hidden entry of a layer, where attention is grouped 5 to 1. The counts come
from the libraries' source. They were measured on a GPU with the sizes of a 32B rank, without
parallelism (docs/scaling.md), but not with FP8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain, pairwise
from operator import attrgetter

import numpy as np

from openrlhf_ext.config import RunConfig
from openrlhf_ext.megatron.attentions import Attention
from openrlhf_ext.megatron.layers import LayerConverter
from openrlhf_ext.megatron.layers.lora import adapters_of
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.model.flops import ForwardFlops, forward_flops
from openrlhf_ext.megatron.model.shape import ModelShape
from openrlhf_ext.megatron.model.weight_map import (
    Cut,
    hf_tensors,
    layer_shards,
    shard_shape,
    stage_rules,
)
from openrlhf_ext.megatron.settings import layer_converters
from openrlhf_ext.megatron.step.host_optimizer import BLOCK_BYTES
from openrlhf_ext.options.sections import Megatron
from openrlhf_ext.ranks.shared_gpu import RESERVE_BYTES, Parts, shared_parts

GIB = 1 << 30
COPIES = "FP8 copies"
GRADIENT_BYTES = 4  # accumulated in fp32
_PARAMETER_UNIT, _BUCKET_UNIT = 64, 128
"""Alignment of parameters and of bucket ends in the distributed optimizer's buffer (megatron-core
0.19.2 optimizer/param_layout.py:24-41)."""


@dataclass(frozen=True)
class States:
    """A rank's states of the model and its optimizer on the device, in bytes except for
    ``parameters``.

    ``on_host``: optimizer states in host memory (``ds.adam_offload``).
    """

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    copies: int
    on_host: int = 0

    @property
    def with_optimizer_on_host(self) -> States:
        return replace(self, optimizer=0, on_host=self.optimizer)

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        return _there(
            {
                "weights": self.weights,
                "gradients (fp32)": self.gradients,
                "optimizer": self.optimizer,
                f"{COPIES} of weights": self.copies,
            }
        )


def _there(parts: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in parts.items() if size}


@dataclass(frozen=True)
class StateOptions:
    """Options that determine a rank's states besides model and layout.

    Attributes:
        param_bytes: 2 (bf16, with fp32 master weights) or 4.
        distributed: Adam's states are divided over the ranks that hold the same parameters.
        bucket_size: in parameters, if gradients are reduced during the backward pass; None = one
            bucket.
        on_host: Adam's states are in host memory.
    """

    param_bytes: int = 2
    distributed: bool = True
    bucket_size: int | None = None
    converters: tuple[LayerConverter, ...] = ()
    on_host: bool = False


@cache
def entries(shape: ModelShape) -> int:
    """Entries of all tensors of a checkpoint: a model's parameters, or those of its adapters."""
    return sum(math.prod(tensor.shape) for tensor in hf_tensors(shape))


@cache
def chunk_parameters(
    shape: ModelShape,
    cut: Cut,
    layers: range,
    of_experts: bool | None = None,
) -> tuple[tuple[str, int], ...]:
    """(name, entries) of a rank's parameters in a model chunk, in Megatron's build order.

    Every layer is named as if it were the first one. ``of_experts``: only parameters of experts, or
    only the others.
    """
    first, last = layers.start == 0, layers.stop == shape.num_layers
    of_layers = [
        (name, math.prod(shard))
        for number in layers
        for name, shard, of_expert in layer_shards(shape, cut, shape.attentions[number])
        if of_experts is None or of_expert == of_experts
    ]
    outer = [
        (rule.parameter, math.prod(shard_shape(rule, shape, cut.tensor)))
        for rule in stage_rules(shape, range(0), first, last)
        if not of_experts
    ]
    return (*outer[:first], *of_layers, *outer[first:])


@cache
def rank_states(
    shape: ModelShape, layout: ParallelLayout, stage: int, options: StateOptions
) -> States:
    """States of the ranks of a stage; if ranks share the optimizer's states, those of the rank with
    the largest share."""
    size = options.param_bytes
    named = chain.from_iterable(_stage_parameters(shape, layout, stage))
    parameters = sum(count for _, count in named)
    copies = _copies(shape, layout, stage, options)
    # Adapters are fp32, and frozen weights are in no padded buffer.
    if (lora := adapters_of(options.converters)) is not None:
        shards = layout.copies if options.distributed else 1
        adapters = lora.shape(shape)
        trained = sum(
            math.prod(shard)
            for number in chain(*_stage_chunks(shape, layout, stage))
            for _, shard, _ in layer_shards(adapters, Cut.of(layout), adapters.attentions[number])
        )
        return States(
            parameters + trained,
            parameters * size + 4 * trained,
            trained * GRADIENT_BYTES,
            -(-8 * trained // shards),
            copies,
        )

    # Experts that are dealt over ranks have separate gradient buffers and a separate optimizer,
    # divided over their own copies (megatron-core 0.19.2 distributed/param_and_grad_buffer.py:918).
    if shape.num_experts > 0 and layout.expert_parallel_size > 1:
        length, owned = _buffers(shape, layout, stage, options, layout.copies, False)
        more, of_experts = _buffers(shape, layout, stage, options, layout.expert_copies, True)
        length += more
        largest = _largest_share(layout, stage, owned, of_experts)
    else:
        length, owned = _buffers(shape, layout, stage, options, layout.copies, None)
        largest = int(owned.max())
    optimizer = largest * (12 if size == 2 else 8)
    states = States(parameters, length * size, length * GRADIENT_BYTES, optimizer, copies)
    return states.with_optimizer_on_host if options.on_host else states


def _stage_parameters(
    shape: ModelShape, layout: ParallelLayout, stage: int, of_experts: bool | None = None
) -> list[tuple[tuple[str, int], ...]]:
    """``chunk_parameters`` of every model chunk of a stage."""
    cut = Cut.of(layout)
    return [
        chunk_parameters(shape, cut, layers, of_experts)
        for layers in _stage_chunks(shape, layout, stage)
    ]


def _stage_chunks(shape: ModelShape, layout: ParallelLayout, stage: int) -> list[range]:
    """The numbers of the layers of each of a stage's model chunks."""
    chunks = layout.chunk_layers(shape.num_layers)
    return [layers for (at, _), layers in chunks.items() if at == stage]


def _buffers(
    shape: ModelShape,
    layout: ParallelLayout,
    stage: int,
    options: StateOptions,
    copies: int,
    of_experts: bool | None,
) -> tuple[int, np.ndarray]:
    """``_buffer`` summed over all model chunks of a stage; ``copies``: number of ranks that hold
    the same parameters."""
    shards = copies if options.distributed else 1
    tied = shape.tied_embeddings and layout.pipeline_parallel_size > 1
    bucket_size = options.bucket_size if stage == 0 else None
    held = _stage_parameters(shape, layout, stage, of_experts)
    buffers = [_buffer(named, shards, options.distributed, bucket_size, tied) for named in held]
    return sum(length for length, _ in buffers), np.sum([owned for _, owned in buffers], axis=0)


def _largest_share(
    layout: ParallelLayout, stage: int, owned: np.ndarray, of_experts: np.ndarray
) -> int:
    """Optimizer entries on the rank of the stage that has the most; ``owned``: the entries of each
    copy, or of all copies."""
    shares = []
    for rank in layout.ranks(stage=stage):
        replica = layout.place(rank).expert_replica
        share = owned[layout.copy(rank) % len(owned)] + of_experts[replica % len(of_experts)]
        shares.append(int(share))
    return max(shares)


def _buffer(
    named: tuple[tuple[str, int], ...],
    shards: int,
    distributed: bool,
    bucket_size: int | None,
    tied: bool,
) -> tuple[int, np.ndarray]:
    """Entries of a chunk's gradient buffer, and how many parameter entries are in each rank's part
    of it.

    Parameters are in reverse order, in buckets; every rank owns an equal part of each bucket. A
    tied embedding that two stages hold has its own bucket (megatron-core 0.19.2
    optimizer/distrib_optimizer.py:530-580).
    """
    unit = _PARAMETER_UNIT if distributed else 1
    bucket_unit = math.lcm(shards, _BUCKET_UNIT) if distributed else 1
    places: list[tuple[int, int]] = []
    ends = [0]  # of the complete buckets
    position = 0
    for name, count in reversed(named):
        position = _up(position, unit)
        is_embedding = name in ("embedding.word_embeddings.weight", "output_layer.weight")
        alone = tied and distributed and is_embedding
        if alone and position > ends[-1]:
            position = _up(places[-1][1], bucket_unit)
            ends.append(position)
        places.append((position, position + count))
        position += count
        if alone or (bucket_size is not None and position - ends[-1] >= bucket_size):
            position = _up(position, bucket_unit)
            ends.append(position)
    if position > ends[-1]:
        ends.append(_up(position, bucket_unit))
    return ends[-1], _owned(np.array(places), ends, shards)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _owned(places: np.ndarray, ends: Sequence[int], shards: int) -> np.ndarray:
    owned = np.zeros(shards, dtype=np.int64)
    for start, end in pairwise(ends):
        part = (end - start) // shards
        for rank in range(shards):
            low = start + rank * part
            overlap = np.minimum(places[:, 1], low + part) - np.maximum(places[:, 0], low)
            owned[rank] += overlap.clip(min=0).sum()
    return owned


def _copies(shape: ModelShape, layout: ParallelLayout, stage: int, options: StateOptions) -> int:
    """Bytes of the copies of linear weights (two dimensions) that layers keep beside the
    weights."""
    copies = 0
    for number in chain(*_stage_chunks(shape, layout, stage)) if options.converters else ():
        shards = layer_shards(shape, Cut.of(layout), shape.attentions[number])
        matrices = [(name, math.prod(size)) for name, size, _ in shards if len(size) == 2]
        for converter in options.converters:
            for name, size in matrices:
                copies += converter.kept_per_weight(name, number, shape.num_layers) * size
    return copies


# ---- activations


@dataclass(frozen=True)
class LayerActivations:
    """Bytes that autograd keeps of one layer for one micro-batch.

    Attributes:
        input: the layer's input; recomputation of whole layers keeps only this.
        attention: everything before attention and between it and the MLP, without ``core``.
        core: the tensors that attention itself keeps: its operands, its result and their
            statistics.
        core_operands: the tensors that recomputation of attention (core_attn) keeps instead of
            ``core``.
        mlp: norm and MLP.
        final: the final norm and the hidden states that the head reads; only the last stage keeps
            them.
        shares_input: the norms keep their input itself, not a copy.
        mlp_kept: the tensors that recomputation keeps instead of ``mlp``: the norm and its result,
            if that is the input of the recomputed part; None: the norm is recomputed too, and its
            input is kept, as large as ``input``.
    """

    input: int
    attention: int
    core: int
    core_operands: int
    mlp: int
    final: int
    shares_input: bool = True
    mlp_kept: int | None = None

    @property
    def total(self) -> int:
        return self.attention + self.core + self.mlp


@dataclass(frozen=True)
class Pass:
    """A micro-batch in training on one rank, with the options of its computation.

    Attributes:
        tokens: tokens of a micro-batch on one rank, its context-parallel share.
        fp8: linear layers keep their inputs in FP8, one byte per entry.
    """

    tokens: int
    param_bytes: int = 2
    fp8: bool = False
    megatron: Megatron = Megatron()


def layer_activations(
    shape: ModelShape, layout: ParallelLayout, work: Pass, attention: Attention
) -> LayerActivations:
    """Of a layer with this attention."""
    tokens = work.tokens
    entry = work.param_bytes
    rows = layout.rows(tokens)
    wide = rows * shape.hidden_size
    linear_input = 1 if work.fp8 else entry
    norm = wide * (entry + linear_input) + 4 * rows
    kept = attention.kept(tokens, layout, entry, linear_input)
    mlp = norm + shape.mlp.activation_bytes(tokens, layout, entry, linear_input)
    final = wide * entry + 4 * rows
    mlp_kept = norm if shape.mlp.is_mixture else None
    return LayerActivations(
        wide * entry,
        norm + kept.around,
        kept.core,
        kept.operands,
        mlp,
        final,
        mlp_kept=mlp_kept,
    )


def activations(
    shape: ModelShape, layout: ParallelLayout, stage: int, work: Pass, micro_batches: int
) -> int:
    """Maximum bytes that autograd keeps at a time on a stage's ranks, in a train step of
    ``micro_batches`` micro-batches.

    The head's workspace is not included.
    """
    megatron = work.megatron
    of_kind = {
        attention: layer_activations(shape, layout, work, attention)
        for attention in shape.attention_counts
    }
    chunks = [
        [of_kind[shape.attentions[number]] for number in layers]
        for layers in _stage_chunks(shape, layout, stage)
    ]
    # Chunks that hold other kinds of layers count as the fullest.
    kept, recomputed = map(
        max,
        zip(
            *(
                _kept_and_recomputed(chunk, megatron, shape.mlp.recompute_module)
                for chunk in chunks
            ),
            strict=True,
        ),
    )
    # The checkpointed function takes the rotary table of the whole pack.
    if megatron.recompute == "full":
        kept += 4 * work.tokens * layout.context_parallel_size * shape.rotary_width
    final = chunks[0][0].final if stage == layout.pipeline_parallel_size - 1 else 0
    # The part after the layers is complete before any recomputation starts.
    return kept * in_flight(layout, stage, micro_batches) + max(recomputed, final)


def _kept_and_recomputed(
    layers: Sequence[LayerActivations], megatron: Megatron, mlp_module: str
) -> tuple[int, int]:
    """Bytes that a chunk's layers keep of a micro-batch, and the maximum that their backward pass
    recomputes at once.

    ``layers`` differ in their attention only. ``mlp_module``: the name of their MLP in
    ``megatron.recompute_modules``.
    """
    first, together = layers[0], min(megatron.recompute_num_layers, len(layers))
    totals = [layer.total for layer in layers]
    # The recomputed pass saves the kept input itself.
    again = first.input if first.shares_input else 0
    if megatron.recompute == "full" and megatron.recompute_method == "uniform":
        groups = [
            sum(totals[start : start + together]) for start in range(0, len(totals), together)
        ]
        return len(groups) * first.input, max(groups) - again
    if megatron.recompute == "full":
        rest = sum(totals[together:])
        return together * first.input + rest, max(0, max(totals[:together]) - again - rest)
    if megatron.recompute == "none":
        return sum(totals), 0
    inside = "core_attn" in megatron.recompute_modules
    attention = sum(
        layer.attention + (layer.core_operands if inside else layer.core) for layer in layers
    )
    if mlp_module not in megatron.recompute_modules:
        return attention + len(layers) * first.mlp, 0
    mlp = first.input
    if first.mlp_kept is not None:
        mlp = again = first.mlp_kept
    return attention + len(layers) * mlp, first.mlp - again


def in_flight(layout: ParallelLayout, stage: int, micro_batches: int) -> int:
    """Number of forward passes of model chunks that a stage runs ahead of its backward passes
    (megatron-core 0.19.2 pipeline_parallel/schedules.py: warm-up passes and one of the steady
    state)."""
    stages, chunks = layout.pipeline_parallel_size, layout.virtual_pipeline_size
    if chunks == 1:
        return min(micro_batches, stages - stage)
    return min(micro_batches * chunks, (stages - stage - 1) * 2 + (chunks - 1) * stages + 1)


# ---- moments of a run

_CONTEXTS = "CUDA contexts and NCCL (estimate)"
REWARD = "reward model"
"""The name of the reward model among frozen models."""
_WORKING = (
    "activations",
    "fragmentation (estimate)",
    "tokens sent to experts and back (estimate)",
    "head: workspace, hidden states and their gradient",
    "Adam's states in transit (ds.adam_offload)",
)
_FRAGMENTS = 0.1
"""Fraction of the activations that torch's allocator loses to fragmentation. An estimate."""


@dataclass(frozen=True)
class Workload:
    """One step of a run.

    Attributes:
        prompts, group: prompts of a batch, and responses to each.
        prompt_tokens, response_tokens: mean lengths; the model assumes that every sequence is that
            long.
        longest, batch: tokens of the longest response; samples of an optimizer update.
        scored_by: number of models that compute log-probs before training: the policy
            (algo.old_logprobs), a reference, a guide.
        frozen: only adapters are trained.
    """

    prompts: int
    group: int
    prompt_tokens: int
    response_tokens: int
    longest: int
    batch: int
    epochs: int
    scored_by: int
    frozen: bool = False

    @property
    def samples(self) -> int:
        return self.prompts * self.group

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.response_tokens

    def forward(self, shape: ModelShape) -> ForwardFlops:
        return replace(
            forward_flops(shape, [self.length], self.response_tokens), frozen=self.frozen
        )


@dataclass(frozen=True)
class Moment:
    """The content of a GPU at one time, by part, in bytes; ``doing`` names the time."""

    doing: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def standing(self) -> Moment:
        """The parts that are there before anything is computed."""
        return Moment(
            self.doing, {name: size for name, size in self.parts.items() if name not in _WORKING}
        )

    @property
    def largest(self) -> str:
        return max(self.parts, key=self.parts.__getitem__)


TOTAL = attrgetter("total")


def param_bytes(megatron: Megatron) -> int:
    return 2 if megatron.param_dtype == "bf16" else 4


@dataclass(frozen=True)
class TrainedModel:
    """The policy or the critic in a configuration's layout, in a step of ``work``; a critic's
    layers are not in FP8."""

    config: RunConfig
    work: Workload
    shape: ModelShape
    is_critic: bool = False

    @cached_property
    def megatron(self) -> Megatron:
        return self.config.critic_megatron if self.is_critic else self.config.megatron

    @cached_property
    def layout(self) -> ParallelLayout:
        return self.config.critic_layout if self.is_critic else self.config.layout

    @property
    def near_ranks(self) -> int:
        return (self.config.critic if self.is_critic else self.config.actor).num_gpus_per_node

    @property
    def recipe(self) -> str:
        """The FP8 recipe; "" if no layer is in FP8."""
        fp8 = self.config.fp8
        return fp8.recipe if fp8.enable and not fp8.emulate and not self.is_critic else ""

    @cached_property
    def layers(self) -> list[int]:
        """The number of layers of every stage."""
        return self.layout.stage_layers(self.shape.num_layers)

    @cached_property
    def states(self) -> tuple[States, ...]:
        """The states of the ranks of each stage."""
        own = self.megatron
        options = StateOptions(
            param_bytes(own),
            own.distributed_optimizer_enable,
            on_host=self.config.ds.optimizer_on_host,
        )
        if not self.is_critic:
            bucket_size = None
            if own.overlap_grad_reduce:
                least = max(40_000_000, 1_000_000 * self.layout.data_parallel_size)
                bucket_size = own.ddp_bucket_size or least
            converters = layer_converters(self.config, self.shape.family)
            options = replace(options, bucket_size=bucket_size, converters=converters)
        return tuple(
            rank_states(self.shape, self.layout, stage, options)
            for stage in range(len(self.layers))
        )

    @cached_property
    def fullest(self) -> States:
        return max(self.states, key=TOTAL)

    @property
    def budget(self) -> int | None:
        """Tokens of a training micro-batch on one rank; None if the run sets the number of
        sequences instead."""
        train = self.config.train
        return train.max_tokens_per_gpu if train.dynamic_batch_enable else None

    def micro_batches(self, samples: int, forward_only: bool = False) -> tuple[int, float]:
        """Number of micro-batches of a data-parallel rank, and the sequences in each; interleaved
        schedules take whole rounds of the stages."""
        layout = self.layout
        train = self.config.train
        rollout = self.config.rollout
        if self.budget is None:
            sequences = rollout.micro_batch_size if forward_only else train.micro_batch_size
        else:
            budget = (forward_only and rollout.max_tokens_per_gpu) or self.budget
            sequences = max(1, budget * layout.context_parallel_size // self.work.length)
        rows = math.ceil(samples / layout.data_parallel_size)
        count = math.ceil(rows / sequences)
        if layout.virtual_pipeline_size > 1:
            count = _up(count, layout.pipeline_parallel_size)
        return count, rows / count

    @property
    def _tokens(self) -> int:
        """Tokens of the largest micro-batch on a rank; a sequence that exceeds the budget is its
        own micro-batch."""
        longest = self.config.data.max_len
        cp = self.layout.context_parallel_size
        if self.budget is not None:
            return max(self.budget, math.ceil(longest / cp))
        return math.ceil(self.config.train.micro_batch_size * longest / cp)

    def activations(self, stage: int, megatron: Megatron) -> int:
        """Bytes of activations on a stage's ranks, with the recomputation options of
        ``megatron``."""
        count, _ = self.micro_batches(min(self.work.batch, self.work.samples))
        one = Pass(self._tokens, param_bytes(self.config.megatron), bool(self.recipe), megatron)
        return activations(self.shape, self.layout, stage, one, count)

    @cached_property
    def parts(self) -> tuple[Parts, Parts]:
        """The parts of the fullest ranks: states, and what training adds to them."""
        stages = [(states.parts, self._working(stage)) for stage, states in enumerate(self.states)]
        return max(stages, key=lambda parts: sum(parts[0].values()) + sum(parts[1].values()))

    def _working(self, stage: int) -> dict[str, int]:
        activated, fragments, exchanged, head, passing = _WORKING
        entry = param_bytes(self.config.megatron)
        kept = self.activations(stage, self.megatron)
        working = {activated: kept, fragments: int(_FRAGMENTS * kept)}
        if exchange := self.shape.mlp.exchange_bytes(self._tokens, self.layout, entry):
            working[exchanged] = exchange
        if stage == len(self.states) - 1 and self.shape.value_head is None:
            # Its workspace, and the hidden states of response tokens with their gradient
            # (docs/head.md).
            tokens = self._tokens * self.work.response_tokens // self.work.length
            states = tokens * self.shape.hidden_size * 2 * entry
            working[head] = (self.config.megatron.head_workspace_mib << 20) + states
        if on_host := self.states[stage].on_host:  # all of it, if that is less than the blocks
            working[passing] = min(BLOCK_BYTES, on_host)
        return working


# ---- parts of a GPU


def frozen_weights(config: RunConfig, shape: ModelShape, layout: ParallelLayout) -> int:
    """Bytes on the fullest of the separate ranks of a model that only scores."""
    options = StateOptions(param_bytes(config.megatron), distributed=False)
    stages = range(layout.pipeline_parallel_size)
    return max(rank_states(shape, layout, stage, options).weights for stage in stages)


def adapter_entries(config: RunConfig, shape: ModelShape) -> int:
    """Entries of A and B of all adapters; 0 if the policy has none."""
    lora = adapters_of(layer_converters(config, shape.family))
    return 0 if lora is None else entries(lora.shape(shape))


def sends_adapters(config: RunConfig) -> bool:
    """Whether the engines receive only the adapters, and never the base."""
    return config.ds.lora.enabled and config.vllm.lora == "adapter"


def moments(
    config: RunConfig,
    sent: int,
    engine: Parts,
    policy: tuple[Parts, Parts],
    critic: tuple[Parts, Parts] | None = None,
    frozen: Parts | None = None,
) -> tuple[Moment, ...]:
    """The fullest GPU at each time; engines, a critic and frozen models may have separate GPUs.

    The engine's worker is awake. A model's parts are the states and the training additions of its
    fullest ranks. ``sent``: bytes of an update of the engines.
    """
    beside = {f"weights of the {name}": size for name, size in (frozen or {}).items()}
    staging = 2 * min(config.weight_sync.bucket_mib << 20, sent)
    states, working = policy
    critic_states, critic_working = critic or ({}, {})
    if not config.engines_share_gpus:
        buffers = {"buffers of the weight sync": staging}
        sampling = {**engine, **buffers, _CONTEXTS: RESERVE_BYTES // 2}  # of one process
        found = [Moment("sampling", sampling)]
        training = {**states, **working, **buffers, _CONTEXTS: RESERVE_BYTES}
        # Models that train or score are on the policy's GPUs, and stay there.
        if config.train.colocate_all:
            of_critic = _of({**critic_states, **critic_working}, "critic")
            return (*found, Moment("training", {**training, **of_critic, **beside}))
        found.append(Moment("training", training))
        if critic is not None:
            parts = {**critic_states, **critic_working}
            weights = f"weights of the {REWARD}"
            stays = config.critic_shares_with_reward and not config.reward.offload
            if stays and weights in beside:
                parts[weights] = beside[weights]
            parts[_CONTEXTS] = RESERVE_BYTES
            found.append(Moment("training the critic", parts))
        found += [
            Moment(f"scoring by the {name}", {"weights": size, _CONTEXTS: RESERVE_BYTES // 2})
            for name, size in (frozen or {}).items()
        ]
        return tuple(found)
    asleep, engine_sleeps = config.ds.enable_sleep, config.vllm.enable_sleep
    awake = {} if asleep else _of(critic_states, "critic")
    sampling, training = shared_parts(
        engine, states, staging, policy_sleeps=asleep, engine_sleeps=engine_sleeps
    )
    found = [
        Moment("sampling", {**sampling, **awake}),
        Moment("training", {**training, **working, **awake}),
    ]
    if critic is not None:
        _, training = shared_parts(
            engine, critic_states, staging, policy_sleeps=asleep, engine_sleeps=engine_sleeps
        )
        awake = {} if asleep else _of(states, "policy")
        found.append(Moment("training the critic", {**training, **critic_working, **awake}))
    return tuple(Moment(moment.doing, {**moment.parts, **beside}) for moment in found)


def _of(parts: Parts, model: str) -> dict[str, int]:
    return {f"{name} of the {model}": size for name, size in parts.items()}


# ---- host memory and disk


def host_memory(
    config: RunConfig, policy: TrainedModel, pool: int, critic: TrainedModel | None
) -> dict[str, int]:
    """Host memory of a node of the policy, by part, if all its ranks were the fullest.

    ``pool``: bytes of an engine worker in vLLM's pool of weights; ``critic``: a critic on the
    policy's GPUs.
    """
    fullest = max(policy.states, key=lambda one: one.weights + one.optimizer + one.on_host)
    per_node = config.actor.num_gpus_per_node
    moved = fullest.weights + fullest.optimizer
    adam = per_node * max(one.on_host for one in policy.states)
    parts = {"Adam's states (ds.adam_offload), pinned": adam}
    if critic is not None:
        of_critic = per_node * max(one.on_host for one in critic.states)
        parts["Adam's states of the critic (ds.adam_offload), pinned"] = of_critic
    if config.ds.enable_sleep:
        parts["states of sleeping ranks"] = per_node * moved
    if config.vllm.enable_sleep:
        # vLLM pins block by block, and torch rounds each block up to a power of two
        # (device_allocator/cumem.py:268).
        asleep = min(per_node, config.engine_workers) * pool
        parts["engines asleep (level 1: adapters, evaluations), pinned"] = asleep
    if config.has_reference and not config.ds.lora.enabled:
        parts["reference policy"] = per_node * fullest.weights
    if config.train.enable_ema:
        parts["moving average (fp32)"] = per_node * fullest.gradients
    if config.ckpt.async_enable and config.ckpt.saves:
        parts["checkpoint being written"] = per_node * moved + adam
    return _there(parts)


def checkpoints(config: RunConfig, parameters: int, adapters: int) -> dict[str, int]:
    """Bytes on disk of the policy's checkpoints that are kept, by form; of the adapters, in fp32,
    if there are any."""
    ckpt = config.ckpt
    size = 4 if adapters else param_bytes(config.megatron)
    parameters = adapters or parameters
    entry = size + 12 if size == 2 else 12
    if config.train.enable_ema:
        entry += 4
    resumable = parameters * entry
    kept = ckpt.max_num if ckpt.saves else 0
    return _there(
        {
            f"{kept} resumable": 0 if ckpt.disable_ds else kept * resumable,
            f"{kept} in Hugging Face format": kept * parameters * size if ckpt.save_hf else 0,
            "the final one in Hugging Face format": parameters * size,
        }
    )
