"""OpenRLHF's PPO with a critic and KL penalties to a reference train on an agent's rollouts, by the
whole stack; and with a reward model in the place of the agent."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from openrlhf_ext.reporting import is_documented
from openrlhf_ext.reporting.lines import read_lines
from tests.e2e.jobs import FORKED, JOB_S, ONE_RANK, Job, Task
from tests.models import make_reward_model, make_tiny_policy

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A folder in which both jobs have run."""
    folder = tmp_path_factory.mktemp("ppo")
    task = Task.make(folder)
    root = Path(__file__).resolve().parent.parent.parent
    run = subprocess.run(
        [sys.executable, "-m", "tests.e2e.ppo", str(folder)],
        cwd=root,
        env=os.environ | FORKED,
        capture_output=True,
        text=True,
        timeout=JOB_S,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    return task


def steps_of(task, name: str) -> list[dict]:
    records = [record for record in task.metrics(name) if record["step"]]
    assert [record["step"] for record in records] == [1, 2, 3]
    for record in records:
        for metric, value in record.items():
            assert is_documented(metric), f"{metric} is not in docs/reference/metrics.md"
            assert isinstance(value, (int, float)) and math.isfinite(value), f"{metric} = {value}"
    return records


def test_policy_and_critic_train(task):
    records = steps_of(task, "ppo")
    for record in records:
        assert record["loss/value"] > 0 and record["value/grad_norm"] > 0 and record["value/lr"] > 0
        assert "value/explained_variance" in record
    first, *later = records
    assert "loss/policy" not in first, "the policy was trained in a step of critic.freezing_steps"
    assert all(record["grad_norm"] > 0 for record in later)
    assert later[-1]["loss/value"] < first["loss/value"], "the critic learnt nothing"


def test_the_reference_is_the_policy_of_the_start_and_the_coefficient_is_steered(task):
    first, second, third = steps_of(task, "ppo")
    # in the second step the policy still is the reference: it was frozen in the first
    assert first["kl/reference"] == second["kl/reference"] == 0 < third["kl/reference"]
    # 24 prompts, 8 a step, 4 samples each: the coefficient falls by 0.2 * 32 / 100 while the KL is
    # below the target
    assert first["kl/coef"] == pytest.approx(0.05)
    assert second["kl/coef"] == pytest.approx(0.05 * (1 - 0.2 * 32 / 100))
    assert third["kl/coef"] == pytest.approx(0.05 * (1 - 0.2 * 32 / 100) ** 2)


def test_grpo_with_the_penalty_in_the_loss(task):
    for record in steps_of(task, "grpo"):
        assert record["kl/reference"] > 0 and record["kl/coef"] == 0.1
        # on the first update of a batch the loss's estimate is the one of the rollout
        assert record["algorithm/ref_kl"] == pytest.approx(record["kl/reference"], rel=1e-3)
        assert "loss/value" not in record


def test_the_agent_s_failures_are_counted_and_its_turns_trained_on(task):
    records = steps_of(task, "ppo") + steps_of(task, "grpo")
    # raised, hung, and gave no reward: each leaves a response with the reward of a failure
    assert [record["reward/failures"] for record in records] == [3, 0, 0, 0, 0, 0]
    assert all(record["reward_log/turns"] == 2 for record in records), "of those that tell it"
    # at most six tokens in each of two turns: what the environment said is not trained on
    assert all(6 < record["response/length_mean"] <= 12 for record in records[1:])
    assert all(record["kl/rollout_max_abs"] < 1e-3 for record in records)


def test_samples_have_the_environment_s_words_and_the_reference_answer(task):
    records = [record for _, record in read_lines(task.folder / "ppo" / "samples.jsonl")]
    told = [record for record in records if any(record.get("environment", ()))]
    assert told and all(str(record["label"]).startswith("#### ") for record in records)
    for record in told:
        written = [
            token
            for token, theirs in zip(record["tokens"], record["environment"], strict=True)
            if theirs
        ]
        assert "".join(written) == " no " and len(record["entropies"]) == len(record["tokens"])


def test_the_saved_critic_loads_in_transformers(task):
    model, info = AutoModelForSequenceClassification.from_pretrained(
        task.folder / "ppo_critic", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.score.weight.abs().max() > 0


# ---- a reward model


# critic and reward model take turns on one GPU, the policy samples while it trains
REWARD = {
    **ONE_RANK, "algo__advantage__estimator": "gae", "algo__advantage__lambd": 0.95, "actor__adam__lr": 3e-3,
    "actor__lr_scheduler": "constant",
    "rollout__n_samples_per_prompt": 8,
    "train__batch_size": 64, "train__max_staleness": 1, "critic__num_gpus_per_node": 1, "critic__adam__lr": 1e-3,
    "critic__save_value_network": "true", "reward__num_gpus_per_node": 1, "reward__remote_url": "null",
    "reward__normalize_enable": "true", "reward__offload": "true", "train__colocate_critic_reward": "true",
}  # fmt: skip


def test_a_reward_model_grades_and_both_policy_and_critic_learn(tmp_path):
    task = Task.make(tmp_path, prompts=128)
    make_tiny_policy(tmp_path / "lm", seed=3)
    model = make_reward_model(tmp_path / "rm", tmp_path / "lm", mean=0.5, std=11.0)
    job = Job(
        task.options("reward", **REWARD, reward__model_name_or_path=tmp_path / "rm"),
        tmp_path / "log",
    )
    assert job.finish() == 0, job.text[-6000:]
    records = [record for record in task.metrics("reward") if record["step"]]
    means = [record["reward/mean"] for record in records]
    assert len(means) == 16 and sum(means[12:]) / 4 > sum(means[:4]) / 4 + 0.25
    losses = [record["loss/value"] for record in records]
    # of four steps: which batch is the last one depends on how fast the engines were
    assert sum(losses[12:]) < sum(losses[:4]) and records[-1]["staleness/max"] == 1
    assert all(record["reward/failures"] == 0 for record in records)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    samples = [record for _, record in read_lines(tmp_path / "reward/samples.jsonl")]
    assert samples and {sample["step"] for sample in samples} >= {1, 16}
    for sample in samples:
        ids = (
            tokenizer(sample["prompt"], add_special_tokens=False)["input_ids"] + sample["token_ids"]
        )
        with torch.no_grad():
            score = model.score(model.model(torch.tensor([ids])).last_hidden_state[0, -1])
        assert (
            sample["reward"]
            == pytest.approx((score.item() - 0.5) / 11.0, abs=1e-5)
            == sample["score"]
        )
    critic = json.loads((tmp_path / "reward_critic/config.json").read_text())
    assert (critic["mean"], critic["std"]) == (0.5, 11.0), (
        "its values are normalized as the reward model's"
    )
