"""From OpenRLHF's flags and ``algo.<estimator>`` maps to the arguments of ``get_algorithm``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from openrlhf_ext.config.access import is_set
from openrlhf_ext.config.entities.algo import CUSTOM

if TYPE_CHECKING:
    from openrlhf_ext.config.schema import RunConfig

# OpenRLHF's flags that set an option of the estimator. They act only when given: their defaults are OpenRLHF's, an
# estimator has defaults of its own (DAPO clips at 0.2/0.28, OpenRLHF at 0.2/0.2).
FLAG_KEYS: dict[str, tuple[str, ...]] = {
    "actor.eps_clip": ("clip_low", "clip_high"),
    "actor.eps_clip_low_high": ("clip_low", "clip_high"),
    "actor.dual_clip": ("dual_clip",),
    "actor.loss_agg_mode": ("agg",),
    "algo.advantage.no_std_norm": ("normalize_std",),
    "algo.advantage.gamma": ("gamma",),
    "algo.advantage.lambd": ("lambd",),
    "reward.overlong_buffer_len": ("length_penalty",),
}

# Arguments of ``get_algorithm`` that are no options of an estimator, and the options that set them.
RESERVED_KEYS = {
    "kl": "algo.kl.*",
    "correction": "algo.advantage.is_correction_*",
    "name": "algo.advantage.estimator",
}


@dataclass(frozen=True)
class FlagOption:
    """An option of the estimator that was set by one of OpenRLHF's flags."""

    key: str
    value: Any
    flag: str


def flag_options(config: RunConfig) -> Iterator[FlagOption]:
    """The estimator's options that were set by OpenRLHF's flags."""
    yield from _clip_options(config)
    if config.actor.dual_clip is not None:
        yield FlagOption("dual_clip", config.actor.dual_clip, "actor.dual_clip")
    if is_set(config, "actor.loss_agg_mode"):
        yield FlagOption("agg", config.actor.loss_agg_mode, "actor.loss_agg_mode")
    if config.algo.advantage.no_std_norm:
        yield FlagOption("normalize_std", False, "algo.advantage.no_std_norm")
    for key in ("gamma", "lambd"):
        if config.algo.advantage.estimator == "gae" and is_set(config, f"algo.advantage.{key}"):
            yield FlagOption(key, getattr(config.algo.advantage, key), f"algo.advantage.{key}")
    if config.reward.overlong_buffer_len is not None:
        yield FlagOption("length_penalty", _overlong_penalty(config), "reward.overlong_buffer_len")


def algorithm_name(config: RunConfig) -> str:
    """The name under which the estimator is registered; for ``custom`` after running the file of ``algo.module_path``.

    Raises:
        ValueError: the file cannot be run, or does not register one algorithm.
    """
    if config.algo.advantage.estimator != CUSTOM:
        return config.algo.advantage.estimator
    from openrlhf_ext.algorithms.own_file import algorithm_of_file  # here, not above: it imports torch

    return algorithm_of_file(config.algo.module_path)


def merged_algorithm_options(config: RunConfig) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
    """(algorithm, its options, importance correction or None), as ``get_algorithm`` takes them.

    A KL penalty of ``algo.kl.*`` is in the options under the name ``kl``. Options of ``algo.<estimator>`` win over
    flags; the checks refuse a configuration in which they disagree. Flags that the estimator does not read are left
    out; a warning says so at the start of a run.
    """
    from openrlhf_ext.algorithms import describe_options, with_published_values  # here, not above: it imports torch

    name = algorithm_name(config)
    own = getattr(config.algo, config.algo.advantage.estimator)
    known = {info.name for info in describe_options(name)}
    flags = {option.key: option.value for option in flag_options(config) if option.key in known}
    options = flags | own | _kl_penalty(config)
    options = with_published_values(name, options, max_length=config.rollout.max_new_tokens)
    return name, options, _correction(config)


def _kl_penalty(config: RunConfig) -> dict[str, Any]:
    kl = config.algo.kl
    if kl.init_coef == 0:
        return {}
    place = "loss" if kl.use_loss else "reward"
    penalty = {"coef": kl.init_coef, "estimator": kl.estimator, "place": place}
    return {"kl": penalty | ({"unbiased_gradient": True} if kl.unbiased_gradient else {})}


def _clip_options(config: RunConfig) -> Iterator[FlagOption]:
    if config.actor.eps_clip_low_high is not None:
        low, high = config.actor.eps_clip_low_high
        flag = "actor.eps_clip_low_high"
    elif is_set(config, "actor.eps_clip"):
        low = high = config.actor.eps_clip
        flag = "actor.eps_clip"
    else:
        return
    yield FlagOption("clip_low", low, flag)
    yield FlagOption("clip_high", high, flag)


def _overlong_penalty(config: RunConfig) -> dict[str, Any]:
    """DAPO eq. 13: nothing up to l_max - l_cache, then linear down to -factor at l_max."""
    return {
        "kind": "dapo",
        "l_max": config.rollout.max_new_tokens,
        "l_cache": int(config.reward.overlong_buffer_len),
        "factor": config.reward.overlong_penalty_factor,
    }


def correction_level(config: RunConfig) -> str:
    """``algo.advantage.is_correction_level``, its default resolved: tokens that lag are off-policy."""
    if config.max_staleness > 0 and not is_set(config, "algo.advantage.is_correction_level"):
        return "token"
    return config.algo.advantage.is_correction_level


def _correction(config: RunConfig) -> dict[str, Any] | None:
    advantage, level = config.algo.advantage, correction_level(config)
    if level == "off":
        return None
    return {
        "level": level,
        "mode": advantage.is_correction_mode,
        "gating": advantage.is_correction_gating,
        "threshold": correction_threshold(advantage.is_correction_threshold),
    }


def correction_threshold(threshold: tuple[float, ...]) -> list[float]:
    """[low, high]; a single value is an upper bound."""
    return [0.0, *threshold] if len(threshold) == 1 else list(threshold)
