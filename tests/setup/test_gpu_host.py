"""What keeps a machine with GPUs from running the stack, and how the doctor says it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from openrlhf_ext.cli import doctor, gpu_host
from openrlhf_ext.cli.gpu_host import GpuHost, examine_gpu_host

TE = {"transformer-engine": "2.11.0", "transformer-engine-torch": "2.11.0", "transformer-engine-cu13": "2.11.0"}
GOOD = GpuHost("13.0", "580.65.06", (9, 20, 0), ("/site/nvidia/cudnn/lib/libcudnn.so.9",), "/bin/gcc", "/Python.h", TE)


def test_a_good_host_has_no_problems() -> None:
    assert list(GOOD.problems()) == [] == list(replace(GOOD, transformer_engine={}).problems())
    assert list(replace(GOOD, cuda="12.8", driver="535.1", transformer_engine={}).problems()) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"driver": "570.124"}, "the driver is 570.124, torch's CUDA 13.0 needs 580 or newer"),
        ({"driver": None}, "nvidia-smi does not tell the driver's version"),
        ({"cudnn": (9, 17, 1)}, "cuDNN 9.17.1 is loaded, 9.18 or newer is needed"),
        ({"cudnn_libraries": ("/a", "/b")}, "there are 2 cuDNNs (/a, /b) and TransformerEngine prefers that of"),
        ({"compiler": None}, "gcc is missing, Triton compiles a launcher with it"),
        ({"python_header": None}, "Python.h is missing"),
        ({"cuda": "12.8", "driver": "580.1"}, "must be transformer-engine-cu12 alone, as torch's CUDA is 12.8"),
        ({"transformer_engine": {**TE, "transformer-engine-cu12": "2.11.0"}}, "-cu13, transformer-engine-cu12; uninst"),
        ({"transformer_engine": {**TE, "transformer-engine-torch": "2.14.1"}}, "must be of one version, it refuses"),
        ({"transformer_engine": {k: TE[k] for k in TE if k != "transformer-engine-torch"}}, "torch is missing: Transf"),
    ],
)
def test_what_would_crash_or_lie_is_named(change: dict, says: str) -> None:
    (problem,) = replace(GOOD, **change).problems()
    assert says in problem.replace("transformer-engine-cu13, transformer-engine-cu12", "-cu13, transformer-engine-cu12")


def test_every_cudnn_that_could_be_loaded_is_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel, system = tmp_path / "nvidia/cudnn/lib/libcudnn.so.9", tmp_path / "usr/libcudnn.so.9"
    for file in (wheel, system):
        file.parent.mkdir(parents=True)
        file.touch()
    nvidia = SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr(gpu_host, "find_spec", lambda name: nvidia)
    monkeypatch.delenv("CUDNN_HOME", raising=False)
    monkeypatch.setenv("CUDNN_PATH", str(tmp_path / "nvidia/cudnn"))
    answers = {"nvidia-smi": "580.65.06\n580.65.06\n", "ldconfig": f"\tlibcudnn.so.9 (libc6,x86-64) => {system}\n"}
    monkeypatch.setattr(gpu_host, "_output", lambda command, *_: answers[command])
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91801)
    host = examine_gpu_host()
    assert host.cudnn_libraries == (str(wheel), str(system))
    assert (host.driver, host.cudnn, host.transformer_engine) == ("580.65.06", (9, 18, 1), {})


def test_the_doctor_shows_the_host_and_counts_its_problems(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(doctor, "has_cuda", lambda: True)
    monkeypatch.setattr(doctor, "examine_gpu_host", lambda: replace(GOOD, compiler=None))
    assert doctor.main([]) == 1
    text = capsys.readouterr().out
    assert "GPU host" in text and "580.65.06" in text and "gcc is missing" in text
    assert "Remedy: bash examples/scripts/setup_env.sh gpu" in text


def test_a_command_that_is_not_there_or_fails_says_nothing() -> None:
    assert gpu_host._output("no-such-command-anywhere") == "" == gpu_host._output("false")
