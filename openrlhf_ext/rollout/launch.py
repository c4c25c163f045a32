"""Starting rollout engines as Ray actors, on GPUs or on a machine without any."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from openrlhf_ext.exact import VARIABLE
from openrlhf_ext.options import required
from openrlhf_ext.options.sections import Vllm
from openrlhf_ext.rollout.engine import RolloutEngine
from openrlhf_ext.rollout.response import EngineStartError

logger = logging.getLogger(__name__)
_SAY_SO_S = 15.0  # of waiting
_GPU_BATCH = (1024, 8192)
"""Sequences and tokens of a step that vLLM's server has on an H100 (an engine in an actor would get
128 and 2048)."""
_CPU_BATCH = (256, 4096)
"""vLLM's 128 sequences leave a tenth of the speed of a tiny model unused."""
_NGRAM = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
"""Lengths of the ends of a text that are looked for in it."""
_SHARE = 0.2
"""Part of a shared bundle that an engine's worker takes, as in OpenRLHF."""
_OTHER_CALLS = 100
"""Calls of an engine besides its requests: questions and weight updates, with room for some that
nobody awaits."""


class EngineFleet(list):
    """Handles of the engines, in order; a new engine takes the place of an old one in the list
    itself. Whoever keeps it sees that; a copy that went to another process is an ordinary list."""

    def __init__(self, start: Callable[[int], Any], num_engines: int) -> None:
        super().__init__(start(index) for index in range(num_engines))
        self._start = start

    def start_anew(self, index: int) -> Any:
        self[index] = self._start(index)
        return self[index]

    def __reduce__(self) -> tuple:
        return list, (list(self),)


@dataclass(frozen=True)
class EnginePlaces:
    """Bundles of which engines take a fifth of each, in the order in which workers take them: the
    policy's, or of their own."""

    group: PlacementGroup
    bundles: Sequence[int]


def create_rollout_engines(
    model_path: str,
    options: Vllm,
    *,
    max_model_len: int,
    request_timeout_s: float,
    executor_factory: Callable[[], Any],
    use_gpu: bool,
    seed: int,
    places: EnginePlaces | None = None,
    fast_tokenizer: bool = True,
    batch_invariant: bool = False,
    exact: bool = False,
    bf16_layers: Sequence[int] | None = None,
    adapter: tuple[int, Sequence[str]] | None = None,
    tells_entropies: bool = False,
    routed_experts: bool = False,
    more_env: Mapping[str, str] = MappingProxyType({}),
    hf_overrides: Mapping[str, Any] = MappingProxyType({}),
    keeps_states: bool = False,
) -> EngineFleet:
    """Starts engines and returns their handles at once (`wait_until_ready`). Raises ValueError or
    EngineStartError.

    Args:
        options: of these engines, with `dtype`, `max_requests` and `gpu_memory_utilization` set.
        seed: engine i samples with seed + i, where a request has no seed of its own.
        places: None for engines on CPU, which go where Ray puts them.
        batch_invariant: GPUs only: kernels whose results do not depend on the rest of the batch.
        exact: compute with the operations that the policy's ranks share (`openrlhf_ext.exact`).
        adapter: rank and modules of the adapters that updates bring instead of all weights.
        tells_entropies: return the entropy of each token's distribution with the completions.
        routed_experts: return the experts of each token (`response.Response.experts_RLK`). vLLM
            keeps layers x experts of a token bytes on the host for every slot of its cache.
        more_env: variables of the engines' processes, besides `engine_env`.
        hf_overrides: entries of the model's config.json that differ for vLLM.
        keeps_states: the model has layers with a state of each request.
    """
    engine_args = _model_args(model_path, options, max_model_len, use_gpu, hf_overrides) | {
        **_state_args(keeps_states),
        "executor_factory": executor_factory,
        "fast_tokenizer": fast_tokenizer,
        "request_timeout_s": request_timeout_s,
        "bf16_layers": bf16_layers,
        "adapter": adapter,
        "tells_entropies": tells_entropies,
        "routed_experts": routed_experts,
    }
    engine_args |= batch_limits(use_gpu, options, max_model_len)
    if not use_gpu:
        engine_args |= cpu_engine_args(options)
        placements = _cpu_placements(options, places)
    elif places is None:
        raise ValueError("engines on GPUs need a placement group, one bundle for each worker")
    else:
        engine_args |= _gpu_args(options, routed_experts, exact)
        placements = _gpu_placements(options, places)
    max_requests = required(options.max_requests, "vllm.max_requests")
    actor_class = ray.remote(RolloutEngine)
    environment = engine_env(
        use_gpu=use_gpu, model_path=model_path, batch_invariant=batch_invariant, exact=exact
    )
    environment |= {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, **more_env}

    def start(index: int) -> Any:
        placing, extra = placements[index]
        # Ray gives an asynchronous actor 1,000 calls at a time (ray 2.60.0 actor.py:1943), fewer
        # than an engine batches
        calls = {"max_concurrency": max_requests + _OTHER_CALLS}
        placing = {"runtime_env": {"env_vars": environment}, **calls, **placing}
        return actor_class.options(**placing).remote(seed=seed + index, **engine_args, **extra)

    return EngineFleet(start, options.num_engines)


