"""The evaluations of a run: one held-out set, or several that have names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError, WithJsonSchema

from openrlhf_ext.inputs import named_part, split_inputs
from openrlhf_ext.options import Float, Int, Section, Violation, Words, added, option
from openrlhf_ext.options.sections.run import Interval


def named_parts(value: str) -> list[tuple[str, str]]:
    """``a=x,y,b=z`` is [("a", "x,y"), ("b", "z")]: what has no name belongs to the name before it,
    or to none ("")."""
    parts: list[tuple[str, str]] = []
    for text in split_inputs(value):
        name, rest = named_part(text)
        if parts and not name:
            parts[-1] = parts[-1][0], f"{parts[-1][1]},{rest}"
        else:
            parts.append((name, rest))
    return parts


def _one_or_by_name(kind: Any) -> AfterValidator:
    """Of an option that has one value for all sets, or ``NAME=VALUE,...``, which stays a text."""
    adapter: TypeAdapter[Any] = TypeAdapter(kind)

    def parse(value: Any) -> Any:
        if not isinstance(value, str) or "=" not in value:
            return _checked(adapter, value)
        for name, number in named_parts(value):
            if not name:
                raise ValueError("one value, or NAME=VALUE for each set")
            _checked(adapter, number)
        return value

    return AfterValidator(parse)


def _checked(adapter: TypeAdapter[Any], value: Any) -> Any:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"]) from None


_BY_NAME = "or NAME=VALUE,... by set"
_TEXT = {"type": "string", "pattern": "="}
_Samples = Annotated[
    Any,
    _one_or_by_name(Annotated[Int, Field(ge=1, le=2**16)]),
    Words(f"integer >= 1 and <= 65536, {_BY_NAME}"),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": 2**16}, _TEXT]}),
]
_Temperature = Annotated[
    Any,
    _one_or_by_name(Annotated[Float, Field(ge=0)]),
    Words(f"number >= 0, {_BY_NAME}"),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, _TEXT]}),
]
_TopP = Annotated[
    Any,
    _one_or_by_name(Annotated[Float, Field(gt=0, le=1)]),
    Words(f"number > 0 and <= 1, {_BY_NAME}"),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0, "maximum": 1}, _TEXT]}),
]
_Tokens = Annotated[
    Any,
    _one_or_by_name(Annotated[Int, Field(ge=1)]),
    Words(f"integer >= 1, {_BY_NAME}"),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, _TEXT]}),
]
_KINDS: dict[str, Any] = {
    "n_samples_per_prompt": int,
    "temperature": float,
    "top_p": float,
    "max_new_tokens": int,
    "remote_url": str,
}


@dataclass(frozen=True)
class HeldOutSet:
    """One set of held-out prompts and how it is sampled; ``name`` is empty where the only set has
    none, None in ``max_new_tokens`` and ``remote_url`` is what rollouts have."""

    name: str
    paths: str
    n_samples_per_prompt: int
    temperature: float
    top_p: float
    max_new_tokens: int | None
    remote_url: str | None


# an option has its default, its meaning and its bounds, as in a table


class Eval(Section):
    """Evaluation during training."""

    needs = {
        "eval.dataset": (
            "steps",
            "split",
            "temperature",
            "top_p",
            "n_samples_per_prompt",
            "max_new_tokens",
            "remote_url",
            "async_enable",
        )
    }

    steps: Interval = option(
        -1, "training steps between evaluations of eval.dataset, -1 = none during training"
    )
    dataset: str | None = option(
        None,
        "evaluation prompts; same forms as data.prompt_dataset, or several sets by name, "
        "NAME=FILE,NAME=FILE, each with its own metrics (docs/evaluation.md)",
        path="input",
    )
    split: str | None = option(
        None,
        "split of eval.dataset",
        default_text="validation, or test, where the data set has it, else train",
    )
    temperature: _Temperature = option(0.6, "sampling temperature in evaluation")
    top_p: _TopP = added(
        1.0, "nucleus sampling threshold in evaluation; OpenRLHF uses rollout.top_p"
    )
    n_samples_per_prompt: _Samples = option(
        4, "responses per prompt in evaluation (n of pass@k and maj@k)"
    )
    max_new_tokens: _Tokens | None = added(
        None, "longest response in evaluation, tokens", default_text="rollout.max_new_tokens"
    )
    remote_url: str | None = added(
        None,
        default_text="reward.remote_url",
        help_text="what grades evaluations, in the forms of reward.remote_url; a different grader "
        "gets its own reward.num_workers processes per engine",
        path="input",
    )
    async_enable: bool = added(
        False,
        "evaluate while the next step trains (train.max_staleness above 0): the next weight "
        "sync waits for it",
    )

    @property
    def paths(self) -> str | None:
        """The files, folders and hub names of all sets, separated by commas."""
        return (
            None
            if self.dataset is None
            else ",".join(paths for _, paths in named_parts(self.dataset))
        )

    @property
    def sets(self) -> tuple[HeldOutSet, ...]:
        """Every set, of options without violations."""
        if self.dataset is None:
            return ()
        return tuple(
            HeldOutSet(name, paths, **{option: self._value(option, name) for option in _KINDS})
            for name, paths in named_parts(self.dataset)
        )

    def _value(self, option: str, name: str) -> Any:
        """What an option says for a set; the default where it names others only."""
        value = getattr(self, option)
        if not isinstance(value, str):
            return value
        by_name = dict(named_parts(value))
        found = by_name.get("", by_name.get(name))
        return (
            _KINDS[option](found) if found is not None else type(self).model_fields[option].default
        )

    def violations(self) -> Iterator[Violation]:
        """Names are given once, and to all sets or none; options that name sets name sets that
        there are."""
        names = [name for name, _ in named_parts(self.dataset or "")]
        if "" in names and len(names) > 1:
            yield Violation(
                ("eval.dataset",),
                "eval.dataset must give each of several sets a name, NAME=FILE,NAME=FILE: got "
                f"{self.dataset}",
            )
            return
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            yield Violation(
                ("eval.dataset",),
                f"eval.dataset must use each name only once: got {', '.join(repeated)} twice in "
                f"{self.dataset}",
            )
        for name in _KINDS:
            if isinstance(value := getattr(self, name), str) and self.dataset is not None:
                yield from self._by_name_violations(name, value, names)

    def _by_name_violations(self, name: str, value: str, sets: list[str]) -> Iterator[Violation]:
        option, given = f"eval.{name}", [part for part, _ in named_parts(value)]
        if given == [""]:
            return
        known = ", ".join(filter(None, sets)) or "eval.dataset names none"
        if unknown := [part for part in given if part not in sets or not part]:
            yield Violation(
                (option, "eval.dataset"),
                f"{option} must name sets of eval.dataset ({known}): got "
                f"{', '.join(unknown) or 'no name'} in {value}",
            )
        if repeated := [part for part, count in Counter(given).items() if count > 1]:
            yield Violation(
                (option,),
                f"{option} must give each set one value: got {', '.join(repeated)} twice in "
                f"{value}",
            )
