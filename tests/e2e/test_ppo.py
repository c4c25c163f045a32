"""OpenRLHF's PPO with a critic and KL penalties to a reference train on an agent's rollouts, by the whole stack."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from openrlhf_ext.reporting import is_documented
from openrlhf_ext.reporting.lines import read_lines
from tests.e2e.jobs import JOB_S, Task

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A folder in which both jobs have run."""
    folder = tmp_path_factory.mktemp("ppo")
    task = Task.make(folder)
    root = Path(__file__).resolve().parent.parent.parent
    run = subprocess.run(
        [sys.executable, "-m", "tests.e2e.ppo", str(folder)],
        cwd=root, env=dict(os.environ), capture_output=True, text=True, timeout=JOB_S,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    return task


def steps_of(task, name: str) -> list[dict]:
    records = [record for record in task.metrics(name) if record["step"]]
    assert [record["step"] for record in records] == [1, 2, 3]
    for record in records:
        for metric, value in record.items():
            assert is_documented(metric), f"{metric} is not in docs/metrics.md"
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
    # 24 prompts, 8 a step, 4 samples each: the coefficient falls by 0.2 * 32 / 100 while the KL is below the target
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
    assert records[0]["reward_log/turns"] == pytest.approx(2 * 29 / 32)
    assert all(record["reward_log/turns"] == 2 for record in records[1:])
    # at most six tokens in each of two turns: what the environment said is not trained on
    assert all(6 < record["response/length_mean"] <= 12 for record in records[1:])
    assert all(record["kl/rollout_max_abs"] < 1e-3 for record in records)


def test_samples_have_the_environment_s_words_and_the_reference_answer(task):
    records = [record for _, record in read_lines(task.folder / "ppo" / "samples.jsonl")]
    told = [record for record in records if any(record.get("environment", ()))]
    assert told and all(str(record["label"]).startswith("#### ") for record in records)
    for record in told:
        written = [token for token, theirs in zip(record["tokens"], record["environment"], strict=True) if theirs]
        assert "".join(written) == " no " and len(record["entropies"]) == len(record["tokens"])


def test_the_saved_critic_loads_in_transformers(task):
    model, info = AutoModelForSequenceClassification.from_pretrained(
        task.folder / "ppo_critic", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.score.weight.abs().max() > 0
