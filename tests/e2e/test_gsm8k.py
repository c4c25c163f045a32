"""Real questions and real grading: the toy policy cannot answer them, but nothing may break on them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.e2e.jobs import ONE_RANK, Job, Task

ROOT = Path(__file__).resolve().parent.parent.parent
GSM8K = ROOT.parent / "shared/data/gsm8k/train.jsonl"


@pytest.mark.e2e
@pytest.mark.skipif(not GSM8K.exists(), reason=f"no GSM8K file at {GSM8K}")
def test_steps_on_gsm8k_with_the_toy_policy(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples/python")
    import toy_policy

    settings = toy_policy.PolicySettings(knowledge_steps=1, careless_steps=1, batch_size=4)  # nearly untrained
    toy_policy.build_policy(tmp_path / "policy", settings)
    options = Task(tmp_path).options(
        "out", data__prompt_dataset=GSM8K, data__max_samples=40, data__max_len=320, rollout__max_new_tokens=16,
        reward__remote_url=ROOT / "examples/python/reward_gsm8k.py", algo__advantage__estimator="gtpo_entropy",
        **ONE_RANK,
    )  # fmt: skip
    job = Job(options, tmp_path / "log")
    assert job.finish() == 0, job.text
    records = Task(tmp_path).metrics("out")
    assert records[-1]["prompts/skipped_overlong"] > 0, "a byte-level tokenizer makes some questions too long"
    assert records[-1]["prompts/consumed"] == 40 - records[-1]["prompts/skipped_overlong"]
    assert all(record["reward/failures"] == 0 and record["kl/rollout_max_abs"] < 1e-3 for record in records)
    assert "toy_policy" in sys.modules
