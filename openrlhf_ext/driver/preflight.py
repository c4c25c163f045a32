"""What only other rooms than the configuration know, checked before Ray starts: algorithms, models, the reward file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator

from openrlhf_ext.config import ConfigError, Findings, RunConfig, Violation
from openrlhf_ext.config.algorithm_options import RESERVED_KEYS, algorithm_name, flag_options
from openrlhf_ext.config.checks import model_violations
from openrlhf_ext.config.entities.algo import CUSTOM
from openrlhf_ext.config.file_rules import own_algorithm_violations
from openrlhf_ext.config.inputs import InputError, read_model_facts


def findings(config: RunConfig) -> Findings:
    """For ``load_config(more_rules=...)``: the estimator's own options, and whether the models' files can be loaded."""
    if unusable := own_algorithm_problems(config):
        return Findings((*unusable, *checkpoint_violations(config)), ())
    violations = [
        *foreign_violations(config),
        *option_violations(config),
        *kl_place_violations(config),
        *update_violations(config),
        *checkpoint_violations(config),
        *guide_violations(config),
    ]
    return Findings(tuple(violations), tuple(idle_flag_warnings(config)))


def check_downloaded(config: RunConfig) -> None:
    """The rules about models that :func:`load_config` could not apply to a hub name.

    Raises:
        ConfigError: lists every violation.
    """
    _require([*model_violations(config), *checkpoint_violations(config), *guide_violations(config)])


def check_reward(config: RunConfig) -> None:
    """Imports the reward file in a process of its own, with that process's deadline; agents and servers have none.

    Raises:
        ConfigError: it cannot be imported, or not in time.
    """
    from openrlhf_ext.rewards.errors import RewardImportError
    from openrlhf_ext.rewards.pool import check_reward_file

    path = config.reward.remote_url
    if path is None or not path.endswith(".py"):
        return
    try:
        check_reward_file(path)
    except RewardImportError as error:
        _require([Violation(("reward.remote_url",), f"reward.remote_url: {error}")])


# ---- the estimator -----------------------------------------------------------------------------------------------


def own_algorithm_problems(config: RunConfig) -> list[Violation]:
    """Why there is no algorithm to check: the file of the estimator custom is not there, or registers none."""
    if config.algo.advantage.estimator != CUSTOM:
        return []
    if absent := [*own_algorithm_violations(path=config.algo.module_path)]:
        return absent
    try:
        algorithm_name(config)
    except ValueError as error:
        return [Violation(("algo.module_path",), f"algo.module_path: {error}")]
    return []


def foreign_violations(config: RunConfig) -> Iterator[Violation]:
    """The estimator's map holds no options that only others read."""
    from openrlhf_ext.algorithms import algorithm_names

    name = config.algo.advantage.estimator
    foreign = _foreign_keys(algorithm_name(config))
    for key, value in getattr(config.algo, name).items():
        if key not in foreign or value is None:
            continue
        owners = ", ".join(other for other in algorithm_names() if key in _keys(other))
        yield Violation(
            (f"algo.{name}.{key}",),
            f"algo.{name}.{key} is an option of {owners}, which algo.advantage.estimator {name} does not read: got "
            f"{value}; leave it out",
        )


def option_violations(config: RunConfig) -> Iterator[Violation]:
    """The estimator takes its options, apart from those that other rules are about."""
    from openrlhf_ext.algorithms import get_algorithm

    estimator = config.algo.advantage.estimator
    name, options, _ = config.algorithm_options()
    checked = {*RESERVED_KEYS, *_foreign_keys(name)}
    if config.reward.overlong_buffer_len is not None and "length_penalty" not in getattr(config.algo, estimator):
        checked.add("length_penalty")  # made of options with rules of their own
    try:
        get_algorithm(name, **{key: value for key, value in options.items() if key not in checked})
    except ValueError as error:
        for line in str(error).splitlines():
            yield Violation((f"algo.{estimator}",), f"algo.{estimator}: {line.removeprefix(f'{name}: ')}")


def kl_place_violations(config: RunConfig) -> Iterator[Violation]:
    """The KL penalty of ``algo.kl.*`` acts where the estimator defines one."""
    from openrlhf_ext.algorithms.registry import algorithm_class

    name, kl = config.algo.advantage.estimator, config.algo.kl
    legal = algorithm_class(algorithm_name(config)).kl_places
    if kl.init_coef == 0 or ("loss" if kl.use_loss else "reward") in legal:
        return
    remedy = "set algo.kl.init_coef 0"
    if legal:
        remedy = f"{'add' if 'loss' in legal else 'leave out'} algo.kl.use_loss, or {remedy}"
    yield Violation(
        ("algo.kl.init_coef", "algo.kl.use_loss", "algo.advantage.estimator"),
        f"algo.advantage.estimator {name} takes a KL penalty {'only in the ' + legal[0] if legal else 'nowhere'}: got "
        f"algo.kl.init_coef {kl.init_coef:g} and algo.kl.use_loss {str(kl.use_loss).lower()}; {remedy}",
    )


