"""requirements/lock_gpu.sh with a stub in place of both Pythons: what it asks of pip, what it makes
of the answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]

# A venv is a copy of the stub. `pip install --report FILE` gets the report prepared for the
# version, or fails with
# $STUB_CONFLICT; programs on standard input are run by a real Python.
STUB = r"""#!/usr/bin/env bash
if [[ $1 == -c ]]; then echo VERSION; exit; fi
if [[ $1 == - ]]; then exec "$STUB_PYTHON" "$@"; fi
if [[ $2 == venv ]]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; exit; fi
echo "VERSION $*" >>"$STUB_CALLS"
if [[ $* != *--report* ]]; then exit; fi
cp "${@: -1}" "$STUB_CALLS.in"
if [[ -n ${STUB_CONFLICT:-} ]]; then echo "$STUB_CONFLICT" >&2; exit 1; fi
while [[ $1 != --report ]]; do shift; done
cp "$STUB_REPORTS/VERSION.json" "$2"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    checkout = tmp_path / "my checkout"
    (checkout / "requirements").mkdir(parents=True)
    for name in ("requirements/lock_gpu.sh", "setup.py"):
        shutil.copy(ROOT / name, checkout / name)
    (checkout / "requirements/gpu.lock").write_text("as it was\n")
    for version in ("3.11", "3.12"):
        stub = tmp_path / f"python{version}"
        stub.write_text(STUB.replace("VERSION", version))
        stub.chmod(0o755)
    return checkout


def lock(
    checkout: Path, reports: dict[str, dict[str, str]], **env: str
) -> subprocess.CompletedProcess[str]:
    folder = checkout.parent
    for version, found in reports.items():
        install = [{"metadata": {"name": name, "version": pin}} for name, pin in found.items()]
        (folder / f"{version}.json").write_text(json.dumps({"install": install}))
    stubs = {
        "STUB_CALLS": str(folder / "calls"),
        "STUB_REPORTS": str(folder),
        "STUB_PYTHON": sys.executable,
    }
    return subprocess.run(
        ["bash", str(checkout / "requirements/lock_gpu.sh")],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **stubs, **env},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


SAME = {"torch": "2.13.0", "Some_Name": "1.0"}


def test_both_versions_become_one_lock(checkout: Path) -> None:
    other = {"networkx": "3.6.1", "tomli": "2.0", "setuptools": "84"}
    result = lock(
        checkout, {"3.11": SAME | other, "3.12": SAME | {"networkx": "3.7", "setuptools": "80"}}
    )
    assert result.returncode == 0, result.stderr
    lines = (checkout / "requirements/gpu.lock").read_text().splitlines()
    committed = (ROOT / "requirements/gpu.lock").read_text().splitlines()
    assert [line for line in lines if line.startswith("#")] == [
        line for line in committed if line.startswith("#")
    ]
    assert [line for line in lines if not line.startswith("#")] == [
        "deepspeed==0.19.6",
        "megatron-core==0.19.2",
        'networkx==3.6.1; python_version == "3.11"',
        'networkx==3.7; python_version == "3.12"',
        "openrlhf==0.11.2",
        "pylatexenc==2.11",
        "some-name==1.0",
        'tomli==2.0; python_version == "3.11"',
        "torch==2.13.0",
        "transformer-engine-torch==2.11.0",
    ]


def test_pip_reads_metadata_alone_and_is_asked_for_the_whole_extra(checkout: Path) -> None:
    lock(checkout, {"3.11": SAME, "3.12": SAME})
    calls = (checkout.parent / "calls").read_text().splitlines()
    resolving = [call for call in calls if "--report" in call]
    assert [call.split()[0] for call in resolving] == ["3.11", "3.12"], (
        "markers are those of the Python that runs pip"
    )
    for call in resolving:
        assert (
            "--dry-run" in call
            and "--only-binary=:all:" in call
            and "--use-feature=fast-deps" in call
        )
        assert "--platform=manylinux_2_31_x86_64" in call and "manylinux_2_32" not in call
    wanted = (checkout.parent / "calls.in").read_text().split()
    assert {
        "torch==2.13.0",
        "vllm==0.32.0",
        "ray[default]==2.60.0",
        "cuda-toolkit[nvcc,cccl]",
    } <= set(wanted)
    assert {"transformer-engine==2.11.0", "transformer-engine-cu13==2.11.0"} <= set(wanted)
    apart = ("openrlhf", "deepspeed", "pylatexenc", "megatron", "flash")
    assert not [name for name in wanted if name.startswith(apart)]
    assert {"numpy", "packaging>=24.2"} <= set(wanted), (
        "what megatron-core asks for, which pip does not see"
    )


@pytest.mark.parametrize(
    ("reports", "env", "says"),
    [
        (
            {"3.11": SAME, "3.12": SAME},
            {"STUB_CONFLICT": "ERROR: vllm 0.32.0 depends on torch==2.12"},
            "torch==2.12",
        ),
        (
            {"3.11": SAME, "3.12": {"torch": "2.13.0+cpu"}},
            {},
            "for Python 3.12 pip found builds of a local",
        ),
        (
            {},
            {"PYTHON312": "/nowhere/python"},
            "Python 3.12 is needed and '/nowhere/python' is not: set PYTHON312",
        ),
        ({}, {"PYTHON312": "python3.11"}, "Python 3.12 is needed and 'python3.11' is not"),
    ],
)
def test_a_failure_is_said_and_leaves_the_lock_alone(
    checkout: Path, reports: dict, env: dict, says: str
) -> None:
    result = lock(checkout, {"3.11": SAME, **reports}, **env)
    assert result.returncode == 1 and says in result.stderr
    assert (checkout / "requirements/gpu.lock").read_text() == "as it was\n"
