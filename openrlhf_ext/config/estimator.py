"""The chosen estimator of a configuration: its name, its options by all the names that set them,
what it measures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from openrlhf_ext.config.run_config import RunConfig
from openrlhf_ext.options import is_set, value_of
from openrlhf_ext.options.sections.algo import CUSTOM
from openrlhf_ext.options.sections.rollout import PenaltyFormula

# OpenRLHF's flags that set an option of the estimator. They act only when given: their defaults are
# OpenRLHF's, an estimator has defaults of its own (DAPO clips at 0.2/0.28, OpenRLHF at 0.2/0.2).
_AS_IT_IS = {
    "actor.dual_clip": "dual_clip",
    "actor.loss_agg_mode": "agg",
    "actor.policy_loss_type": "policy_loss_type",
    "reward.clip_range": "reward_clip",
    "reward.stop_properly_penalty_coef": "stop_properly",
}
FLAGS = {
    *_AS_IT_IS,
    "actor.eps_clip",
    "actor.eps_clip_low_high",
    "algo.advantage.no_std_norm",
    "algo.advantage.gamma",
    "algo.advantage.lambd",
    "reward.overlong_buffer_len",
    "reward.length_penalty.kind",
    "reward.length_penalty.grop_gamma1",
    "reward.length_penalty.grop_medium_else",
}


@dataclass(frozen=True)
class FlagOption:
    key: str
    value: Any
    flag: str


def flag_options(config: RunConfig) -> Iterator[FlagOption]:
    actor, advantage, reward = config.actor, config.algo.advantage, config.reward
    pair, flag = actor.eps_clip_low_high, "actor.eps_clip_low_high"
    if pair is None and is_set(config, "actor.eps_clip"):
        pair, flag = (actor.eps_clip, actor.eps_clip), "actor.eps_clip"
    if pair is not None:
        yield FlagOption("clip_low", pair[0], flag)
        yield FlagOption("clip_high", pair[1], flag)
    for flag, key in _AS_IT_IS.items():
        if is_set(config, flag) and (value := value_of(config, flag)) is not None:
            yield FlagOption(key, value, flag)
    if advantage.no_std_norm:
        yield FlagOption("normalize_std", False, "algo.advantage.no_std_norm")
    for key, readers in (("gamma", ("gae", "reinforce")), ("lambd", ("gae",))):
        if advantage.estimator in readers and is_set(config, f"algo.advantage.{key}"):
            yield FlagOption(key, getattr(advantage, key), f"algo.advantage.{key}")
    if reward.overlong_buffer_len is not None:
        # DAPO eq. 13: nothing up to l_max - l_cache, then linear down to -factor at l_max
        penalty = {
            "kind": "dapo",
            "l_max": config.rollout.max_new_tokens,
            "l_cache": int(reward.overlong_buffer_len),
            "factor": reward.overlong_penalty_factor,
        }
        yield FlagOption("length_penalty", penalty, "reward.overlong_buffer_len")
    yield from _length_penalty(config)


def _length_penalty(config: RunConfig) -> Iterator[FlagOption]:
    """``reward.length_penalty.*`` under the estimator's names: what its kind reads, where that is
    not the default."""
    penalty, flag = config.reward.length_penalty, "reward.length_penalty"
    if penalty.kind == "none":
        return
    formula = {
        name: getattr(penalty, name)
        for name in ("kind", "on", *penalty.read_by.get(penalty.kind, ()))
    }
    given = {
        name: value
        for name, value in formula.items()
        if value != PenaltyFormula.model_fields[name].default
    }
    yield FlagOption("length_penalty", given, f"{flag}.kind")
    for key in ("grop_gamma1", "grop_medium_else"):
        if penalty.kind == "grop" and (value := getattr(penalty, key)) is not None:
            yield FlagOption(key, value, f"{flag}.{key}")


def algorithm_name(config: RunConfig) -> str:
    """The name under which the estimator is registered; for ``custom`` after running the file that
    registers it, which raises ValueError where it cannot be run, or does not register one
    algorithm."""
    if config.algo.advantage.estimator != CUSTOM:
        return config.algo.advantage.estimator
    from openrlhf_ext.algorithms.registry import algorithm_of_file  # late: algorithms import torch

    return algorithm_of_file(config.algo.module_path or "")


def algorithm_options(config: RunConfig) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
    """Arguments of ``get_algorithm``: (name, options, importance correction or None).

    A KL penalty of ``algo.kl.*`` is in the options under the name ``kl``. Options of
    ``algo.<estimator>`` win over flags; the checks refuse a configuration in which they disagree.
    What the estimator does not read is left out; a warning says so at the start of a run.
    """
    # late, as above
    from openrlhf_ext.algorithms.registry import foreign_keys, option_keys, with_published_values

    name = algorithm_name(config)
    known, foreign = option_keys(name), foreign_keys(name)
    options = {option.key: option.value for option in flag_options(config) if option.key in known}
    options |= {key: value for key, value in config.own_options.items() if key not in foreign}
    options |= _kl_penalty(config)
    if config.actor.entropy_coef:
        options["entropy_coef"] = config.actor.entropy_coef
    options = with_published_values(name, options, max_length=config.rollout.max_new_tokens)
    return name, options, _correction(config)


def _kl_penalty(config: RunConfig) -> dict[str, Any]:
    kl = config.algo.kl
    if kl.init_coef == 0:
        return {}
    place = "loss" if kl.use_loss else "reward"
    penalty = {"coef": kl.init_coef, "estimator": kl.estimator, "place": place}
    return {"kl": penalty | ({"unbiased_gradient": True} if kl.unbiased_gradient else {})}


def _correction(config: RunConfig) -> dict[str, Any] | None:
    if config.correction_level == "off":
        return None
    advantage = config.algo.advantage
    return {
        "level": config.correction_level,
        "mode": config.correction_mode,
        "gating": advantage.is_correction_gating,
        "threshold": config.correction_threshold,
    }


def old_logprobs(config: RunConfig) -> tuple[str, str]:
    """Where the log-probs come from that ratios are relative to, ``policy``, ``engine`` or
    ``update`` (the update that they are used in), and why: ``algo.old_logprobs`` with ``auto``
    resolved."""
    if config.algo.old_logprobs != "auto":
        return config.algo.old_logprobs, "algo.old_logprobs"
    if config.ratios_to_engines:
        if config.max_staleness == 0:
            return "engine", "exact mode: the engines' log-probs are the policy's"
        return "engine", "exact mode: of tokens that lag, those of the weights that sampled them"
    why = config.why_policy_pass if config.train.exact_rollout_enable else _why_policy(config)
    return (
        ("policy", why)
        if why
        else ("update", "one update per batch, whose ratios are 1 by definition")
    )


def engine_entropies(config: RunConfig) -> bool:
    """Whether the estimator shapes by entropies, and by those of the engines (``algo.entropies``
    with its default resolved)."""
    from openrlhf_ext.algorithms.registry import algorithm_class  # late, as above

    return (
        config.entropy_source == "engine"
        and "entropies" in algorithm_class(algorithm_name(config)).needs
    )


def _why_policy(config: RunConfig) -> str | None:
    from openrlhf_ext.algorithms.registry import algorithm_class  # late, as above

    if config.train.max_epochs > 1 or config.samples_per_rollout > config.train.batch_size:
        return "several updates per batch"
    if config.train.routing_replay == "policy":
        return "the experts of that pass are replayed"
    if config.train.drift_check:
        return "train.drift_check compares them with those after the step"
    if config.has_critic:
        return "the policy is not trained in the critic's first steps"
    if config.algo.advantage.estimator == CUSTOM:
        return "the algorithm is not part of the package"
    in_reward = config.algo.kl.init_coef > 0 and not config.algo.kl.use_loss
    # the planner asks before anybody has looked whether the estimator's options can be built
    return algorithm_class(algorithm_name(config)).why_with(
        config.algo.entropies == "engine", in_reward, config.correction_level
    )


def initial_entropy_prompts(config: RunConfig) -> int:
    """Prompts over which the trainer measures the initial entropy of gtpo_conflict (``h_ini``); 0 =
    it does not.

    Not where ``h_ini`` is given, the filter is off, or the preset is ``official``, which knows no
    initial entropy.
    """
    if config.algo.advantage.estimator != "gtpo_conflict":
        return 0
    from openrlhf_ext.algorithms.methods.gtpo_conflict import GtpoConflictOptions  # late, as above

    given = {
        key: value
        for key, value in config.own_options.items()
        if key in GtpoConflictOptions.model_fields
    }
    options = GtpoConflictOptions.model_validate(given)
    if "h_ini" in given or options.filter == "off" or options.preset == "official":
        return 0
    return options.initial_entropy_prompts
