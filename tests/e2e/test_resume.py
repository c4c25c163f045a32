"""A run that is killed at any moment and resumed is, step for step, the run that was never killed."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from openrlhf_ext.checkpoints import CheckpointStore, check_files, read_manifest
from openrlhf_ext.checkpoints.store import step_of
from tests.e2e.jobs import REWARD, Job, Task

# every graded sample leaves a byte behind, so that the test sees how far a generation is
COUNTING_REWARD = REWARD.replace(
    "    completion =",
    '    with open(__file__ + ".graded", "ab") as file:\n        file.write(b".")\n    completion =',
)
SAMPLES, EVALUATED = 32, 20  # per step; per evaluation
# of an uninterrupted run: they must come back equal; the rest of a record measures time, memory and the machine
EXACT = ("reward/mean", "accuracy/mean", "response/length_mean", "tokens/generated", "prompts/consumed", "lr")
CLOSE = ("loss/policy", "grad_norm", "entropy/mean")
EVALUATIONS = ("eval/accuracy", "eval/reward_mean", "eval/response_length_mean")


def kill(job: Job) -> None:
    """SIGKILL to the driver and to everything it started, as a machine that fails does."""
    job.process.send_signal(signal.SIGSTOP)  # this is the moment; finding all processes takes longer than a phase
    job.look()
    job.stop()
    job.process.wait(10)
    psutil.wait_procs(job.seen.values(), timeout=20)


def wait_until(job: Job, happens: Callable[[], bool], what: str, timeout_s: float = 200) -> None:
    deadline = time.monotonic() + timeout_s
    while not happens():
        assert job.process.poll() is None, f"the job ended ({job.process.returncode}) before {what}:\n{job.text}"
        assert time.monotonic() < deadline, f"{what} did not come within {timeout_s} s:\n{job.text}"
        time.sleep(0.002)


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def in_call(job: Job, call: str) -> psutil.Process:
    """Waits until a policy rank is in the middle of a call, which Ray writes into the process title."""
    job.look()
    ranks = [p for p in job.seen.values() if title(p).startswith("ray::PolicyActor")]
    assert len(ranks) == 2, [title(p)[:60] for p in job.seen.values()]
    found: list[psutil.Process] = []

    def happens() -> bool:
        found.extend(p for p in ranks if title(p).startswith(f"ray::PolicyActor.{call}"))
        return bool(found)

    wait_until(job, happens, f"the call {call} of a policy rank")
    return found[0]


def steps_done(job: Job) -> int:
    return sum(line.strip().partition("/")[0].isdigit() for line in job.text.splitlines())


def graded(task: Task) -> int:
    path = task.folder / "reward.py.graded"
    return path.stat().st_size if path.exists() else 0


def options(task: Task, name: str, *flags: str) -> list[str]:
    """Two episodes of 20 prompts in batches of 8: three steps each, the last one with 4 prompts."""
    more = {
        "ckpt__path": task.folder / f"{name}_ckpt", "ckpt__save_steps": 1, "ckpt__best_metric_key": "eval/reward_mean",
        "train__num_episodes": 2, "eval__dataset": task.folder / "prompts.jsonl", "eval__steps": 2,
        "eval__n_samples_per_prompt": 1,
    }  # fmt: skip
    return [*task.options(name, **more), "--train.full_determinism_enable", *flags]


@pytest.mark.e2e
@pytest.mark.timeout(1500)
def test_a_run_killed_in_every_phase_continues_as_if_never_killed(tmp_path):
    task = Task.make(tmp_path, prompts=20, reward=COUNTING_REWARD)
    job = Job(options(task, "whole"), tmp_path / "whole.log")
    assert job.finish(280) == 0, job.text

    before = graded(task)
    job = Job(options(task, "cut"), tmp_path / "cut1.log")
    wait_until(job, lambda: graded(task) - before > EVALUATED + SAMPLES + 2, "the second generation")
    kill(job)
    assert newest(task) == 1 and steps_done(job) == 1

    resume = ("--ckpt.load_enable", "--train.max_restarts", "1")
    job = Job(options(task, "cut", *resume), tmp_path / "cut2.log")
    job.wait_for(r"resumed from .*global_step1\n")
    in_call(job, "fit").kill()  # of step 2
    job.wait_for(r"restart 1 of 1[\s\S]*resumed from .*global_step1\n")
    job.wait_for(r"(?m)^ *3/6 ")
    in_call(job, "broadcast_to_vllm")  # of step 4
    kill(job)
    assert newest(task) == 3

    job = Job(options(task, "cut", *resume), tmp_path / "cut3.log")
    job.wait_for(r"resumed from .*global_step3\n")
    wait_until(job, (tmp_path / "cut_ckpt/global_step5.incomplete/policy").exists, "saving step 5")
    kill(job)
    assert newest(task) == 4

    damage(tmp_path / "cut_ckpt/global_step4/policy/rank00001.safetensors")
    resume = ("--ckpt.load_enable", "--ckpt.fallback_enable", "--ckpt.async_enable")
    job = Job(options(task, "cut", *resume), tmp_path / "cut4.log")
    assert job.finish(280) == 0, job.text
    assert "rank00001.safetensors is corrupted" in job.text and "going back to the checkpoint before it" in job.text
    assert re.search(r"resumed from .*global_step3\n", job.text), job.text

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
    assert steps == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6], "training, and an evaluation at the start and every second step"
    assert [record["step"] for record in cut] == steps
    for expected, got in zip(whole, cut, strict=True):
        for name in EVALUATIONS if "eval/accuracy" in expected else EXACT:
            assert got[name] == expected[name], (got["step"], name)
        for name in CLOSE if "lr" in expected else ():
            assert got[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), (got["step"], name)
    weights, resumed = (load_file(task.folder / name / "model.safetensors") for name in ("whole", "cut"))
    for name, tensor in weights.items():
        assert resumed[name].allclose(tensor, atol=1e-5), name
    stores = [CheckpointStore(task.folder / f"{name}_ckpt", keep=1) for name in ("whole", "cut")]
    assert stores[0].best() == stores[1].best() and stores[0].best()["step"] in (2, 4, 6)
    for path in stores[1].checkpoints():
        assert check_files(path, read_manifest(path).files) == []
    assert newest(task) == 6 and not list(stores[1].folder.glob("*.incomplete"))
