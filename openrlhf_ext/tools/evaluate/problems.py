"""Problem files for evaluation: one JSON object per line, in a user's format or as a benchmark was published."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf_ext.config.records import Wanted, record_fault
from openrlhf_ext.inputs import InputError, check, decode, json_lines, nearest
from openrlhf_ext.rewards.answers import last_boxed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN_FAULTS = 5
_HASHES = re.compile(r"####[ \t]*(\S.*)\Z")
_DEGREES = re.compile(r"\^\s*(?:\\circ|\{\\circ\})\Z")
MATH_TEMPLATE = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
"""The instruction of Qwen2.5-Math's evaluation. ``extract_answer`` looks into ``<answer>`` before ``\\boxed{}``."""
SYSTEM_PROMPTS = {
    # arXiv 2508.03772, appendix 8.2
    "conflict": "You are a helpful assistant for solving math problems. Given a question, first think step by step "
    "between <reasoning> and </reasoning>. Then, give the final answer between <answer> and </answer>.",
}
"""System messages that protocols ask for, by name; the questions of these protocols stand alone (template ``{}``)."""


class NotThisFormat(InputError):
    """A value is not what the benchmark has there."""


def system_message(given: str | None) -> str | None:
    """The system message that is meant by a protocol's name or a text; None = there is none.

    Raises:
        InputError: one word that is no protocol's name.
    """
    if given is None or given in SYSTEM_PROMPTS:
        return SYSTEM_PROMPTS.get(given or "")
    if len(given.split()) < 2:
        known = ", ".join(SYSTEM_PROMPTS)
        raise InputError(f"--system_prompt {given!r} is no protocol's name ({known}), and a message has more words")
    return given


@dataclass(frozen=True)
class Problem:
    """A question as it stands in the file, or as the prompt made of it, and the label the reward function gets.

    Attributes:
        index: its place in the file, from 0.
    """

    index: int
    prompt: Any
    label: Any


@dataclass(frozen=True, kw_only=True)
class PromptStyle:
    """How a question becomes a prompt.

    Attributes:
        template: a format string around the question, for instance ``"User: {}\\nAssistant: "``.
        system_prompt: the chat's system message; without a chat template it stands in front, an empty line between.
    """

    template: str | None = None
    system_prompt: str | None = None
    chat: bool = False

    def fault(self) -> str | None:
        """Why the template cannot be used; None if it can."""
        try:
            used = (self.template or "{}").format("\0question")
        except (IndexError, KeyError, ValueError) as error:
            return (
                f"--input_template {self.template!r} is no format string with one {{}} for the question "
                f"({type(error).__name__}: {error}); write other braces twice"
            )
        return None if "\0question" in used else f"--input_template {self.template!r} has no {{}} for the question"

    def prompt(self, question: Any, tokenizer: PreTrainedTokenizerBase | None) -> str:
        """The prompt of one question, ready for the tokenizer; chats given as lists of messages stay as they are."""
        text = self.template.format(question) if self.template and isinstance(question, str) else question
        if not self.chat:
            return f"{self.system_prompt}\n\n{text}" if self.system_prompt else text
        assert tokenizer is not None
        chat = [{"role": "user", "content": text}] if isinstance(text, str) else list(text)
        if self.system_prompt:
            chat.insert(0, {"role": "system", "content": self.system_prompt})
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


@dataclass(frozen=True)
class Task:
    """A problem file and how it is graded.

    Attributes:
        reward: Python file with ``reward_func``, or addresses of reward servers.
    """

    name: str
    path: str
    problems: Sequence[Problem]
    reward: str
    style: PromptStyle


