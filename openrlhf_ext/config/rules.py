"""Rules between options as pure functions: plain numbers in, violations out; nothing is read and nothing is raised."""

from __future__ import annotations

from collections.abc import Iterator

from openrlhf_ext.config.algorithm_options import correction_threshold
from openrlhf_ext.config.errors import Violation
from openrlhf_ext.config.inputs import ModelFacts


def layout_violations(
    *, num_nodes: int, gpus_per_node: int, tp: int, pp: int, cp: int, vp: int, sequence_parallel: bool
) -> Iterator[Violation]:
    """The ranks can be divided into copies of the policy."""
    world, copy = num_nodes * gpus_per_node, tp * pp * cp
    if world % copy:
        yield Violation(
            (
                "actor.num_nodes",
                "actor.num_gpus_per_node",
                "megatron.tensor_parallel_size",
                "megatron.pipeline_parallel_size",
                "megatron.context_parallel_size",
            ),
            f"actor.num_nodes * actor.num_gpus_per_node must be a multiple of megatron.tensor_parallel_size * "
            f"megatron.pipeline_parallel_size * megatron.context_parallel_size: {num_nodes} * {gpus_per_node} = "
            f"{world}, {tp} * {pp} * {cp} = {copy}; use {_multiples(world, copy)} ranks or another layout",
        )
    if vp > 1 and pp == 1:
        yield Violation(
            ("megatron.virtual_pipeline_size", "megatron.pipeline_parallel_size"),
            f"megatron.virtual_pipeline_size needs megatron.pipeline_parallel_size > 1: got {vp} and 1; set it to 1",
        )
    if sequence_parallel and tp == 1:
        yield Violation(
            ("megatron.sequence_parallel_enable", "megatron.tensor_parallel_size"),
            "megatron.sequence_parallel_enable needs megatron.tensor_parallel_size > 1: got 1; switch it off",
        )


def model_violations(
    *, model: ModelFacts, tp: int, pp: int, engine_tp: int, max_len: int, vp: int = 1,
    path: str = "actor.model_name_or_path",
) -> Iterator[Violation]:  # fmt: skip
    """The model can be cut as the layout says, and takes sequences of the given length.

    Args:
        path: option of the model.
    """
    tp_option = "megatron.tensor_parallel_size"
    for count, what in (
        (model.num_heads, "attention heads"),
        (model.ffn_hidden_size, "MLP width"),
    ):
        if count % tp:
            yield Violation(
                (path, tp_option),
                f"{tp_option} must divide the model's {what}: got {tp}, the model of {path} has {count}; use "
                f"{_divisors(count)}",
            )
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        yield Violation(
            (path, tp_option),
            f"{tp_option} must divide the model's key-value heads (query groups) or be a multiple of them: got {tp}, "
            f"the model of {path} has {model.num_kv_heads}; use {_divisors(model.num_kv_heads)}",
        )
    if vp > 1 and model.num_layers % pp == 0 and model.num_layers % (pp * vp):
        yield Violation(
            (path, "megatron.pipeline_parallel_size", "megatron.virtual_pipeline_size"),
            f"megatron.pipeline_parallel_size * megatron.virtual_pipeline_size must divide the model's layers: got "
            f"{pp} * {vp}, the model of {path} has {model.num_layers}; use a megatron.virtual_pipeline_size of "
            f"{_divisors(model.num_layers // pp)}",
        )
    if model.num_layers % pp:
        yield Violation(
            (path, "megatron.pipeline_parallel_size"),
            f"megatron.pipeline_parallel_size must divide the model's layers: got {pp}, the model of {path} has "
            f"{model.num_layers}; use {_divisors(model.num_layers)}",
        )
    if model.num_heads % engine_tp:
        yield Violation(
            (path, "vllm.tensor_parallel_size"),
            f"vllm.tensor_parallel_size must divide the model's attention heads: got {engine_tp}, the model of {path} "
            f"has {model.num_heads}; use {_divisors(model.num_heads)}",
        )
    kv_heads = model.num_kv_heads
    if kv_heads % engine_tp and engine_tp % kv_heads:
        yield Violation(
            (path, "vllm.tensor_parallel_size"),
            f"vllm.tensor_parallel_size must divide the model's key-value heads or be a multiple of them: got "
            f"{engine_tp}, the model of {path} has {kv_heads}; use {_divisors(kv_heads)}",
        )
    if model.max_positions is not None and max_len > model.max_positions:
        yield Violation(
            (path, "data.max_len"),
            f"data.max_len must not exceed the model's max_position_embeddings: got {max_len} > {model.max_positions} "
            f"tokens; lower data.max_len",
        )


