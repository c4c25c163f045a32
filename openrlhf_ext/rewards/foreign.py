"""Reward functions of verl and TRL, called as
``reward_func(queries, prompts, labels, completions)``.

    verl: compute_score(data_source, solution_str, ground_truth, extra_info=None)
              -> number or {"score": number, ...}
    TRL:  f(completions, **columns) -> a list of numbers or None

TRL's get all completions of a prompt at once, verl's one. A run hands on one column, the label: it
is the column that a function reads, or an object whose keys are the columns. What a function needs
and nobody has, and a label that it would never see, are refused by name. Two lines of the file
decide what nothing else tells: ``label_column = "answer"`` (None: it needs no label) and
``completions = "texts"`` or ``"messages"``.
"""

from __future__ import annotations

import ast
import inspect
import numbers
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

from openrlhf_ext.rewards.grading import RESERVED_LOG_KEYS, InvalidAnswer, finite_number, settled

_WORDS = {"completions", "solution_str"}
_NO_LABEL = {
    *_WORDS,
    "prompts",
    "completion_ids",
    "trainer_state",
    "environments",
    "log_extra",
    "log_metric",
    "reward_router_address",
    "reward_model_tokenizer",
}
# which it hands on with the label, and most functions do not read
_VERLS = {"data_source", "extra_info"}
_UNTOLD = "a name in its **kwargs"
_MADE = (
    "?",
    "{0}",
    "The answer is \\boxed{{{0}}}.\n#### {0}",
    "<think>\n{0}\n</think>\n<answer>\n{0}\n</answer>",
    '{{"answer": "{0}", "content": "{0}"}}',
)
"""Completions to which a function shows whether it takes texts or messages: a wrong one, and right
ones as usual."""
TRIED = 2 * len(_MADE)


def is_foreign(function: Any) -> bool:
    """Whether a function takes what only verl's and TRL's take."""
    return (
        callable(function)
        and not inspect.isclass(function)
        and not _WORDS.isdisjoint(_needed(function))
    )


def _needed(function: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {one.name for one in parameters if one.default is one.empty and "*" not in str(one)}


def _body(function: Callable[..., Any]) -> str:
    """Its code in single quotes, without comments and docstring; its signature where the code is in
    no file."""
    inner = (
        function
        if inspect.isroutine(function)
        else getattr(function, "func", type(function).__call__)
    )
    try:
        code = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(inner)))))
    except (OSError, TypeError, SyntaxError):
        return str(inspect.signature(function))
    return re.sub('""".*?"""', "", code.partition(":\n    ")[2], flags=re.DOTALL)


