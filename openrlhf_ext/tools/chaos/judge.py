"""Whether a disturbed run came to what it must come to; each fault of it is a sentence."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from openrlhf_ext.tools.chaos.watch import REMOVED, is_evaluation, read_records

# of an undisturbed run: they must come back equal; the rest of a record measures time, memory and
# the machine
EXACT = (
    "reward/mean",
    "accuracy/mean",
    "response/length_mean",
    "tokens/generated",
    "prompts/consumed",
    "lr",
    "loss/policy",
    "grad_norm",
    "entropy/mean",
    "eval/accuracy",
    "eval/reward_mean",
    "loss/sft",
    "eval/loss",
)
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)(?s:.{0,1500})")
_NUMBER = re.compile(r"[0-9a-f]{6,}|\d+")


def outcome(undisturbed: Path, folder: Path, exact: bool) -> list[str]:
    """What is wrong with the records and the weights of a run that has ended; ``exact``: they must
    be those of the undisturbed one to the last bit."""
    want, got = read_records(undisturbed / "run/metrics.jsonl"), _all_records(folder)
    found = (
        [f"metrics.jsonl has the steps {_steps(got)}, not {_steps(want)}"]
        if _steps(got) != _steps(want)
        else []
    )
    weights = [sorted((path / "run").glob("*.safetensors")) for path in (undisturbed, folder)]
    if [path.name for path in weights[0]] != [path.name for path in weights[1]]:
        return [*found, "the final weights are missing"]
    if exact and not found:
        for name in EXACT:
            if differ := [
                b["step"] for a, b in zip(want, got, strict=True) if a.get(name) != b.get(name)
            ]:
                found.append(f"{name} is another one from step {differ[0]} on")
        for a, b in zip(*weights, strict=True):
            tensors, others = load_file(a), load_file(b)
            differ = [
                name
                for name in tensors
                if name not in others or not tensors[name].equal(others[name])
            ]
            found += (
                [f"{len(differ)} of {len(tensors)} tensors of the final weights differ"]
                if differ
                else []
            )
    return found


def _all_records(folder: Path) -> list[dict[str, Any]]:
    """Of a run whose folder was removed in its course, those that it went on from, too."""
    own = read_records(folder / "run/metrics.jsonl")
    first = min(((r["step"], is_evaluation(r)) for r in own), default=(0, False))
    removed = read_records(folder / REMOVED / "metrics.jsonl")
    return [*(r for r in removed if (r["step"], is_evaluation(r)) < first), *own]


def _steps(records: Sequence[Mapping[str, Any]]) -> list[int]:
    return [record["step"] for record in records]


def terminal(text: str) -> list[str]:
    return [f"the terminal has a traceback: {found}" for found in _TRACEBACK.findall(text)[:1]]


def files(undisturbed: Path, folder: Path) -> list[str]:
    """Names of the temporary files that are left, other than Ray's logs, and other than those of
    the undisturbed run:
    what a process had when it was killed."""
    known = {_NUMBER.sub("N", path.name) for path in (undisturbed / "tmp").glob("*")} | {"ray"}
    return sorted(
        path.name for path in (folder / "tmp").glob("*") if _NUMBER.sub("N", path.name) not in known
    )


def ledger(folder: Path) -> list[str]:
    """What the run's ledger says of prompts that were lost or trained twice; nothing where a run
    has none."""
    if not (folder / "run/ledger.jsonl").exists():
        return []
    command = [sys.executable, "-m", "openrlhf_ext", "ledger", str(folder / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return [f"ledger: {(done.stdout + done.stderr).strip()[-500:]}"] if done.returncode else []