def batch_violations(
    *,
    prompts: int,
    samples_per_prompt: int,
    generate_prompts: int | None,
    train_samples: int,
) -> Iterator[Violation]:
    """A batch of rollouts is a whole number of optimizer steps, each of whole groups.

    Nothing has to be divisible by the data-parallel ranks or the micro-batches: sequences are dealt by their cost.
    """
    samples = prompts * samples_per_prompt
    total = f"rollout.batch_size * rollout.n_samples_per_prompt ({prompts} * {samples_per_prompt} = {samples})"
    if train_samples % samples_per_prompt:
        yield Violation(
            ("train.batch_size", "rollout.n_samples_per_prompt"),
            f"train.batch_size (samples) must be a multiple of rollout.n_samples_per_prompt, groups are never split: "
            f"got {train_samples} and {samples_per_prompt}; use {_multiples(train_samples, samples_per_prompt)}",
        )
    if samples % train_samples:
        yield Violation(
            ("train.batch_size", "rollout.batch_size", "rollout.n_samples_per_prompt"),
            f"train.batch_size (samples) must divide {total}: got {train_samples}; lower train.batch_size or make "
            f"rollout.batch_size larger",
        )
    if generate_prompts not in (None, prompts):
        yield Violation(
            ("rollout.vllm_generate_batch_size", "rollout.batch_size"),
            f"rollout.vllm_generate_batch_size must equal rollout.batch_size: got {generate_prompts} and {prompts}; "
            f"leave it out",
        )


def head_violations(*, head: str, kernels: str) -> Iterator[Violation]:
    """Kernels are chosen only for a head that has some."""
    if head == "naive" and kernels != "auto":
        yield Violation(
            ("megatron.head_kernels", "megatron.head"),
            f"megatron.head_kernels has no effect with megatron.head naive, which is plain torch: got {kernels}; "
            f"leave it out, or set megatron.head to fused or two_pass",
        )


def recompute_violations(
    *, granularity: str, modules: tuple[str, ...], method: str, num_layers: int
) -> Iterator[Violation]:
    """Details of recomputation are given only where they have an effect."""
    for wanted, options, given, default in (
        ("selective", ("megatron.recompute_modules",), (modules,), (("core_attn",),)),
        ("full", ("megatron.recompute_method", "megatron.recompute_num_layers"), (method, num_layers), ("uniform", 1)),
    ):
        if granularity != wanted and given != default:
            yield Violation(
                (*options, "megatron.recompute"),
                f"{' and '.join(options)} have no effect without megatron.recompute {wanted}: got "
                f"{', '.join(map(str, given))} and {granularity}; set that, or leave them out",
            )
    if granularity == "selective" and not modules:
        yield Violation(
            ("megatron.recompute_modules", "megatron.recompute"),
            "megatron.recompute selective needs megatron.recompute_modules: got none; name core_attn, mlp or both, or "
            "set megatron.recompute none",
        )