class _Function:
    """One of their functions. Raises TypeError: a line of its file is not understood."""

    def __init__(self, function: Callable[..., Any], module: ModuleType) -> None:
        self._function, self._module = function, module
        self._name = getattr(function, "__name__", type(function).__name__)
        parameters, needed, body = (
            inspect.signature(function).parameters,
            _needed(function),
            _body(function),
        )
        rest = next((name for name, one in parameters.items() if one.kind is one.VAR_KEYWORD), None)
        self.is_trls, self._takes_all = "completions" in needed, rest is not None
        if rest and not self.is_trls:
            needed.add("ground_truth")
        reads = re.findall(
            rf"(?:'(\w+)' (?:not )?in )?\b{rest}\b(?:(?:\[|\.get\(|\.pop\()'(\w+)')?", body
        )
        keys = [asked or key or _UNTOLD for asked, key in reads if rest]
        verls = () if self.is_trls else _VERLS
        self._none = dict.fromkeys(
            one
            for one in verls
            if (one in needed and one not in body) or (rest and one not in parameters)
        )
        self._needs = sorted(needed - {*self._none, *_WORDS, "prompts"})
        may = [
            one
            for one in parameters
            if not isinstance(parameters[one].default, numbers.Number) and one != rest
        ]
        labels = [
            one for one in self._needs or dict.fromkeys([*may, *keys]) if one not in _NO_LABEL
        ]
        if "ground_truth" in needed:
            labels = ["ground_truth"]
        if hasattr(module, "label_column"):
            labels = [] if module.label_column is None else [module.label_column]
        self._labels, self._label = (
            labels,
            labels[0] if len(labels) == 1 and labels[0] != _UNTOLD else None,
        )
        self._prompts = self._takes_all or "prompts" in parameters
        self._names = {*needed, *parameters, *keys, *(labels if rest else ())}
        self._chat: bool | None = None if self.is_trls else False
        if self.is_trls and isinstance(form := getattr(module, "completions", None), str):
            if form not in ("texts", "messages"):
                raise TypeError(f'completions must be "texts" or "messages": got {form!r}')
            self._chat = form == "messages"

    @property
    def said(self) -> str:
        """How it is called."""
        form = (
            "TRL's form, with all completions of a prompt"
            if self.is_trls
            else "verl's form, with one completion"
        )
        texts = "messages" if self._chat else "texts"
        return (
            f"{self._name} is called in {form}; {self._label or 'no column'} is the label; "
            f"completions are {texts}"
        )

    def answers(
        self, prompt: str, label: Any, completions: Sequence[str]
    ) -> list[Mapping[str, Any]]:
        """Its answer to each completion in the form of ``reward_func``. Raises InvalidAnswer."""
        keys = dict(label) if isinstance(label, Mapping) else {}
        if self._label is not None:
            keys.setdefault(self._label, label)
        # TRL hands on None for a column that a row has not; of verl's functions none expects that
        told = [one for one, value in keys.items() if self.is_trls or value is not None]
        if missing := sorted({*self._needs} - {*told}):
            raise InvalidAnswer(
                f"needs {', '.join(missing)}, and a run hands on one column, the label "
                f"(--data.label_key): make it an object with the keys {', '.join(self._needs)}, "
                "or give what nobody has here a default"
            )
        given = {one: keys[one] for one in keys if self._takes_all or one in self._names}
        reached = given if _UNTOLD in self._names else self._names & {*given}
        if self._labels and not reached and label not in (None, ""):
            raise InvalidAnswer(
                f"would never see the label {label!r:.80}: it may read it as "
                f"{' or '.join(self._labels)}. Write a line "
                f'label_column = "NAME" into the file (None: {self._name} needs no label), or '
                "make the label an object "
                "with the keys that it reads"
            )
        given = self._none | given
        if not self.is_trls:
            return [
                _as_ours(settled(self._function(solution_str=one, **given))) for one in completions
            ]
        if self._chat is None:
            self._chat = self._takes_messages(prompt, given)
        return [{"rewards": one} for one in self._ask(prompt, given, completions, self._chat)]

    def _ask(
        self, prompt: str, given: Mapping[str, Any], completions: Sequence[str], chat: bool
    ) -> list[Any]:
        def said(role: str, text: str) -> Any:
            return [{"role": role, "content": text}] if chat else text

        count = len(completions)
        columns = {one: [value] * count for one, value in given.items()}
        columns["completions"] = [said("assistant", text) for text in completions]
        if self._prompts:
            columns["prompts"] = [said("user", prompt)] * count
        found = list(settled(self._function(**columns)))
        if len(found) != count:
            raise InvalidAnswer(f"returned {len(found)} rewards for {count} completions")
        return found

    def _takes_messages(self, prompt: str, given: Mapping[str, Any]) -> bool:
        """Whether its completions are messages, by its answers to made ones in both forms: it takes
        the form that alone works, or in which alone it tells completions from each other. Raises
        InvalidAnswer: nothing decides."""
        label = given.get(self._label or "", next(iter(given.values()), "4"))

        def outcome(chat: bool, made: str) -> float | str | None:
            try:
                (found,) = self._ask(prompt, given, [made], chat)
                return None if found is None else finite_number(found, "reward")
            except Exception as error:  # as is to be expected in the wrong form
                return f"{type(error).__name__}: {error}"

        texts, messages = (
            [outcome(chat, one.format(label)) for one in _MADE] for chat in (False, True)
        )
        # 0: it fails, 1: it says the same to all, 2: it tells them from each other
        of_texts, of_messages = (
            any(not isinstance(one, str) for one in each) * min(2, len({*each}))
            for each in (texts, messages)
        )
        if of_texts != of_messages:
            return of_messages > of_texts
        if (
            texts == messages
            and of_texts == 2
            or "content" not in Path(str(self._module.__file__)).read_text()
        ):
            return False
        raise InvalidAnswer(
            "takes texts and messages alike, and nothing tells which it is made for: to "
            "completions made for a trial "
            f"it answers {texts!r:.300} as texts, {messages!r:.300} as messages. Write a line "
            'completions = "texts" or '
            'completions = "messages" into the file'
        )


class ForeignReward:
    """One or several of their functions: the weighted sum of the rewards of those that do not say
    None, as in TRL. It answers a list, of each completion in the form of ``reward_func``.

    Attributes:
        takes_groups: all completions of a prompt are to be handed over at once.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        module: ModuleType,
        weights: Sequence[float] | None = None,
    ) -> None:
        if strange := [function for function in functions if not is_foreign(function)]:
            raise TypeError(
                f"reward_funcs must be functions in TRL's or verl's form: got {strange[0]!r}"
            )
        self._weights = [1.0] * len(functions) if weights is None else weights
        if not len(self._weights) == len(functions) > 0:
            raise TypeError(
                f"reward_weights has {len(self._weights)} numbers for {len(functions)} reward_funcs"
            )
        self._functions = [_Function(function, module) for function in functions]
        self.takes_groups = any(function.is_trls for function in self._functions)

    @property
    def said(self) -> str:
        """How they are called."""
        return "; ".join(function.said for function in self._functions)

    def __call__(
        self, queries: Any, prompts: Any, labels: Any, completions: Any
    ) -> list[Mapping[str, Any]]:
        answers = [
            function.answers(prompts[0], labels[0], completions) for function in self._functions
        ]
        return (
            answers[0]
            if self._weights == [1.0]
            else [*map(self._summed, zip(*answers, strict=True))]
        )

    def _summed(self, answers: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """``acc`` is the mean of those that tell it."""
        pairs = [
            (one["rewards"], weight) for one, weight in zip(answers, self._weights, strict=True)
        ]
        given = [reward * weight for reward, weight in pairs if reward is not None]
        right = [one["scores"] for one in answers if one.get("scores") is not None]
        logs = {key: value for one in answers for key, value in one.get("extra_logs", {}).items()}
        return {
            "rewards": sum(given) if given else None,
            "scores": fmean(right) if right else None,
            "extra_logs": logs,
        }


def _as_ours(found: Any) -> Mapping[str, Any]:
    """verl's dict or number. Its ``acc`` says what counts as right; other numbers are logs."""
    if not isinstance(found, Mapping):
        return {"rewards": found}
    if "score" not in found:
        raise InvalidAnswer(
            f"returned a dict without the key 'score'; its keys are {sorted(map(str, found))}"
        )
    taken = RESERVED_LOG_KEYS | {"acc"}
    logs = {
        key: value
        for key, value in found.items()
        if key not in taken and isinstance(value, numbers.Real)
    }
    return {"rewards": found["score"], "scores": found.get("acc"), "extra_logs": logs}
