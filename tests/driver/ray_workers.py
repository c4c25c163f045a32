"""How vLLM starts the workers of an engine with several GPUs (RayExecutorV2), without vLLM and
without GPUs.

vLLM's engine is a process that the engine's actor spawns. It joins Ray as a driver of its own, with
the runtime environment of the actor that spawned it, and starts an actor for each worker with a
copy of that environment (vllm 0.32.0 engine/arg_utils.py:2319, v1/executor/ray_utils.py:570,
v1/executor/ray_executor_v2.py:261).
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import sys
from typing import Any

import ray

from tests.patience import PATIENCE_S


def describe() -> dict[str, Any]:
    """What a process of ours must have: the environment, and the patches, which the set-up hook
    brings."""
    finders = [type(finder).__module__ for finder in sys.meta_path]
    return {
        "environment": dict(os.environ),
        "is_patched": "openrlhf_ext.patches.import_hooks" in finders,
    }


class Worker:
    def describe(self) -> dict[str, Any]:
        return describe()


def engine_process(runtime_env: Any, answers: Any) -> None:
    """vLLM's EngineCore: its ``ray.init`` and a worker."""
    ray.init(address=None, runtime_env=runtime_env)
    inherited = copy.deepcopy(dict(runtime_env))
    inherited.setdefault("env_vars", {})["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
    worker = ray.remote(Worker).options(num_cpus=0, runtime_env=inherited).remote()
    answers.put(ray.get(worker.describe.remote(), timeout=PATIENCE_S))
    ray.shutdown()


class Engine:
    """The rollout actor."""

    def describe(self) -> dict[str, Any]:
        return describe()

    def describe_worker(self) -> dict[str, Any]:
        """What a worker of this engine is."""
        context = ray.get_runtime_context()
        os.environ["RAY_ADDRESS"] = context.gcs_address
        spawn = multiprocessing.get_context("spawn")
        answers = spawn.Queue()
        process = spawn.Process(target=engine_process, args=(context.runtime_env, answers))
        process.start()
        try:
            return answers.get(timeout=PATIENCE_S)
        finally:
            process.join(PATIENCE_S)
            process.kill()
