"""Every estimator trains through the whole stack, the reader's own of docs/algorithms.md too, and a
study's run makes the same weights of the same completions."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from benchmarks.study.decoding import Sampled
from benchmarks.study.settings import Evaluation, resolve
from benchmarks.study.training import Rollout, StudyRun
from openrlhf_ext.algorithms import algorithm_names, get_algorithm
from openrlhf_ext.config import RunConfig
from openrlhf_ext.config.estimator import algorithm_options, initial_entropy_prompts
from openrlhf_ext.megatron.step.dealing import mini_batch_order
from openrlhf_ext.options.sections.algo import CUSTOM, ESTIMATORS
from openrlhf_ext.reporting import is_documented
from tests.e2e.estimators import OPTIONS, SAME_FOR_ALL
from tests.e2e.jobs import FORKED, JOB_S, REWARD, Task

REPORTED_BY_ALL = {
    "loss/clip_fraction",
    "algorithm/degenerate_groups",
    "algorithm/entropy_correct",
    "algorithm/entropy_wrong",
    *(f"algorithm/advantage_mass_q{fifth}" for fifth in range(1, 6)),
}
REPORTED_BY = {
    "gtpo_conflict": {
        "algorithm/conflict_forward",
        "algorithm/conflict_backward",
        "algorithm/filtered_completions",
    }
}


def test_every_estimator_is_covered():
    assert set(ESTIMATORS) <= set(algorithm_names())
    assert set(OPTIONS) | {"gae"} == {*ESTIMATORS, CUSTOM}


@pytest.mark.e2e
def test_two_steps_with_every_estimator(tmp_path):
    task = Task.make(
        tmp_path,
        prompts=16,
        reward=REWARD.replace('"rewards": share', '"rewards": float(share > 0.25)'),
    )
    command = [sys.executable, "-m", "tests.e2e.estimators", str(tmp_path)]
    root = Path(__file__).resolve().parent.parent.parent
    run = subprocess.run(
        command, cwd=root, env=os.environ | FORKED, capture_output=True, text=True, timeout=JOB_S
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    for estimator in OPTIONS:
        records = task.metrics(estimator)
        assert [r["step"] for r in records if r["step"]] == [1, 2], estimator
        for record in records:
            for name, value in record.items():
                assert is_documented(name), (
                    f"{estimator}: {name} is not in docs/reference/metrics.md"
                )
                assert isinstance(value, (int, float)) and math.isfinite(value), (
                    f"{estimator}: {name} = {value}"
                )
            assert record["step"] == 0 or record["packs/shared_fraction"] > 0, (
                "responses share their prompt"
            )
            # whose tokens are chosen in the update
            if record["step"] and estimator not in ("clip_cov", "kl_cov"):
                assert (
                    record["mismatch/loss"] < AS_SHAPED and record["mismatch/trained"] < AS_SHAPED
                ), estimator
        assert any(record.get("grad_norm", 0.0) > 0 for record in records), (
            f"{estimator}: no step had a gradient"
        )
    assert "algorithm/initial_entropy" in task.metrics("gtpo_conflict")[0]
    for estimator in ("clip_cov", "kl_cov"):
        steps = [r["algorithm/optimizer_steps"] for r in task.metrics(estimator) if r["step"]]
        assert steps == [2.0, 2.0], estimator
    for estimator in OPTIONS:  # the others' old log-probs are those of the update, or the engine's
        passes = {
            "rank/0/time_logprob" in record for record in task.metrics(estimator) if record["step"]
        }
        assert passes == {estimator in WITH_A_PASS}, estimator
        apart = [
            record.get("mismatch/entropy_mean_abs")
            for record in task.metrics(estimator)
            if record["step"]
        ]
        if "algo__entropies" in OPTIONS[estimator]:
            assert max(apart) < ENGINES_ENTROPY, f"{estimator}: {apart}"
        else:
            assert apart == [None] * len(apart), estimator
    for estimator in OPTIONS:
        if estimator not in NOT_IN_A_STUDY:
            check_parity(task, estimator)
        everything = set().union(*task.metrics(estimator))
        assert everything >= REPORTED_BY_ALL | REPORTED_BY.get(estimator, set()), estimator


WITH_A_PASS = {
    "gtpo_entropy",
    "gtpo_conflict",
    "high_entropy_tokens",
    "clip_cov",
    "kl_cov",
    "on_policy_distillation",
    "mixed_policy_dapo",
    CUSTOM,
}
NOT_IN_A_STUDY = ("mixed_policy_dapo", "on_policy_distillation", "custom")
ENGINES_ENTROPY = 1e-4
"""Nats by which entropies of an fp32 engine may differ from the policy's."""
AS_SHAPED = 1e-5
"""By which the first update's loss may differ from the driver's in float64, and what tells tokens
and advantages."""
PARITY = 1e-4
"""Of the way that all weights went; 6e-6 is usual."""


