"""Predicts the seconds of a step's phases from data-sheet rates of a GPU and constants fitted to
published seconds. The predictions are a model; nothing is measured here.

Every constant has a name and a value here. Every plan prints the constants and the model's error.
The model never overlaps communication with computation, so it penalizes layouts that communicate
much.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from openrlhf_ext.config import RunConfig
from openrlhf_ext.config.drafts import Head
from openrlhf_ext.megatron.mlps.moe import FULLEST_RANK
from openrlhf_ext.megatron.model.flops import BACKWARD, PEAK_BF16_TFLOPS
from openrlhf_ext.megatron.model.shape import ModelShape
from openrlhf_ext.planning.memory import GIB, TrainedModel, Workload, entries

_BF16, _FP32 = 2, 4
_NODE = 8
"""GPUs of an SXM node, even if the policy takes fewer of them."""
_SIZE_GIB = 14  # nvidia-smi may list up to this much less than the card's name says
_MOST_REQUESTS = 1024  # default in rollout/launch.py on a GPU


@dataclass(frozen=True)
class Gpu:
    """A GPU in a node, by data sheets; rates in GB/s (1e9) in one direction.

    Attributes:
        memory: bytes, as reported by the driver.
        tflops: dense bf16; ``has_fp8``: whether its tensor cores multiply FP8.
        hbm: rate of its memory.
        near, far: rate between GPUs of a node; rate between nodes, for each GPU.
    """

    memory: int
    tflops: float
    has_fp8: bool
    hbm: float
    near: float
    far: float
    host: float


def _gpu(
    name: str, memory_mib: int, fp8: bool, hbm: float, near: float, far: float, host: float
) -> Gpu:
    return Gpu(memory_mib << 20, PEAK_BF16_TFLOPS[name], fp8, hbm, near, far, host)


GPUS = {
    "A100": _gpu("A100", 81920, False, 2039, 300, 25, 25),
    "A100-40": _gpu("A100", 40960, False, 1555, 300, 25, 25),
    "A800": _gpu("A800", 81920, False, 2039, 200, 25, 25),
    "H100": _gpu("H100", 81559, True, 3350, 450, 50, 50),
    "H100-PCIe": _gpu("H100 PCIe", 81559, True, 2000, 64, 50, 50),
    "H100-NVL": _gpu("H100 NVL", 95830, True, 3900, 64, 50, 50),
    "H800": _gpu("H800", 81559, True, 3350, 200, 50, 50),
    "H200": _gpu("H200", 143771, True, 4800, 450, 50, 50),
    "H20": _gpu("H20", 97871, True, 4000, 450, 50, 50),
    "B200": _gpu("B200", 183359, True, 8000, 900, 50, 50),
    "GB200": _gpu("GB200", 189471, True, 8000, 900, 50, 225),
    "L40S": _gpu("L40S", 46068, True, 864, 32, 25, 25),
    "L4": _gpu("L4", 23034, True, 300, 32, 25, 25),
    "A40": _gpu("A40", 46068, False, 696, 32, 25, 25),
    "RTX-4090": _gpu("RTX 4090", 24564, True, 1008, 32, 25, 25),
}
"""SXM variants where there are two; memory as nvidia-smi lists it, rates from NVIDIA's data sheets,
one 400 Gb/s port per GPU (before H100, and with PCIe 4: 200). Cards without NVLink, or with a
bridge between two cards, communicate over PCIe."""


def card(name: str) -> str | None:
    """The entry of a GPU for any of its names: "NVIDIA A100-SXM4-40GB", "h100 80GB", "4090". None
    if there is no entry."""
    kind, size = _kind_and_size(name)
    for wanted in (kind, kind.removesuffix("PCIE")):
        off = {
            entry: abs(gpu.memory / GIB - size)
            for entry, gpu in GPUS.items()
            if _kind_and_size(entry)[0] == wanted
        }
        if off and not size:
            return next(iter(off))
        if off and min(off.values()) < _SIZE_GIB:
            return min(off, key=lambda entry: off[entry])
    return None


def _kind_and_size(name: str) -> tuple[str, int]:
    words = re.sub(r"NVIDIA|GEFORCE|RTX|SXM\d?|HBM\w*|(?<=\d)GI?B\b|-", " ", name.upper()).split()
    sizes = [int(word) for word in words if re.fullmatch(r"\d{2,3}", word)]
    return "".join(word for word in words if not re.fullmatch(r"\d{2,3}", word)), sizes[
        0
    ] if sizes else 0


NODE_MEMORY = 400
"""GB/s at which all GPUs of a node together read and write its host memory. Assumed."""
EXPERTS_RATE = 0.5
"""Rate of experts' products relative to a dense layer's: many small products in one launch.
Assumed."""
EXPERT_US = 20.0
"""Microseconds of the host for each expert of a rank in a layer's forward pass of a micro-batch:
gradient hooks of its weights, and TransformerEngine's loop over them. Assumed."""
FP8_GAIN = {"blockwise": 1.40, "current": 1.69, "delayed": 1.75}
"""Speedup of products within layers over bf16, including quantization, by recipe: an H200, the
shapes of Qwen2.5-32B without tensor parallelism (benchmarks/results/gpu_h200.json). The data sheet
has 2. vLLM's ``fp8_per_block`` is treated as blockwise."""


