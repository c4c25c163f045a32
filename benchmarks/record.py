"""What every record says about itself, whether it still holds, and the text that is made from it.

    python benchmarks/record.py                  # which records are older than what they measure
    python benchmarks/record.py --pages          # writes what stands between the marks of README
    and docs anew

A record in ``benchmarks/results`` has ``measures``: the files of MEASURES that it is about, each
with a digest of what it was when it was measured. It holds while the files are the same. Where one
has changed, the numbers are those of another commit, and the text that is made from the record says
so, until the benchmark is run again: no word extends a record. ``tests/test_records.py`` holds the
text, and that no measured number of README and docs/performance.md stands outside of it.

A digest that is null was never recorded. Where a benchmark was run again in part, a file has the
digests of all parts.

A record whose program was removed has ``removed_program``: the program's path, the last commit that
has it, and the texts that the program made for the pages. Such a record stays as measured: nobody
can renew it, so no digest is compared and MEASURES does not name it.
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
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_STEP = (
    "driver/loop.py",
    "driver/experience.py",
    "driver/rollouts.py",
    "megatron/policy.py",
    "megatron/step",
    "head",
    "ranks/policy.py",
    "rollout/engine.py",
    "rollout/response.py",
    "rollout/sync",
)
_TOY = ("configs/quickstart.yaml", "examples/python/toy_policy.py", "examples/python/toy_task.py")
# record -> what its numbers depend on
MEASURES: dict[str, tuple[str, ...]] = {
    "algorithms.json": ("openrlhf_ext/algorithms",),
    "curves_cpu.json": (
        *_TOY,
        "configs/real_model.yaml",
        "examples/python/gym_task.py",
        "examples/python/reward_gsm8k.py",
        "openrlhf_ext/run/corridor.py",
    ),
    "end_to_end_cpu.json": (
        *_TOY,
        *(f"openrlhf_ext/{part}" for part in _STEP),
        *(
            f"benchmarks/end_to_end_{name}"
            for name in ("arithmetic.py", "number.py", "reward.py", "trl.py", "trl.lock")
        ),
    ),
    "exact_cpu.json": (
        "openrlhf_ext/exact",
        "openrlhf_ext/megatron/layers",
        "openrlhf_ext/head",
        "tests/exact/sides.py",
    ),
    "faults_cpu.json": (
        "openrlhf_ext/tools/chaos",
        "openrlhf_ext/driver/guard.py",
        "openrlhf_ext/driver/engines.py",
        "openrlhf_ext/run/checkpoints.py",
    ),
    "fp8_study_cpu.json": ("openrlhf_ext/fp8", "openrlhf_ext/megatron/layers"),
    "gpu_h200.json": (
        "openrlhf_ext/head",
        "openrlhf_ext/fp8",
        "openrlhf_ext/megatron/model",
        "openrlhf_ext/rollout/sync/cuda_ipc.py",
    ),
    "hybrid_cpu.json": (
        *_TOY,
        "openrlhf_ext/delta_rule.py",
        "openrlhf_ext/megatron/attentions",
        "openrlhf_ext/megatron/model/delta_layer.py",
        "patches/vllm_gdn.py",
    ),
    "plan_cpu.json": ("openrlhf_ext/planning", "benchmarks/published_steps.json"),
    "quickstart_cpu.json": (*_TOY, *(f"openrlhf_ext/{part}" for part in _STEP)),
    "real_model.json": (
        "configs/real_model.yaml",
        "examples/python/gym_task.py",
        "examples/python/reward_gsm8k.py",
    ),
    "silent_faults_cpu.json": (
        "benchmarks/silent",
        "openrlhf_ext/run/corridor.py",
        "openrlhf_ext/driver/description.py",
        "openrlhf_ext/rollout/sync",
        "openrlhf_ext/ranks/movement.py",
        "openrlhf_ext/sft/gauges.py",
    ),
}
# <!-- begin: quickstart.text -->: what benchmarks/quickstart.py has under "text" in its TEXTS;
# record.probe_cpu: only the state of probe_cpu.json, for text beside it that is written by hand
REGION = re.compile(r"(<!-- begin: (\w+)\.(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
COMMIT = re.compile(r"([0-9a-f]{7,40})(-dirty)?\b")
_LOADED: list[str] = []


def environment(*packages: str) -> dict[str, Any]:
    """What a number needs to be repeated: machine, load, commit (marked if the work tree differs),
    versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.split(":", 1)[1].strip() for line in lines if "model name" in line),
        platform.processor(),
    )
    return {
        "device": model,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
    }


