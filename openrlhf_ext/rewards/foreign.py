"""Reward functions of verl and TRL, called as ``reward_func(queries, prompts, labels, completions)``.

    compute_score(data_source, solution_str, ground_truth, extra_info=None) -> number or {"score": number, ...}   verl
    f(completions, **columns) -> a list of numbers or None                                                        TRL

TRL's get all completions of a prompt at once, verl's one. A run hands on one column, the label: it is the column that
a function reads, or an object whose keys are the columns. What a function needs and nobody has, and a label that it
would never see, are refused by name. Two lines of the file decide what nothing else tells: ``label_column = "answer"``
(None: it needs no label) and ``completions = "texts"`` or ``"messages"``.
"""

from __future__ import annotations

import ast
import inspect
import numbers
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from openrlhf_ext.rewards.grading import RESERVED_LOG_KEYS, InvalidAnswer, finite_number, settled

_WORDS = ("completions", "solution_str")
_NOT_GIVEN = {"completion_ids", "trainer_state", "environments", "log_extra", "log_metric", "reward_router_address",
    "reward_model_tokenizer"}  # fmt: skip
_VERLS = ("data_source", "extra_info")  # which it hands on with the label, and most functions do not read
_UNTOLD = "a name in its **kwargs"
_MADE = (
    "?", "{0}", "The answer is \\boxed{{{0}}}.\n#### {0}", "<think>\n{0}\n</think>\n<answer>\n{0}\n</answer>",
    '{{"answer": "{0}", "content": "{0}"}}',
)  # fmt: skip
"""Completions to which a function shows whether it takes texts or messages: a wrong one, and right ones as usual."""
TRIED = 2 * len(_MADE)


class _Reads(NamedTuple):
    """Names that a function cannot be called without; that it may be given; of these, those that may be meant for the
    label (``answer=""``, not ``weight=0.5``), or ``_UNTOLD``; whether it takes any name; its body, "" if unknown.
    ``kwargs["solution"]`` cannot do without solution, ``kwargs.get("solution")`` may be given it."""

    needs: list[str]
    may: list[str]
    labels: list[str]
    takes_all: bool
    body: str


def is_foreign(function: Any) -> bool:
    """Whether a function takes what only verl's and TRL's take."""
    try:
        return not inspect.isclass(function) and not set(_WORDS).isdisjoint(_reads(function).needs)
    except (TypeError, ValueError):  # not callable, or of compiled code
        return False


def _reads(function: Callable[..., Any]) -> _Reads:
    parameters = inspect.signature(function).parameters.values()
    named = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    needs = [one.name for one in named if one.default is one.empty]
    may = [one.name for one in named if one.name not in needs]
    settings = [one.name for one in named if isinstance(one.default, numbers.Number)]
    rest = next((one.name for one in parameters if one.kind is one.VAR_KEYWORD), None)
    try:
        inner = function if inspect.isroutine(function) else getattr(function, "func", type(function).__call__)
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(inner)))
        body = ast.unparse(ast.parse(source)).partition(":\n    ")[2]  # whose quotes are single ones
    except (OSError, TypeError, SyntaxError):  # of compiled code, or in no file
        body = ""
    body = re.sub('""".*?"""', "", body, flags=re.DOTALL)
    read = re.compile(rf"\b{rest}(\[|\.get\(|\.pop\()'(\w+)'|'(\w+)' (?:not )?in {rest}\b")
    for how, name, asked in read.findall(body):
        (needs if how == "[" else may).append(name or asked)
    labels = [one for one in dict.fromkeys(may) if one not in (*settings, *needs, *_NOT_GIVEN, "prompts")]
    if rest and (not body or re.search(rf"\b{rest}\b", read.sub("", body))):
        labels.append(_UNTOLD)
    return _Reads(needs, may, labels, rest is not None, body)


