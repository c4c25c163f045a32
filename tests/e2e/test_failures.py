"""A job that cannot go on ends, says why in the failing part's own words, and leaves no process."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from openrlhf_ext.checkpoints import check_files, read_manifest
from openrlhf_ext.checkpoints.files import read_plain
from openrlhf_ext.exact.limits import processor_problem
from openrlhf_ext.reporting.lines import read_lines
from openrlhf_ext.run.ledger import LEDGER, Audit
from tests.e2e.jobs import ONE_RANK, REWARD, Job, Task
from tests.patience import SOONER_S, until

pytestmark = pytest.mark.e2e
# every process of the job imports this first: what is being written never gets onto the disk
STUCK_DISK = """
import os, time
def fsync(descriptor, fsync=os.fsync):
    while "/.incomplete/" in os.readlink(f"/proc/self/fd/{descriptor}"):
        time.sleep(0.1)
    fsync(descriptor)
os.fsync = fsync
"""
FIRST_STEP = r"(?m)^ *1/\d+ "


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return Task.make(tmp_path_factory.mktemp("task"), prompts=4000)  # never finishes by itself


def test_a_failing_reward_function_stops_the_run_with_prompt_and_completion(tmp_path):
    task = Task.make(
        tmp_path,
        reward=REWARD.replace(
            "    share =", "    raise ZeroDivisionError('no grade')\n    share ="
        ),
    )
    job = Job(task.options("out", **ONE_RANK, reward__max_failures=2), tmp_path / "log")
    assert job.finish() == 1
    for part in (
        "ZeroDivisionError: no grade",
        "--reward.max_failures",
        " + ",
    ):
        assert part in job.text, job.text
    # what was being graded when the third failed may have failed too
    (failed,) = re.findall(r"(\d+) samples could not be graded", job.text)
    assert int(failed) > 2, job.text
    *_, last = [record for _, record in read_lines(tmp_path / "out/events.jsonl")]
    assert last["event"] == "failure" and "ZeroDivisionError: no grade" in last["error"]


def test_an_engine_killed_in_an_update_changes_no_bit_of_the_run(tmp_path):
    """Two data-parallel ranks send; the engine has a bucket of each when it dies. In exact mode:
    the new engine's log-probs are the policy's to the last bit, as the old one's."""
    task = Task.make(tmp_path)
    common = {
        "megatron__tensor_parallel_size": 1,
        "megatron__param_dtype": "bf16",
        "actor__adam__lr": 1e-6,
        "train__full_determinism_enable": True,
        "vllm__sync_backend": "gloo",
        "weight_sync__bucket_mib": 1,
        "train__exact_rollout_enable": processor_problem() is None,
    }
    runs = {"alone": {}, "disturbed": {"vllm__num_engines": 2}}
    for name, options in runs.items():
        module = {"module": "tests.e2e.killed_in_a_sync"} if name == "disturbed" else {}
        job = Job(task.options(name, **common, **options), tmp_path / f"{name}.log", **module)
        assert job.finish() == 0, job.text
    assert (tmp_path / "killed").exists()
    alone, disturbed = (task.metrics(name) for name in runs)
    assert [record["engines/restarts"] for record in disturbed] == [0, 1, 1]
    if processor_problem() is None:
        assert [record["rollout/bit_equal"] for record in disturbed] == [1.0, 1.0, 1.0]
    policies = [load_file(tmp_path / name / "model.safetensors") for name in runs]
    assert all(torch.equal(tensor, policies[1][key]) for key, tensor in policies[0].items())
    for metric in (
        "reward/mean",
        "loss/policy",
        "grad_norm",
        "entropy/mean",
        "tokens/generated",
        "weight_sync/bytes",
    ):
        assert [record[metric] for record in disturbed] == [record[metric] for record in alone]


