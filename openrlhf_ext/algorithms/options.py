"""Options of every algorithm: one frozen dataclass each, flat keys, defaults, choices and help text.

The shared blocks A-E of the specification are small base classes; an algorithm's class lists the blocks it reads and
overrides the defaults that are its own. `parse_options` turns a mapping (from YAML or the command line) into such a
dataclass and reports *all* violations in one ValueError. `describe_options` is what a command line prints.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)

REQUIRED = object()
LN2 = math.log(2.0)


@dataclass(frozen=True)
class OptionInfo:
    """One option as a command line shows it.

    Attributes:
        name: key, spelled as in `get_algorithm(name, key=value)`.
        kind: "float", "int", "bool", "choice", "pair", "ints" or "mapping".
        default: value used when the key is absent; None where null is the default.
        required: True when there is no default and a missing key is always an error.
        choices: legal values of a "choice".
        nullable: null is a value with a meaning of its own (not "take the default").
        recommended: published value of a key without a default; what a command line should supply.
        help: one sentence.
    """

    name: str
    kind: str
    default: Any
    required: bool
    choices: tuple[Any, ...]
    nullable: bool
    recommended: Any
    help: str


def option(
    kind: str,
    default: Any,
    help: str,
    *,
    choices: tuple[Any, ...] = (),
    nullable: bool = False,
    recommended: Any = None,
    check: Callable[[Any], bool] | None = None,
    rule: str = "",
) -> Any:
    """A dataclass field that carries what `describe_options` and `parse_options` need to know about a key."""
    metadata = {
        "kind": kind,
        "help": help,
        "choices": choices,
        "nullable": nullable or default is None,
        "required": default is REQUIRED,
        "recommended": recommended,
        "check": check,
        "rule": rule,
    }
    return field(default=None if default is REQUIRED else default, metadata=metadata)


def _positive(value: float) -> bool:
    return value > 0


def _not_negative(value: float) -> bool:
    return value >= 0


def _in_closed_unit_interval(value: float) -> bool:
    return 0 <= value <= 1


def _in_unit_interval(value: float) -> bool:
    return 0 < value < 1


# --------------------------------------------------------------------------------------------------------------------
# Parsing
# --------------------------------------------------------------------------------------------------------------------


def nearest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the known name closest to `name`, or an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""


def _as_float(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _as_int(value: Any) -> int:
    number = _as_float(value)
    if number != int(number):
        raise ValueError
    return int(number)


def _as_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError


def _as_pair(value: Any) -> tuple[float, float]:
    low, high = value
    return _as_float(low), _as_float(high)


def _as_ints(value: Any) -> tuple[int, ...]:
    return tuple(_as_int(item) for item in value)


def _as_mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError
    return dict(value)


_READERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "float": (_as_float, "a finite number"),
    "int": (_as_int, "an integer"),
    "bool": (_as_bool, "true or false"),
    "pair": (_as_pair, "two numbers [low, high]"),
    "ints": (_as_ints, "a list of integers"),
    "mapping": (_as_mapping, "a mapping"),
}


def read_value(name: str, value: Any, metadata: Mapping[str, Any]) -> Any:
    """`value` converted to the kind of an option; ValueError names the option, the rule and the value."""
    if metadata["kind"] == "choice":
        if value not in metadata["choices"]:
            known = ", ".join(repr(choice) for choice in metadata["choices"])
            hint = nearest(str(value), [str(choice) for choice in metadata["choices"]])
            raise ValueError(f"{name} must be one of {known}, got {value!r}{hint}")
        return value
    reader, wanted = _READERS[metadata["kind"]]
    try:
        converted = reader(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be {wanted}, got {value!r}") from None
    if metadata["check"] is not None and not metadata["check"](converted):
        raise ValueError(f"{name} must be {metadata['rule']}, got {value!r}")
    return converted


def parse_options(
    cls: type,
    values: Mapping[str, Any],
    *,
    owner: str,
    foreign: Iterable[str] = (),
    overrides: Mapping[str, Any] | None = None,
) -> Any:
    """Build the options dataclass `cls` from a mapping.

    Args:
        cls: options dataclass of the algorithm.
        values: key -> value; a null value takes the default unless null has a meaning for this key.
        owner: algorithm name, for messages.
        foreign: keys that other algorithms read; they are ignored here with a warning.
        overrides: defaults that replace those of `cls` (presets); explicit keys win.
    Raises:
        ValueError: every violation found, one line each.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    foreign = set(foreign)
    errors: list[str] = []
    parsed: dict[str, Any] = dict(overrides or {})
    for name, value in values.items():
        if name not in fields:
            errors.extend(_unknown_key(name, owner, fields, foreign))
        elif value is None:
            if fields[name].metadata["nullable"]:
                parsed[name] = None
            elif name == "degenerate":
                errors.append(f"degenerate must be one of {fields[name].metadata['choices']}, null is not accepted")
        else:
            try:
                parsed[name] = read_value(name, value, fields[name].metadata)
            except ValueError as error:
                errors.append(str(error))
    for name, f in fields.items():
        if f.metadata["required"] and parsed.get(name) is None:
            errors.append(f"{name} is required ({f.metadata['help']})")
    if not errors:
        options = cls(**parsed)
        errors.extend(options.violations())
        if not errors:
            return options
    raise ValueError(f"{owner}: " + f"\n{owner}: ".join(errors))


