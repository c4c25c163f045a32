"""What keeps a machine with GPUs from running the stack, and how the doctor says it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from openrlhf_ext.cli import doctor
from openrlhf_ext.cli.doctor import GpuHost, examine_gpu_host
from openrlhf_ext.rollout.sync import cuda_ipc

TE = {
    "transformer-engine": "2.11.0",
    "transformer-engine-torch": "2.11.0",
    "transformer-engine-cu13": "2.11.0",
}
GOOD = GpuHost(
    "13.0",
    "580.65.06",
    (9, 20, 0),
    ("/site/nvidia/cudnn/lib/libcudnn.so.9",),
    "/bin/gcc",
    "/Python.h",
    TE,
)


def test_a_good_host_has_no_problems() -> None:
    assert list(GOOD.problems()) == [] == list(replace(GOOD, transformer_engine={}).problems())
    assert list(replace(GOOD, cuda="12.8", driver="535.1", transformer_engine={}).problems()) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"driver": "570.124"}, "the driver is 570.124, but torch's CUDA 13.0 needs 580 or newer"),
        ({"driver": None}, "nvidia-smi does not report the driver's version"),
        ({"cudnn": (9, 17, 1)}, "cuDNN 9.17.1 is loaded, but 9.18 or newer is needed"),
        (
            {"cudnn_libraries": ("/a", "/b")},
            "there are 2 cuDNNs (/a, /b) and a process may load a different one than",
        ),
        ({"compiler": None}, "gcc is missing, but Triton compiles a launcher with it"),
        ({"python_header": None}, "Python.h is missing"),
        (
            {"cuda": "12.8", "driver": "580.1"},
            "must be only transformer-engine-cu12, because torch's CUDA is 12.8",
        ),
        (
            {"transformer_engine": {**TE, "transformer-engine-cu12": "2.11.0"}},
            "-cu13, transformer-engine-cu12; uninst",
        ),
        (
            {"transformer_engine": {**TE, "transformer-engine-torch": "2.14.1"}},
            "must have the same version",
        ),
        ({"ptrace_scope": 2}, "ptrace_scope is 2: CUDA IPC, which sends weights"),
        (
            {"engine_error": "undefined symbol: c10"},
            "TransformerEngine cannot be imported (undefined symbol: c10)",
        ),
        (
            {"transformer_engine": {k: TE[k] for k in TE if k != "transformer-engine-torch"}},
            "torch is missing: Transf",
        ),
    ],
)
def test_what_would_crash_or_lie_is_named(change: dict, says: str) -> None:
    (problem,) = replace(GOOD, **change).problems()
    assert says in problem.replace(
        "transformer-engine-cu13, transformer-engine-cu12", "-cu13, transformer-engine-cu12"
    )


@pytest.mark.parametrize(
    ("ray", "nixl", "says"),
    [
        ("2.55.0", None, "it needs ray 2.56, got 2.55.0; it needs nixl, which is absent"),
        ("2.56.1", "1.0", "are there"),
    ],
)
def test_what_vllms_sharded_transfer_lacks_is_said(ray: str, nixl: str | None, says: str) -> None:
    found = doctor._sharded_rdt(ray, nixl)
    assert (
        says in found
        and ("sharded_rdt of vLLM", f"not used; {found}") in replace(GOOD, sharded_rdt=found).rows
    )


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of all that is looked at; holds cuDNN's wheel in nvidia/cudnn."""
    touch(tmp_path / "nvidia/cudnn/lib/libcudnn.so.9")
    nvidia = SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr(doctor, "find_spec", lambda name: nvidia)
    for name in ("CUDNN_HOME", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        doctor, "_output", lambda command, *_: "580.65.06\n580.65.06\n" * (command == "nvidia-smi")
    )
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91801)
    return tmp_path


def touch(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


def test_torch_s_own_cudnn_is_found_once(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDNN_HOME", str(machine / "nvidia/cudnn"))
    host = examine_gpu_host()
    assert host.cudnn_libraries == (str(machine / "nvidia/cudnn/lib/libcudnn.so.9"),)
    assert (host.driver, host.cudnn, host.transformer_engine) == ("580.65.06", (9, 18, 1), {})
    assert host.engine_error is None, "what is not installed is not imported"


@pytest.mark.parametrize(
    ("place", "variable"),
    [
        ("home/lib", "CUDNN_HOME=home"),
        ("loaded", "LD_LIBRARY_PATH=nowhere:loaded"),
    ],
)
def test_a_second_cudnn_is_found_wherever_a_run_looks_first(
    machine: Path, monkeypatch: pytest.MonkeyPatch, place: str, variable: str
) -> None:
    touch(machine / place / "libcudnn.so.9.13.0")
    touch(machine / place / "stubs/libcudnn.so")
    (machine / place / "libcudnn.so").symlink_to("libcudnn.so.9.13.0")
    name, value = variable.split("=")
    monkeypatch.setenv(name, ":".join(str(machine / folder) for folder in value.split(":")))
    wheel = str(machine / "nvidia/cudnn/lib/libcudnn.so.9")
    assert set(examine_gpu_host().cudnn_libraries) == {
        wheel,
        str(machine / place / "libcudnn.so.9.13.0"),
    }


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("", None),
        (
            "raise ImportError('te.so: undefined symbol: c10')",
            "ImportError: te.so: undefined symbol: c10",
        ),
        ("import os; os._exit(7)", "exit status 7"),
        ("import sys; assert 'torch' in sys.modules, 'torch comes first'", None),
        ("import time; time.sleep(600)", "not finished after 2 s"),
    ],
)
def test_an_extension_of_another_torch_is_seen_by_its_import(
    machine: Path, monkeypatch: pytest.MonkeyPatch, module: str, says: str | None
) -> None:
    touch(machine / "transformer_engine/__init__.py")
    (machine / "transformer_engine/pytorch.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", str(machine))
    monkeypatch.setattr(doctor, "_IMPORT_S", 2.0 if "sleep" in module else 60.0)
    monkeypatch.setattr(doctor, "installed_version", TE.get)
    assert examine_gpu_host().engine_error == says


def test_ptrace_scope_is_read(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc, "_PTRACE_SCOPE", machine / "ptrace_scope")
    assert examine_gpu_host().ptrace_scope == 0, "a kernel without Yama"
    (machine / "ptrace_scope").write_text("3\n")
    assert examine_gpu_host().ptrace_scope == 3
    assert list(replace(GOOD, ptrace_scope=1).problems()) == []


def test_the_doctor_shows_the_host_and_counts_its_problems(
    monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(doctor, "has_cuda", lambda: True)
    monkeypatch.setattr(doctor, "examine_gpu_host", lambda: replace(GOOD, compiler=None))
    assert doctor.main([]) == 1
    text = capsys.readouterr().out
    assert "GPU host" in text and "580.65.06" in text and "gcc is missing" in text
    assert "Remedy: bash examples/scripts/setup_env.sh gpu" in text


def test_a_command_that_is_not_there_or_fails_says_nothing() -> None:
    assert doctor._output("no-such-command-anywhere") == "" == doctor._output("false")
