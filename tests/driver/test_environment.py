"""What libraries find in their environment on GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from openrlhf_ext import fp8 as formats
from openrlhf_ext.config import load_config
from openrlhf_ext.driver.processes import fp8_env
from openrlhf_ext.driver.settings import worker_env
from openrlhf_ext.patches import environment
from openrlhf_ext.rollout.launch import engine_env
from tests.e2e.jobs import Task

INCLUDE = "NVTE_CUDA_INCLUDE_DIR"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """NVIDIA's wheels of CUDA 13, on a machine without a toolkit."""
    folder = tmp_path / "nvidia" / "cu13"
    (folder / "include").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(formats, "_USUAL", tmp_path / "absent")
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv(INCLUDE, raising=False)
    return folder


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return Task.make(tmp_path)


def test_an_error_of_one_nccl_group_is_no_reason_to_end_processes(task: Task) -> None:
    """Engines inherit it, as all that is in the environment of the run's workers
    (test_determinism)."""
    assert worker_env(load_config(task.options("out")))["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"


def test_transformer_engine_finds_the_headers_it_compiles_with(
    task: Task, cuda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp8 = load_config([*task.options("out"), "--fp8.enable", "--megatron.param_dtype", "bf16"])
    assert worker_env(fp8)[INCLUDE] == str(cuda / "include")
    assert "CUDA_HOME" not in worker_env(fp8), (
        "by that it would load the toolkit's libraries instead of torch's"
    )
    monkeypatch.setenv(INCLUDE, "/own")
    assert worker_env(fp8)[INCLUDE] == "/own"
    assert INCLUDE not in worker_env(load_config(task.options("out")))


def test_the_checks_for_a_gpu_set_it_too(cuda: Path) -> None:
    command = f"source {ROOT}/tests/gpu/environment.sh; echo ${INCLUDE}"
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHON": sys.executable,
        "PYTHONPATH": str(cuda.parents[1]),
    }
    answer = subprocess.run(
        ["bash", "-c", command, "run.sh"], env=environment, capture_output=True, text=True
    )
    assert answer.stdout.strip() == str(cuda / "include"), answer.stderr


def test_deep_gemm_finds_a_compiler(
    cuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = fp8_env(use_gpu=True)
    assert environment["CUDA_HOME"] == str(cuda)
    assert environment["PATH"] == f"{Path(sys.executable).parent}:${{PATH}}"
    assert environment["VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER"] == "0"
    assert engine_env(use_gpu=True, model_path="")["CUDA_DEVICE_MAX_CONNECTIONS"] == "8", (
        "not the ranks' 1"
    )
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in engine_env(use_gpu=False, model_path="")
    assert not {"CUDA_HOME", "PATH"} & (
        engine_env(use_gpu=True, model_path="").keys() | fp8_env(use_gpu=False).keys()
    )
    monkeypatch.setenv("CUDA_HOME", "/own")
    assert fp8_env(use_gpu=True)["CUDA_HOME"] == "/own"
    monkeypatch.delenv("CUDA_HOME")
    compiler = tmp_path / "bin" / "nvcc"
    compiler.parent.mkdir()
    compiler.touch(0o755)
    monkeypatch.setenv("PATH", str(compiler.parent))
    assert "CUDA_HOME" not in fp8_env(use_gpu=True)


def test_gpus_are_named_by_nvml_and_cuda_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one alone is shown to this process."""
    asked = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda index: ("NVIDIA H100 80GB HBM3", "NVIDIA H200")[index],
    )
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA was started"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "_get_nvml_device_index", lambda index: index + 1)
    monkeypatch.setattr(environment, "has_module", lambda name: True)
    monkeypatch.setitem(sys.modules, "pynvml", asked)
    assert environment.gpu_names() == ["NVIDIA H200"] == environment.machine()["hardware"]["gpus"]
    monkeypatch.setattr(environment, "has_module", lambda name: False)
    assert "nvidia-ml-py is not installed" in environment.gpu_names()[0]
