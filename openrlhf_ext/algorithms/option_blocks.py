"""Blocks of options that algorithms share (specification 4.1, blocks A-E), and the `length_penalty` mapping.

An algorithm's options class lists the blocks it reads, overrides the defaults that are its own and adds its own keys.
`degenerate`, `clip_low`, `clip_high` and `agg` make one of these keys with another default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from openrlhf_ext.algorithms.option_parsing import (
    REQUIRED,
    Options,
    in_unit_interval,
    not_negative,
    option,
    parse_options,
    positive,
)


@dataclass(frozen=True, kw_only=True)
class LengthPenalty(Options):
    """The `length_penalty` mapping, parsed (specification 2.6). Lengths are in tokens."""

    kind: str = option("choice", REQUIRED, "formula of the penalty", choices=("none", "dapo", "tan_v1", "grop"))
    on: str = option("choice", "all", "completions it may act on", choices=("all", "correct", "incorrect"))
    l_max: int | None = option("int", None, "dapo: maximum length", check=positive, rule="positive")
    l_cache: int | None = option("int", None, "dapo: length of the soft interval", check=positive, rule="positive")
    factor: float = option("float", 1.0, "dapo: scale of the penalty")
    L1: int | None = option("int", None, "tan_v1: shorter length", check=positive, rule="positive")
    L2: int | None = option("int", None, "tan_v1: longer length", check=positive, rule="positive")
    denominator: str = option("choice", "L2", "tan_v1: slope denominator", choices=("L2", "L1"))

    def violations(self) -> Iterator[str]:
        needed = {"dapo": ("l_max", "l_cache"), "tan_v1": ("L1", "L2")}.get(self.kind, ())
        missing = [name for name in needed if getattr(self, name) is None]
        optional = {"dapo": ("factor",), "tan_v1": ("denominator",)}.get(self.kind, ())
        given = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        unread = sorted(set(given) - {"kind", "on", *needed, *optional})
        if unread and self.kind != "none":
            yield f"length_penalty kind {self.kind!r} does not read {', '.join(unread)}"
        if missing:
            yield f"length_penalty kind {self.kind!r} requires {', '.join(missing)}"
        elif self.kind == "tan_v1" and not self.L2 > self.L1:
            yield f"length_penalty requires L2 > L1, got L1 = {self.L1}, L2 = {self.L2}"
        elif self.kind == "dapo" and self.l_cache > self.l_max:
            yield f"length_penalty requires l_cache <= l_max, got {self.l_cache} > {self.l_max}"


def parse_length_penalty(value: Mapping[str, Any] | None) -> LengthPenalty | None:
    """The mapping as a `LengthPenalty`; None for no penalty (null or `kind: none`)."""
    if value is None:
        return None
    penalty = parse_options(LengthPenalty, value, owner="length_penalty")
    return None if penalty.kind == "none" else penalty


@dataclass(frozen=True, kw_only=True)
class PartitionOptions(Options):
    """Block A without `mask_truncated` and `degenerate`, which some algorithms do not read."""

    success_threshold: float = option("float", 0.5, "a completion is successful iff its reward is above this")
    degenerate_by: str = option(
        "choice", "class", "degenerate means one class only, or all rewards equal", choices=("class", "reward")
    )


@dataclass(frozen=True, kw_only=True)
class TruncationOptions(Options):
    """`mask_truncated` of block A."""

    mask_truncated: bool = option("bool", False, "completions cut at the length limit leave the loss")


def degenerate(default: str) -> Any:
    """The `degenerate` option with an algorithm's own default; null is not accepted."""
    return option(
        "choice",
        default,
        "groups without a signal: leave the batch, stay with zero advantage, or no special case",
        choices=("drop", "zero", "literal"),
        refuses_null=True,
    )


@dataclass(frozen=True, kw_only=True)
class EpsOptions(Options):
    """`adv_eps` of block B."""

    adv_eps: float = option(
        "float", 1e-6, "added to every standard deviation that divides", check=not_negative, rule="at least 0"
    )


@dataclass(frozen=True, kw_only=True)
class SequenceAdvantageOptions(EpsOptions):
    """Block B: the group-relative advantage."""

    ddof_seq: int = option("choice", 1, "std over sequences: 1 sample, 0 population", choices=(0, 1))
    normalize_std: bool = option("bool", True, "divide by the group's standard deviation")
    baseline: str = option(
        "choice", "seq", "mean over completions, or weighted by their lengths", choices=("seq", "token")
    )


