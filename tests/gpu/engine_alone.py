"""One vLLM engine alone in this process, before any Ray, for calls 5 and 6: what of it runs on this
machine, and how fast."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from openrlhf_ext.imports import without_collection
from openrlhf_ext.options.sections import Vllm
from openrlhf_ext.rollout.launch import cpu_engine_args, engine_env
from tests.gpu.kit import Machine, Partly
from tests.gpu.runs import Runs, report
from tests.gpu.shapes import SEVEN_B, TINY, make_config

_GIB = 1 << 30
_LEFT_GIB = 2.0
"""What level 2 may keep, as ``ranks.shared_gpu`` reckons."""
_LENGTHS = (3, 17, 64, 200)  # of prompts, tokens


def first(machine: Machine) -> dict:
    """Eager, with the runner that vLLM chooses."""
    with Runs.open(machine, "first") as runs:
        return report(machine, _alone(machine, runs.policy, enforce_eager=True))


def graphs(machine: Machine) -> dict:
    """The same compiled, with CUDA graphs."""
    machine.need_gpu("an engine with CUDA graphs")
    with Runs.open(machine, "graphs") as runs:
        return report(machine, _alone(machine, runs.policy, enforce_eager=False))


def v1_runner(machine: Machine) -> dict:
    """vLLM's first model runner."""
    machine.need_gpu("choosing the runner, on a CPU it is the first,")
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    with Runs.open(machine, "v1_runner") as runs:
        return report(machine, _alone(machine, runs.policy, enforce_eager=True))


def _alone(machine: Machine, model: Path, **more: Any) -> dict:
    """
    Returns:
        Names of what runs; seconds to start, to generate with and without compiling; tokens per
        second; GiB of the device in use before, with, and at each level of sleep, seconds to sleep
        and wake.

    Raises:
        Partly: the same requests gave other tokens a second time, or after sleep.
    """
    before = _used(machine)
    started = time.monotonic()
    llm = start(machine, model, **more)
    found: dict[str, Any] = {
        "start_seconds": _since(started),
        "gib_before": before,
        "gib_awake": _used(machine),
    }
    found |= names(llm)
    params = _params(64 if machine.on_gpu else 16)
    prompts = [{"prompt_token_ids": [5 + i % 50 for i in range(n)]} for n in _LENGTHS] * (
        16 if machine.on_gpu else 4
    )
    tokens, found["first_generate_seconds"], _ = _generate(llm, prompts, params)
    again, _, found["tokens_per_second"] = _generate(llm, prompts, params)
    same = {"a second time": again == tokens}
    for level in (1, 2):
        found[f"sleep_level_{level}"] = _sleep(machine, llm, level)
        same[f"after sleep level {level}"] = _generate(llm, prompts, params)[0] == tokens
    found["same_tokens"] = same
    if machine.on_gpu:
        kept = found["sleep_level_2"]["gib_asleep"] - before
        found["reached"] = {
            f"sleep level 2 gives back all but {_LEFT_GIB:g} GiB": kept <= _LEFT_GIB
        }
    if not all(same.values()):
        raise Partly(
            f"other tokens: {[when for when, is_same in same.items() if not is_same]}", found
        )
    return found