class _Function:
    """One of their functions. Raises TypeError: it needs what no run has, or a line of its file is not understood."""

    def __init__(self, function: Callable[..., Any], module: ModuleType) -> None:
        self._function, self._module = function, module
        self._name = getattr(function, "__name__", type(function).__name__)
        needs, may, labels, self._takes_all, body = _reads(function)
        if absent := sorted(_NOT_GIVEN.intersection(needs)):
            raise TypeError(f"{self._name} needs {', '.join(absent)}, which nobody has here: give it a default")
        self.is_trls = "completions" in needs
        if not self.is_trls and self._takes_all:
            needs += ["ground_truth", *_VERLS]
        columns = {*needs} - {*_WORDS, "prompts"}
        self._names = columns.union(may) - {*_NOT_GIVEN, "prompts"}
        self._prompts = self._takes_all or "prompts" in (*needs, *may)
        self._needs = sorted(one for one in columns if one not in _VERLS or one in (body or one))
        self._none = {} if self.is_trls else dict.fromkeys(columns.intersection(_VERLS))
        labels = ["ground_truth"] if "ground_truth" in needs else self._needs or labels
        if hasattr(module, "label_column"):
            labels = [] if module.label_column is None else [module.label_column]
        self._label = labels[0] if len(labels) == 1 and labels[0] != _UNTOLD else None
        self._labels = labels
        form = getattr(module, "completions", None) if self.is_trls else "texts"
        if isinstance(form, str) and form not in ("texts", "messages"):
            raise TypeError(f'completions must be "texts" or "messages": got {form!r}')
        self._chat = form == "messages" if isinstance(form, str) else None

    @property
    def said(self) -> str:
        """How it is called."""
        form = "TRL's form, with all completions of a prompt" if self.is_trls else "verl's form, with one completion"
        label, keys = self._label or "no column", ", ".join(sorted(self._names)) or "none"
        texts = "messages" if self._chat else "texts"
        return f"{self._name} is called in {form}; {label} is the label (keys: {keys}); completions are {texts}"

    def answers(self, prompt: str, label: Any, completions: Sequence[str]) -> list[Any]:
        """Its answer to each completion in the form of ``reward_func``; None where it says None. Raises
        InvalidAnswer."""
        keys = dict(label) if isinstance(label, Mapping) else {}
        if self._label is not None:
            keys.setdefault(self._label, label)
        if missing := sorted({*self._needs} - {*keys}):
            raise InvalidAnswer(
                f"needs {', '.join(missing)}, and a run hands on one column, the label (--data.label_key): make it "
                f"an object with the keys {', '.join(self._needs)}"
            )
        given = self._none | {one: keys[one] for one in keys if self._takes_all or one in {*self._names, self._label}}
        seen = self._labels == [] or (given if _UNTOLD in self._labels else {*self._names, *self._labels} & {*given})
        if not seen and label not in (None, ""):
            raise InvalidAnswer(
                f"would never see the label {label!r:.80}: it may read it as {' or '.join(self._labels)}. Write a line "
                f'label_column = "NAME" into the file (None: {self._name} needs no label), or make the label an object '
                "with the keys that it reads"
            )
        if not self.is_trls:
            return [_as_ours(settled(self._function(solution_str=one, **given))) for one in completions]
        if self._chat is None:
            self._chat = self._takes_messages(prompt, given)
        return [None if one is None else {"rewards": one} for one in self._ask(prompt, given, completions, self._chat)]

    def _ask(self, prompt: str, given: Mapping[str, Any], completions: Sequence[str], chat: bool) -> list[Any]:
        count = len(completions)
        columns = {one: [value] * count for one, value in given.items()}
        texts = {"completions": completions, "prompts": [prompt] * count}
        for one, role in (("completions", "assistant"), ("prompts", "user"))[: 1 + self._prompts]:
            columns[one] = [[{"role": role, "content": text}] if chat else text for text in texts[one]]
        found = list(settled(self._function(**columns)))
        if len(found) != count:
            raise InvalidAnswer(f"returned {len(found)} rewards for {count} completions")
        return found

    def _takes_messages(self, prompt: str, given: Mapping[str, Any]) -> bool:
        """Whether its completions are messages, by its answers to made ones in both forms: it takes the form that alone
        works, or in which alone it tells completions from each other. Raises InvalidAnswer: nothing decides."""
        label = given.get(self._label or "", next(iter(given.values()), "4"))

        def outcome(chat: bool, made: str) -> float | str | None:
            try:
                (found,) = self._ask(prompt, given, [made], chat)
                return None if found is None else finite_number(found, "reward")
            except Exception as error:  # as is to be expected in the wrong form
                return f"{type(error).__name__}: {error}"

        texts, messages = found = [[outcome(chat, one.format(label)) for one in _MADE] for chat in (False, True)]
        told = [[one for one in answers if not isinstance(one, str)] for answers in found]
        for either in (map(bool, told), (len({*answers}) > 1 or 0 < len(answers) < len(_MADE) for answers in told)):
            first, second = either
            if first != second:
                return second
        if "list[list" in str(inspect.signature(self._function).parameters["completions"]).lower():
            return True
        if texts == messages and len({*told[0]}) > 1 or "content" not in Path(str(self._module.__file__)).read_text():
            return False
        raise InvalidAnswer(
            "takes texts and messages alike, and nothing tells which it is made for: to completions made for a trial "
            f'it answers {texts!r:.300} as texts, {messages!r:.300} as messages. Write a line completions = "texts" or '
            'completions = "messages" into the file'
        )