@dataclass(frozen=True, kw_only=True)
class PenaltyOptions(Options):
    """Block C: the length penalty."""

    length_penalty: Mapping[str, Any] | None = option(
        "mapping", None, "null, or a mapping with kind none, dapo, tan_v1 or grop"
    )
    grop_gamma1: float = option(
        "float", 0.75, "grop: share of correct completions of an easy prompt", check=in_unit_interval, rule="in (0, 1)"
    )
    grop_medium_else: str = option(
        "choice", "none", "grop: who is penalised on a medium prompt with n <= m", choices=("none", "incorrect")
    )
    grop_hard_dapo: Mapping[str, Any] | None = option(
        "mapping", None, "grop: null, or {l_max, l_cache} of a penalty on hard prompts"
    )

    def violations(self) -> Iterator[str]:
        yield from super().violations()
        try:
            parse_length_penalty(self.length_penalty)
            self.hard_penalty()
        except ValueError as error:
            yield str(error)

    def hard_penalty(self) -> LengthPenalty | None:
        """`grop_hard_dapo` as a DAPO penalty of factor 1, or None."""
        if self.grop_hard_dapo is None:
            return None
        extra = sorted(set(self.grop_hard_dapo) - {"l_max", "l_cache"})
        if extra:
            raise ValueError(f"grop_hard_dapo takes l_max and l_cache only, got {', '.join(extra)}")
        return parse_options(LengthPenalty, {"kind": "dapo", **self.grop_hard_dapo}, owner="grop_hard_dapo")


def clip_low(default: float | None) -> Any:
    """The `clip_low` option with an algorithm's own default."""
    return option(
        "float",
        default,
        "lower clip: ratio >= 1 - clip_low; null: no clipping at all",
        nullable=True,
        check=not_negative,
        rule="at least 0",
    )


def clip_high(default: float | None) -> Any:
    """The `clip_high` option with an algorithm's own default."""
    return option(
        "float", default, "upper clip: ratio <= 1 + clip_high", nullable=True, check=not_negative, rule="at least 0"
    )


@dataclass(frozen=True, kw_only=True)
class ClipIntervalOptions(Options):
    """Block D, the clip interval."""

    clip_low: float | None = clip_low(0.2)
    clip_high: float | None = clip_high(0.2)

    def violations(self) -> Iterator[str]:
        yield from super().violations()
        yield from self.interval_violations()

    def interval_violations(self) -> Iterator[str]:
        """Both ends, or none."""
        if self.clip_low is not None and self.clip_high is None:
            yield f"clip_low = {self.clip_low} needs clip_high; set both, or clip_low to null for no clipping"


@dataclass(frozen=True, kw_only=True)
class ClipOptions(ClipIntervalOptions):
    """Block D, the surrogate."""

    dual_clip: float | None = option(
        "float",
        None,
        "lower bound k * A of the surrogate where A < 0; null: off",
        check=lambda k: k > 1,
        rule="above 1",
    )


@dataclass(frozen=True, kw_only=True)
class KLOptions(Options):
    """Block D, the KL to a reference."""

    kl_coef: float = option(
        "float", 0.0, "k3 penalty to the reference policy, per token", check=not_negative, rule="at least 0"
    )


@dataclass(frozen=True, kw_only=True)
class ScopeOptions(Options):
    """Block D, the scope of `token-mean`."""

    agg_scope: str = option(
        "choice",
        "batch",
        "token-mean over the whole batch, or per prompt and then over prompts",
        choices=("batch", "group"),
    )


AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def agg(default: str) -> Any:
    """The `agg` option with an algorithm's own default."""
    return option("choice", default, "how token objectives are averaged", choices=AGGREGATIONS)


@dataclass(frozen=True, kw_only=True)
class AggregationOptions(ScopeOptions):
    """Block D, the aggregation."""

    agg: str = agg("token-mean")
    l_norm: float | None = option(
        "float",
        None,
        "constant length normaliser of seq-mean-token-sum-norm: the maximum completion length",
        check=positive,
        rule="positive",
    )

    def violations(self) -> Iterator[str]:
        yield from super().violations()
        if self.agg == "seq-mean-token-sum-norm" and self.l_norm is None:
            yield "l_norm is required with agg seq-mean-token-sum-norm (published: the maximum completion length)"


@dataclass(frozen=True, kw_only=True)
class EntropyOptions(Options):
    """Block E: entropy shaping."""

    base_reward: str = option(
        "choice",
        "binary",
        "reward inside shaped rewards: 1 for success, or the reward itself",
        choices=("binary", "raw"),
    )
    entropy_eps: float = option("float", 1e-6, "numerical constant", check=not_negative, rule="at least 0")
    eps_mode: str = option(
        "choice", "shift", "eps added to the entropy first, or to the denominators", choices=("shift", "denominator")
    )
    entropy_clamp: tuple[float, float] | None = option(
        "pair", None, "clamp the entropy to [lo, hi] before eps", check=lambda p: p[0] <= p[1], rule="ordered, lo <= hi"
    )
    entropy_scope: str = option(
        "choice", "group", "entropies are compared inside a group or over the batch", choices=("group", "batch")
    )
    normaliser: str = option(
        "choice", "sum", "shares: divided by the mean, or by the geometric mean", choices=("sum", "geomean")
    )
    norm_scope: str = option("choice", "group", "pool of mean and std", choices=("group", "batch"))
    adv_pool: str = option(
        "choice", "all", "pools contain the other class's zeros, or the own class only", choices=("all", "own")
    )


@dataclass(frozen=True, kw_only=True)
class GroupOptions(PartitionOptions, TruncationOptions, SequenceAdvantageOptions, PenaltyOptions):
    """Blocks A (without `degenerate`), B and C: what the group-relative advantage reads."""