def load_problems(
    path: str | Path, input_key: str = "question", label_key: str = "answer", limit: int | None = None,
    chat: bool = False,
) -> list[Problem]:  # fmt: skip
    """Read a user's JSONL file.

    Args:
        limit: number of problems from the start of the file; all if ``None``.
        chat: a question may be a list of messages.

    Raises:
        InputError: lines are not JSON objects, lack a key or have no such question, or the file holds no problem; names
            the first of them.
    """
    wanted = Wanted(input_key, label_key, chat)

    def read(row: dict[str, Any]) -> tuple[Any, Any]:
        _require_keys(row, (input_key, label_key), "--input_key, --label_key")
        if (fault := record_fault(row, wanted)) is not None:
            raise NotThisFormat(f"{fault} (--input_key, --label_key)")
        return row[input_key], row[label_key]

    return _load(path, read, limit)


def load_benchmark(name: str, path: str | Path, limit: int | None = None) -> list[Problem]:
    """Read a benchmark's file as it was published.

    Args:
        limit: number of problems from the start of the file; all if ``None``.

    Returns:
        Questions, and labels that are the bare final answers.

    Raises:
        InputError: the benchmark is unknown, or the file is not in its format; names the first wrong lines.
    """
    if name not in BENCHMARKS:
        hint = f"; did you mean {near}?" if (near := nearest(name, BENCHMARKS)) else "."
        raise InputError(f"there is no benchmark {name!r}{hint} Known: {', '.join(BENCHMARKS)}. Other files: --data")
    try:
        return _load(path, BENCHMARKS[name], limit)
    except InputError as error:
        raise InputError(f"benchmark {name}: {error}") from error


def _gsm8k(row: Mapping[str, Any]) -> tuple[str, str]:
    _require_keys(row, ("question", "answer"))
    if (found := _HASHES.search(_text(row, "answer").strip())) is None:
        raise NotThisFormat("the solution under 'answer' does not end in '#### ' and the final answer")
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
        raise NotThisFormat(f"the answer must be a whole number from 0 to 999, got {row['answer']!r}")
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
        raise NotThisFormat(f"the answer must be a whole number, such as 27.0, got {row['answer']!r}")
    return question, str(int(number))


BENCHMARKS: dict[str, Callable[[Mapping[str, Any]], tuple[str, str]]] = {
    "gsm8k": _gsm8k, "math": _math, "math500": _math500, "aime24": _aime, "aime25": _aime, "amc23": _amc,
}  # fmt: skip


def _question(row: Mapping[str, Any]) -> str:
    _require_keys(row, ("problem" if "problem" in row else "question", "answer"))
    return _text(row, "problem" if "problem" in row else "question")


def _text(row: Mapping[str, Any], key: str) -> str:
    if not isinstance(row[key], str) or not row[key].strip():
        raise NotThisFormat(f"{key!r} must be a text, got {row[key]!r:.80}")
    return row[key]


def _require_keys(row: Mapping[str, Any], keys: tuple[str, ...], options: str = "") -> None:
    if missing := [key for key in keys if key not in row]:
        near = [found for key in missing if (found := nearest(key, row, cutoff=0.6))]
        hint = f"; did you mean {', '.join(map(repr, near))}?" if near and options else ""
        raise NotThisFormat(
            f"needs the keys {missing}, has {sorted(row)}" + hint + (f" ({options})" if options else "")
        )


def _load(path: str | Path, read: Callable[[dict[str, Any]], tuple[Any, Any]], limit: int | None) -> list[Problem]:
    lines = list(islice(json_lines(path), limit))
    if not lines:
        raise InputError(f"{path} holds no problem")
    problems: list[Problem] = []
    faults: dict[str, str] = {}  # what is wrong, and in which line first
    for index, (number, line) in enumerate(lines):
        where = f"{path}, line {number}"
        try:
            problems.append(Problem(index, *read(check(decode(line, where), where, {}))))
        except NotThisFormat as error:
            faults.setdefault(str(error), f"{where}: {error}")
        except InputError as error:
            faults.setdefault(str(error), str(error))
    if faults:
        shown = [*faults.values()][:_SHOWN_FAULTS]
        more = len(lines) - len(problems) - len(shown)
        raise InputError("; ".join(shown) + (f"; and {more} more" if more else ""))
    return problems