def commit() -> str:
    """From git, or from the file COMMIT that a copy of the checkout without git has."""
    if (ROOT / "COMMIT").exists():
        return (ROOT / "COMMIT").read_text().strip()
    return _git("rev-parse", "--short=12", "HEAD") + (
        "-dirty" if _git("status", "--porcelain") else ""
    )


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.strip()


def digests(paths: Iterable[str]) -> dict[str, str]:
    """Of files, or of all files of folders: path from the checkout -> digest of what they mean,
    without comments.

    Raises:
        FileNotFoundError: there is no such file or folder.
    """
    return {path: _digest(ROOT / path) for path in paths}


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    files = sorted(
        file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts
    )
    for file in files if path.is_dir() else [path]:
        found.update(meaning(file))
    return found.hexdigest()[:12]


def meaning(file: Path) -> bytes:
    """A file's content; of Python without comments, documentation, and layout."""
    if file.suffix != ".py":
        return file.read_bytes()
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        # strings that stand alone are documentation: of functions and classes, and of fields
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = None
    return ast.dump(tree).encode()


def unlike(name: str, record: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Files that a record measures: those that have changed since, and those of which it has no
    digest."""
    known = {path: None for path in MEASURES[name]} | record["measures"]
    then = {
        path: digest if isinstance(digest, list) else [digest] for path, digest in known.items()
    }
    unknown = [path for path, each in then.items() if None in each]
    now = {path: _digest(ROOT / path) if (ROOT / path).exists() else "" for path in then}
    return [path for path in then if path not in unknown and then[path] != [now[path]]], unknown


def write(path: Path, found: dict[str, Any], kept: bool = False) -> None:
    """Writes a record that was just made, with what it measures if it is one of the committed ones.

    Args:
        path: of the record.
        found: its content.
        kept: parts of it are those of the file that is there, and so are their digests.
    """
    if path.name in MEASURES:
        measures: dict[str, Any] = digests(MEASURES[path.name])
        if kept and path.exists():
            known = json.loads(path.read_text()).get("measures", {})
            measures = {file: _both(known.get(file), digest) for file, digest in measures.items()}
        found = found | {"measures": measures}
    path.write_text(json.dumps(found, indent=1) + "\n")


def _both(then: str | list[str | None] | None, now: str) -> str | list[str | None]:
    digests_then = then if isinstance(then, list) else [then]
    return now if digests_then == [now] else [*(each for each in digests_then if each != now), now]


def load(name: str) -> dict[str, Any]:
    """A record of ``benchmarks/results``; the text that is made from it says whether it holds."""
    _LOADED.append(name)
    return json.loads((RESULTS / name).read_text())


def state(name: str) -> str:
    """One line: where a record was measured, and what has changed since."""
    record = load(name)
    at = " (".join(
        filter(None, [", ".join(f"`{each}`" for each in commits(record)), _days(record)])
    )
    at += ")" * ("(" in at)
    if removed := record.get("removed_program"):
        return wrapped(
            f"Measured by `{removed['path']}` at commit {at}. The program was removed after commit "
            f"`{removed['last_commit']}`; the record stays as measured, and the code may have changed "
            "since."
        )
    text = [f"Measured at commit {at}."]
    changed, unknown = unlike(name, record)
    if changed:
        text.append(f"Since then {_some(changed)} changed.")
    if unknown:
        text.append(f"The record has no digest of {_some(unknown)}.")
    if changed or unknown:
        commit_s = "those commits" if len(commits(record)) > 1 else "that commit"
        text.append(f"The numbers describe {commit_s}.")
    return wrapped(" ".join(text))


def _some(paths: list[str]) -> str:
    names = [f"`{path.removeprefix('openrlhf_ext/')}`" for path in paths[:2]]
    more = len(paths) - 2
    if more > 0:
        return ", ".join(names) + f", and {more} more"
    return " and ".join(names)


def commits(record: dict[str, Any]) -> list[str]:
    """All that the record names, each once, in its order."""
    found = [COMMIT.match(text) for text in _named(record, ("commit", "commits"))]
    return list(dict.fromkeys(match[1][:12] + (match[2] or "") for match in found if match))


def _days(record: dict[str, Any]) -> str:
    days = sorted({text[:10] for text in _named(record, ("date", "started"))})
    return " to ".join(dict.fromkeys([days[0], days[-1]])) if days else ""


def _named(part: Any, keys: tuple[str, ...]) -> Iterable[str]:
    """Texts under these keys, wherever they stand."""
    if isinstance(part, list):
        for each in part:
            yield from _named(each, keys)
    elif isinstance(part, dict):
        for key, value in part.items():
            if key in keys:
                yield from (
                    text
                    for text in (value if isinstance(value, list) else [value])
                    if isinstance(text, str)
                )
            yield from _named(value, keys)


def wrapped(text: str) -> str:
    """Markdown of several lines as paragraphs and list items of the width that the pages have."""
    return "\n".join(
        textwrap.fill(
            line,
            130,
            subsequent_indent="  " * line.startswith("- "),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in text.splitlines()
    )


def filled(page: str) -> str:
    """A page with every region as its benchmark writes it, and the state of the records that it is
    made from."""
    return REGION.sub(lambda region: f"{region[1]}{_text(region[2], region[3])}\n{region[4]}", page)


def write_pages() -> None:
    """Writes every region of README and docs anew."""
    for page in PAGES:
        page.write_text(filled(page.read_text()))


def _text(program: str, name: str) -> str:
    text, names = _made(program, name)
    return "\n\n".join([*filter(None, [text]), *map(state, names)])


def _made(program: str, name: str) -> tuple[str, list[str]]:
    """The text of a region and the records that were read for it."""
    if program == "record":
        return "", [f"{name}.json"]
    if not (ROOT / f"benchmarks/{program}.py").exists():
        return _text_of_removed(program, name)
    _LOADED.clear()
    text = importlib.import_module(f"benchmarks.{program}").TEXTS[name]()
    if not _LOADED:
        raise ValueError(f"benchmarks/{program}.py: TEXTS[{name!r}] reads no record by record.load")
    return text, list(dict.fromkeys(_LOADED))


def _text_of_removed(program: str, name: str) -> tuple[str, list[str]]:
    for path in sorted(RESULTS.glob("*.json")):
        removed = json.loads(path.read_text()).get("removed_program", {})
        if removed.get("path") == f"benchmarks/{program}.py" and name in removed["texts"]:
            return removed["texts"][name], [path.name]
    raise ValueError(f"no program and no record has the text {name!r} of benchmarks/{program}.py")


def main() -> int:
    """Lists, or writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pages", action="store_true", help="write README and docs")
    if parser.parse_args().pages:
        write_pages()
    names = [name for name in MEASURES if (RESULTS / name).exists()]
    old = {name: found for name in names if any(found := unlike(name, load(name)))}
    for name, (changed, unknown) in old.items():
        said = [f"changed since: {', '.join(changed)}"] * bool(changed)
        said += [f"no digest recorded: {', '.join(unknown)}"] * bool(unknown)
        print(f"{name}: {'; '.join(said)}")
    return 1 if old else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from benchmarks.record import main as of_the_module  # the benchmarks read records by it

    sys.exit(of_the_module())
