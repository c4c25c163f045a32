"""The Dockerfile is linted, and what it names is there; nobody here can build it
(docs/status.md)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
LINES = TEXT.replace("\\\n", " ").splitlines()


def values(instruction: str) -> list[str]:
    return [line.partition(" ")[2] for line in LINES if line.startswith(f"{instruction} ")]


def test_hadolint_finds_nothing() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [linter, ROOT / "Dockerfile"], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout


def test_the_image_is_pinned_has_the_drivers_cuda_and_ends_as_a_user_without_rights() -> None:
    (base,) = values("FROM")
    cuda = re.fullmatch(r"nvidia/cuda:(\d+)\.\d+\.\d+-base-ubuntu24\.04", base)
    toolkit = re.search(r"^cuda-toolkit==(\d+)", (ROOT / "requirements/gpu.lock").read_text(), re.M)
    assert cuda and toolkit and cuda[1] == toolkit[1]
    assert values("USER") == ["1001"] and LINES.index("USER 1001") > LINES.index(
        "COPY --chown=trainer . ."
    )
    assert "useradd --create-home --uid 1001 trainer" in values("RUN")[0]


def test_what_it_runs_exists_and_secrets_have_no_place() -> None:
    script = ROOT / "examples/scripts/setup_env.sh"
    (install,) = [run for run in values("RUN") if "setup_env.sh gpu" in run]
    assert "examples/scripts/setup_env.sh" in install
    names = re.findall(r"OPENRLHF_EXT_\w+", TEXT)
    assert len(names) == 2 and all(f"${{{name}:-" in script.read_text() for name in names)
    assert "openrlhf-ext = openrlhf_ext.cli.main:main" in (ROOT / "setup.py").read_text()
    assert values("ENTRYPOINT") == ['["openrlhf-ext"]'] and values("CMD") == ['["doctor"]']
    assert {".git", ".venv", "runs"} <= set((ROOT / ".dockerignore").read_text().split())
    assert not re.search(r"(?i)token|passw|secret|api_key", TEXT)