class ForeignReward:
    """One or several of their functions: the weighted sum of the rewards of those that do not say None, as in TRL. It
    answers a list, of each completion in the form of ``reward_func``.

    Attributes:
        takes_groups: all completions of a prompt are to be handed over at once.
    """

    def __init__(
        self, functions: Sequence[Callable[..., Any]], module: ModuleType, weights: Sequence[float] | None = None
    ) -> None:
        if strange := [function for function in functions if not is_foreign(function)]:
            raise TypeError(f"reward_funcs must be functions in TRL's or verl's form: got {strange[0]!r}")
        self._weights = [1.0] * len(functions) if weights is None else weights
        if not len(self._weights) == len(functions) > 0:
            raise TypeError(f"reward_weights has {len(self._weights)} numbers for {len(functions)} reward_funcs")
        self._functions = [_Function(function, module) for function in functions]
        self.takes_groups = any(function.is_trls for function in self._functions)

    @property
    def said(self) -> str:
        """How they are called."""
        return "; ".join(function.said for function in self._functions)

    def __call__(self, queries: Any, prompts: Any, labels: Any, completions: Any) -> list[Mapping[str, Any]]:
        answers = [function.answers(prompts[0], labels[0], completions) for function in self._functions]
        return [self._summed(one) for one in zip(*answers, strict=True)]

    def _summed(self, answers: Sequence[Mapping[str, Any] | None]) -> Mapping[str, Any]:
        """``acc`` is the mean of those that tell it. A completion that no function grades has the reward None."""
        graded = [(one, weight) for one, weight in zip(answers, self._weights, strict=True) if one is not None]
        if len(graded) == len(answers) == 1 and self._weights == [1.0]:
            return graded[0][0]
        right = [one["scores"] for one, _ in graded if one.get("scores") is not None]
        return {
            "rewards": sum(weight * one["rewards"] for one, weight in graded) if graded else None,
            "scores": sum(right) / len(right) if right else None,
            "extra_logs": {key: value for one, _ in graded for key, value in one.get("extra_logs", {}).items()},
        }


def _as_ours(found: Any) -> Mapping[str, Any]:
    """verl's dict or number. Its ``acc`` says what counts as right; other numbers are logs."""
    if not isinstance(found, Mapping):
        return {"rewards": found}
    if "score" not in found:
        raise InvalidAnswer(f"returned a dict without the key 'score'; its keys are {sorted(map(str, found))}")
    taken = RESERVED_LOG_KEYS | {"acc"}
    logs = {key: value for key, value in found.items() if key not in taken and isinstance(value, numbers.Real)}
    return {"rewards": found["score"], "scores": found.get("acc"), "extra_logs": logs}