def _gpu_args(options: Vllm, routed_experts: bool, exact: bool) -> dict[str, Any]:
    share = required(options.gpu_memory_utilization, "vllm.gpu_memory_utilization")
    arguments: dict[str, Any] = {
        "gpu_memory_utilization": share,
        "enable_sleep_mode": options.enable_sleep,
    }
    if routed_experts:
        # FlashInfer's, which vLLM takes on B200, keeps its routers' choice to itself, and vLLM
        # refuses the two
        arguments["moe_backend"] = "triton"
    if exact:
        arguments["attention_backend"] = "FLASH_ATTN"  # vLLM takes FlashInfer's on a B200
    return arguments


def _model_args(
    model_path: str,
    options: Vllm,
    max_model_len: int,
    use_gpu: bool,
    hf_overrides: Mapping[str, Any],
) -> dict[str, Any]:
    """What vLLM is told of the model and of its log-probs."""
    overrides = dict(hf_overrides)
    if options.dtype != "fp32":
        # else logits are rounded to the model's dtype, 0.06 nats where they exceed 16; "required
        # for RL training-inference consistency" (vllm 0.32.0 config/model.py:2082)
        overrides["head_dtype"] = "float32"
    return {
        "model": model_path,
        "dtype": {"bf16": "bfloat16", "fp32": "float32"}[options.dtype],
        "max_model_len": max_model_len,
        "enable_prefix_caching": options.enable_prefix_caching,
        "enforce_eager": options.enforce_eager or not use_gpu,  # CUDA graphs need CUDA
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
        "max_logprobs": 1,
        "tensor_parallel_size": options.tensor_parallel_size,
        "disable_log_stats": True,
        "hf_overrides": overrides,
        **_draft_args(options),
    }


def _draft_args(options: Vllm) -> dict[str, Any]:
    """Of drafts, and of vLLM's own counts of them. The head stays when a sleep gives up the weights:
    no update brings it."""
    drafts = options.speculative
    if drafts.method == "none":
        return {}
    how: dict[str, Any] = {"method": drafts.method, "num_speculative_tokens": drafts.num_tokens}
    if drafts.method == "ngram":
        how |= _NGRAM
    else:
        how["model"] = drafts.path
    return {
        "speculative_config": how,
        "per_request_spec_decode_metrics": "summary",
        "sleep_preserve_parameter_names": ["draft.*"],
    }


def _state_args(keeps_states: bool) -> dict[str, Any]:
    """fp32, which vLLM else takes only if config.json says so: a state is added to at every
    token."""
    return {"mamba_ssm_cache_dtype": "float32"} if keeps_states else {}


