"""Graded problems on the disk: one line for the settings, then one for each problem, in order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from openrlhf_ext.inputs import (
    FLAG,
    INTEGER,
    MAP,
    NUMBER,
    TEXT,
    InputError,
    Kind,
    check,
    decode,
    json_lines,
    list_of,
    map_of,
    map_with,
    or_null,
)
from openrlhf_ext.redaction import redact
from openrlhf_ext.reporting.lines import JsonLines, read_lines
from openrlhf_ext.tools.evaluate.problems import Problem, Task

_SETTINGS = "settings"
_LINE_FORMAT = 2
"""Of a problem's line; the first one had no ``extra_logs``, and did not say its number."""
_ANOTHER = "give another --out"
_COMPLETION = map_with(
    {
        "text": TEXT, "tokens": or_null(NUMBER), "truncated": or_null(FLAG), "reward": NUMBER, "score": NUMBER,
        "graded": FLAG, "extra_logs": map_of(NUMBER),
    },
    {"error": TEXT, "entropy": NUMBER, "kl": NUMBER, "vote": or_null(INTEGER)},
)  # fmt: skip
_COMPLETIONS = Kind(
    f"a list of at least one, each {_COMPLETION.words}", lambda v: list_of(_COMPLETION).holds(v) and v != []
)
_LINE = {"problem": INTEGER, "prompt": TEXT, "completions": _COMPLETIONS}
_TEXT_OR_LINE = Kind("a text", lambda v: TEXT.holds(v) or (MAP.holds(v) and TEXT.holds(v.get("text"))))
_HASHED_BYTES = 1 << 20
_HASHED_FILES = (".safetensors", ".bin", ".json", ".model", ".txt", ".jinja")


class Store:
    """The results of one problem file: those of an earlier, killed command, and those appended now; a context manager.

    Args:
        path: the JSONL file, in a folder that no other process works in; ``None`` keeps results in memory only.

    Raises:
        InputError: as :func:`read_results`.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self.results = [] if path is None else read_results(path, settings)
        self._lines = None if path is None else JsonLines(path, keep=lambda line: True)
        if self._lines is not None and path is not None and not path.stat().st_size:
            self._lines.append({_SETTINGS: dict(settings)})

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lines is not None:
            self._lines.close()

    def append(self, results: Sequence[Mapping[str, Any]]) -> None:
        for result in map(dict, results):
            self.results.append(result)
            if self._lines is not None:
                self._lines.append(result)


def read_results(path: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The graded problems that a file holds; a line that a kill cut off is left out. Changes nothing.

    Raises:
        InputError: the file holds results of other settings (which, it says), or something else than results.
    """
    text = path.read_bytes() if path.exists() else b""
    first, newline, _ = text.partition(b"\n")
    ours = json.dumps({_SETTINGS: dict(settings)})
    if not newline and ours.encode().startswith(first):  # nothing yet, or killed within the first write
        return []
    where = f"{path} does not hold results of an evaluation"
    before = check(decode(first, where), where, {_SETTINGS: MAP}, remedy=_ANOTHER)[_SETTINGS]
    pairs = [(name, before.get(name), value) for name, value in json.loads(ours)[_SETTINGS].items()]
    if different := [f"{name} was {was!r}, is {now!r}" for name, was, now in pairs if was != now]:
        raise InputError(
            f"{path} holds results of other settings ({'; '.join(different)}): give these settings, or another --out"
        )
    results = [
        check(line, f"{path}, line {number}", _LINE, {"greedy": _COMPLETION}, _ANOTHER)
        for number, line in read_lines(path)
        if number > 1
    ]
    if len({len(result["completions"]) for result in results}) > 1:
        raise InputError(f"{path}: its problems have different numbers of completions; {_ANOTHER}")
    return results


def task_settings(
    task: Task, sampling: Mapping[str, Any], model: str | None, completions: str | None, reference: str | None
) -> dict[str, Any]:
    """What the results of a task depend on, in plain data.

    Args:
        sampling: how completions are sampled: every option that changes them, the engine's included.
        completions: file of saved completions that are graded instead; then the others do not matter.
        reference: folder of the checkpoint that the model is compared with; ``None``: there is none.
    """
    settings = {
        "line_format": _LINE_FORMAT,
        "benchmark": task.name,
        "data": _file_digest(task.path),
        "problems": len(task.problems),
        "questions_and_labels": digest_of([[problem.prompt, problem.label] for problem in task.problems]),
        "reward": _file_digest(task.reward) if Path(task.reward).is_file() else redact(task.reward),
        **{f"prompt_{name}": value for name, value in asdict(task.style).items()},
    }
    if completions is not None:
        return settings | {"completions": _file_digest(completions)}
    assert model is not None
    compared = None if reference is None else _model_digest(reference)
    return settings | {"model": _model_digest(model), "reference": compared, **sampling}


def digest_of(content: Any) -> str:
    """SHA-256 of plain data."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _file_digest(path: str | Path) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _model_digest(folder: str | Path) -> str:
    """What tells two checkpoints apart: names, sizes, first and last MiB of the files of weights, tokenizer, settings.

    A training step changes every tensor, so that whole files need not be read.
    """
    digest = hashlib.sha256()
    for path in sorted(p for p in Path(folder).iterdir() if p.suffix in _HASHED_FILES and p.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HASHED_BYTES))
            file.seek(max(0, size - _HASHED_BYTES))
            digest.update(file.read(_HASHED_BYTES))
    return digest.hexdigest()


def load_completions(path: str | Path, problems: Sequence[Problem]) -> list[list[str]]:
    """Read saved completions: lines ``{"problem": 0, "completions": ["text", ...]}``, in any order.

    A line of settings, and completions that are objects with ``text``, are what :class:`Store` writes.

    Args:
        problems: what they are of; lines of later ones are left out.

    Raises:
        InputError: the file has another format, lacks problems, has different numbers of completions, or says that they
            are of other prompts.
    """
    found: dict[int, list[str]] = {}
    remedy = 'give lines {"problem": 0, "completions": ["text", ...]}'
    for number, line in json_lines(path):
        where = f"{path}, line {number}"
        row = check(decode(line, where), where, {})
        if _SETTINGS in row:
            continue
        check(row, where, {"problem": INTEGER, "completions": list_of(_TEXT_OR_LINE)}, remedy=remedy)
        place, texts = row["problem"], [each if isinstance(each, str) else each["text"] for each in row["completions"]]
        if not texts:
            raise InputError(f"{where}: problem {place} has no completions; {remedy}")
        if place in found:
            raise InputError(f"{where}: problem {place} is there twice")
        found[place] = texts
        question = problems[place].prompt if 0 <= place < len(problems) else None
        prompt = row.get("prompt")
        if isinstance(question, str) and isinstance(prompt, str) and question.strip() not in prompt:
            raise InputError(f"{where}: these are completions of {prompt!r:.80}, problem {place} is {question!r:.80}")
    if missing := [place for place in range(len(problems)) if place not in found]:
        raise InputError(
            f"{path} lacks {len(missing)} of {len(problems)} problems, the first is {missing[0]} (counted from 0)"
        )
    counts = sorted({len(found[place]) for place in range(len(problems))})
    if len(counts) > 1:
        raise InputError(f"{path} has between {counts[0]} and {counts[-1]} completions of a problem: give equally many")
    return [found[place] for place in range(len(problems))]
