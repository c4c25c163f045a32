"""A guide samples a part of every group and scores all completions, in two layouts alike, and
through kills."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from openrlhf_ext.reporting import is_documented
from tests.e2e.jobs import Job, Task
from tests.e2e.test_resume import HOLDING_REWARD, hold_after, kill
from tests.models import make_tiny_policy

# both parts of the loss have groups: a success takes more letters and digits than a completion
# usually has
MIXED = {
    "algo__advantage__estimator": "mixed_policy_dapo",
    "algo__mixed_policy_dapo__zero_batch": "true",
    "algo__mixed_policy_dapo__success_threshold": 0.45,
    "guide__samples_per_prompt": 2,
    "reward__timeout_s": 600,
}
# two copies of the policy, micro-batches by tokens instead of samples, and the guide on a rank of
# its own instead of in host memory
DP2 = {
    "megatron__tensor_parallel_size": 1,
    "guide__num_gpus_per_node": 1,
    "train__dynamic_batch_enable": True,
    "train__max_tokens_per_gpu": 100,
}
EXACT = (
    "reward/mean",
    "accuracy/mean",
    "tokens/generated",
    "guide/reward_mean",
    "guide/accuracy_mean",
    "guide/length_mean",
    "policy/reward_mean",
    "policy/accuracy_mean",
    "policy/length_mean",
)
CLOSE = ("loss/policy", "algorithm/zero_batch_loss", "grad_norm", "entropy/mean")


def options(task: Task, name: str, *flags: str, **more: object) -> list[str]:
    more |= {
        "guide__model_name_or_path": task.folder / "guide",
        "ckpt__path": task.folder / f"{name}_ckpt",
        "ckpt__save_steps": 1,
        "ckpt__max_num": 3,
    }
    return [*task.options(name, **MIXED, **more), "--train.full_determinism_enable", *flags]


@pytest.mark.e2e
def test_a_guide_in_two_layouts_and_through_kills(tmp_path: Path) -> None:
    """A run that is killed in its fourth step; resumed from the first in another layout, it loses
    all engines."""
    task = Task.make(tmp_path, prompts=32, reward=HOLDING_REWARD)
    make_tiny_policy(tmp_path / "guide", seed=1)
    hold_after(task, 3)
    job = Job(options(task, "cut"), tmp_path / "cut.log")
    job.wait_until((tmp_path / "held3").exists, "the fourth generation")
    kill(job)
    before = steps_of(task, (1, 2, 3))

    for step in (2, 3):
        shutil.rmtree(tmp_path / f"cut_ckpt/global_step{step}")
    # or the reward function sees the third step before the run has taken it back, and holds the
    # second generation
    metrics = tmp_path / "cut/metrics.jsonl"
    metrics.write_text("".join(line for line in metrics.open() if json.loads(line)["step"] < 2))
    hold_after(task, 2)
    job = Job(options(task, "cut", "--ckpt.load_enable", **DP2), tmp_path / "cut2.log")
    job.wait_for(r"resumed from .*global_step1\n")
    job.wait_until((tmp_path / "held2").exists, "the third generation")
    engines = job.named("ray::RolloutEngine")
    assert len(engines) == 2, "one of the policy and one of the guide"
    for engine in engines:
        engine.kill()
    (tmp_path / "hold").unlink()
    assert job.finish() == 0, job.text
    assert "replacing rollout engines [0]" in job.text and "replacing guide engines [0]" in job.text
    after = steps_of(task, (1, 2, 3, 4))
    assert [record["engines/restarts"] for record in after] == [0, 0, 2, 2]
    for expected, got in zip(before, after[:3], strict=True):
        assert {name: got[name] for name in EXACT} == {name: expected[name] for name in EXACT}
        for name in CLOSE:  # the third step is computed with the weights of the second
            assert got[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), (
                got["step"],
                name,
            )


def steps_of(task: Task, steps: tuple[int, ...]) -> list[dict]:
    records = task.metrics("cut")
    assert tuple(record["step"] for record in records) == steps
    for record in records:
        assert all(is_documented(metric) for metric in record)
        assert record["guide/fraction"] == 0.5
        # the engines' log-probs are those of the weights that they have; and the guide's are not
        # the policy's
        assert record["guide/rollout_max_abs"] < 1e-4 and record["kl/rollout_max_abs"] < 1e-4
        assert record["guide/reward_mean"] != record["policy/reward_mean"]
        means = [record[f"{source}/reward_mean"] for source in ("guide", "policy")]
        assert sum(means) / 2 == pytest.approx(record["reward/mean"])
        assert record["staleness/max"] == 0, (
            "the weights of the guide are not old weights of the policy"
        )
        assert record["algorithm/zero_batch_loss"] > 0 and math.isfinite(record["loss/policy"])
        assert 0 < record["algorithm/degenerate_groups"] < 1, (
            "one of the two parts of the loss has no group"
        )
    return records