def recompute_layer_violations(
    *, path: str, granularity: str, method: str, num_layers: int, chunk_layers: int
) -> Iterator[Violation]:
    """A model chunk consists of whole groups of recomputed layers.

    Args:
        path: option of the model; ``chunk_layers``: layers of each of its chunks.
    """
    option = "megatron.recompute_num_layers"
    if granularity == "full" and method == "uniform" and chunk_layers % num_layers:
        yield Violation(
            (path, option),
            f"{option} must divide the layers of a model chunk with megatron.recompute_method uniform: got "
            f"{num_layers}, a chunk of the model of {path} has {chunk_layers}; use {_divisors(chunk_layers)}",
        )


def packing_violations(
    *, enabled: bool, train_tokens: int | None, rollout_tokens: int | None, cp: int, max_len: int
) -> Iterator[Violation]:
    """A token budget of micro-batches is asked for, and the longest sequence fits into it.

    ``train_tokens`` and ``rollout_tokens`` are None where they are not set.
    """
    for option, tokens in (("train.max_tokens_per_gpu", train_tokens), ("rollout.max_tokens_per_gpu", rollout_tokens)):
        if tokens is None:
            continue
        if not enabled:
            yield Violation(
                (option, "train.dynamic_batch_enable"),
                f"{option} has no effect without train.dynamic_batch_enable: got {tokens}; switch that on",
            )
        elif tokens * cp < max_len:
            yield Violation(
                (option, "data.max_len", "megatron.context_parallel_size"),
                f"{option} * megatron.context_parallel_size must be at least data.max_len, a micro-batch holds whole "
                f"sequences: got {tokens} * {cp} < {max_len} tokens; use {-(-max_len // cp)} or more",
            )


def engine_batch_violations(*, sequences: int | None, tokens: int | None) -> Iterator[Violation]:
    """A step of an engine has at least one token of every sequence; what is not set gives way to what is."""
    if sequences is not None and tokens is not None and tokens < sequences:
        yield Violation(
            ("vllm.max_num_batched_tokens", "vllm.max_num_seqs"),
            f"vllm.max_num_batched_tokens must be at least vllm.max_num_seqs: got {tokens} and {sequences}; set one of "
            f"them only",
        )


def sync_violations(*, backend: str, colocate_all: bool) -> Iterator[Violation]:
    """The transport of the weights fits where the engines are."""
    options = ("vllm.sync_backend", "train.colocate_all")
    if backend == "nccl" and colocate_all:
        yield Violation(
            options,
            "vllm.sync_backend nccl needs engines with GPUs of their own, NCCL takes one rank per GPU: got nccl and "
            "train.colocate_all; use auto or cuda_ipc",
        )
    if backend == "cuda_ipc" and not colocate_all:
        yield Violation(
            options,
            "vllm.sync_backend cuda_ipc needs engines on the policy's GPUs: got cuda_ipc without train.colocate_all; "
            "use auto or nccl",
        )


def group_violations(*, estimator: str, samples_per_prompt: int) -> Iterator[Violation]:
    """Every estimator here compares the responses to one prompt with each other."""
    if samples_per_prompt < 2:
        yield Violation(
            ("rollout.n_samples_per_prompt", "algo.advantage.estimator"),
            f"rollout.n_samples_per_prompt must be at least 2 for algo.advantage.estimator {estimator}, which compares "
            f"the responses to one prompt: got {samples_per_prompt}; 8 is a usual value",
        )


