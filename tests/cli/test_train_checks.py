"""What the command line refuses because algorithms and models say so."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from openrlhf_ext.cli.train_ppo_ray import check
from openrlhf_ext.config import ConfigError, load_config
from tests.e2e.jobs import Task


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Task:
    return Task.make(tmp_path_factory.mktemp("run"))


def problems(task: Task, *words: str) -> list[str]:
    config = load_config([*task.options("out"), *words])
    try:
        check(config)
    except ConfigError as error:
        return [violation.message for violation in error.violations]
    return []


@pytest.mark.parametrize(
    ("estimator", "in_reward", "in_loss"),
    [
        ("grpo", None, None),
        ("gtpo_entropy", r"only in the loss: .*; add algo\.kl\.use_loss, or set algo\.kl\.init_coef 0", None),
        ("gspo", None, r"only in the reward: .*use_loss true; leave out algo\.kl\.use_loss"),
        ("grpo_s", r"nowhere: .*; set algo\.kl\.init_coef 0", "nowhere"),
    ],
)
def test_a_kl_penalty_acts_where_the_estimator_defines_one(task, estimator, in_reward, in_loss):
    words = ["--algo.advantage.estimator", estimator, "--algo.kl.init_coef", "0.1", "--algo.kl.estimator", "k3"]
    for more, wanted in (([], in_reward), (["--algo.kl.use_loss"], in_loss)):
        found = problems(task, *words, *more)
        assert len(found) == (wanted is not None), found
        assert wanted is None or re.search(wanted, found[0]), found


def test_two_penalties_are_refused(task):
    (message,) = problems(task, "--algo.kl.init_coef", "0.1", "--algo.grpo.kl_coef", "0.1")
    assert "both set a penalty" in message


def test_the_critic_is_a_model_that_can_be_built(task, tmp_path: Path):
    critic = tmp_path / "critic"
    shutil.copytree(task.folder / "policy", critic)
    config = json.loads((critic / "config.json").read_text())
    (critic / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    words = ["--critic.model_name_or_path", str(critic), "--critic.num_gpus_per_node", "2"]
    (message,) = problems(task, "--algo.advantage.estimator", "gae", *words)
    assert message.startswith("critic.model_name_or_path: ") and "hidden_act must be 'silu'" in message
    assert problems(task, *words) == []