def test_a_gradient_that_is_not_finite_costs_the_steps_since_the_checkpoint_and_its_batch_alone(
    tmp_path, monkeypatch
):
    """Two data-parallel ranks: what the run goes on with, optimizer and moving average included, is
    bit for bit that of a run which never met the batch."""
    task, ends = Task.make(tmp_path, prompts=48), {}
    options = {
        "megatron__tensor_parallel_size": 1,
        "megatron__param_dtype": "bf16",
        "train__enable_ema": True,
        "ds__adam_offload": True,
        "train__full_determinism_enable": True,
        "train__rollback_on": "nan",
        "ckpt__save_steps": 2,
    }
    for name, spoiled in (("rolled_back", "not_finite"), ("left_out", "")):
        monkeypatch.setenv("SPOILED", spoiled)
        job = Job(
            task.options(name, **options),
            tmp_path / f"{name}.log",
            module="tests.e2e.spoiled_ranks",
        )
        assert job.finish() == 0, job.text
        events = [record for _, record in read_lines(tmp_path / name / "events.jsonl")]
        if spoiled:
            (event,) = [event for event in events if event["event"] == "rollback"]
            assert (event["step"], event["to"], len(event["prompts"]), event["rollbacks"]) == (
                4,
                2,
                8,
                1,
            )
            assert event["why"].endswith("= nan"), event
            monkeypatch.setenv("LEFT_OUT", " ".join(map(str, event["prompts"])))
            ledger = Audit(tmp_path / name / LEDGER)
            assert not ledger.faults and ledger.counts == {"trained": 40, "skipped": 8}, (
                ledger.lines
            )
        folder = tmp_path / "checkpoints" / name / "global_step4"
        ends[name] = {
            e.path: e.sha256 for e in read_manifest(folder).files if e.path.startswith("policy/")
        }
        # Python's and NumPy's are others in every process, and nothing draws from them
        for rank in range(2):
            drawn = read_plain(folder / f"policy/rank{rank:05}.json")["torch"]
            ends[name][f"policy/rank{rank:05}.json"] = drawn.numpy().tobytes()
        assert [record["step"] for record in task.metrics(name)] == [1, 2, 3, 4, 5], (
            "each step once"
        )
        assert task.metrics(name)[-1]["groups/dropped_skipped"] == 8
    assert ends["rolled_back"] == ends["left_out"] and len(ends["left_out"]) >= 6
    policies = [load_file(tmp_path / name / "model.safetensors") for name in ends]
    assert all(torch.equal(tensor, policies[1][key]) for key, tensor in policies[0].items())
    for metric in (
        "reward/mean",
        "loss/policy",
        "grad_norm",
        "entropy/mean",
        "weight_sync/version",
    ):
        assert (
            len({tuple(record[metric] for record in task.metrics(name)) for name in ends}) == 1
        ), metric


def test_ctrl_c_leaves_no_process_and_no_half_written_checkpoint(tmp_path, monkeypatch):
    """Interrupted while it writes its final model, where an earlier run had left one."""
    task, out = Task.make(tmp_path, prompts=8), tmp_path / "out"
    (tmp_path / "policy/README.md").write_text("the card of the earlier run")
    shutil.copytree(tmp_path / "policy", out)
    (tmp_path / "stuck_disk").mkdir()
    (tmp_path / "stuck_disk/sitecustomize.py").write_text(STUCK_DISK)
    monkeypatch.setenv(
        "PYTHONPATH", f"{tmp_path / 'stuck_disk'}:{os.environ.get('PYTHONPATH', '')}"
    )
    job = Job(task.options("out", **ONE_RANK), tmp_path / "log")
    job.wait_until((out / ".incomplete/model.safetensors").exists, "writing the final checkpoint")
    job.look()
    job.process.send_signal(signal.SIGINT)
    assert job.finish(SOONER_S) == 130
    assert not [*tmp_path.rglob("*.incomplete"), *tmp_path.rglob(".complete")], job.text
    for path in (tmp_path / "policy").iterdir():
        aside = out / "superseded.1" / path.name
        assert aside.read_bytes() == path.read_bytes(), f"{path.name} of the earlier run"
    assert (
        not [*out.glob("model*")]
        and f"the final model of an earlier run: moved to {aside.parent}" in job.text
    )
    assert task.metrics("out"), "the records written so far are complete"
    *_, last = [record for _, record in read_lines(out / "events.jsonl")]
    assert (last["event"], last["signal"], last["checkpoint"]) == ("interrupted", "SIGINT", None)
    assert "SIGINT: no checkpoint is in " in job.text and "the run has to begin again" in job.text


