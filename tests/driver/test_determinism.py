"""What ``train.full_determinism_enable`` reaches: processes of engines, of their workers, of the
policy's ranks."""

from __future__ import annotations

import os

import pytest
import ray

from openrlhf_ext.config import load_config
from openrlhf_ext.driver.cluster import RaySession
from openrlhf_ext.driver.processes import fp8_env
from openrlhf_ext.driver.settings import worker_env
from openrlhf_ext.rollout.launch import engine_env
from tests.driver.ray_workers import Engine
from tests.e2e.jobs import Task
from tests.patience import PATIENCE_S

BATCH_INVARIANT, DETERMINISTIC = "VLLM_BATCH_INVARIANT", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Task:
    return Task.make(tmp_path_factory.mktemp("run"))


def test_engines_on_gpus_alone_are_batch_invariant(task):
    """vLLM's kernels for it are Triton's: on CPU the first log-softmax would raise."""
    path = str(task.folder / "policy")
    assert engine_env(use_gpu=True, model_path=path, batch_invariant=True)[BATCH_INVARIANT] == "1"
    assert BATCH_INVARIANT not in engine_env(use_gpu=False, model_path=path, batch_invariant=True)
    assert BATCH_INVARIANT not in engine_env(use_gpu=True, model_path=path, batch_invariant=False)
    assert DETERMINISTIC not in worker_env(load_config(task.options("out")))


def test_the_settings_reach_every_process(task):
    """An engine's workers are actors of another driver, vLLM's engine process: they inherit all
    that the engine has."""
    config = load_config([*task.options("out"), "--train.full_determinism_enable"])
    invariant = config.train.full_determinism_enable
    environment = engine_env(use_gpu=True, model_path="", batch_invariant=invariant) | fp8_env(True)
    with RaySession(policy_ranks=1, engines=1, env=worker_env(config), verbose=False):
        rank = ray.remote(Engine).options(num_cpus=1).remote()
        engine = (
            ray.remote(Engine).options(num_cpus=1, runtime_env={"env_vars": environment}).remote()
        )
        calls = [rank.describe.remote(), engine.describe.remote(), engine.describe_worker.remote()]
        of_rank, of_engine, of_worker = ray.get(calls, timeout=PATIENCE_S)
    assert of_rank["environment"][DETERMINISTIC] == "0"
    assert BATCH_INVARIANT not in of_rank["environment"]
    path = environment.pop("PATH")
    for process in (of_engine, of_worker):
        assert process["environment"].items() >= environment.items()
        assert process["environment"]["PATH"].endswith(os.path.expandvars(path))
        assert process["environment"]["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
        assert process["is_patched"], "the set-up hook ran"