def _unknown_key(name: str, owner: str, fields: Mapping[str, Any], foreign: set[str]) -> Iterator[str]:
    if name in foreign:
        logger.warning("%s does not read the option %r; it is ignored", owner, name)
        return
    hint = nearest(name, [*fields, *foreign])
    yield f"unknown option {name!r}{hint} Options: {', '.join(sorted(fields))}"


def option_infos(cls: type) -> list[OptionInfo]:
    """The options of a dataclass built from `option(...)` fields, sorted by name."""
    return [
        OptionInfo(
            name=f.name,
            kind=f.metadata["kind"],
            default=f.default,
            required=f.metadata["required"],
            choices=f.metadata["choices"],
            nullable=f.metadata["nullable"],
            recommended=f.metadata["recommended"],
            help=f.metadata["help"],
        )
        for f in sorted(dataclasses.fields(cls), key=lambda f: f.name)
    ]


# --------------------------------------------------------------------------------------------------------------------
# Length penalty mapping (specification 2.6)
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LengthPenalty:
    """The `length_penalty` mapping, parsed. Lengths are in tokens."""

    kind: str = option("choice", REQUIRED, "formula of the penalty", choices=("none", "dapo", "tan_v1", "grop"))
    on: str = option("choice", "all", "completions it may act on", choices=("all", "correct", "incorrect"))
    l_max: int | None = option("int", None, "dapo: maximum length", check=_positive, rule="positive")
    l_cache: int | None = option("int", None, "dapo: length of the soft interval", check=_positive, rule="positive")
    factor: float = option("float", 1.0, "dapo: scale of the penalty")
    L1: int | None = option("int", None, "tan_v1: shorter length", check=_positive, rule="positive")
    L2: int | None = option("int", None, "tan_v1: longer length", check=_positive, rule="positive")
    denominator: str = option("choice", "L2", "tan_v1: slope denominator", choices=("L2", "L1"))

    def violations(self) -> Iterator[str]:
        needed = {"dapo": ("l_max", "l_cache"), "tan_v1": ("L1", "L2")}.get(self.kind, ())
        missing = [name for name in needed if getattr(self, name) is None]
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


# --------------------------------------------------------------------------------------------------------------------
# Shared blocks (specification 4.1)
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of all options: cross-field rules come from `violations`, which each block extends."""

    def violations(self) -> Iterator[str]:
        yield from ()


DEGENERATE_HELP = "groups without a signal: leave the batch, stay with zero advantage, or no special case"


@dataclass(frozen=True, kw_only=True)
class PartitionOptions(Options):
    """Block A without `mask_truncated` and `degenerate`."""

    success_threshold: float = option("float", 0.5, "a completion is successful iff its reward is above this")
    degenerate_by: str = option(
        "choice", "class", "degenerate means one class only, or all rewards equal", choices=("class", "reward")
    )


@dataclass(frozen=True, kw_only=True)
class TruncationOptions(Options):
    mask_truncated: bool = option("bool", False, "completions cut at the length limit leave the loss")


def degenerate(default: str) -> Any:
    """The `degenerate` option with an algorithm's own default; null is not accepted."""
    return option("choice", default, DEGENERATE_HELP, choices=("drop", "zero", "literal"))


