"""The user's own reward function, agent and algorithm, each tried once on something tiny before Ray starts."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from openrlhf_ext.config import ConfigError, RunConfig, Violation
from openrlhf_ext.config.estimator import algorithm_options
from openrlhf_ext.config.files import Wanted, dataset_refs, first_record, is_hub_name
from openrlhf_ext.options.sections.algo import CUSTOM
from openrlhf_ext.rewards.errors import RewardError, RewardFailureLimit, RewardImportError, RewardInvalid
from openrlhf_ext.user_code import time_limit, told

COMPLETION = "0"
"""What a reward function and an agent are given as the model's words."""

logger = logging.getLogger(__name__)

_ALGORITHM_S = 60.0
_SLOW_S = 5.0
_REWARD_S = 30.0  # however long a grading may take: nobody should wait longer for a trial
_Trial = Callable[[RunConfig], str | None]


@dataclass(frozen=True)
class Tried:
    """One file of the user's: what came out of it, and whether it has raised, which need not be wrong for a run."""

    option: str
    text: str
    raised: bool = False

    def __str__(self) -> str:
        return f"{self.option}: {self.text}"


def try_user_code(config: RunConfig) -> list[Tried]:
    """What came out of each of the user's files.

    An exception on a made completion is an outcome: a server may not be up yet. What would be wrong for every
    completion is a fault.

    Raises:
        ConfigError: lists every file that cannot be imported or called, returns what a run cannot take, or (an
            algorithm) raises.
    """
    tried, faults = [], []
    trials: dict[str, _Trial] = {
        "algo.module_path": _try_algorithm, "reward.remote_url": _try_reward, "train.agent_func_path": _try_agent,
    }  # fmt: skip
    for option, trial in trials.items():
        slow = threading.Timer(_SLOW_S, logger.info, [f"{option}: still being imported and tried"])
        slow.daemon = True
        slow.start()
        try:
            tried += [Tried(option, said) for said in [trial(config)] if said is not None]
        except (RewardInvalid, RewardImportError, RewardFailureLimit, _Fault) as error:
            faults.append(Violation((option,), f"{option}: {error}{_of_environment(option, str(error))}"))
        except RewardError as error:
            text = f"tried on the made completion {COMPLETION!r}, which failed: {error}"
            tried.append(Tried(option, text + _of_environment(option, str(error)), raised=True))
        finally:
            slow.cancel()
    if faults:
        raise ConfigError(faults)
    return tried


def _of_environment(option: str, text: str) -> str:
    """What to do where a reward function misses a variable that this process has: graders get few of them."""
    missed = re.search(r"KeyError: '(\w+)'", text)
    if option != "reward.remote_url" or missed is None or missed[1] not in os.environ:
        return ""
    return f"\nreward functions see {missed[1]} of the environment with --reward.environment {missed[1]} only"


class _Fault(Exception):
    """What is wrong with a user's file; the text says it."""


def _try_algorithm(config: RunConfig) -> str | None:
    from openrlhf_ext.algorithms.registry import get_algorithm
    from openrlhf_ext.algorithms.trial import try_algorithm

    if config.algo.advantage.estimator != CUSTOM:
        return None
    name, options, correction = algorithm_options(config)
    sources = {"ref_logprobs": config.has_reference, "values": config.has_critic, "guide_logprobs": config.has_guide}
    absent = [tensor for tensor, is_there in sources.items() if not is_there]
    try:
        with time_limit(_ALGORITHM_S, "the trial of the algorithm on a made batch"):
            algorithm = get_algorithm(name, correction=correction, warn=False, **options)
            return f"{name}, {try_algorithm(algorithm, config.rollout.n_samples_per_prompt, absent)}"
    except Exception as error:
        none = f"\n(with these options inputs.batch has no {', '.join(absent)}: they are None)" if absent else ""
        hint = none if "NoneType" in str(error) else ""
        raise _Fault(f"{name} ({config.algo.module_path}) fails on a made batch:\n{told(error)}{hint}") from error


def _try_reward(config: RunConfig) -> str | None:
    from openrlhf_ext.rewards.pool import RewardPool

    reward = config.reward
    if reward.remote_url is None or not reward.remote_url.endswith(".py"):
        return None
    trial = {"num_workers": 1, "timeout_s": min(reward.timeout_s, _REWARD_S)}
    with RewardPool(reward.model_copy(update=trial)) as pool:
        pool.check()
        for prompt, label in _first_prompt(config):
            grade = pool.submit(prompt + COMPLETION, prompt, label, COMPLETION).result()
            return (
                f"{COMPLETION!r} made as the answer to the first prompt: reward {grade.reward:g}, score {grade.score:g}"
            )
    return "imported, and not tried: data.prompt_dataset is not on this machine"


def _try_agent(config: RunConfig) -> str | None:
    path, policy = config.train.agent_func_path, config.actor.model_name_or_path or ""
    if path is None:
        return None
    from openrlhf_ext.rewards.agent import load_agent
    from openrlhf_ext.rewards.agent_trial import try_agent

    limit_s = config.reward.timeout_s
    try:
        with time_limit(limit_s, "importing the agent (reward.timeout_s)"):
            agent = load_agent(Path(path))
    except Exception as error:
        raise _Fault(str(error) if isinstance(error, ValueError) else told(error)) from error
    for prompt, label in _first_prompt(config) if os.path.isdir(policy) else ():
        with time_limit(2 * limit_s, "a made episode of the agent (twice reward.timeout_s)"):
            return try_agent(agent, policy, prompt, label, COMPLETION, limit_s)
    return "imported, and not tried: model or data.prompt_dataset is not on this machine"


def _first_prompt(config: RunConfig) -> Iterator[tuple[str, object]]:
    """Text and label of the first record, where a file has it; of messages the text of the last."""
    data = config.data
    wanted = Wanted(data.input_key, data.label_key, data.apply_chat_template)
    for ref in [*dataset_refs(data.prompt_dataset or "")][:1]:
        record = None if is_hub_name(ref.path) else first_record(ref.path, wanted)
        if record is not None:
            prompt = record[data.input_key]
            text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
            yield str(text), "" if data.label_key is None else record[data.label_key]
