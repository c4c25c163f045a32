"""Problem files for evaluation, in a user's format or as a benchmark was published, and graded
problems on the disk."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf_ext import rewards
from openrlhf_ext.config.records import (
    TOOLS_ARE_NOT_READ,
    Records,
    Wanted,
    as_chat,
    record_fault,
    records_of,
    warn_once,
)
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
    nearest,
    or_null,
    sha256_of,
)
from openrlhf_ext.redaction import redact
from openrlhf_ext.reporting.lines import JsonLines, Writer, read_lines
from openrlhf_ext.rewards.answers import Stated, last_boxed
from openrlhf_ext.tools.evaluate.protocols import SYSTEM_PROMPTS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN_FAULTS = 5
_HASHES = re.compile(r"####[ \t]*(\S.*)\Z")
_DEGREES = re.compile(r"\^\s*(?:\\circ|\{\\circ\})\Z")
MATHS = str(Path(rewards.__file__).with_name("maths.py"))
"""The benchmarks' reward function: mathematical equality."""


class NotThisFormat(InputError):
    """A line is not of the format that it should have."""


def system_message(given: str | None) -> str | None:
    """The system message that is meant by a protocol's name or a text; None = there is none."""
    if given is None or given in SYSTEM_PROMPTS:
        return SYSTEM_PROMPTS.get(given or "")
    if len(given.split()) < 2:
        known = ", ".join(SYSTEM_PROMPTS)
        raise InputError(
            f"--system_prompt {given!r} is no protocol's name ({known}), and a message has more "
            "words"
        )
    return given


@dataclass(frozen=True)
class Problem:
    """A question as it stands in the file, or as the prompt made of it, its label, its place in the
    file, from 0."""

    index: int
    prompt: Any
    label: Any


@dataclass(frozen=True, kw_only=True)
class PromptStyle:
    """How a question becomes a prompt: a format string around it, and a chat's system message.

    Without a chat template the system message stands in front, an empty line between.
    """

    template: str | None = None
    system_prompt: str | None = None
    chat: bool = False

    def fault(self) -> str | None:
        try:
            used = (self.template or "{}").format("\0question")
        except (IndexError, KeyError, ValueError) as error:
            return (
                f"--input_template {self.template!r} is no format string with one {{}} for the "
                f"question ({type(error).__name__}: {error}); write other braces twice"
            )
        return (
            None
            if "\0question" in used
            else f"--input_template {self.template!r} has no {{}} for the question"
        )

    def prompt(self, question: Any, tokenizer: PreTrainedTokenizerBase | None) -> str:
        """The prompt of one question, ready for the tokenizer; chats given as lists of messages
        stay as they are."""
        text = (
            self.template.format(question)
            if self.template and isinstance(question, str)
            else question
        )
        if not self.chat:
            return f"{self.system_prompt}\n\n{text}" if self.system_prompt else text
        assert tokenizer is not None
        chat = as_chat(text)
        if self.system_prompt:
            chat.insert(0, {"role": "system", "content": self.system_prompt})
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


@dataclass(frozen=True)
class Task:
    """A problem file, and its reward: a Python file with ``reward_func``, or addresses of reward
    servers. ``answers``:
    where a completion states its answer; what grades by equality, and votes, see that alone."""

    name: str
    path: str
    problems: Sequence[Problem]
    reward: str
    style: PromptStyle
    answers: Stated = "any"


def load_problems(
    path: str | Path,
    input_key: str = "question",
    label_key: str = "answer",
    limit: int | None = None,
    chat: bool = False,
) -> list[Problem]:
    """The (first) problems of a user's file; with ``chat`` a question may be a list of messages.

    InputError names the first lines that are not JSON objects, lack a key or have no such question.
    """
    wanted = Wanted(input_key, label_key, chat)

    def read(row: dict[str, Any]) -> tuple[Any, Any]:
        _require_keys(row, (input_key, label_key), "--input_key, --label_key")
        if (fault := record_fault(row, wanted)) is not None:
            raise NotThisFormat(f"{fault} (--input_key, --label_key)")
        if chat and "tools" in row:
            warn_once(f"{path}: {TOOLS_ARE_NOT_READ}")
        return row[input_key], row[label_key]

    return _load(path, records_of(str(path), wanted), read, limit)


def load_benchmark(name: str, path: str | Path, limit: int | None = None) -> list[Problem]:
    """The (first) problems of a benchmark's file as it was published; labels are the bare final
    answers."""
    if name not in BENCHMARKS:
        hint = f"; did you mean {near}?" if (near := nearest(name, BENCHMARKS)) else "."
        raise InputError(
            f"there is no benchmark {name!r}{hint} Known: {', '.join(BENCHMARKS)}. Other files: "
            "--data"
        )
    try:
        return _load(path, records_of(str(path)), BENCHMARKS[name], limit)
    except InputError as error:
        raise InputError(f"benchmark {name}: {error}") from error


def _gsm8k(row: Mapping[str, Any]) -> tuple[str, str]:
    _require_keys(row, ("question", "answer"))
    if (found := _HASHES.search(_text(row, "answer").strip())) is None:
        raise NotThisFormat(
            "the solution under 'answer' does not end in '#### ' and the final answer"
        )
    return _text(row, "question"), found.group(1).replace(",", "")