@dataclass(frozen=True, kw_only=True)
class EpsOptions(Options):
    adv_eps: float = option(
        "float", 1e-6, "added to every standard deviation that divides", check=_not_negative, rule="at least 0"
    )


@dataclass(frozen=True, kw_only=True)
class SequenceAdvantageOptions(EpsOptions):
    """Block B."""

    ddof_seq: int = option("choice", 1, "std over sequences: 1 sample, 0 population", choices=(0, 1))
    normalize_std: bool = option("bool", True, "divide by the group's standard deviation")
    baseline: str = option(
        "choice", "seq", "mean over completions, or weighted by their lengths", choices=("seq", "token")
    )


@dataclass(frozen=True, kw_only=True)
class PenaltyOptions(Options):
    """Block C."""

    length_penalty: Mapping[str, Any] | None = option(
        "mapping", None, "null, or a mapping with kind none, dapo, tan_v1 or grop"
    )
    grop_gamma1: float = option(
        "float", 0.75, "grop: share of correct completions of an easy prompt", check=_in_unit_interval, rule="in (0, 1)"
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
    return option(
        "float",
        default,
        "lower clip: ratio >= 1 - clip_low; null: no clipping at all",
        nullable=True,
        check=_not_negative,
        rule="at least 0",
    )


def clip_high(default: float | None) -> Any:
    return option(
        "float", default, "upper clip: ratio <= 1 + clip_high", nullable=True, check=_not_negative, rule="at least 0"
    )


@dataclass(frozen=True, kw_only=True)
class ClipOptions(Options):
    """Block D, the surrogate."""

    clip_low: float | None = clip_low(0.2)
    clip_high: float | None = clip_high(0.2)
    dual_clip: float | None = option(
        "float",
        None,
        "lower bound k * A of the surrogate where A < 0; null: off",
        check=lambda k: k > 1,
        rule="above 1",
    )

    def violations(self) -> Iterator[str]:
        yield from super().violations()
        if self.clip_low is not None and self.clip_high is None:
            yield f"clip_low = {self.clip_low} needs clip_high; set both, or clip_low to null for no clipping"


@dataclass(frozen=True, kw_only=True)
class KLOptions(Options):
    kl_coef: float = option(
        "float", 0.0, "k3 penalty to the reference policy, per token", check=_not_negative, rule="at least 0"
    )


@dataclass(frozen=True, kw_only=True)
class ScopeOptions(Options):
    agg_scope: str = option(
        "choice",
        "batch",
        "token-mean over the whole batch, or per prompt and then over prompts",
        choices=("batch", "group"),
    )


AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def agg(default: str) -> Any:
    return option("choice", default, "how token objectives are averaged", choices=AGGREGATIONS)


@dataclass(frozen=True, kw_only=True)
class AggregationOptions(ScopeOptions):
    """Block D, the aggregation."""

    agg: str = agg("token-mean")
    l_norm: float | None = option(
        "float",
        None,
        "constant length normaliser of seq-mean-token-sum-norm: the maximum completion length",
        check=_positive,
        rule="positive",
    )

    def violations(self) -> Iterator[str]:
        yield from super().violations()
        if self.agg == "seq-mean-token-sum-norm" and self.l_norm is None:
            yield "l_norm is required with agg seq-mean-token-sum-norm (published: the maximum completion length)"


@dataclass(frozen=True, kw_only=True)
class EntropyOptions(Options):
    """Block E."""

    base_reward: str = option(
        "choice",
        "binary",
        "reward inside shaped rewards: 1 for success, or the reward itself",
        choices=("binary", "raw"),
    )
    entropy_eps: float = option("float", 1e-6, "numerical constant", check=_not_negative, rule="at least 0")
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


# --------------------------------------------------------------------------------------------------------------------
# Algorithms (specification 4.2 - 4.13)
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GroupOptions(PartitionOptions, TruncationOptions, SequenceAdvantageOptions, PenaltyOptions):
    """Blocks A, B, C: what the group-relative advantage reads."""


@dataclass(frozen=True, kw_only=True)
class GrpoOptions(GroupOptions, ClipOptions, KLOptions, AggregationOptions):
    degenerate: str = degenerate("literal")
    agg: str = agg("seq-mean-token-mean")


@dataclass(frozen=True, kw_only=True)
class DapoOptions(GroupOptions, ClipOptions, KLOptions, AggregationOptions):
    degenerate: str = degenerate("drop")
    clip_high: float | None = clip_high(0.28)


@dataclass(frozen=True, kw_only=True)
class DrGrpoOptions(GroupOptions, ClipOptions, KLOptions, AggregationOptions):
    degenerate: str = degenerate("literal")
    normalize_std: bool = option("bool", False, "divide by the group's standard deviation")
    agg: str = agg("seq-mean-token-sum-norm")


@dataclass(frozen=True, kw_only=True)
class GspoOptions(GroupOptions, ClipOptions):
    degenerate: str = degenerate("literal")
    clip_low: float | None = clip_low(3e-4)
    clip_high: float | None = clip_high(4e-4)


@dataclass(frozen=True, kw_only=True)
class GtpoEntropyOptions(
    PartitionOptions,
    TruncationOptions,
    PenaltyOptions,
    EpsOptions,
    EntropyOptions,
    ClipOptions,
    KLOptions,
    ScopeOptions,
):
    version: str = option("choice", "v6", "formula of the shaped reward", choices=("v1", "v1u", "v2", "v6"))
    alpha: float = option("float", 0.1, "v1, v2: entropy weight")
    alpha1: float | None = option(
        "float", None, "base weight; required for v6, v1u and v2_positive v1u", recommended=1.0
    )
    alpha2: float | None = option(
        "float", None, "entropy weight; required for v6, v1u and v2_positive v1u", recommended=0.1
    )
    kappa: float | None = option(
        "float", None, "v1u: upper clip alpha1 (1 + 1/kappa); required there", check=lambda k: k > 1, rule="above 1"
    )
    v2_positive: str = option("choice", "v1", "v2: formula for successful completions", choices=("v1", "v1u"))
    entropy_axis: str = option(
        "choice",
        "column",
        "entropies compared at equal positions, inside a completion, or all together",
        choices=("column", "row", "matrix"),
    )
    inverse_floor: float = option(
        "float", 0.0, "lower bound of the entropy before it is inverted", check=_not_negative, rule="at least 0"
    )
    ddof_tok: int = option("choice", 0, "std of token pools: 0 population, 1 sample", choices=(0, 1))
    sign_guard: bool = option("bool", False, "clamp advantages to >= 0 on successes and <= 0 on failures; in no paper")
    degenerate: str = degenerate("drop")
    clip_high: float | None = clip_high(0.28)

    @property
    def clipped_positive(self) -> bool:
        """Successful completions use the clipped reward of T1 eq. 11."""
        return self.version == "v1u" or (self.version == "v2" and self.v2_positive == "v1u")

    @property
    def two_tables(self) -> bool:
        """Failures have shaped rewards of their own."""
        return self.version in ("v2", "v6")

    def violations(self) -> Iterator[str]:
        yield from super().violations()
        if self.v2_positive != "v1" and self.version != "v2":
            yield f"v2_positive = {self.v2_positive!r} is read only with version v2, got version {self.version!r}"
        needed = ("alpha1", "alpha2") if self.version == "v6" else ("alpha1", "alpha2", "kappa")
        published = {"alpha1": "published for v6: 1.0", "alpha2": "published for v6: 0.1", "kappa": "must be above 1"}
        if self.version == "v6" or self.clipped_positive:
            missing = [name for name in needed if getattr(self, name) is None]
            yield from (f"{name} is required with version {self.version} ({published[name]})" for name in missing)
            if self.clipped_positive and not missing:
                yield from self._clip_violations()

    def _clip_violations(self) -> Iterator[str]:
        upper = self.alpha1 * (1 + 1 / self.kappa)
        if upper < 1:
            yield (
                f"the clip interval [1, alpha1 (1 + 1/kappa)] is empty: alpha1 = {self.alpha1}, kappa = {self.kappa} "
                f"give an upper end of {upper:.6g}; raise alpha1 or lower kappa"
            )
        if abs(self.alpha1 + self.alpha2 - 1) > 1e-9:
            logger.warning("the paper requires alpha1 + alpha2 = 1 here, got %s + %s", self.alpha1, self.alpha2)


@dataclass(frozen=True, kw_only=True)
class GrpoSOptions(PartitionOptions, TruncationOptions, PenaltyOptions, EpsOptions, EntropyOptions, ClipOptions):
    version: str = option("choice", "v6", "formula of the shaped reward", choices=("v1", "v2", "v6"))
    beta: float = option("float", 0.1, "v1, v2: entropy weight")
    beta1: float | None = option("float", None, "base weight; required for v6", recommended=1.0)
    beta2: float | None = option("float", None, "entropy weight; required for v6", recommended=0.1)
    h_hat: str = option(
        "choice", "arithmetic", "mean of a completion's token entropies", choices=("arithmetic", "geometric")
    )
    w_hat: str = option(
        "choice", "arithmetic", "sequence ratio: mean of token ratios", choices=("arithmetic", "geometric")
    )
    ddof_seq: int = option("choice", 1, "std over sequences: 1 sample, 0 population", choices=(0, 1))
    degenerate: str = degenerate("drop")
    clip_high: float | None = clip_high(0.28)

    @property
    def two_tables(self) -> bool:
        """Failures have shaped rewards of their own."""
        return self.version in ("v2", "v6")

    def violations(self) -> Iterator[str]:
        yield from super().violations()
        if self.version == "v6":
            published = {"beta1": "1.0", "beta2": "0.1"}
            missing = [name for name in published if getattr(self, name) is None]
            yield from (f"{name} is required with version v6 (published: {published[name]})" for name in missing)


@dataclass(frozen=True, kw_only=True)
class GtpoConflictOptions(TruncationOptions, EpsOptions):
    preset: str = option(
        "choice", "paper", "defaults of the paper or of its released code", choices=("paper", "official")
    )
    gamma: float = option("float", 0.1, "entropy regulariser")
    entropy_threshold: float = option("float", LN2, "filter level of a completion's mean entropy, in nats")
    h_ini: float | None = option("float", None, "initial entropy; null: filter always on; a number: on only below ln 2")
    filter: str = option("choice", "all", "who the entropy filter removes", choices=("all", "only_neg", "off"))
    use_conflict: bool = option("bool", True, "false: lambda is 1 everywhere")
    w_pos: float = option("float", 2.0, "lambda of conflict tokens of positive completions")
    anchor: str = option(
        "choice", "start", "conflict spans begin at the first/last token, or anywhere", choices=("start", "first")
    )
    overlap: str = option(
        "choice", "or", "tokens in both spans: one weight, or the product of both", choices=("or", "product")
    )
    zero_adv: str = option(
        "choice", "literal", "A = 0 completions get -gamma <H>, or nothing", choices=("literal", "skip")
    )
    conflict_divisor: str = option(
        "choice", "none", "divide a completion by its longer conflict run", choices=("none", "max_run")
    )
    group_reduce: str = option("choice", "mean", "mean over completions and prompts, or sum", choices=("mean", "sum"))
    normalize_std: bool = option("bool", True, "divide by the group's standard deviation")
    ddof_seq: int = option("choice", 1, "std over sequences: 1 sample, 0 population", choices=(0, 1))
    sign_tol: float = option("float", 1e-8, "|A| at or below this is 0", check=_not_negative, rule="at least 0")
    clip_low: float | None = clip_low(None)
    clip_high: float | None = clip_high(None)

    OFFICIAL = {
        "normalize_std": False,
        "entropy_threshold": 0.7,
        "h_ini": None,
        "overlap": "product",
        "conflict_divisor": "max_run",
        "group_reduce": "sum",
        "gamma": 0.1,
        "w_pos": 2.0,
    }

    @classmethod
    def preset_overrides(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults replaced by the preset named in `values`."""
        return dict(cls.OFFICIAL) if values.get("preset") == "official" else {}

    def violations(self) -> Iterator[str]:
        yield from super().violations()
        if self.clip_low is not None and self.clip_high is None:
            yield f"clip_low = {self.clip_low} needs clip_high; set both, or clip_low to null for no clipping"


@dataclass(frozen=True, kw_only=True)
class EntropyAdvantageOptions(GroupOptions, ClipOptions, KLOptions, AggregationOptions):
    ent_alpha: float = option("float", 0.4, "entropy weight (published: 0.4 with GRPO, 0.1 with PPO)")
    ent_kappa: float = option("float", 2.0, "the bonus is at most |A| / kappa", check=_positive, rule="positive")
    degenerate: str = degenerate("zero")
    clip_high: float | None = clip_high(0.28)


@dataclass(frozen=True, kw_only=True)
class HighEntropyTokensOptions(GroupOptions, ClipOptions, KLOptions, ScopeOptions):
    top_rho: float = option("float", 0.2, "share of tokens kept", check=lambda r: 0 < r <= 1, rule="in (0, 1]")
    mask_denominator: str = option(
        "choice", "selected", "denominators count the selected tokens, or all", choices=("selected", "all")
    )
    degenerate: str = degenerate("drop")
    clip_high: float | None = clip_high(0.28)


@dataclass(frozen=True, kw_only=True)
class _CovOptions(PartitionOptions, SequenceAdvantageOptions, PenaltyOptions, ClipOptions, ScopeOptions):
    mask_truncated: bool = option("bool", False, "not defined for covariance methods: true is rejected")
    degenerate: str = degenerate("drop")

    def violations(self) -> Iterator[str]:
        yield from super().violations()
        if self.mask_truncated:
            yield "mask_truncated = true is not defined for covariance methods; leave it false"


@dataclass(frozen=True, kw_only=True)
class ClipCovOptions(_CovOptions):
    cov_ratio: float = option("float", 2e-4, "share of tokens removed", check=_not_negative, rule="at least 0")
    cov_lb: float = option("float", 1.0, "lower end of the candidate band, exclusive")
    cov_ub: float = option("float", 5.0, "upper end of the candidate band, exclusive")
    perm: tuple[int, ...] | None = option("ints", None, "selection order of the candidates; null: natural order")
    kl_coef: float = option("float", 0.0, "not defined here: a non-zero value is rejected")
    clip_low: float | None = clip_low(1.0)
    clip_high: float | None = clip_high(1.0)

    def violations(self) -> Iterator[str]:
        yield from super().violations()
        if self.kl_coef != 0:
            yield f"kl_coef = {self.kl_coef} is not defined for clip_cov; leave it 0"


@dataclass(frozen=True, kw_only=True)
class KLCovOptions(_CovOptions, KLOptions):
    cov_ratio: float = option(
        "float", 2e-3, "share of tokens penalised (2e-3 for 7B, 2e-4 for 32B)", check=_not_negative, rule="at least 0"
    )
    ppo_kl_coef: float = option("float", 1.0, "coefficient of |new - old| on the chosen tokens")
    clip_low: float | None = option("float", None, "accepted, without effect", nullable=True)
    clip_high: float | None = option("float", None, "accepted, without effect")
    dual_clip: float | None = option("float", None, "accepted, without effect")

    def violations(self) -> Iterator[str]:
        # No clipping here, so the rules between the clip keys do not apply.
        yield from (v for v in super().violations() if not v.startswith("clip_low"))


@dataclass(frozen=True, kw_only=True)
class MixedPolicyOptions(DapoOptions):
    zero_batch: bool = option("bool", False, "add the loss over groups without a success, guided by the other policy")
    zero_weight: float = option("float", 1.0, "weight of that loss")


@dataclass(frozen=True, kw_only=True)
class GaeOptions(ClipOptions, KLOptions, AggregationOptions, PenaltyOptions):
    gamma: float = option("float", 1.0, "discount per token", check=_in_closed_unit_interval, rule="in [0, 1]")
    lambd: float = option("float", 1.0, "GAE lambda", check=_in_closed_unit_interval, rule="in [0, 1]")
    whiten: bool = option("bool", True, "standardise the advantages over all tokens of the rollout batch")
    normalize_std: bool = option("bool", True, "divide by the std when whitening; false only subtracts the mean")
    adv_eps: float = option("float", 1e-8, "added to the standard deviation", check=_positive, rule="positive")