def engine_env(
    *, use_gpu: bool, model_path: str, batch_invariant: bool = False, exact: bool = False
) -> dict[str, str]:
    """Environment of an engine's process, to be there before vLLM is imported. A model in a
    directory needs no hub."""
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "TOKENIZERS_PARALLELISM": "false",
        # OpenRLHF's constructor sets it. A name that the process starts with is not added to the
        # environment while Ray's threads may be reading it.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    if os.path.isdir(model_path):
        environment["HF_HUB_OFFLINE"] = "1"
    if use_gpu:
        # CUDA's own default: the 1 that ranks want (examples/scripts/ray_node.sh) would make vLLM's
        # second stream, on which its V2 runner copies results, wait for the first
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    if exact:
        environment[VARIABLE] = "1"
    if use_gpu and (batch_invariant or exact):
        environment["VLLM_BATCH_INVARIANT"] = "1"
    if not use_gpu:
        environment |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # binding to cores that others use costs a factor of 5
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            # else the first log-prob compiles C++, which takes longer than most tests
            "TORCHDYNAMO_DISABLE": "1",
        }
    if exact and use_gpu:  # `exact.engine` says what for
        environment |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}
    elif exact:  # do not cut the keys of a generation into parts for several threads
        environment["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
    return environment


def wait_until_ready(
    engines: Sequence[Any], timeout_s: float, name: str = "rollout engine"
) -> None:
    """Wait until every engine serves; messages call one ``name``. Raises EngineStartError."""
    pending = {engine.ping.remote(): index for index, engine in enumerate(engines)}
    started = time.monotonic()
    while pending:
        left = max(0.0, started + timeout_s - time.monotonic())
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=min(left, _SAY_SO_S))
        missing = sorted(pending.values())
        if not ready and left > _SAY_SO_S:
            waited = time.monotonic() - started
            logger.info(
                "waiting for %ss %s: %.0f s so far; Ray has free: %s",
                name,
                missing,
                waited,
                _free(),
            )
            continue
        if not ready:
            raise EngineStartError(_timeout_message(name, missing, timeout_s), missing)
        index = pending.pop(ready[0])
        try:
            ray.get(ready[0])
        except Exception as error:
            raise EngineStartError(f"{name} {index} did not start:\n{error}", [index]) from error


def _timeout_message(name: str, missing: list[int], timeout_s: float) -> str:
    return (
        f"{name}s {missing} were not ready within {round(timeout_s, 1):g} s (what was left of "
        f"vllm.start_timeout_s). Ray has free: {_free()}; an engine whose resources are taken "
        "never starts. Otherwise see the RolloutEngine actors' logs in Ray's session directory "
        "(by default /tmp/ray/session_latest/logs)"
    )


def _free() -> dict[str, float]:
    return {name: ray.available_resources().get(name, 0) for name in ("CPU", "GPU")}


def batch_limits(use_gpu: bool, options: Vllm, max_model_len: int) -> dict[str, int]:
    """The size of a step; what is not asked for gives way to what is, because every sequence of a
    step has a token."""
    sequences, tokens = options.max_num_seqs, options.max_num_batched_tokens
    usual_sequences, usual_tokens = _GPU_BATCH if use_gpu else _CPU_BATCH
    if not use_gpu:
        usual_tokens = max(usual_tokens, max_model_len)
        if tokens is not None and tokens < max_model_len:
            raise ValueError(
                "vllm.max_num_batched_tokens must be at least data.max_len where engines run on "
                f"CPU, which compute a prompt in one step: got {tokens} < {max_model_len}; raise "
                "it, or leave it out"
            )
    sequences = sequences or min(usual_sequences, tokens or usual_sequences)
    captured = options.max_cudagraph_capture_size if use_gpu else None
    graphs = {} if captured is None else {"max_cudagraph_capture_size": captured}
    return {
        "max_num_seqs": sequences,
        "max_num_batched_tokens": tokens or max(usual_tokens, sequences),
        **graphs,
    }