def start(
    machine: Machine, model: Path, *, share: float = 0.3, batch: int = 256, **more: Any
) -> Any:
    """``vllm.LLM`` with what a run's engines have, in this process: an error has its traceback
    here."""
    os.environ |= {
        **engine_env(use_gpu=machine.on_gpu, model_path=str(model)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    with without_collection():
        from vllm import LLM

    args: dict[str, Any] = {
        "model": str(model),
        "dtype": "bfloat16",
        "max_model_len": 512,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 1,
        "hf_overrides": {"head_dtype": "float32"},
        "seed": 1,
        "max_num_seqs": batch,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
    }
    if machine.on_gpu:
        args |= {"gpu_memory_utilization": share, "enable_sleep_mode": True}
    else:
        args |= {
            key: value
            for key, value in cpu_engine_args(Vllm(kv_cache_mib=64)).items()
            if key != "in_process"
        }
    return LLM(**(args | more))


def runner_of(llm: Any) -> Any:
    """vLLM's model runner, which is in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def names(llm: Any) -> dict[str, Any]:
    """What of vLLM this machine runs."""
    runner = runner_of(llm)
    layers = [module for module in runner.get_model().modules() if hasattr(module, "attn_backend")]
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    libraries = {Path(file).name for file in mapped if "/vllm/" in file and ".so" in file}
    return {
        "runner": type(runner).__module__,
        "extensions": sorted(libraries),
        "attention": layers[0].attn_backend.get_name(),
        "attention_class": type(layers[0].impl).__name__,
        "flash_attention_version": getattr(layers[0].impl, "vllm_flash_attn_version", None),
    }


def _params(length: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=length, logprobs=0, temperature=1.0, seed=7, ignore_eos=True)


def _generate(
    llm: Any, prompts: Sequence[Any], params: Any
) -> tuple[list[list[int]], float, float]:
    """Tokens, seconds, tokens a second."""
    started = time.monotonic()
    tokens = [
        list(output.outputs[0].token_ids)
        for output in llm.generate(prompts, params, use_tqdm=False)
    ]
    seconds = _since(started)
    return tokens, seconds, sum(map(len, tokens)) / seconds


def _sleep(machine: Machine, llm: Any, level: int, reload: bool = True) -> dict[str, float | None]:
    """Seconds and GiB of the device in use, asleep and while only the weights are awake."""
    started = time.monotonic()
    llm.sleep(level=level)
    found: dict[str, float | None] = {
        "sleep_seconds": _since(started),
        "gib_asleep": _used(machine),
    }
    started = time.monotonic()
    llm.wake_up(tags=["weights"])
    found |= {"wake_weights_seconds": _since(started), "gib_weights_awake": _used(machine)}
    if level == 2 and reload:
        started = time.monotonic()
        llm.collective_rpc("reload_weights")
        found["reload_seconds"] = _since(started)
    started = time.monotonic()
    llm.wake_up(tags=["kv_cache"])
    return {**found, "wake_cache_seconds": _since(started), "gib_awake": _used(machine)}


def _used(machine: Machine) -> float | None:
    """GiB of the whole device; None on a CPU."""
    if not machine.on_gpu:
        return None
    free, total = torch.cuda.mem_get_info(machine.device)
    return (total - free) / _GIB


def _since(started: float) -> float:
    return time.monotonic() - started


# ---- size


def of_7b(machine: Machine) -> dict:
    """Qwen2.5-7B's shape with made-up weights: 256, 512 and 1,024 requests, graphs as vLLM captures
    them by itself."""
    return _of_7b(machine)


def of_7b_graphs_to_1024(machine: Machine) -> dict:
    """The same with graphs up to 1,024 requests, as many as a run's engine batches."""
    machine.need_gpu("an engine with CUDA graphs")
    return _of_7b(machine, compilation_config={"max_cudagraph_capture_size": 1024})


def _of_7b(machine: Machine, **more: Any) -> dict:
    sizes, length = ((256, 512, 1024), 128) if machine.on_gpu else ((4, 8, 16), 8)
    before, started = _used(machine), time.monotonic()
    with Runs.open(machine, "of_7b") as runs:
        model = make_config(runs.folder / "random", SEVEN_B if machine.on_gpu else TINY)
        llm = start(
            machine,
            model,
            share=0.5,
            batch=max(sizes),
            load_format="dummy",
            enforce_eager=not machine.on_gpu,
            **more,
        )
        found: dict[str, Any] = {
            "start_seconds": _since(started),
            **names(llm),
            "gib_before": before,
        }
        found |= {"gib_awake": _used(machine), "capture_sizes": _capture_sizes(llm)}
        params = _params(length)
        for size in sizes:
            prompts = [
                {"prompt_token_ids": tokens} for tokens in itertools.islice(_prompts(), size)
            ]
            _generate(llm, prompts, _params(2))  # compiles what this size needs
            tokens, seconds, rate = _generate(llm, prompts, params)
            wrong = [len(each) for each in tokens if len(each) != length]
            if wrong:
                raise AssertionError(
                    f"of {size} requests for {length} tokens, {len(wrong)} got others: {wrong[:5]}"
                )
            found[f"{size} requests"] = {"seconds": seconds, "tokens_per_second": rate}
        found |= {
            f"sleep_level_{level}": _sleep(machine, llm, level, reload=False) for level in (1, 2)
        }
    return report(machine, found, ["CUDA graphs", "inductor"])


def _prompts() -> Any:
    """Different ones of 16 tokens."""
    return ([5 + (7 * number + place) % 199 for place in range(16)] for number in itertools.count())


def _capture_sizes(llm: Any) -> list[int]:
    """The smallest and the largest batch that has a graph; empty: none has."""
    sizes = sorted(llm.llm_engine.vllm_config.compilation_config.cudagraph_capture_sizes or [])
    return [sizes[0], sizes[-1]] if sizes else []
