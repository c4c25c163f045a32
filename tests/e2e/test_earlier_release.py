"""A checkpoint of release 0.1 resumes in another layout: what is on disk (folders, keys, names) is
a promise to users.

``run_0_1.tar.xz`` is a run of the commit before the package was laid out by process: three steps on
two data-parallel ranks (``tests.e2e.jobs.Task.options`` with ``--algo.kl.init_coef 0.01
--train.full_determinism_enable``, a model of one layer with hidden size 32), its policy and reward,
the checkpoint of step 2, and the records of all three steps.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from openrlhf_ext.run.ledger import Audit
from tests.e2e.jobs import ONE_RANK, Job, Task

ARCHIVE = Path(__file__).with_name("run_0_1.tar.xz")
# The third step of vLLM 0.32, which draws other tokens than 0.29 did. With 0.29 this checkpoint
# gave the numbers of the archive's third step, and the two engines' log-probs of given tokens are
# the same bits. Another processor may round in another way, so a run is near to these, not equal.
THIRD = {
    "reward/mean": 0.3210100531578064, "response/length_mean": 11.75, "entropy/mean": 5.370541024715342,
    "loss/policy": 7.450580596923828e-09, "grad_norm": 0.6873333468888901, "lr": 1e-4,
    "kl/reference": 0.0022654798656305234,
}  # fmt: skip


@pytest.mark.e2e
def test_a_checkpoint_of_release_0_1_resumes(tmp_path: Path) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    before = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    task = Task(tmp_path)
    options = task.options(
        "run",
        **ONE_RANK,
        ckpt__path=tmp_path / "ckpt",
        ckpt__save_steps=1,
        ckpt__max_num=3,
        algo__kl__init_coef=0.01,
    )
    job = Job([*options, "--train.full_determinism_enable", "--ckpt.load_enable"], tmp_path / "log")
    assert job.finish() == 0, job.text
    assert "resumed from" in job.text and "global_step2" in job.text
    (third,) = task.metrics("run")
    assert third["step"] == 3 and third["prompts/consumed"] == before[2]["prompts/consumed"]
    audit = Audit(tmp_path / "run/ledger.jsonl")
    assert audit.faults == [] and (audit.since, audit.step, audit.counts) == (
        2,
        3,
        {"trained": 8},
    ), audit.lines
    for name, value in THIRD.items():
        assert third[name] == pytest.approx(value, rel=1e-3, abs=1e-6), name