def length_violations(
    *,
    max_new_tokens: int | None,
    max_len: int,
    overlong_buffer: float | None,
    overlong_factor: float,
    probe_length: int | None,
) -> Iterator[Violation]:
    """Responses fit into sequences, and the overlong buffer into responses."""
    if max_new_tokens is not None and max_new_tokens >= max_len:
        yield Violation(
            ("rollout.max_new_tokens", "data.max_len"),
            f"rollout.max_new_tokens must be below data.max_len, the prompt needs room: got {max_new_tokens} and "
            f"{max_len} tokens; lower the one or raise the other",
        )
    if probe_length is not None and probe_length >= max_len:
        yield Violation(
            ("weight_sync.probe_length", "data.max_len"),
            f"weight_sync.probe_length must be below data.max_len: got {probe_length} and {max_len} tokens",
        )
    if overlong_buffer is None:
        if overlong_factor != 1:
            yield Violation(
                ("reward.overlong_penalty_factor", "reward.overlong_buffer_len"),
                f"reward.overlong_penalty_factor has no effect without reward.overlong_buffer_len: got "
                f"{overlong_factor:g}; set the buffer too",
            )
        return
    if overlong_buffer != int(overlong_buffer):
        yield Violation(
            ("reward.overlong_buffer_len",),
            f"reward.overlong_buffer_len must be a whole number of tokens: got {overlong_buffer:g}",
        )
    if max_new_tokens is None or overlong_buffer > max_new_tokens:
        yield Violation(
            ("reward.overlong_buffer_len", "rollout.max_new_tokens"),
            f"reward.overlong_buffer_len must not exceed rollout.max_new_tokens: got {overlong_buffer:g} and "
            f"{'null' if max_new_tokens is None else max_new_tokens} tokens",
        )


def correction_violations(*, level: str, mode: str, gating: str, threshold: tuple[float, ...]) -> Iterator[Violation]:
    """The importance correction is one that exists (OpenRLHF's PolicyLoss has the same rules)."""
    prefix = "algo.advantage.is_correction_"
    low, high = correction_threshold(threshold)
    if low >= high or low < 0:
        yield Violation(
            (f"{prefix}threshold",),
            f"{prefix}threshold must be LOW HIGH with 0 <= LOW < HIGH, or HIGH > 0 alone: got {list(threshold)}",
        )
    if level == "off":
        return
    if mode == "clip" and (level != "token" or gating != "ratio"):
        yield Violation(
            (f"{prefix}mode", f"{prefix}level", f"{prefix}gating"),
            f"{prefix}mode clip needs {prefix}level token and {prefix}gating ratio: got {level} and {gating}; use "
            f"{prefix}mode mask",
        )
    if gating != "ratio" and low > 0:
        yield Violation(
            (f"{prefix}gating", f"{prefix}threshold"),
            f"{prefix}gating {gating} takes an upper bound only: got {list(threshold)}; give one {prefix}threshold",
        )


def filtering_violations(*, enabled: bool, low: float, high: float) -> Iterator[Violation]:
    """The range of mean scores that are kept is not empty."""
    if enabled and low >= high:
        yield Violation(
            ("algo.dynamic_filtering_range",),
            f"algo.dynamic_filtering_range must be LOW HIGH with LOW < HIGH: got {low:g} {high:g}",
        )


def mixture_violations(*, datasets: str, shares: str | None) -> Iterator[Violation]:
    """One share for each dataset, adding up to 1."""
    if shares is None:
        return
    option = "data.prompt_probs"
    count = len(datasets.split(","))
    try:
        numbers = [float(share) for share in shares.split(",")]
    except ValueError:
        yield Violation((option,), f"{option} must be numbers separated by commas: got {shares}")
        return
    if len(numbers) != count or not abs(sum(numbers) - 1) <= 1e-6 or min(numbers) < 0:  # false for nan
        yield Violation(
            (option, "data.prompt_dataset"),
            f"{option} must hold one share for each dataset of data.prompt_dataset and add up to 1: got {shares} for "
            f"{count} dataset{'s' if count > 1 else ''}",
        )


def _multiples(value: int, factor: int) -> str:
    """The multiples of ``factor`` around ``value``, as a remedy."""
    below = value // factor * factor
    return " or ".join(str(choice) for choice in (below, below + factor) if choice > 0)


def _divisors(number: int, limit: int = 8) -> str:
    """The smallest divisors, as a remedy."""
    found = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    return ", ".join(map(str, found[:limit]))