def check_parity(task: Task, estimator: str) -> None:
    """A study's run, given the rollouts of the job, has its gradient norms and ends in its
    weights."""
    command = task.given(
        estimator, algo__advantage__estimator=estimator, **SAME_FOR_ALL, **OPTIONS[estimator]
    )
    options = {name: yaml.safe_load(str(value)) for name, value in command.items()}
    records = [record for record in task.metrics(estimator) if record["step"]]
    prompts = str(task.folder / "prompts.jsonl")
    run = StudyRun(
        resolve(options, seed=0),
        policy=str(task.folder / "policy"),
        train=prompts,
        heldout=prompts,
        steps=len(records),
        evaluation=Evaluation(),
        short_tokens=1,
    )
    if initial_entropy_prompts(run.config):  # of completions that the job has not kept
        measured = task.metrics(estimator)[0]["algorithm/initial_entropy"]
        run.algorithm = get_algorithm(
            estimator, warn=False, **algorithm_options(run.config)[1], h_ini=measured
        )
    for record in records:
        rollout = rollout_of(task, estimator, record["step"], run)
        trained = run.train(rollout, run.algorithm.shape(run.batch(rollout)), record["step"])
        assert trained["grad_norm"] == pytest.approx(record["grad_norm"], rel=1e-4), (
            f"{estimator}: {record}"
        )
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        for folder in (task.folder / "policy", task.folder / estimator)
    )
    own = run.model.state_dict()
    moved = max(float((after[name] - before[name]).abs().max()) for name in own)
    assert moved > 1e-3, f"{estimator}: nothing was learnt"
    apart = {name: float((after[name] - own[name]).norm()) for name in own}
    way = math.sqrt(sum(float((after[name] - before[name]).square().sum()) for name in own))
    # of all together: Adam makes much of the rounding of a single entry whose gradient is almost
    # zero
    assert math.hypot(*apart.values()) < PARITY * way, f"{estimator}: {apart} on a way of {way}"


def rollout_of(task: Task, estimator: str, step: int, run: StudyRun) -> Rollout:
    """What the job trained on, in its order."""
    tokenizer, group = run.tokenizer, run.config.rollout.n_samples_per_prompt
    lines = (task.folder / estimator / "samples.jsonl").read_text().splitlines()
    kept = sorted(
        (r for r in map(json.loads, lines) if r["step"] == step),
        key=lambda record: record["prompt"],
    )
    assert len(kept) == 32
    order = mini_batch_order(
        32 // group, run.config.train.batch_size // group, RunConfig().train.seed, step - 1
    )
    kept = [kept[place * group + i] for place in order for i in range(group)]
    return Rollout(
        prompts=tokenizer([record["prompt"] for record in kept], add_special_tokens=False)[
            "input_ids"
        ],
        sampled=Sampled(
            [record["token_ids"] for record in kept],
            torch.tensor([entropy for record in kept for entropy in record["entropies"]]),
            torch.tensor([record["truncated"] for record in kept]),
        ),
        rewards=torch.tensor([record["reward"] for record in kept], dtype=torch.float64),
        scores=torch.tensor([record["score"] for record in kept], dtype=torch.float64),
        logs={},
    )
