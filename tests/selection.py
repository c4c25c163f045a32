"""Leaves out tests that have passed on the same code before.

Usage, as ``tests/run.sh`` calls it::

    python -m tests.selection         # prints pytest's arguments that leave out what has passed
    python -m tests.selection --now   # prints what tests/passed.json says once all has passed

Much of the suite's time goes to the tests of ``CHOSEN``: whole jobs that differ from another one in
one option, rehearsals of the kit for GPUs, and programs that users do not start. Each of them runs
if a file that it reaches has changed since it last passed. A test reaches the files that it
imports, those whose path or module it mentions, and what these reach in turn. ``tests/passed.json``
has a digest of these files for each test of ``CHOSEN``: commit it with the code on which everything
has passed.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from benchmarks.record import meaning

ROOT = Path(__file__).resolve().parents[1]
PASSED = ROOT / "tests/passed.json"
CHOSEN: tuple[str, ...] = (
    "tests/benchmarks/",
    "tests/cli/test_chaos.py::test_the_toy_holds_against_an_engine_that_dies_and_a_rank_that_hangs",
    "tests/cli/test_convert.py::test_a_mixtures_experts_are_dealt_on_the_way",
    "tests/cli/test_convert.py::test_a_sharded_bf16_checkpoint_goes_in_and_out_unchanged",
    "tests/cli/test_evaluate.py",
    "tests/e2e/test_code.py",
    "tests/e2e/test_earlier_release.py",
    "tests/e2e/test_elastic.py",
    "tests/e2e/test_fp8.py",
    "tests/e2e/test_guide.py",
    "tests/e2e/test_lora.py",
    "tests/e2e/test_mixture.py",
    "tests/e2e/test_modes.py",
    "tests/e2e/test_own_state.py",
    "tests/e2e/test_streaming.py",
    "tests/e2e/test_walkthrough.py",
    "tests/fp8/test_quantize.py",
    "tests/gpu/",
    "tests/megatron/fp8/test_emulated.py",
    "tests/megatron/layers/test_lora.py",
    "tests/patches/test_megatron_cpu.py",
    "tests/patches/test_vllm_moe.py",
    "tests/planning/test_memory.py",
    "tests/rollout/test_adapters.py",
    "tests/rollout/test_families.py",
    "tests/rollout/test_fp8.py",
    "tests/rollout/test_held_weights.py",
    "tests/rollout/test_long_run.py",
    "tests/rollout/test_mixture.py",
)
"""Folders, files, and tests: beginnings of pytest's node IDs."""

EVERY_TEST = ("tests/conftest.py", "requirements")
"""Files and folders that every test depends on."""

_FOLDERS = ("openrlhf_ext", "patches", "benchmarks", "tests", "examples", "configs", "requirements")
_CODE = {".py", ".sh", ".yaml", ".toml"}
_DATA = {".lock", ".json", ".jsonl", ".txt"}  # digests have them; nothing is reached from them
_NAME = re.compile(r"[A-Za-z_][\w./-]*\w")
_RUN = re.compile(r"openrlhf_ext(\.\w+)+\.?|\w+\.py")
_LISTS = re.compile(r"\bimport_module\b|\biter_modules\b")  # any file of the folder may be imported
_COMMAND = re.compile(r"\bopenrlhf-ext\b|^openrlhf_ext$|-m openrlhf_ext\b", re.MULTILINE)


_meaning = cache(meaning)


def left_out() -> list[str]:
    """The tests of ``CHOSEN`` whose digest is the one that they last passed with."""
    passed = json.loads(PASSED.read_text())
    return [test for test in CHOSEN if passed.get(test) == digest(test)]


def digest(test: str) -> str:
    """Of the meaning of all files that a test reaches."""
    found = hashlib.sha256()
    for file in sorted(reached(test)):
        found.update(f"{file.relative_to(ROOT)}\0".encode())
        found.update(_meaning(file))
    return found.hexdigest()[:16]


def reached(test: str) -> set[Path]:
    """Files that a test of ``CHOSEN`` depends on.

    Raises:
        FileNotFoundError: there is no such test file.
    """
    path = ROOT / test.split("::")[0]
    if not path.exists():
        raise FileNotFoundError(f"tests/selection.py names {test}, which does not exist")
    folder = path if path.is_dir() else path.parent
    helpers = (file for file in folder.glob("*.py") if not file.name.startswith("test_"))
    waiting = [*_files(path), *helpers]
    for name in EVERY_TEST:
        waiting += _files(ROOT / name)
    found: set[Path] = set()
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += neighbors(file)
    return found


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return [file for file in path.rglob("*") if file in tracked()]


@cache
def tracked() -> frozenset[Path]:
    """Files of the checkout that digests have."""
    files = (file for folder in _FOLDERS for file in (ROOT / folder).rglob("*") if file.is_file())
    return frozenset(file for file in files if file.suffix in _CODE | _DATA) - {PASSED}


@cache
def neighbors(file: Path) -> frozenset[Path]:
    """Files that a file imports, names as a module, or, outside of the package, mentions."""
    if file.suffix in _DATA:
        return frozenset()
    packaged = file.is_relative_to(ROOT / "openrlhf_ext")
    text = file.read_text()
    found: set[Path] = set()
    if file.suffix == ".py":
        tree = ast.parse(text)
        if packaged and _LISTS.search(text):
            found.update(file.parent.glob("*.py"))
        texts = [*_texts(tree)]
        if packaged:  # help and messages mention much that does not run
            texts = [text for text in texts if _RUN.fullmatch(text)]
            found.update(each for each in file.parent.glob("*.yaml") if each in tracked())
        text = " ".join([*texts, *imports(tree)])
    for name in _NAME.findall(text):
        found.update(_modules(name) if "." in name else ())
        found.update({ROOT / name, file.parent / name, file.parent / f"{name}.py"} & tracked())
    if not packaged and _COMMAND.search(text):
        found.update({ROOT / "openrlhf_ext/__main__.py"} & tracked())
    return frozenset(found - {file})


def _texts(tree: ast.AST) -> Iterator[str]:
    """Strings of a file, without those that stand alone: they are documentation."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.value


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a file imports, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _modules(name: str) -> Iterator[Path]:
    """Files of ours that importing a dotted name runs."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        module = ROOT.joinpath(*parts[:end])
        for path in (module.with_suffix(".py"), module / "__init__.py"):
            if path in tracked():
                yield path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--now", action="store_true", help="print the record of today's code")
    if parser.parse_args().now:
        print(json.dumps({test: digest(test) for test in CHOSEN}, indent=1))
        return
    for test in left_out():
        print(f"--deselect={test}")


if __name__ == "__main__":
    main()