@dataclass(frozen=True)
class Assumptions:
    """Constants that are in no data sheet.

    ``products`` was measured on an H200 (674 to 690 TFLOP/s in the layers of a 32B rank,
    benchmarks/results/gpu_h200.json). ``memory``, ``traffic``, ``launch_us`` and ``fixed_s`` are
    fitted to a third of the published runs of benchmarks/published_steps.json (benchmarks/plan.py,
    docs/scaling.md). The others are guesses.

    Attributes:
        products: fraction of the peak that bf16 matrix products reach in training and prefill.
        attention: fraction of the peak that causal attention reaches.
        memory: fraction of the memory's rate that decoding reaches.
        network: fraction of the rate that collectives and copies reach.
        layer_us: fixed microseconds of a layer in a decoding step: kernels, two all-reduces.
        message_us: microseconds of a collective or a ring step before any byte travels.
        traffic: bytes of the GPU's memory that a layer's forward pass reads and writes for each
            token and hidden entry beside its matrix products: norms, rotary embedding, activation,
            residual sums.
        launch_us: microseconds of the host for a layer's forward pass of a micro-batch of any size.
        tail: fraction of an engine's requests that are still decoding while the longest responses
            finish.
        engine_gib: memory of an engine worker besides weights and KV cache: activations, CUDA
            graphs.
        fixed_s: seconds of a step for grading, shaping, records and waking up.
        accepted: mean tokens of a draft that are accepted, with `vllm.speculative`.
    """

    products: float = 0.69
    attention: float = 0.4
    memory: float = 0.56
    network: float = 0.7
    layer_us: float = 30.0
    message_us: float = 20.0
    traffic: float = 270.0
    launch_us: float = 2100.0
    tail: float = 0.25
    engine_gib: float = 4.0
    fixed_s: float = 9.8
    accepted: float = 0.0


@dataclass(frozen=True)
class Error:
    """Error on published seconds that the fit did not use: the larger of predicted / published and
    its inverse.

    ``low``, ``high``: range of predicted / published.
    """

    rows: int
    median: float
    worst: float
    low: float
    high: float


STEP_ERROR = Error(rows=13, median=1.17, worst=1.54, low=0.65, high=1.2)
MIXTURE_ERROR = Error(rows=8, median=1.45, worst=2.02, low=0.49, high=1.23)
"""Errors for dense models and for mixtures of experts, as in benchmarks/results/plan_cpu.json."""


KV_CACHE = "engine: KV cache"


@dataclass(frozen=True)
class Engines:
    """The rollout engines.

    Each processes ``most`` requests at a time. With ``prefix_caching`` a group's prompt is computed
    once.

    Attributes:
        parts: bytes on one of its GPUs, by part.
        kv_token_bytes: bytes of a token's keys and values on one of its GPUs, bf16.
        request_bytes: bytes that a request takes there whatever its length.
        drafts: most tokens of a draft; 0: there are none.
        head: bytes of the head that drafts.
        pool: bytes in vLLM's pool of weights: awake in every sync, and copied if the pool sleeps at
            level 1.
        lacking: bytes that its share of a GPU lacks for one of the longest sequences; 0 or less: it
            fits.
    """

    count: int
    tensor_parallel_size: int
    parts: dict[str, int]
    kv_token_bytes: int
    request_bytes: int
    pool: int
    lacking: int
    most: int
    prefix_caching: bool
    recipe: str
    drafts: int
    head: int

    @property
    def weights(self) -> int:
        return self.parts["engine: weights"]


