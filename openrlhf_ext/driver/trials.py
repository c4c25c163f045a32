"""The user's own files, tried before Ray starts: a method, a reward function, an agent."""

from __future__ import annotations

import io
import logging
import os
import re
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf_ext.checkpoints.files import plain_copy
from openrlhf_ext.config import ConfigError, RunConfig, Violation
from openrlhf_ext.config.estimator import (
    algorithm_options,
)
from openrlhf_ext.config.files import dataset_refs, is_hub_name
from openrlhf_ext.config.records import Wanted, as_chat, open_source
from openrlhf_ext.config.tokenizers import tokenizer_fault
from openrlhf_ext.options.sections.algo import CUSTOM
from openrlhf_ext.rewards.grading import (
    Group,
    RewardError,
    RewardFailureLimit,
    RewardImportError,
    RewardInvalid,
)
from openrlhf_ext.user_code import time_limit, told, users_part

logger = logging.getLogger(__name__)

COMPLETION = "0"
"""What a reward function and an agent are given as the model's words."""


_ALGORITHM_S = 60.0
_SLOW_S = 5.0
_REWARD_S = 30.0  # however long a grading may take: nobody should wait longer for a trial
_First = Callable[[RunConfig], Iterator[tuple[str, object]]]
_Trial = Callable[[RunConfig, _First], str | None]


@contextmanager
def library_chatter(shown: bool) -> Iterator[None]:
    """Keeps what libraries print (not what they log) from the terminal."""
    if shown:
        yield
        return
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield


@dataclass(frozen=True)
class Tried:
    """One file of the user's: what came out of it, and whether it has raised, which need not be
    wrong for a run."""

    option: str
    text: str
    raised: bool = False

    def __str__(self) -> str:
        return f"{self.option}: {self.text}"


def with_user_code(found: ConfigError, config: RunConfig) -> ConfigError:
    """The same report with the user's files that cannot be imported, where nothing is said of them
    yet."""
    said = {option for violation in found.violations for option in violation.options}
    try:
        try_user_code(config, import_only=True)
    except ConfigError as error:
        return ConfigError(
            [*found.violations, *(one for one in error.violations if said.isdisjoint(one.options))]
        )
    return found


def try_user_code(config: RunConfig, *, import_only: bool = False) -> list[Tried]:
    """What came out of each of the user's files. An exception on a made completion is an outcome: a
    server may not be up yet. ``import_only`` where the options are wrong, and with them the data or
    the model of a trial. Raises
    ConfigError: lists every file that cannot be imported or called, returns what a run cannot take,
    or (an algorithm) raises."""
    tried, faults = [], []
    first = (lambda _: iter(())) if import_only else _first_prompt
    trials: dict[str, _Trial] = {
        "algo.module_path": _try_algorithm,
        "reward.remote_url": _try_reward,
        "train.agent_func_path": _try_agent,
    }
    if import_only:
        del trials["algo.module_path"]  # its import is a rule of the configuration
    for option, trial in trials.items():
        slow = threading.Timer(_SLOW_S, logger.info, [f"{option}: still being imported and tried"])
        slow.daemon = True
        slow.start()
        try:
            tried += [Tried(option, said) for said in [trial(config, first)] if said is not None]
        except (RewardInvalid, RewardImportError, RewardFailureLimit, _Fault) as error:
            faults.append(
                Violation((option,), f"{option}: {error}{_of_environment(option, str(error))}")
            )
        except RewardError as error:
            text = f"tried on the made completion {COMPLETION!r}, which failed: {error}"
            tried.append(Tried(option, text + _of_environment(option, str(error)), raised=True))
        finally:
            slow.cancel()
    if faults:
        raise ConfigError(faults)
    return tried


def _of_environment(option: str, text: str) -> str:
    """What to do where a reward function misses a variable that this process has: graders get few
    of them."""
    missed = re.search(r"KeyError: '(\w+)'", text)
    if option != "reward.remote_url" or missed is None or missed[1] not in os.environ:
        return ""
    return (
        f"\nreward functions see {missed[1]} of the environment with --reward.environment "
        f"{missed[1]} only"
    )


_RELATIVE = (
    "its answers to several completions are not those to each of them: it compares them. A "
    "function of TRL's form, f(completions, prompts, ..., **kwargs), gets all "
    "rollout.n_samples_per_prompt (here {}) completions of a prompt, of which there must be 2 "
    "or more, and none a guide's; in other forms it gets one at a time, as in OpenRLHF"
)


class _Fault(Exception):
    """What is wrong with a user's file; the text says it."""