def _math(row: Mapping[str, Any]) -> tuple[str, str]:
    _require_keys(row, ("problem", "solution"))
    if not (boxed := last_boxed(_text(row, "solution"))):
        raise NotThisFormat("the solution under 'solution' has no \\boxed{final answer}")
    return _text(row, "problem"), boxed


def _math500(row: Mapping[str, Any]) -> tuple[str, str]:
    _require_keys(row, ("problem", "answer"))
    return _text(row, "problem"), _text(row, "answer")


def _aime(row: Mapping[str, Any]) -> tuple[str, str]:
    """Answers are whole numbers from 0 to 999, some with leading zeros, one of 2025 in degrees."""
    question = _question(row)
    text = _DEGREES.sub("", str(row["answer"]).strip())
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) > 999:
        raise NotThisFormat(
            f"the answer must be a whole number from 0 to 999, got {row['answer']!r}"
        )
    return question, str(int(text))


def _amc(row: Mapping[str, Any]) -> tuple[str, str]:
    """Answers are whole numbers, published as floating-point ones."""
    question = _question(row)
    try:
        number = float(row["answer"])
        whole = number == int(number)
    except (TypeError, ValueError, OverflowError):
        whole = False
    if not whole:
        raise NotThisFormat(
            f"the answer must be a whole number, such as 27.0, got {row['answer']!r}"
        )
    return question, str(int(number))


BENCHMARKS: dict[str, Callable[[Mapping[str, Any]], tuple[str, str]]] = {
    "gsm8k": _gsm8k,
    "math": _math,
    "math500": _math500,
    "aime24": _aime,
    "aime25": _aime,
    "amc23": _amc,
}


def _question(row: Mapping[str, Any]) -> str:
    key = "problem" if "problem" in row else "question"
    _require_keys(row, (key, "answer"))
    return _text(row, key)


def _text(row: Mapping[str, Any], key: str) -> str:
    if not isinstance(row[key], str) or not row[key].strip():
        raise NotThisFormat(f"{key!r} must be a text, got {row[key]!r:.80}")
    return row[key]


def _require_keys(row: Mapping[str, Any], keys: tuple[str, ...], options: str = "") -> None:
    if missing := [key for key in keys if key not in row]:
        near = [found for key in missing if (found := nearest(key, row, cutoff=0.6))]
        hint = f"; did you mean {', '.join(map(repr, near))}?" if near and options else ""
        raise NotThisFormat(
            f"needs the keys {missing}, has {sorted(row)}"
            + hint
            + (f" ({options})" if options else "")
        )


def _load(
    path: str | Path,
    records: Records,
    read: Callable[[dict[str, Any]], tuple[Any, Any]],
    limit: int | None,
) -> list[Problem]:
    problems: list[Problem] = []
    faults: dict[str, str] = {}  # what is wrong, and in which record first
    index = -1
    for index, (place, record) in enumerate(islice(records, limit)):
        where = f"{path}, {place}"
        try:
            if isinstance(record, InputError):
                raise record
            problems.append(Problem(index, *read(check(record, where, {}))))
        except InputError as error:
            said = str(error)
            faults.setdefault(said, said if said.startswith(where) else f"{where}: {said}")
    if index < 0:
        raise InputError(f"{path} holds no problem")
    if faults:
        shown = [*faults.values()][:_SHOWN_FAULTS]
        more = index + 1 - len(problems) - len(shown)
        raise InputError("; ".join(shown) + (f"; and {more} more" if more else ""))
    return problems


# ---- graded problems: one line for the settings, then one for each problem, in order

_SETTINGS = "settings"
_LINE_FORMAT = 2
"""Of a problem's line; the first one had no ``extra_logs``, and did not say its number."""
_ANOTHER = "give another --out"
_COMPLETION = map_with(
    {
        "text": TEXT,
        "tokens": or_null(NUMBER),
        "truncated": or_null(FLAG),
        "reward": NUMBER,
        "score": NUMBER,
        "graded": FLAG,
        "extra_logs": map_of(NUMBER),
    },
    {"error": TEXT, "vote": or_null(INTEGER)},
)
_COMPLETIONS = Kind(
    f"a list of at least one, each {_COMPLETION.words}",
    lambda v: list_of(_COMPLETION).holds(v) and v != [],
)
_LINE = {"problem": INTEGER, "prompt": TEXT, "completions": _COMPLETIONS}
_TEXT_OR_LINE = Kind(
    "a text", lambda v: TEXT.holds(v) or (MAP.holds(v) and TEXT.holds(v.get("text")))
)
_HASHED_BYTES = 1 << 20
_HASHED_FILES = (".safetensors", ".bin", ".json", ".model", ".txt", ".jinja")