@dataclass(frozen=True)
class Seconds:
    """Seconds of one step, by phase; 0 if a phase is hidden behind another."""

    rollout: float
    logprobs: float
    train: float
    sync: float
    moves: float
    other: float

    @property
    def step(self) -> float:
        return self.rollout + self.logprobs + self.train + self.sync + self.moves + self.other


def _gains() -> str:
    return ", ".join(f"{recipe} {gain:g}" for recipe, gain in FP8_GAIN.items())


_CALLS_S = (0.05, 0.018)
"""Seconds of an update's calls with one engine, and for each further engine. These values and the
next were measured on two cores with Qwen2.5-0.5B (benchmarks/results/weight_sync_cpu.json: control;
engine; transport)."""
_GLOO_S_PER_GB = 1.15
"""Over gloo into a loaded engine: of the whole sync, 0.38 s is sending and 0.75 s loading."""


@dataclass(frozen=True)
class Clock:
    """Predicts the seconds of a run's phases on one kind of GPU.

    ``sent``: bytes of an update of the engines; ``on_host``: Adam's states are in host memory;
    ``head``: what drafts in the engines, if a model does.
    """

    gpu: Gpu
    shape: ModelShape
    work: Workload
    sent: int
    assumed: Assumptions = Assumptions()
    on_host: bool = False
    head: Head | None = None

    # ---- rollout

    def engines(self, config: RunConfig) -> Engines:
        """The engines of a configuration: the rest of their share of a GPU, after weights and other
        parts, is KV cache."""
        vllm, fp8, shape, tp = (
            config.vllm,
            config.fp8.rollout_enable,
            self.shape,
            config.vllm.tensor_parallel_size,
        )
        most = vllm.max_num_seqs or _MOST_REQUESTS
        # In FP8, all weights except embedding and head.
        outer = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)
        weights = (outer * _BF16 + (self.parameters - outer) * (1 if fp8 else _BF16)) // tp
        # Requests times vocabulary, as int32 and as bits (vllm 0.32.0
        # v1/worker/gpu/sample/penalties.py:39-47).
        sampler = 4 * most * (shape.vocab_size + math.ceil(shape.vocab_size / 32))
        room = int(self.assumed.engine_gib * GIB)
        drafting = 0
        if (head := self.head) is not None:
            drafting = _BF16 * (head.whole + (head.parameters - head.whole) // tp)
        left = int(config.gpu_memory_utilization * self.gpu.memory) - weights - room - sampler
        left -= drafting
        parts = {
            "engine: weights": weights,
            KV_CACHE: max(0, left),
            "engine: sampler (requests x vocabulary)": sampler,
            "engine: activations, CUDA graphs (estimate)": room,
            **({"engine: head that drafts": drafting} if drafting else {}),
        }
        token = shape.of_layers(lambda kind: kind.token_bytes(tp, _BF16))
        token += _BF16 * math.ceil(head.cached / tp) if head is not None else 0
        request = shape.of_layers(lambda kind: kind.request_bytes(tp, _BF16))
        lacking = (self.work.prompt_tokens + self.work.longest) * token + request - left
        return Engines(
            vllm.num_engines,
            tp,
            parts,
            token,
            request,
            weights + sampler + drafting,
            lacking,
            most,
            vllm.enable_prefix_caching,
            "blockwise" if fp8 else "",
            vllm.speculative.num_tokens if vllm.speculative.method != "none" else 0,
            drafting,
        )

    @cached_property
    def parameters(self) -> int:
        return entries(self.shape)

    @cached_property
    def active(self) -> int:
        """Number of parameters that multiply each token."""
        return self.parameters - self.shape.num_layers * self.shape.mlp.idle_weights

    @property
    def error(self) -> Error:
        return MIXTURE_ERROR if self.shape.num_experts else STEP_ERROR

    @property
    def _held(self) -> int:
        """Mean tokens of a request while it is decoded."""
        return self.work.prompt_tokens + self.work.response_tokens // 2

    def _request_bytes(self, engines: Engines) -> int:
        """Bytes of the cache that a request holds while it is decoded."""
        return max(1, engines.kv_token_bytes * self._held + engines.request_bytes)

    def concurrency(self, engines: Engines) -> int:
        """Requests that an engine processes at a time; 0 if its cache does not hold one of the
        longest sequences."""
        if engines.lacking > 0:
            return 0
        waiting = math.ceil(self.work.samples / engines.count)
        return max(
            1,
            min(
                waiting,
                engines.most,
                engines.parts[KV_CACHE] // self._request_bytes(engines),
            ),
        )

    def rollout(self, engines: Engines) -> float:
        """Seconds of prefill, decoding in full batches, and the tail of the longest responses.

        The tail is a fraction of all requests that the engine may receive, so a larger cache is
        never slower.
        """
        batch = self.concurrency(engines)
        if batch == 0:
            return math.inf
        mine = math.ceil(self.work.samples / engines.count)
        prompts = math.ceil(mine / self.work.group) if engines.prefix_caching else mine
        prefill = (
            prompts * self.work.prompt_tokens * self._products(2 * self.active, engines.recipe)
        )
        full = mine * self.work.response_tokens / batch * self._decode(engines, batch)
        rest = max(1, int(min(mine, engines.most) * self.assumed.tail))
        together = min(batch, rest)
        tail = (
            (self.work.longest - self.work.response_tokens)
            * rest
            / together
            * self._decode(engines, together)
        )
        return prefill / engines.tensor_parallel_size + full + tail

    def _decode(self, engines: Engines, batch: int) -> float:
        """Seconds of one decoding step for each token that a request gets by it.

        Weights and KV cache are read once, and every weight is multiplied for every request and
        every token of its draft. Only experts that some token chooses are read, as if each chose at
        random. A head is read once for each token of a draft.
        """
        rows = batch * (1 + engines.drafts)
        tp, rate, shape = (
            engines.tensor_parallel_size,
            self.gpu.hbm * 1e9 * self.assumed.memory,
            self.shape,
        )
        read = float(engines.weights)
        if shape.num_experts:
            unread = (1 - shape.experts_per_token / shape.num_experts) ** rows
            read *= 1 - unread * shape.num_layers * shape.mlp.expert_weights / self.parameters
        weights = read / rate
        products = rows * self._products(2 * self.active, engines.recipe) / tp
        # A state is read and written.
        cache = batch * (self._request_bytes(engines) + engines.request_bytes) / rate
        layer = self.assumed.layer_us * 1e-6
        drafting = engines.drafts * (engines.head / rate + layer) if engines.head else 0.0
        step = max(weights, products) + cache + shape.num_layers * layer + drafting
        return step / (1 + self.assumed.accepted)

    def _products(self, flops: float, recipe: str = "") -> float:
        gain = FP8_GAIN[recipe] if recipe and self.gpu.has_fp8 else 1.0
        return flops / (gain * self.gpu.tflops * 1e12 * self.assumed.products)

    # ---- log-probs and training

    def logprobs(self, model: TrainedModel) -> float:
        return model.work.scored_by * self._schedule(model, model.work.samples, forward_only=True)

    def train(self, model: TrainedModel) -> float:
        work = model.work
        updates = math.ceil(work.samples / work.batch)
        one = self._schedule(model, min(work.batch, work.samples), forward_only=False)
        return work.epochs * updates * (one + self._update(model))

    def _schedule(self, model: TrainedModel, samples: int, *, forward_only: bool) -> float:
        """Seconds of a pipeline schedule: every micro-batch on every stage, all about equally
        large.

        The slowest stage is always busy except in the bubble, in which the first micro-batch passes
        the other stages.
        """
        count, sequences = model.micro_batches(samples, forward_only)
        *others, last = model.layers
        alike = Counter([*((layers, False) for layers in others), (last, True)])
        stages = {
            (n, head): self._stage(model, n, head, sequences, forward_only) for n, head in alike
        }
        slowest, together = (
            max(stages.values()),
            sum(stages[one] * number for one, number in alike.items()),
        )
        return count * slowest + (together - slowest) / model.layout.virtual_pipeline_size

    def _stage(
        self, model: TrainedModel, layers: float, head: bool, sequences: float, forward_only: bool
    ) -> float:
        """Seconds of a micro-batch on a stage of ``layers`` layers, with ``head`` including the
        head."""
        ranks = model.layout.tensor_parallel_size * model.layout.context_parallel_size
        of_layer, of_head, passes = self._computing(model, forward_only)
        computing = sequences * (layers * of_layer + (of_head if head else 0.0)) / ranks
        held = model.shape.num_experts / model.layout.expert_parallel_size
        launching = passes * layers * (self.assumed.launch_us + held * EXPERT_US) * 1e-6
        return max(computing, launching) + self._communication(model, layers, sequences, passes)

    def head_layers(self, model: TrainedModel) -> float:
        """Number of layers that take as long as the head in training, on a stage with the mean
        number of layers."""
        layers = model.shape.num_layers / model.layout.pipeline_parallel_size
        _, sequences = model.micro_batches(min(model.work.batch, model.work.samples))
        without, together = (
            self._stage(model, layers, head, sequences, False) for head in (False, True)
        )
        return (together - without) * layers / without

    def _computing(self, model: TrainedModel, forward_only: bool) -> tuple[float, float, int]:
        """Seconds of a layer and of the head for one sequence on one GPU, and the passes in units
        of a forward pass."""
        shape, megatron = model.shape, model.megatron
        flops, layers = model.work.forward(shape), shape.num_layers
        mlp = shape.mlp.token_weights
        of_mlp = mlp / (mlp + shape.attention_weights)
        share = of_mlp if model.recipe and model.config.fp8.modules == "mlp" else 1.0
        linear = self._products(share * flops.layers, model.recipe) + self._products(
            (1 - share) * flops.layers
        )
        slower = self._products(of_mlp * flops.layers) * self._slower_experts(model)
        linear, mlp_linear = linear + slower, linear * of_mlp + slower
        attention = flops.attention / (self.gpu.tflops * 1e12 * self.assumed.attention)
        again = 0.0
        if not forward_only and megatron.recompute == "full":
            again = linear + attention
        elif not forward_only and megatron.recompute == "selective":
            again = mlp_linear if shape.mlp.recompute_module in megatron.recompute_modules else 0.0
            again += attention if "core_attn" in megatron.recompute_modules else 0.0
        passes = 1 if forward_only else 1 + BACKWARD
        computing, head = passes * (linear + attention) + again, passes * self._products(flops.head)
        passes += again > 0
        wide = model.work.length * shape.hidden_size * layers
        computing += (
            passes
            * wide
            * (self.assumed.traffic + shape.mlp.moved_bytes(_BF16))
            / (self.gpu.hbm * 1e9)
        )
        return computing / layers, head, passes

    def _slower_experts(self, model: TrainedModel) -> float:
        """Extra time of a mixture's products, as a fraction of their time at a dense layer's rate,
        on the rank with the most tokens; all ranks wait for it."""
        if not model.shape.num_experts:
            return 0.0
        fullest = FULLEST_RANK if model.layout.expert_parallel_size > 1 else 1.0
        return fullest / EXPERTS_RATE - 1

    def _communication(
        self, model: TrainedModel, layers: float, sequences: float, passes: float
    ) -> float:
        """Seconds of the tensor-, context-, expert- and pipeline-parallel messages of one
        micro-batch on a stage of ``layers`` layers."""
        layout, shape = model.layout, model.shape
        tokens = sequences * model.work.length / layout.context_parallel_size
        tp, cp = layout.tensor_parallel_size, layout.context_parallel_size
        wide = tokens * shape.hidden_size * _BF16
        # Two all-gathers and two reduce-scatters (or two all-reduces) per layer and pass; there are
        # none around experts.
        collectives = 2 if shape.num_experts and not shape.shared_ffn_hidden_size else 4
        near = layers * passes * collectives * wide * (tp - 1) / tp
        keys = (
            layers
            * passes
            * tokens
            * (shape.of_layers(lambda kind: kind.token_bytes(tp, _BF16)) / shape.num_layers)
            * (cp - 1)
        )
        sent = (
            min(passes, 2)
            * layout.virtual_pipeline_size
            * wide
            / (tp if layout.sequence_parallel else 1)
        )
        messages = layers * passes * (collectives * (tp > 1) + 2 * (cp - 1))
        seconds = messages * self.assumed.message_us * 1e-6 + near / self._rate(self.gpu.near)
        seconds += keys / self._rate(self.gpu.near if tp * cp <= model.near_ranks else self.gpu.far)
        seconds += self._exchange(model, layers, wide / tp, passes)
        return seconds + (
            sent / self._rate(self.gpu.far) if layout.pipeline_parallel_size > 1 else 0.0
        )

    def _exchange(self, model: TrainedModel, layers: float, states: float, passes: float) -> float:
        """Seconds of sending tokens to their experts and back; ``states``: bytes of a rank's hidden
        states.

        A backward pass sends as much as a forward pass. Messages between nodes travel beside
        messages within a node. Ranks that share an expert get all of its tokens from each other,
        and are on one node.
        """
        layout, chosen = model.layout, states * model.shape.experts_per_token
        ep, etp = layout.expert_parallel_size, layout.expert_tensor
        if not model.shape.num_experts or ep * etp == 1:
            return 0.0
        here = min(ep, max(1, model.near_ranks // etp))
        near = chosen * (here - 1) / ep / self._rate(self.gpu.near)
        far = chosen * (ep - here) / ep / self._rate(self.gpu.far)
        shared = chosen * (etp - 1) / self._rate(self.gpu.near)
        slowest = (FULLEST_RANK if ep > 1 else 1.0) * (max(near, far) + shared)
        exchanges = layers * 2 * (passes if passes == 1 else passes - BACKWARD + 1)
        return exchanges * (slowest + ((ep > 1) + (etp > 1)) * self.assumed.message_us * 1e-6)

    def _shares(self, model: TrainedModel) -> list[tuple[int, int]]:
        """Parameters of the fullest rank, and how many ranks hold the same: those of experts, which
        may have their own copies, and all others."""
        layout, held = model.layout, model.fullest.parameters
        if layout.expert_parallel_size == 1:
            return [(held, layout.copies)]
        shared = layout.expert_tensor * layout.expert_parallel_size
        experts = max(model.layers) * model.shape.mlp.expert_weights // shared
        return [(held - experts, layout.copies), (experts, layout.expert_copies)]

    def _update(self, model: TrainedModel) -> float:
        """Seconds to reduce gradients, gather parameters, and read and write the optimizer's
        states.

        Transfers of states in host memory overlap with the reads and writes on the GPU.
        """
        states, near = model.fullest, model.layout.world_size <= model.near_ranks
        moved = sum(
            held * (_FP32 + _BF16) * (copies - 1) / copies for held, copies in self._shares(model)
        )
        touched = 2 * (states.optimizer + states.on_host) + states.gradients
        gathered = moved / self._rate(self.gpu.near if near else self.gpu.far)
        # Both directions at the same time: a rank's bus carries each, a node's memory those of all
        # its ranks.
        streamed = states.on_host / self._rate(self.gpu.host)
        streamed = max(streamed, 2 * model.near_ranks * states.on_host / (NODE_MEMORY * 1e9))
        return gathered + max(streamed, touched / self._rate(self.gpu.hbm))

    def _rate(self, gigabytes: float) -> float:
        return gigabytes * 1e9 * self.assumed.network

    # ---- weights and states

    def sync(self, policy: TrainedModel, engines: Engines) -> float:
        """Seconds of a weight sync: rank 0 gathers all weights and sends them to every engine, or
        gloo does in host memory.

        Sending, receiving, loading and summing overlap, so the slowest of them counts; the calls
        are added.
        """
        size, layout, workers = (
            self.sent,
            policy.layout,
            engines.count * engines.tensor_parallel_size,
        )
        calls = _CALLS_S[0] + _CALLS_S[1] * (engines.count - 1)
        if policy.config.vllm.sync_backend == "gloo":
            return calls + size / 1e9 * _GLOO_S_PER_GB
        places = layout.world_size + (0 if policy.config.engines_share_gpus else workers)
        one_node = places <= max(policy.near_ranks, _NODE)
        nodes = 1 if one_node else math.ceil(layout.copy_ranks / policy.near_ranks)
        near, far = self._rate(self.gpu.near), self._rate(self.gpu.far)
        gathered = size * (1 - 1 / nodes) / far if nodes > 1 else size / near
        # Written, read by the loader, written, read for the sum.
        in_memory = 4 * size / self._rate(self.gpu.hbm)
        return calls + max(size / (near if one_node else far), gathered, in_memory)

    def moves(self, model: TrainedModel) -> float:
        """Seconds to move a sleeping policy's states to host memory and back; gradients are only
        freed."""
        return 2 * (model.fullest.weights + model.fullest.optimizer) / self._rate(self.gpu.host)

    def lines(self) -> list[str]:
        gpu, work, a = self.gpu, self.work, self.assumed
        streamed = [
            f"Adam's states move between host memory and GPU at {a.network:.0%} of the bus's rate, "
            f"in both directions at once, at most {NODE_MEMORY:g} GB/s per node (assumed; "
            "update/stream_seconds measures a run's)"
        ]
        mixture = [
            f"matrix products of experts reach {EXPERTS_RATE:g} of that rate, and where experts "
            f"are distributed over ranks the fullest rank has {FULLEST_RANK:g} times the mean "
            "number of tokens (assumed; moe/load_max measures a run's); each expert of a rank "
            f"takes {EXPERT_US:g} microseconds of host time in a layer's forward pass (assumed)"
        ]
        fixed = self.shape.of_layers(lambda kind: kind.request_bytes(1, _BF16))
        linear = [
            "linear attention computes at attention's rate, and a decoding step reads and writes "
            f"the {fixed / 1e6:.0f} MB that an engine keeps for each request whatever its length "
            "(assumed; kernels of its rule were never measured, and no published step has them)"
        ]
        return [
            f"GPU: {gpu.memory / GIB:.1f} GiB, {gpu.tflops:g} TFLOP/s bf16, memory "
            f"{gpu.hbm:g} GB/s, within a node {gpu.near:g} GB/s, between nodes {gpu.far:g} GB/s, "
            f"host {gpu.host:g} GB/s (data sheets)",
            f"a step: {work.prompts} prompts x {work.group} responses; prompts of "
            f"{work.prompt_tokens} tokens, responses of {work.response_tokens} on average, the "
            f"longest {work.longest}; {math.ceil(work.samples / work.batch) * work.epochs} "
            f"updates; log-probs of {work.scored_by} model{'s' if work.scored_by != 1 else ''}",
            f"matrix products reach {a.products:.0%} of the peak (in FP8 times {_gains()}), "
            f"attention {a.attention:.0%}, decoding {a.memory:.0%} of the memory's rate, "
            f"collectives and copies {a.network:.0%} of theirs",
            *(mixture if self.shape.num_experts else []),
            *(streamed if self.on_host else []),
            *(linear if fixed else []),
            f"a layer's forward pass of a micro-batch takes {a.launch_us:g} microseconds of host "
            f"time, and moves {a.traffic:g} bytes per token and hidden entry besides its matrix "
            "products",
            f"a decoding step takes an extra {a.layer_us:g} microseconds per layer, a message "
            f"{a.message_us:g}; the longest responses finish in a batch of {a.tail:.0%}; no "
            f"communication is hidden behind computation; {a.fixed_s:g} s a step for grading, "
            "shaping and records",
            f"a weight sync: {_CALLS_S[0] * 1e3:g} ms of calls and {_CALLS_S[1] * 1e3:g} for each "
            f"further engine, over gloo {_GLOO_S_PER_GB:g} s per 10^9 bytes, measured on two "
            "cores (weight_sync_cpu.json); on a GPU loading and summing are four passes over its "
            "memory",
        ]
