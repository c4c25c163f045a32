"""Options of methods: their base, the blocks that methods share, and the `length_penalty` mapping.

A method's options class inherits the blocks it reads, overrides defaults, and adds its own options.
`option` (`openrlhf_ext.options`) declares each option once: annotation, default, meaning, bounds.
`degenerate`, `clip_low`, `clip_high` and `agg` declare one of these options with another default.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, model_validator

from openrlhf_ext.options import (
    Fault,
    Float,
    Int,
    Pair,
    Section,
    Violation,
    Words,
    describe,
    info_of,
    no_effect,
    option,
    read,
)
from openrlhf_ext.options.sections.rollout import PenaltyFormula

logger = logging.getLogger(__name__)


class NoOption(AttributeError):
    """An options class does not have the option. The message looks up the class's file and line
    when it is formatted."""

    def __str__(self) -> str:
        kind, module = type(self.obj), sys.modules[__name__]
        blocks = [
            one
            for one in vars(module).values()
            if isinstance(one, type) and issubclass(one, Options)
        ]
        block = next(
            (one.__name__ for one in blocks if self.name in vars(one).get("__annotations__", ())),
            None,
        )
        remedy = (
            f"inherit {block}"
            if block
            else f"declare it, such as {self.name}: ... = {self.name}(DEFAULT)"
        )
        place = f"{inspect.getsourcefile(kind)}, line {inspect.getsourcelines(kind)[1]}"
        return (
            f"{kind.__name__} ({place}) has no option {self.name}, which is read here: {remedy} of "
            f"{__name__}"
        )


class Options(Section):
    """Base of all options of methods. A null means the default, unless null is a legal value of the
    option."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                return super().__getattr__(name)
            raise NoOption(name=name, obj=self)

    @model_validator(mode="before")
    @classmethod
    def _nulls_take_the_default(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {
            name: value
            for name, value in values.items()
            if value is not None or cls._keeps_null(name)
        }

    @classmethod
    def _keeps_null(cls, name: str) -> bool:
        field = cls.model_fields.get(name)
        return (
            field is None
            or field.default is None
            or info_of(field).refuses_null
            or describe(cls)[name].nullable
        )

    def given(self, name: str) -> float:
        """The value of a number that this version requires. `violations` has rejected null
        before."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"{name} is null")
        return value

    def missing(self, names: Iterable[str], version: str) -> Iterator[Violation]:
        """A violation for each of these options that is null although `version` needs it."""
        described = describe(type(self))
        for name in names:
            if getattr(self, name) is None:
                published = described[name].info.recommended
                hint = described[name].expects.removesuffix(" or null")
                hint = hint if published is None else f"published for v6: {published}"
                yield Violation((name,), f"{name} is required with version {version} ({hint})")


O = TypeVar("O", bound=Options)  # noqa: E741


def parse(model: type[O], values: Mapping[str, Any], owner: str, *, warn: bool = True) -> O:
    """The options with these values; with ``warn``, every warning about them is logged.

    Raises:
        ValueError: every violation found, one per line, each after the name of the `owner`.
    """
    found = read(model, values)
    if isinstance(found, list):
        raise _refusal(owner, [_fault_text(fault) for fault in found])
    if problems := [violation.message for violation in found.violations()]:
        raise _refusal(owner, problems)
    for warning in found.cautions() if warn else ():
        logger.warning("%s: %s", owner, warning)
    return found


def _refusal(owner: str, problems: Iterable[str]) -> ValueError:
    return ValueError("\n".join(f"{owner}: {problem}" for problem in problems))


def _fault_text(fault: Fault) -> str:
    problem = fault.problem if fault.unknown else f"{fault.name}{fault.problem}"
    return f"{problem}; {fault.hint}" if fault.hint else problem


class LengthPenalty(Options, PenaltyFormula):
    """The `length_penalty` mapping. Lengths are in tokens."""

    kind: Literal["none", "dapo", "tan_v1", "grop"] = option(..., "formula of the penalty")

    @property
    def span(self) -> tuple[int, int]:
        """(l_max, l_cache) of `dapo`, (L1, L2) of `tan_v1`.

        Raises:
            ValueError: one of them is not set; `violations` reports it too.
        """
        first, second = (self.l_max, self.l_cache) if self.kind == "dapo" else (self.L1, self.L2)
        if first is None or second is None:
            raise ValueError(f"length_penalty kind {self.kind!r} has no lengths")
        return first, second

    def violations(self) -> Iterator[Violation]:
        yield from self.broken()

    def cautions(self) -> Iterator[str]:
        for name, field in type(self).model_fields.items():
            if (
                name not in ("kind", "on", *self.read_by.get(self.kind, ()))
                and getattr(self, name) != field.default
            ):
                yield no_effect(
                    f"length_penalty.{name}",
                    getattr(self, name),
                    f"kind {self.kind} does not read it",
                )


class HardPenalty(Options):
    """The `grop_hard_dapo` mapping: a `dapo` penalty of factor 1 on hard prompts."""

    l_max: Int = option(..., "maximum length, tokens", gt=0)
    l_cache: Int = option(..., "length of the soft interval, tokens", gt=0)

    def violations(self) -> Iterator[Violation]:
        if self.l_cache > self.l_max:
            yield Violation(
                ("l_cache", "l_max"),
                f"grop_hard_dapo requires l_cache <= l_max, got {self.l_cache} > {self.l_max}",
            )


class PartitionOptions(Options):
    """Success classes and groups without a signal.

    `mask_truncated` and `degenerate` are not included: some methods do not read them.
    """

    success_threshold: Float = option(
        0.5, "a completion is successful iff its reward is above this"
    )
    degenerate_by: Literal["class", "reward"] = option(
        "class", "degenerate means one class only, or all rewards equal"
    )


class TruncationOptions(Options):
    """Overlong filtering."""

    mask_truncated: bool = option(False, "completions cut at the length limit leave the loss")


Degenerate = Literal["drop", "zero", "literal"]


def degenerate(default: Degenerate) -> Any:
    """The `degenerate` option with a method's own default; null is not accepted."""
    help_text = (
        "groups without a signal: leave the batch, stay with zero advantage, or no special case"
    )
    return option(default, help_text, refuses_null=True)


def _number_of_text(value: Any) -> Any:
    """Convert text from a command line to a number. Raises ValueError for a bool: true is not 1."""
    if isinstance(value, bool):
        raise ValueError("true is no 1")
    return int(value) if isinstance(value, str) and value.isdigit() else value


Ddof = Annotated[Literal[0, 1], BeforeValidator(_number_of_text)]


class EpsOptions(Options):
    """The epsilon of standard deviations."""

    adv_eps: Float = option(1e-6, "added to every standard deviation that divides", ge=0)


class SequenceAdvantageOptions(EpsOptions):
    """The group-relative advantage."""

    ddof_seq: Ddof = option(1, "std over sequences: 1 sample, 0 population")
    normalize_std: bool = option(True, "divide by the group's standard deviation")
    baseline: Literal["seq", "token"] = option(
        "seq", "mean over completions, or weighted by their lengths"
    )


class PenaltyOptions(Options):
    """The length penalty."""

    length_penalty: LengthPenalty | None = option(
        None, "penalty on long completions, added to the reward; null = none"
    )
    grop_gamma1: Float = option(
        0.75, "grop: share of correct completions of an easy prompt", gt=0, lt=1
    )
    grop_medium_else: Literal["none", "incorrect"] = option(
        "none", "grop: who is penalized on a medium prompt with n <= m"
    )
    grop_hard_dapo: HardPenalty | None = option(None, "grop: penalty on hard prompts; null = none")
    stop_properly: Float | None = option(
        None,
        "truncated completions: reward times this (0 to 1), or, if negative, this reward; null: "
        "no change",
        le=1,
    )

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        for name in ("length_penalty", "grop_hard_dapo"):
            penalty = getattr(self, name)
            for violation in () if penalty is None else penalty.violations():
                yield Violation(
                    tuple(f"{name}.{leaf}" for leaf in violation.options), violation.message
                )

    def cautions(self) -> Iterator[str]:
        yield from super().cautions()
        if self.length_penalty is not None:
            yield from self.length_penalty.cautions()
        if self.length_penalty is None or self.length_penalty.kind != "grop":
            for name in ("grop_gamma1", "grop_medium_else", "grop_hard_dapo"):
                if getattr(self, name) != PenaltyOptions.model_fields[name].default:
                    yield no_effect(name, getattr(self, name), "length_penalty.kind is not grop")


def clip_low(default: float | None) -> Any:
    """The `clip_low` option with a method's own default."""
    return option(default, "lower clip: ratio >= 1 - clip_low; null: no clipping at all", ge=0)


def clip_high(default: float | None) -> Any:
    """The `clip_high` option with a method's own default."""
    return option(default, "upper clip: ratio <= 1 + clip_high", ge=0)


class ClipIntervalOptions(Options):
    """The clip interval."""

    clip_low: Float | None = clip_low(0.2)
    clip_high: Float | None = clip_high(0.2)

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        yield from self.interval_violations()

    def interval_violations(self) -> Iterator[Violation]:
        """A violation if only `clip_low` is set."""
        if self.clip_low is not None and self.clip_high is None:
            yield Violation(
                ("clip_low", "clip_high"),
                f"clip_low = {self.clip_low} needs clip_high; set both, or clip_low to null for "
                "no clipping",
            )


class ClipOptions(ClipIntervalOptions):
    """The clipped surrogate."""

    dual_clip: Float | None = option(
        None, "lower bound k * A of the surrogate where A < 0; null: off", gt=1
    )


class KLOptions(Options):
    """The KL to a reference."""

    kl_coef: Float = option(0.0, "k3 penalty to the reference policy, per token", ge=0)


class ScopeOptions(Options):
    """The scope of `token-mean`."""

    agg_scope: Literal["batch", "group"] = option(
        "batch", "token-mean over the whole batch, or per prompt and then over prompts"
    )


Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def agg(default: Aggregation) -> Any:
    """The `agg` option with a method's own default."""
    return option(default, "how token objectives are averaged")


class AggregationOptions(ScopeOptions):
    """The aggregation."""

    agg: Aggregation = agg("token-mean")
    l_norm: Float | None = option(
        None,
        "constant length normalizer of seq-mean-token-sum-norm: the maximum completion length, "
        "tokens",
        gt=0,
    )

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        if self.agg == "seq-mean-token-sum-norm" and self.l_norm is None:
            yield Violation(
                ("l_norm",),
                "l_norm is required with agg seq-mean-token-sum-norm (published: the maximum "
                "completion length)",
            )

    def cautions(self) -> Iterator[str]:
        yield from super().cautions()
        if self.l_norm is not None and self.agg != "seq-mean-token-sum-norm":
            yield no_effect("l_norm", self.l_norm, f"agg is {self.agg}")
        if self.agg_scope != "batch" and self.agg != "token-mean":
            yield no_effect("agg_scope", self.agg_scope, f"agg is {self.agg}")


def _ordered(bounds: tuple[float, float]) -> tuple[float, float]:
    if not 0 <= bounds[0] <= bounds[1]:
        raise ValueError("0 <= LOW <= HIGH")
    return bounds


Bounds = Annotated[
    Pair, AfterValidator(_ordered), Words("2 numbers LOW HIGH with 0 <= LOW <= HIGH")
]


class EntropyOptions(Options):
    """Entropy shaping."""

    base_reward: Literal["binary", "raw"] = option(
        "binary", "reward inside shaped rewards: 1 for success, or the reward itself"
    )
    entropy_eps: Float = option(1e-6, "numerical constant", ge=0)
    eps_mode: Literal["shift", "denominator"] = option(
        "shift", "eps added to the entropy first, or to the denominators"
    )
    entropy_clamp: Bounds | None = option(
        None, "clamp the entropy (nats) to [LOW, HIGH] before eps"
    )
    entropy_scope: Literal["group", "batch"] = option(
        "group", "entropies are compared inside a group or over the batch"
    )
    normaliser: Literal["sum", "geomean"] = option(
        "sum", "shares: divided by the mean, or by the geometric mean"
    )
    norm_scope: Literal["group", "batch"] = option("group", "pool of mean and std")
    adv_pool: Literal["all", "own"] = option(
        "all", "pools contain the other class's zeros, or the own class only"
    )


class GroupOptions(PartitionOptions, TruncationOptions, SequenceAdvantageOptions, PenaltyOptions):
    """Options of the group-relative advantage."""


class TokenGroupOptions(GroupOptions, ClipOptions, KLOptions, AggregationOptions):
    """Options of methods that put the group-relative advantage on every token."""


class EntropyShapingOptions(
    PartitionOptions, TruncationOptions, PenaltyOptions, EpsOptions, EntropyOptions, ClipOptions
):
    """Options of `gtpo_entropy` and `grpo_s`."""