def update_violations(config: RunConfig) -> Iterator[Violation]:
    """An estimator that looks at the policy about to be updated gets one update per batch of rollouts."""
    from openrlhf_ext.algorithms.registry import algorithm_class

    name, train = config.algo.advantage.estimator, config.train
    one_update = config.samples_per_rollout == train.batch_size and train.max_epochs == 1
    if algorithm_class(algorithm_name(config)).needs_prepare and not one_update:
        yield Violation(
            ("algo.advantage.estimator", "train.batch_size", "train.max_epochs"),
            f"algo.advantage.estimator {name} chooses tokens by statistics of the policy that is about to be updated, "
            "which the controller has for one update per batch of rollouts only: train.batch_size must be "
            f"rollout.batch_size * rollout.n_samples_per_prompt = {config.samples_per_rollout} and train.max_epochs 1, "
            f"got {train.batch_size} and {train.max_epochs}",
        )


def idle_flag_warnings(config: RunConfig) -> Iterator[str]:
    """OpenRLHF's flags that set an option which the estimator does not have."""
    name = config.algo.advantage.estimator
    foreign = _foreign_keys(algorithm_name(config))
    for flag in flag_options(config):
        if flag.key in foreign:
            yield f"{flag.flag} has no effect: algo.advantage.estimator {name} does not read {flag.key}"


def _foreign_keys(name: str) -> set[str]:
    """Options of the other estimators that this one does not have."""
    from openrlhf_ext.algorithms import algorithm_names

    return {key for other in algorithm_names() for key in _keys(other)} - _keys(name)


def _keys(name: str) -> set[str]:
    from openrlhf_ext.algorithms import describe_options

    return {info.name for info in describe_options(name)}


# ---- models ------------------------------------------------------------------------------------------------------


def checkpoint_violations(config: RunConfig) -> Iterator[Violation]:
    """Policy, critic and guide are models that are built, and their files hold their tensors."""
    models = {"actor.model_name_or_path": (config.actor.model_name_or_path, None)}
    if config.has_critic:
        models["critic.model_name_or_path"] = (config.critic.model_name_or_path, config.ds.value_head_prefix)
    if config.has_guide:
        models["guide.model_name_or_path"] = (config.guide.model_name_or_path, None)
    for option, (folder, value_head) in models.items():
        if folder is None or not os.path.isdir(folder):
            continue
        try:
            read_model_facts(folder)
            check_model(folder, value_head)
        except InputError:
            continue  # reported by the configuration's own rules
        except ValueError as error:
            yield Violation((option,), f"{option}: {error}")


def guide_violations(config: RunConfig) -> Iterator[Violation]:
    """A guide that takes the policy's place for a forward pass differs from it in nothing but its weights."""
    from openrlhf_ext.megatron.model.shape import read_model_shape

    folders = [config.guide.model_name_or_path, config.actor.model_name_or_path]
    if not config.has_guide or config.guide_ranks or not all(folder and os.path.isdir(folder) for folder in folders):
        return
    try:
        guide, policy = (dataclasses.asdict(read_model_shape(folder)) for folder in folders)
    except (OSError, ValueError, LookupError):
        return  # reported by other rules
    names = [name for name in guide if guide[name] != policy[name] and name != "max_positions"]
    if names:
        different = ", ".join(f"{name} {guide[name]} and {policy[name]}" for name in names)
        yield Violation(
            ("guide.model_name_or_path", "guide.num_gpus_per_node", "actor.model_name_or_path"),
            "guide.model_name_or_path must have the architecture of actor.model_name_or_path, its weights take the "
            f"policy's place for a forward pass: got {different}; give the guide ranks of its own "
            "(guide.num_gpus_per_node)",
        )


def check_model(folder: str, value_head: str | None) -> None:
    """The model is one that is built, and the files hold its tensors; a folder without weights is warned about only.

    Args:
        value_head: HF name of a critic's value head, which the files need not hold; None for a policy.

    Raises:
        ValueError: says what does not fit.
    """
    from openrlhf_ext.megatron.model.accounting import describe, unaccounted_tensors
    from openrlhf_ext.megatron.model.hf_files import HFCheckpoint
    from openrlhf_ext.megatron.model.shape import read_model_shape, read_value_shape

    shape = read_model_shape(folder) if value_head is None else read_value_shape(folder, value_head)
    if any(name.endswith(".safetensors") for name in os.listdir(folder)):
        if problems := unaccounted_tensors(HFCheckpoint(folder), shape):
            raise ValueError(f"{folder}: {describe(problems)}")


def _require(violations: Iterable[Violation]) -> None:
    if found := list(violations):
        raise ConfigError(found)