class Store(Writer):
    """The results of one problem file: those of an earlier, killed command, and those appended now;
    a context manager.

    No other process works in the file's folder; without a path results are kept in memory only.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self.results = [] if path is None else read_results(path, settings)
        self._lines = None if path is None else JsonLines(path, keep=lambda line: True)
        if self._lines is not None and path is not None and not path.stat().st_size:
            self._lines.append({_SETTINGS: dict(settings)})

    def append(self, results: Sequence[Mapping[str, Any]]) -> None:
        for result in map(dict, results):
            self.results.append(result)
            if self._lines is not None:
                self._lines.append(result)


def read_results(path: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The graded problems that a file holds; a line that a kill cut off is left out. Changes
    nothing.

    Raises:
        InputError: the file holds results of other settings (which, it says), or something else
        than results.
    """
    text = path.read_bytes() if path.exists() else b""
    first, newline, _ = text.partition(b"\n")
    ours = json.dumps({_SETTINGS: dict(settings)})
    # nothing yet, or killed within the first write
    if not newline and ours.encode().startswith(first):
        return []
    where = f"{path} does not hold results of an evaluation"
    before = check(decode(first, where), where, {_SETTINGS: MAP}, remedy=_ANOTHER)[_SETTINGS]
    pairs = [(name, before.get(name), value) for name, value in json.loads(ours)[_SETTINGS].items()]
    if different := [f"{name} was {was!r}, is {now!r}" for name, was, now in pairs if was != now]:
        raise InputError(
            f"{path} holds results of other settings ({'; '.join(different)}): give these "
            "settings, or another --out"
        )
    results = [
        check(line, f"{path}, line {number}", _LINE, {}, _ANOTHER)
        for number, line in read_lines(path)
        if number > 1
    ]
    if len({len(result["completions"]) for result in results}) > 1:
        raise InputError(f"{path}: its problems have different numbers of completions; {_ANOTHER}")
    return results


def task_settings(
    task: Task, sampling: Mapping[str, Any], model: str | None, completions: str | None
) -> dict[str, Any]:
    """What the results of a task depend on, in plain data: of saved completions the file, else the
    model, a reference and every option that changes what is sampled, the engine's included."""
    settings = {
        "line_format": _LINE_FORMAT,
        "benchmark": task.name,
        "data": sha256_of(task.path),
        "problems": len(task.problems),
        "questions_and_labels": digest_of(
            [[problem.prompt, problem.label] for problem in task.problems]
        ),
        "reward": sha256_of(task.reward) if Path(task.reward).is_file() else redact(task.reward),
        **{f"prompt_{name}": value for name, value in asdict(task.style).items()},
        **({} if task.answers == "any" else {"answers": task.answers}),
    }
    if completions is not None:
        return settings | {"completions": sha256_of(completions)}
    assert model is not None
    return settings | {"model": _model_digest(model), **sampling}


def digest_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _model_digest(folder: str | Path) -> str:
    """What tells two checkpoints apart: names, sizes, first and last MiB of the files of weights,
    tokenizer, settings.

    A training step changes every tensor, so that whole files need not be read.
    """
    digest = hashlib.sha256()
    for path in sorted(
        p for p in Path(folder).iterdir() if p.suffix in _HASHED_FILES and p.is_file()
    ):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HASHED_BYTES))
            file.seek(max(0, size - _HASHED_BYTES))
            digest.update(file.read(_HASHED_BYTES))
    return digest.hexdigest()


def load_completions(path: str | Path, problems: Sequence[Problem]) -> list[list[str]]:
    """Saved completions: lines ``{"problem": 0, "completions": ["text", ...]}``, in any order;
    those of later problems are left out. A line of settings, and completions that are objects with
    ``text``, are what :class:`Store` writes.
    """
    found: dict[int, list[str]] = {}
    remedy = 'give lines {"problem": 0, "completions": ["text", ...]}'
    for number, line in json_lines(path):
        where = f"{path}, line {number}"
        row = check(decode(line, where), where, {})
        if _SETTINGS in row:
            continue
        check(
            row, where, {"problem": INTEGER, "completions": list_of(_TEXT_OR_LINE)}, remedy=remedy
        )
        place, texts = (
            row["problem"],
            [each if isinstance(each, str) else each["text"] for each in row["completions"]],
        )
        if not texts:
            raise InputError(f"{where}: problem {place} has no completions; {remedy}")
        if place in found:
            raise InputError(f"{where}: problem {place} is there twice")
        found[place] = texts
        question = problems[place].prompt if 0 <= place < len(problems) else None
        prompt = row.get("prompt")
        if isinstance(question, str) and isinstance(prompt, str) and question.strip() not in prompt:
            raise InputError(
                f"{where}: these are completions of {prompt!r:.80}, problem {place} is "
                f"{question!r:.80}"
            )
    if missing := [place for place in range(len(problems)) if place not in found]:
        raise InputError(
            f"{path} lacks {len(missing)} of {len(problems)} problems, the first is {missing[0]} "
            "(counted from 0)"
        )
    counts = sorted({len(found[place]) for place in range(len(problems))})
    if len(counts) > 1:
        raise InputError(
            f"{path} has between {counts[0]} and {counts[-1]} completions of a problem: give "
            "equally many"
        )
    return [found[place] for place in range(len(problems))]