def _try_algorithm(config: RunConfig, _: _First) -> str | None:
    from openrlhf_ext.algorithms.registry import get_algorithm
    from openrlhf_ext.algorithms.trial import try_algorithm

    if config.algo.advantage.estimator != CUSTOM:
        return None
    name, options, correction = algorithm_options(config)
    sources = {
        "ref_logprobs": config.has_reference,
        "values": config.has_critic,
        "guide_logprobs": config.has_guide,
    }
    absent = [tensor for tensor, is_there in sources.items() if not is_there]
    try:
        with time_limit(_ALGORITHM_S, "the trial of the algorithm on a made batch"):
            algorithm = get_algorithm(name, correction=correction, warn=False, **options)
            return (
                f"{name}, "
                f"{try_algorithm(algorithm, config.rollout.n_samples_per_prompt, absent, plain_copy)}"
            )
    except Exception as error:
        none = (
            f"\n(with these options inputs.batch has no {', '.join(absent)}: they are None)"
            if absent
            else ""
        )
        hint = none if "NoneType" in str(error) else ""
        raise _Fault(
            f"{name} ({config.algo.module_path}) fails on a made batch:\n{told(error)}{hint}"
        ) from error


def _try_reward(config: RunConfig, first: _First) -> str | None:
    from openrlhf_ext.rewards.pool import RewardPool

    reward = config.reward
    if reward.remote_url is None or not reward.remote_url.endswith(".py"):
        return None
    trial = {"num_workers": 1, "timeout_s": min(reward.timeout_s, _REWARD_S)}
    with RewardPool(reward.model_copy(update=trial)) as pool:
        pool.check()
        for prompt, label in first(config):
            grade = pool.submit(prompt + COMPLETION, prompt, label, COMPLETION).result()
            is_relative, samples = (
                _compares(pool, prompt, label),
                config.rollout.n_samples_per_prompt,
            )
            if is_relative and (not pool.takes_groups or samples == 1 or config.has_guide):
                raise _Fault(_RELATIVE.format(samples))
            said = (
                f"{COMPLETION!r} made as the answer to the first prompt: reward "
                f"{grade.reward:g}, score "
            )
            return (
                f"{said}{grade.score:g}" + "; it compares the completions of a prompt" * is_relative
            )
    return "imported, and not tried: data.prompt_dataset is not on this machine"


def _compares(pool: Any, prompt: str, label: object) -> bool:
    """Whether the rewards of several completions are not those of each alone, which it gives twice
    alike."""
    texts, found = [COMPLETION, f"The answer is {label}.", COMPLETION], []
    try:
        for groups in ([Group(1), Group(1), Group(1)], [Group(3, is_trial=True)] * 3):
            jobs = [
                pool.submit(prompt + text, prompt, label, text, groups[place], place)
                for place, text in enumerate(texts)
            ]
            found.append([job.result().reward for job in jobs])
    # as of a function that takes no list, or for which one of the texts is nothing
    except RewardError:
        return False
    return found[0][0] == found[0][2] and found[0] != found[1]


def _try_agent(config: RunConfig, first: _First) -> str | None:
    path, policy = config.train.agent_func_path, config.actor.model_name_or_path or ""
    if path is None:
        return None
    from openrlhf_ext.rewards.agent import load_agent, try_agent

    limit_s = config.reward.timeout_s
    try:
        with time_limit(limit_s, "importing the agent (reward.timeout_s)"):
            agent = load_agent(Path(path))
    except (Exception, SystemExit) as error:
        text = users_part("".join(traceback.format_exception(error)))
        raise _Fault(f"{path} cannot be imported:\n{text}" if text else str(error)) from error
    for prompt, label in first(config) if tokenizer_fault(policy, chat=False) is None else ():
        with time_limit(2 * limit_s, "a made episode of the agent (twice reward.timeout_s)"):
            sampled = config.rollout.temperature, config.rollout.top_p
            return try_agent(agent, policy, prompt, label, COMPLETION, limit_s, *sampled)
    return (
        "imported, and not tried: the model with its tokenizer, or data.prompt_dataset, is not "
        "on this machine"
    )


def _first_prompt(config: RunConfig) -> Iterator[tuple[str, object]]:
    """Text and label of the first record, where a file has it; of messages the text of the last."""
    data = config.data
    wanted = Wanted(data.input_key, data.label_key, data.apply_chat_template)
    for ref in [*dataset_refs(data.prompt_dataset or "")][:1]:
        if not is_hub_name(ref.path):
            _, record = next(open_source(ref, data.prompt_split).records(wanted))
            prompt = record[data.input_key]
            yield (
                as_chat(prompt)[-1]["content"],
                "" if data.label_key is None else record[data.label_key],
            )