def test_a_dead_raylet_restarts_the_run_and_sigterm_saves_it(task, tmp_path):
    """Ray ends the driver then, without an exception. SIGTERM comes to a run that was not asked for
    checkpoints."""
    job = Job(
        task.options(
            tmp_path.name, **ONE_RANK, train__max_restarts=1, ckpt__path=tmp_path / "ckpt"
        ),
        tmp_path / "log",
    )
    job.wait_for(FIRST_STEP)
    job.kill("raylet/raylet")
    job.wait_for(r"restart 1 of 1 \(train.max_restarts\)[\s\S]*\n *1/\d+ ")
    job.process.send_signal(signal.SIGTERM)
    assert job.finish(SOONER_S) == 143
    (saved,) = (tmp_path / "ckpt").glob("global_step*")
    assert not check_files(saved, read_manifest(saved).files)
    assert (
        f"SIGTERM: to go on from {saved}: the same command with --ckpt.load_enable" in job.text
    ), job.text
    events = [record for _, record in read_lines(task.folder / tmp_path.name / "events.jsonl")]
    told = {event["event"]: event for event in events}
    died = r"Ray's raylet .pid \d+.( and Ray's gcs_server .pid \d+. have| has) died[^\n]*logs: .+$"
    assert re.search(died, told["failure"]["error"]), told["failure"]
    assert told["restart"]["number"] == 1 and events[-1]["event"] == "interrupted"
    assert (events[-1]["signal"], events[-1]["checkpoint"]) == ("SIGTERM", str(saved))
    assert task.metrics(tmp_path.name)[-1]["step"] == read_manifest(saved).step


def test_a_run_whose_terminal_is_closed_saves_although_nobody_reads_it(task, tmp_path):
    """The signal comes to all of its processes, as from a terminal; the pipe that it writes to was
    closed before."""
    options = task.options(tmp_path.name, **ONE_RANK, ckpt__path=tmp_path / "ckpt")
    command = [sys.executable, "-m", "openrlhf_ext.cli.train_ppo_ray", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as job:
        job.stdout.close()
        metrics = task.folder / tmp_path.name / "metrics.jsonl"
        until(
            lambda: (
                job.poll() is not None
                or len(task.metrics(tmp_path.name) if metrics.exists() else ()) > 2
            ),
            "step",
        )
        os.killpg(job.pid, signal.SIGHUP)
        assert job.wait(SOONER_S) == 129
    events = [record for _, record in read_lines(metrics.with_name("events.jsonl"))]
    assert {event["why"] for event in events if event["event"] == "output_lost"} >= {
        "<stdout>: Broken pipe"
    }
    (saved,) = (tmp_path / "ckpt").glob("global_step*")
    assert (events[-1]["signal"], events[-1]["checkpoint"]) == ("SIGHUP", str(saved))
    assert not check_files(saved, read_manifest(saved).files)
    assert (metrics.parent.stat().st_mode | (tmp_path / "ckpt").stat().st_mode) & 0o77 == 0, (
        "prompts are the user's own"
    )


def test_ray_that_cannot_start_is_a_failure_like_others(task, tmp_path, monkeypatch):
    (tmp_path / "full").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "full"))
    job = Job(task.options(tmp_path.name, **ONE_RANK, train__max_restarts=1), tmp_path / "log")
    assert job.finish(SOONER_S) == 1
    assert (
        job.text.count("RayNotStarted: Ray did not start: ") == 2 and "Traceback" not in job.text
    ), job.text
    told = [
        record["event"] for _, record in read_lines(task.folder / tmp_path.name / "events.jsonl")
    ]
    assert told == ["start", "failure", "restart", "failure"]


def test_a_shared_gpu_that_cannot_hold_policy_and_engine_is_refused_before_training(
    task, tmp_path, monkeypatch
):
    monkeypatch.setenv("SPOILED", "small_gpu")
    colocated = {**ONE_RANK, "train__colocate_all": True, "vllm__gpu_memory_utilization": 0.5}
    job = Job(
        task.options(tmp_path.name, **colocated), tmp_path / "log", module="tests.e2e.spoiled_ranks"
    )
    assert job.finish() == 1
    for part in (
        "SharedGpuTooSmall",
        "while sampling: they need 5.",
        "of 4.0 GiB",
        "Lower --vllm.gpu_memory_util",
    ):
        assert part in job.text, job.text
    assert not re.search(FIRST_STEP, job.text)


def test_a_policy_that_takes_too_long_to_load_ends_the_run_by_a_limit_of_its_own(
    task, tmp_path, monkeypatch
):
    monkeypatch.setenv("SPOILED", "slow")
    options = task.options(tmp_path.name, **ONE_RANK, megatron__start_timeout_s=3)
    job = Job(options, tmp_path / "log", module="tests.e2e.spoiled_ranks")
    assert job.finish() == 1
    assert (
        "waited 3 s while building the policy and connecting it to the engines; raise --megatron.st"
        in job.text
    )
