"""What every record says about itself, whether it still holds, and the text that is made from it.

    python benchmarks/record.py                  # which records are older than what they measure
    python benchmarks/record.py --pages          # writes what stands between the marks of README and docs anew
    python benchmarks/record.py --holds benchmarks/results/head_cpu.json "only messages changed since"

A record in ``benchmarks/results`` has ``measures``: the files of MEASURES that it is about, each with a digest. Where
one has changed since, the benchmark is run again, or ``still_holds`` says why its numbers are the same.
``tests/test_records.py`` holds both, and that no measured number of README and docs/performance.md stands outside of
what is made from a record.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
import os
import platform
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_STEP = ("driver/loop.py", "driver/experience.py", "driver/rollouts.py", "megatron/policy.py", "megatron/step", "head",
         "ranks/policy.py", "rollout/engine.py", "rollout/response.py", "rollout/sync")  # fmt: skip
_TOY = ("configs/quickstart.yaml", "examples/python/toy_policy.py", "examples/python/toy_task.py")
# record -> what its numbers depend on
MEASURES: dict[str, tuple[str, ...]] = {
    "adapters_cpu.json": tuple(
        f"openrlhf_ext/{part}.py" for part in ("megatron/layers/adapted", "rollout/adapters", "ranks/publishing")
    ),
    "algorithms.json": ("openrlhf_ext/algorithms",),
    "curves_cpu.json": (
        *_TOY, "configs/real_model.yaml", "examples/python/gym_task.py", "examples/python/reward_gsm8k.py",
        "openrlhf_ext/run/corridor.py",
    ),
    "end_to_end_cpu.json": (*_TOY, *(f"openrlhf_ext/{part}" for part in _STEP)),
    "engine_side_cpu.json": (
        "openrlhf_ext/rollout/scheduler.py", "openrlhf_ext/rollout/response.py", "openrlhf_ext/rewards/executor.py",
    ),
    "engine_entropies_cpu.json": (
        "openrlhf_ext/algorithms", "openrlhf_ext/rollout/worker_extension.py", "examples/python/gym_task.py",
    ),
    "faults_cpu.json": (
        "openrlhf_ext/tools/chaos", "openrlhf_ext/driver/guard.py", "openrlhf_ext/driver/engines.py",
        "openrlhf_ext/run/checkpoints.py",
    ),
    "fp8_learning_cpu.json": (
        *_TOY, "openrlhf_ext/fp8", "openrlhf_ext/megatron/layers", "openrlhf_ext/rollout/worker_extension.py",
    ),
    "fp8_study_cpu.json": ("openrlhf_ext/fp8", "openrlhf_ext/megatron/layers"),
    "gpu_h200.json": (
        "openrlhf_ext/head", "openrlhf_ext/fp8", "openrlhf_ext/megatron/model", "openrlhf_ext/rollout/sync/cuda_ipc.py",
    ),
    "graders_cpu.json": tuple(f"openrlhf_ext/rewards/{name}.py" for name in ("answers", "maths", "pool", "worker")),
    "head_cpu.json": ("openrlhf_ext/head",),
    "ledger_cpu.json": ("openrlhf_ext/run/ledger.py", "openrlhf_ext/driver/rollouts.py"),
    "lengths_cpu.json": ("openrlhf_ext/driver/rollouts.py",),
    "plan_cpu.json": ("openrlhf_ext/tools/plan", "benchmarks/published_steps.json"),
    "probe_cpu.json": (
        "openrlhf_ext/rollout/probe.py", "openrlhf_ext/megatron/model", "openrlhf_ext/megatron/built.py",
        "openrlhf_ext/megatron/step/schedule.py",
    ),
    "quickstart_cpu.json": (*_TOY, *(f"openrlhf_ext/{part}" for part in _STEP)),
    "real_model.json": ("configs/real_model.yaml", "examples/python/gym_task.py", "examples/python/reward_gsm8k.py"),
    "replay_cpu.json": (
        "openrlhf_ext/megatron/model/experts.py", "openrlhf_ext/megatron/step/batch.py",
        "openrlhf_ext/rollout/scheduler.py", "patches/vllm_moe.py",
    ),
    "replay_learning_cpu.json": (
        *_TOY, "openrlhf_ext/megatron/model/experts.py", "openrlhf_ext/megatron/step/batch.py",
        "openrlhf_ext/rollout/scheduler.py", "patches/vllm_moe.py",
    ),
    "report_cpu.json": ("openrlhf_ext/tools/report",),
    "scale_cpu.json": (
        "openrlhf_ext/driver/experience.py", "openrlhf_ext/driver/scoring.py", "openrlhf_ext/driver/rollouts.py",
        "openrlhf_ext/rollout/response.py", "openrlhf_ext/megatron/step/batch.py",
        "openrlhf_ext/megatron/step/dealing.py", "openrlhf_ext/algorithms/batch.py",
    ),
    "shared_prompts_cpu.json": (
        "openrlhf_ext/megatron/model", "openrlhf_ext/megatron/step/batch.py", "openrlhf_ext/megatron/step/dealing.py",
    ),
    "silent_faults_cpu.json": (
        "benchmarks/silent", "openrlhf_ext/run/corridor.py", "openrlhf_ext/driver/gauges.py",
        "openrlhf_ext/rollout/sync", "openrlhf_ext/ranks/movement.py", "openrlhf_ext/sft/gauges.py",
    ),
    "streaming_cpu.json": ("openrlhf_ext/driver/rollouts.py",),
    "weight_sync_cpu.json": ("openrlhf_ext/rollout/sync", "openrlhf_ext/ranks/publishing.py"),
}  # fmt: skip
# <!-- begin: quickstart.text -->: what benchmarks/quickstart.py has under "text" in its TEXTS
REGION = re.compile(r"(<!-- begin: (\w+)\.(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def status_bytes(key: str) -> int:
    """A size out of /proc/self/status: VmRSS, VmHWM (the most since it was last reset)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def environment(*packages: str) -> dict[str, Any]:
    """What a number needs to be repeated: machine, load, commit (marked if the work tree differs), versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), platform.processor())
    return {
        "device": model,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "commit": commit(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
    }


def commit() -> str:
    """From git, or from the file COMMIT that a copy of the checkout without git has."""
    if (ROOT / "COMMIT").exists():
        return (ROOT / "COMMIT").read_text().strip()
    return _git("rev-parse", "--short=12", "HEAD") + ("-dirty" if _git("status", "--porcelain") else "")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


def digests(paths: Iterable[str]) -> dict[str, str]:
    """Of files, or of all files of folders: path from the checkout -> digest of what they mean, without comments.

    Raises:
        FileNotFoundError: there is no such file or folder.
    """
    return {path: _digest(ROOT / path) for path in paths}


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    files = sorted(file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    for file in files if path.is_dir() else [path]:
        found.update(_meaning(file))
    return found.hexdigest()[:12]


def _meaning(file: Path) -> bytes:
    if file.suffix != ".py":
        return file.read_bytes()
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                node.body[0] = ast.Pass()
    return ast.dump(tree).encode()


def changed(record: dict[str, Any]) -> list[str]:
    """Files that the record measures and that have changed since, and since it was said to hold all the same."""
    known = record.get("still_holds", record)["measures"]
    return [path for path, digest in known.items() if not (ROOT / path).exists() or _digest(ROOT / path) != digest]


def write(path: Path, found: dict[str, Any]) -> None:
    """Writes a record that was just made, with what it measures if it is one of the committed ones."""
    measures = {"measures": digests(MEASURES[path.name])} if path.name in MEASURES else {}
    path.write_text(json.dumps(found | measures, indent=1) + "\n")


def holds(path: Path, why: str) -> None:
    """Writes into a record why its numbers are the same with the files as they are now, behind the reasons of earlier
    changes: one may say of what the numbers are. A reason that is there already is not repeated."""
    record = json.loads(path.read_text())
    earlier = record.get("still_holds", {"why": ""})["why"]
    reasons = earlier if why in earlier else f"{earlier.rstrip('.')}. {why}" if earlier else why
    record["still_holds"] = {"why": reasons, "measures": digests(MEASURES[path.name])}
    path.write_text(json.dumps(record, indent=1) + "\n")


def load(name: str) -> dict[str, Any]:
    """A record of ``benchmarks/results``."""
    return json.loads((RESULTS / name).read_text())


def wrapped(text: str) -> str:
    """Markdown of several lines as paragraphs and list items of the width that the pages have."""
    return "\n".join(
        textwrap.fill(line, 130, subsequent_indent="  " * line.startswith("- "), break_long_words=False,
                      break_on_hyphens=False)
        for line in text.splitlines()
    )  # fmt: skip


def filled(page: str) -> str:
    """A page with every region as its benchmark writes it."""
    return REGION.sub(lambda region: f"{region[1]}{_text(region[2], region[3])}\n{region[4]}", page)


def write_pages() -> None:
    """Writes every region of README and docs anew."""
    for page in PAGES:
        page.write_text(filled(page.read_text()))


def _text(program: str, name: str) -> str:
    return importlib.import_module(f"benchmarks.{program}").TEXTS[name]()


def main() -> int:
    """Lists, or writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", action="store_true", help="write README and docs")
    parser.add_argument("--holds", nargs=2, metavar=("RECORD", "WHY"), help="write into a record why it holds")
    arguments = parser.parse_args()
    if arguments.holds:
        holds(Path(arguments.holds[0]), arguments.holds[1])
    if arguments.pages:
        write_pages()
    old = {name: files for name in MEASURES if (files := changed(load(name)))}
    for name, files in old.items():
        print(f"{name}: {', '.join(files)} changed since")
    return 1 if old else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
