"""A run that is killed and resumed is, step for step, the run that was never killed (in generation:
test_guide.py; a rank in an update, and an engine: test_lora.py)."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from openrlhf_ext.checkpoints import CheckpointStore, check_files, read_manifest
from openrlhf_ext.checkpoints.store import step_of
from tests.e2e.jobs import REWARD, Job, Task, title
from tests.patience import PATIENCE_S

# while the file "hold" names a step that has been recorded, grading waits, and says so; not that of
# the trial, of "0"
HOLDING_REWARD = """
import json, pathlib, time
FOLDER = pathlib.Path(__file__).parent
def wait():
    metrics = FOLDER / "cut" / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    step = json.loads(lines[-1])["step"] if lines else 0
    while (FOLDER / "hold").exists() and step >= (last := int((FOLDER / "hold").read_text())):
        (FOLDER / f"held{last}").touch()
        time.sleep(0.02)
""" + REWARD.replace(
    "    completion =", "    queries[0] == prompts[0] + '0' or wait()\n    completion ="
)
# of an uninterrupted run: they must come back equal; the rest of a record measures time, memory and
# the machine
EXACT = (
    "reward/mean",
    "accuracy/mean",
    "response/length_mean",
    "tokens/generated",
    "prompts/consumed",
    "lr",
    "loss/policy",
    "grad_norm",
    "entropy/mean",
)
EVALUATIONS = ("eval/accuracy", "eval/reward_mean", "eval/response_length_mean")
# of the first job that is killed: engines and policy share bundles, and one side sleeps while the
# other works
COLOCATED = {
    "train__colocate_all": "true",
    "ds__enable_sleep": "true",
    "vllm__enable_sleep": "true",
    "vllm__num_engines": 2,
}


def kill(job: Job) -> None:
    """SIGKILL to the driver and to everything it started, as a machine that fails does."""
    job.stop()
    psutil.wait_procs(job.seen.values(), timeout=PATIENCE_S)


def hold_after(task: Task, step: int) -> None:
    """The next job, or the one that is held, goes on until it samples after this step."""
    (task.folder / "new").write_text(str(step))
    (task.folder / "new").rename(task.folder / "hold")


def policy_ranks(job: Job) -> list[psutil.Process]:
    ranks = job.named("ray::PolicyActor")
    assert len(ranks) == 2, [title(process)[:60] for process in job.living()]
    return ranks


def in_call(ranks: list[psutil.Process], call: str) -> bool:
    """Whether a rank is in the middle of a call, which Ray writes into the process title."""
    return any(title(rank).startswith(f"ray::PolicyActor.{call}") for rank in ranks)


def options(task: Task, name: str, *flags: str, **more: object) -> list[str]:
    """Two episodes of 22 prompts in batches of 8: six steps, one across both episodes, the last one
    of 4 prompts."""
    more |= {
        "ckpt__path": task.folder / f"{name}_ckpt",
        "ckpt__save_steps": 1,
        "ckpt__best_metric_key": "eval/reward_mean",
        "train__num_episodes": 2,
        "eval__dataset": task.folder / "prompts.jsonl",
        "eval__steps": 2,
        "eval__n_samples_per_prompt": 1,
        "reward__timeout_s": 600,
    }
    return [*task.options(name, **more), "--train.full_determinism_enable", *flags]


@pytest.mark.e2e
def test_a_run_killed_in_a_sync_and_a_save_continues_as_if_never_killed(tmp_path):
    task = Task.make(tmp_path, prompts=22, reward=HOLDING_REWARD)
    job = Job(options(task, "whole"), tmp_path / "whole.log")
    assert job.finish() == 0, job.text

    hold_after(task, 3)
    job = Job(options(task, "cut", "--ds.adam_offload", **COLOCATED), tmp_path / "cut1.log")
    job.wait_until((tmp_path / "held3").exists, "the fourth generation")
    ranks = policy_ranks(job)
    hold_after(task, 4)
    job.wait_until(
        lambda: in_call(ranks, "send_weights") or (tmp_path / "held4").exists(),
        "the sync of step 4",
    )
    kill(job)
    assert newest(task) in (3, 4), "4 if the sync was too short to be seen"

    hold_after(task, 5)
    job = Job(options(task, "cut", "--ckpt.load_enable"), tmp_path / "cut2.log")
    job.wait_for(rf"resumed from .*global_step{newest(task)}\n")
    assert "another train.colocate_all: False, it was True" in job.text
    assert "another ds.adam_offload" not in job.text, "the results do not depend on it"
    saving = tmp_path / "cut_ckpt/global_step5.incomplete/policy"
    job.wait_until(lambda: saving.exists() or (tmp_path / "held5").exists(), "saving step 5")
    kill(job)
    last = newest(task)
    assert last in (4, 5), "5 if saving was too short to be seen"

    (tmp_path / "hold").unlink()
    damage(tmp_path / f"cut_ckpt/global_step{last}/policy/rank00001.safetensors")
    resume = (
        "--ckpt.load_enable",
        "--ckpt.fallback_enable",
        "--ckpt.async_enable",
        "--ds.adam_offload",
    )
    job = Job(options(task, "cut", *resume), tmp_path / "cut3.log")
    assert job.finish() == 0, job.text
    assert (
        "rank00001.safetensors is corrupted" in job.text
        and "going back to the checkpoint before it" in job.text
    )
    assert re.search(rf"resumed from .*global_step{last - 1}\n", job.text), job.text

    assert_same_run(task)


def newest(task: Task) -> int:
    return step_of(CheckpointStore(task.folder / "cut_ckpt", keep=1).checkpoints()[-1])


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def assert_same_run(task: Task) -> None:
    whole, cut = task.metrics("whole"), task.metrics("cut")
    steps = [record["step"] for record in whole]
    assert steps == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6], (
        "training, and an evaluation at the start and every second step"
    )
    assert [record["step"] for record in cut] == steps
    streamed = [record["step"] for record in cut if record.get("update/stream_seconds", 0.0) > 0]
    assert {1, 2, 3, 6} <= set(streamed), (
        "Adam's states waited in host memory but in the second part of the run"
    )
    for expected, got in zip(whole, cut, strict=True):
        for name in EVALUATIONS if "eval/accuracy" in expected else EXACT:
            assert got[name] == expected[name], (got["step"], name)
    weights, resumed = (
        load_file(task.folder / name / "model.safetensors") for name in ("whole", "cut")
    )
    for name, tensor in weights.items():
        assert resumed[name].equal(tensor), name
    stores = [CheckpointStore(task.folder / f"{name}_ckpt", keep=1) for name in ("whole", "cut")]
    assert stores[0].best() == stores[1].best() and stores[0].best()["step"] in (2, 4, 6)
    for path in stores[1].checkpoints():
        assert check_files(path, read_manifest(path).files) == []
    assert newest(task) == 6 and not list(stores[1].folder.glob("*.incomplete"))
