"""setup.py, the lock files and the package metadata say the same."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf_ext.cli.doctor import pinned_packages
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
INSTALLED_APART = {"torch", "deepspeed"}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    assert all(len(pin) == 2 for pin in pins), f"{name}: every line must pin one version"
    return {canonical(package): version for package, version in pins}


@pytest.mark.parametrize(("extra", "lock"), [("cpu", "cpu.lock"), ("dev", "dev.lock")])
def test_extras_agree_with_the_lock_files(extra: str, lock: str) -> None:
    locked = read_lock(lock)
    pinned = {canonical(name): version for name, version in pinned_packages(extra)}
    assert pinned, "the installed metadata is out of date: pip install --no-deps -e ."
    assert {name: version for name, version in pinned.items() if name not in INSTALLED_APART} == {
        name: locked[name] for name in pinned if name not in INSTALLED_APART
    }


def test_locks_name_nothing_that_breaks_the_cpu_stack() -> None:
    breaking = {"torchvision", "torchaudio", "torchcodec", "triton", "flash-attn", "transformer-engine", "apex"}
    assert not (breaking | INSTALLED_APART) & (read_lock("cpu.lock").keys() | read_lock("dev.lock").keys())


def test_apex_of_the_public_index_is_no_dependency() -> None:
    requirements = importlib.metadata.requires("openrlhf_ext") or []
    assert not any(re.match(r"apex\b", requirement) for requirement in requirements)


def test_only_torch_and_pydantic_are_required_without_extras() -> None:
    requirements = importlib.metadata.requires("openrlhf_ext") or []
    assert [requirement for requirement in requirements if "extra ==" not in requirement] == [
        "pydantic>=2",
        "torch>=2.10",
    ]


def test_tests_are_not_packaged_and_patches_are() -> None:
    code = (
        "import setuptools, runpy; setuptools.setup = lambda **kw: print('\\n'.join(kw['packages'])); "
        "runpy.run_path('setup.py')"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    packages = result.stdout.split()
    assert "openrlhf_ext.patches" in packages and "openrlhf_ext.algorithms" in packages
    assert not [name for name in packages if name.split(".")[0] != "openrlhf_ext"]


def test_algorithms_import_with_torch_and_pydantic_only() -> None:
    code = """
import sys
ABSENT = {"ray", "vllm", "openrlhf", "megatron", "transformers", "yaml", "deepspeed"}
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import openrlhf_ext.algorithms
"""
    result = subprocess.run(
        [sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert result.returncode == 0, result.stderr
