"""Reward functions of verl and TRL, called as ``reward_func(queries, prompts, labels, completions)``.

    compute_score(data_source, solution_str, ground_truth, extra_info=None) -> number or {"score": number, ...}   verl
    f(completions, **columns) -> a list of numbers or None                                                        TRL

A run hands on one column, the label: it is the column that a function needs, or an object whose keys are the columns.
What a function needs and nobody has is refused by name.
"""

from __future__ import annotations

import ast
import inspect
import numbers
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from openrlhf_ext.rewards.grading import RESERVED_LOG_KEYS, InvalidAnswer, finite_number, settled

_WORDS = ("completions", "solution_str")
_NOT_GIVEN = {"completion_ids", "trainer_state", "environments", "log_extra", "log_metric", "reward_router_address",
    "reward_model_tokenizer"}  # fmt: skip


class _Reads(NamedTuple):
    """Names that a function cannot be called without, that it may be given, whether it takes any; what its source says.
    ``kwargs["solution"]`` cannot do without solution, ``kwargs.get("solution")`` may be given it."""

    needs: list[str]
    may: list[str]
    takes_all: bool
    names: set[str]
    source: str


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
    may = [one.name for one in parameters if one.default is None]
    rest = next((one.name for one in parameters if one.kind is one.VAR_KEYWORD), None)
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(function, "func", function))))
        nodes = [*ast.walk(ast.parse(source))]
    except (OSError, TypeError, SyntaxError):  # an object, or a function that stands in no file
        return _Reads(needs, may, rest is not None, set(needs), "")
    for node in nodes if rest is not None else ():
        match node:
            case ast.Subscript(value=ast.Name(id=it), slice=ast.Constant(value=str(name))) if it == rest:
                needs += [name] * (name not in needs)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=it), attr="get"),
                          args=[ast.Constant(value=str(name)), *_]) if it == rest:  # fmt: skip
                may += [name] * (name not in may)
    names = {node.id for node in nodes if isinstance(node, ast.Name)} | {*needs} - {"data_source", "extra_info"}
    return _Reads(needs, may, rest is not None, names, source)


class _Function:
    """One of their functions. ``said``: how it is called. Raises TypeError: it needs what no run has."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, reads = function, _reads(function)
        name = getattr(function, "__name__", type(function).__name__)
        if absent := sorted(_NOT_GIVEN.intersection(reads.needs)):
            raise TypeError(f"{name} needs {', '.join(absent)}, which nobody has here: give it a default")
        self._is_trls, self._takes_all = "completions" in reads.needs, reads.takes_all
        self._prompts = "prompts" in reads.needs or "prompts" in reads.may or reads.takes_all
        columns = [one for one in reads.needs if one not in (*_WORDS, "prompts")]
        self._needs = [one for one in columns if one in reads.names]  # verl hands on all four, most functions read two
        self._may = [one for one in (*columns, *reads.may) if one not in (*self._needs, *_NOT_GIVEN, "prompts")]
        only = self._needs or self._may
        self._label = "ground_truth" if "ground_truth" in columns else only[0] if len(only) == 1 else None
        written = str(inspect.signature(function).parameters.get("completions", "")) + reads.source
        self._chat = self._is_trls and any(one in written for one in ("list[list", '["content"]', "['content']"))
        said = [
            f"{self._label} is the label, or its key of that name" if self._label else "no column is the label itself",
            f"keys that the label must have: {', '.join(one for one in self._needs if one != self._label) or 'none'}",
            f"keys that it may have: {', '.join(one for one in self._may if one != self._label) or 'none'}",
            "texts are messages, the prompt one of a user's as it was rendered" if self._chat else "texts are texts",
        ]
        self.said = f"{name} is called as {'TRL' if self._is_trls else 'verl'} does; {'; '.join(said)}"

    def __call__(self, prompt: str, completion: str, label: Any) -> Mapping[str, Any] | None:
        """Its answer to one sample in the form of ``reward_func``; None where it says None. Raises InvalidAnswer."""
        keys = dict(label) if isinstance(label, Mapping) else {}
        if self._label is not None:
            keys.setdefault(self._label, label)
        if missing := sorted({*self._needs} - {*keys}):
            raise InvalidAnswer(
                f"needs {', '.join(missing)}, and a run hands on one column, the label (--data.label_key): make it "
                f"an object with the keys {', '.join(sorted(self._needs))}"
            )
        if not self._is_trls:
            given = {one: keys.get(one) for one in (*self._needs, *self._may)} | {"solution_str": completion}
            return _as_ours(settled(self._function(**given)))
        given = {one: keys[one] for one in keys if self._takes_all or one in (*self._needs, *self._may)}
        for one, role, words in (("prompts", "user", prompt), ("completions", "assistant", completion)):
            if one == "completions" or self._prompts:
                given[one] = [{"role": role, "content": words}] if self._chat else words
        found = list(settled(self._function(**{one: [value] for one, value in given.items()})))
        if len(found) != 1:
            raise InvalidAnswer(f"returned {len(found)} rewards for one completion")
        return None if found[0] is None else {"rewards": found[0]}


class ForeignReward:
    """One or several of their functions: the weighted sum of the rewards of those that do not say None, as in TRL."""

    def __init__(self, functions: Sequence[Callable[..., Any]], weights: Sequence[float] | None = None) -> None:
        if strange := [function for function in functions if not is_foreign(function)]:
            raise TypeError(f"reward_funcs must be functions in TRL's or verl's form: got {strange[0]!r}")
        self._weights = [1.0] * len(functions) if weights is None else weights
        if not len(self._weights) == len(functions) > 0:
            raise TypeError(f"reward_weights has {len(self._weights)} numbers for {len(functions)} reward_funcs")
        self._functions = [_Function(function) for function in functions]
        self.said = "; ".join(function.said for function in self._functions)

    def __call__(self, queries: Any, prompts: Any, labels: Any, completions: Any) -> Mapping[str, Any]:
        answers = [function(prompts[0], completions[0], labels[0]) for function in self._functions]
        graded = [(one, weight) for one, weight in zip(answers, self._weights, strict=True) if one is not None]
        if not graded:
            raise InvalidAnswer("returned None: no function graded this completion")
        if len(answers) == 1 and self._weights == [1.0]:
            return graded[0][0]
        return {"rewards": sum(weight * finite_number(one["rewards"], "reward") for one, weight in graded)}


def _as_ours(found: Any) -> Mapping[str, Any]:
    """verl's dict or number. Its ``acc`` says what counts as right; other numbers are logs."""
    if not isinstance(found, Mapping):
        return {"rewards": found}
    if "score" not in found:
        raise InvalidAnswer(f"returned a dict without the key 'score'; its keys are {sorted(map(str, found))}")
    taken = RESERVED_LOG_KEYS | {"acc"}
    logs = {key: value for key, value in found.items() if key not in taken and isinstance(value, numbers.Real)}
    return {"rewards": found["score"], "scores": found.get("acc"), "extra_logs": logs}