def cpu_engine_args(options: Vllm) -> dict[str, Any]:
    """``in_process`` says whether the engine can run on a thread."""
    return {
        # vLLM's default is 92 % of the machine's memory
        "kv_cache_memory_bytes": options.kv_cache_mib << 20,
        "in_process": options.tensor_parallel_size == 1,
        "distributed_executor_backend": "uni" if options.tensor_parallel_size == 1 else "mp",
        # A prompt cut in two rolls back the offset of its request's generator, which CPU generators
        # do not have
        # (vllm 0.32.0 v1/worker/gpu_model_runner.py:3502): the engine would die at the first long
        # seeded batch.
        "enable_chunked_prefill": False,
    }


def offline_engine_args(
    model_path: str,
    dtype: str,
    max_model_len: int,
    options: Vllm,
    gpu_share: float | None,
    hf_overrides: Mapping[str, Any],
    keeps_states: bool = False,
) -> dict[str, Any]:
    """Arguments of an engine outside a run (`in_process.OfflineEngine`); ``gpu_share`` is None on
    CPU, ``hf_overrides`` and ``keeps_states`` as of `create_rollout_engines`."""
    use_gpu = gpu_share is not None
    engine_args = {
        "model": model_path,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "tensor_parallel_size": options.tensor_parallel_size,
        # a problem's samples share its prompt; vLLM keeps states of prefixes only with chunked
        # prefill (vllm 0.32.0 model_executor/models/config.py:694)
        "enable_prefix_caching": use_gpu or not keeps_states,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "hf_overrides": dict(hf_overrides),
        **_state_args(keeps_states),
        **batch_limits(use_gpu, options, max_model_len),
    }
    if use_gpu:
        return engine_args | {"gpu_memory_utilization": gpu_share}
    # by which workers that vLLM spawns get its patches
    extension = "openrlhf_ext.rollout.worker_extension.WeightSyncExtension"
    more = {"enforce_eager": True, "worker_extension_cls": extension}
    return engine_args | more | cpu_engine_args(options)


_Placement = tuple[dict[str, Any], dict[str, Any]]
"""Ray options of an actor, and constructor arguments that depend on its place."""


def _cpu_placements(options: Vllm, places: EnginePlaces | None) -> list[_Placement]:
    num_engines = options.num_engines
    if places is not None:
        bundles = places.bundles[:: options.tensor_parallel_size][:num_engines]
        slots = [
            PlacementGroupSchedulingStrategy(places.group, placement_group_bundle_index=one)
            for one in bundles
        ]
        return [
            ({"num_cpus": _SHARE, "num_gpus": 0, "scheduling_strategy": slot}, {"num_gpus": 0})
            for slot in slots
        ]
    if num_engines > (cpus := ray.cluster_resources().get("CPU", 0.0)):
        raise EngineStartError(
            f"{num_engines} rollout engines need {num_engines} CPUs, the Ray cluster has "
            f"{cpus:g}: start fewer engines, or Ray with more CPUs (it does not check that they "
            "exist)"
        )
    return [({"num_cpus": 1, "num_gpus": 0}, {"num_gpus": 0}) for _ in range(num_engines)]


def _gpu_placements(options: Vllm, places: EnginePlaces) -> list[_Placement]:
    """OpenRLHF's placement: one bundle per worker, an engine's bundles next to each other."""
    workers = options.tensor_parallel_size
    actor_gpus, backend = (_SHARE, "uni") if workers == 1 else (0, "ray")
    placements = []
    for index in range(options.num_engines):
        mine = list(places.bundles[index * workers : (index + 1) * workers])
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=places.group,
            placement_group_capture_child_tasks=True,
            placement_group_bundle_index=mine[0],
        )
        placing = {"num_cpus": actor_gpus, "num_gpus": actor_gpus, "scheduling_strategy": strategy}
        bundles = mine if workers > 1 else None
        extra = {
            "bundle_indices": bundles,
            "num_gpus": _SHARE,
            "distributed_executor_backend": backend,
        }
        placements.append((placing, extra))
    return placements
