"""What one real job leaves in its run folder and on the terminal: events, completions, gauges,
profiles, the page.

It has learning rate 0, and `train.drift_check` proves that its steps change nothing.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import shutil
import signal
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from openrlhf_ext.cli.report import main as report
from openrlhf_ext.reporting import is_documented, read_metrics
from openrlhf_ext.reporting.lines import read_lines
from openrlhf_ext.tools.explain.rollouts import read_rollouts
from tests.e2e.jobs import Job, Task
from tests.patience import SOONER_S

pytestmark = pytest.mark.e2e
# a log record of ours, a line of progress or its heading, of the table of profiles or of the block
# at the end, nothing
PASSWORD = "p@ss/w:o%40rd"
OURS = r"\d\d:\d\d:\d\d (INFO|WARNING) .*|( *\d+/\d+| *step) .*|( +\d+){2}( +\d+\.\d{3})+|  +\w.*|"


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """Two ranks, three steps, of which the second is profiled on rank 1; a checkpoint and an
    evaluation on the way."""
    task = Task.make(tmp_path_factory.mktemp("task"))
    shutil.copy(task.folder / "prompts.jsonl", task.folder / "held_out.jsonl")
    with (task.folder / "prompts.jsonl").open("a") as prompts:
        prompts.write(
            json.dumps({"question": "longer than data.max_len " * 4, "answer": ""}) + "\n"
        )
    options = task.options(
        "run",
        eval__dataset=task.folder / "held_out.jsonl",
        eval__steps=2,
        ckpt__save_steps=2,
        ckpt__path=task.folder / "checkpoints",
        logger__samples_every=2,
        profile__steps=2,
        profile__ranks=1,
        train__batch_size=16,
        logger__peak_tflops=0.01,
    )
    options += ["--logger.wandb.project", f"https://me:{PASSWORD}@wandb/x?token=t0ken"]
    job = Job([*options, "--train.drift_check"], task.folder / "log", forked=False)
    job.wait_for(r"\n +1/3 ")
    job.process.send_signal(signal.SIGSTOP)  # so that it does not end meanwhile
    (gcs,) = job.named("gcs_server")
    token = Path(gcs.environ()["RAY_AUTH_TOKEN_PATH"]).read_text()
    words = [" ".join(process.cmdline()) for process in job.living()]
    listening = {
        seen.laddr.ip.removeprefix("::ffff:")
        for process in job.living()
        for seen in process.net_connections("tcp")
        if seen.status == psutil.CONN_LISTEN
    }
    second = Job(options, task.folder / "second_log")
    assert second.finish(SOONER_S) == 2
    job.process.send_signal(signal.SIGCONT)
    return task.folder, job, token, words, listening


@pytest.fixture(scope="module")
def job(running):
    folder, job, *_ = running
    assert job.finish() == 0, job.text
    return folder / "run", job


def test_ranks_and_engines_listen_on_loopback_and_the_token_of_the_run_is_written_nowhere(
    running, job
):
    folder, _, token, words, listening = running
    assert listening == {"127.0.0.1"} and len(token) == 64 and len(words) > 8
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 8 and not any(token.encode() in path.read_bytes() for path in files)
    assert not any(token in line for line in words)


def test_a_second_run_in_the_folders_of_a_running_one_is_refused_and_told_by_whom(running, job):
    folder, first, *_ = running
    text, pid = (folder / "second_log").read_text(), first.process.pid
    assert "\n2 problems in the configuration:\n" in text, text
    for options, name in (
        ("ckpt.path", "checkpoints"),
        ("ckpt.output_dir and logger.metrics_path", "run"),
    ):
        held = (
            rf"- {options} {folder / name} is in use by pid {pid} on \S+ since [-\d]+ [:\d]+: "
            rf"wait until"
        )
        assert re.search(held, text), text
    assert not [*folder.rglob("*superseded*")] and (folder / "run/.lock").read_bytes() == b"", (
        "given back at its end"
    )


def test_a_password_in_an_address_is_written_nowhere(running, job):
    folder, _ = job
    files = [path for path in running[0].rglob("*") if path.is_file()]
    left = ("w:o%40rd", "ss/w", "t0ken")
    assert not [path for path in files if any(part.encode() in path.read_bytes() for part in left)]
    shown = "https://(hidden)@wandb/x?token=(hidden)"
    config = (folder.parent / "checkpoints/global_step2/config.yaml").read_text()
    assert f'project: "{shown}"' in config and "fill it in before you use this file" in config
    assert shown in (folder / "events.jsonl").read_text()
    assert shown in (folder.parent / "checkpoints/global_step2/controller.json").read_text()


def test_events_tell_what_happened_in_order(job):
    folder, _ = job
    events = [record for _, record in read_lines(folder / "events.jsonl")]
    assert [(event["event"], event["step"]) for event in events] == [
        ("start", 0),
        ("ready", 0),
        ("evaluation", 0),
        ("profile", 2),
        ("evaluation", 2),
        ("checkpoint", 2),
        ("evaluation", 3),
        ("end", 3),
    ]
    start, ready = events[0], events[1]
    assert start["options"]["megatron.tensor_parallel_size"] == 2 and start["layout"]["tensor"] == 2
    assert (
        "profile.steps" in start["set"]
        and start["versions"]["torch"]
        and start["hardware"]["cpus"] >= 1
    )
    assert (
        set(ready["processes"]) == {"policy rank 0", "policy rank 1", "rollout engine 0"}
        and ready["steps"] == 3
    )


def test_completions_of_the_steps_that_are_due_are_those_that_were_trained(job):
    folder, _ = job
    assert {record["step"] for _, record in read_lines(folder / "samples.jsonl")} == {1, 2}
    for step in (1, 2):
        rollouts = read_rollouts(folder / "samples.jsonl", step)
        (largest,) = (
            record["kl/rollout_max_abs"]
            for record in read_metrics(folder / "metrics.jsonl", {"step", "kl/rollout_max_abs"})
            if record["step"] == step and "kl/rollout_max_abs" in record
        )
        groups = [rollout.group for rollout in rollouts]
        assert groups == sorted(groups[::4] * 4, key=groups.index) and len(groups) == 8, (
            "two whole groups"
        )
        for rollout in rollouts:
            record = rollout.record
            assert (
                len(record["advantages"]) == len(record["tokens"]) == len(record["entropies"]) <= 12
            )
            assert max(record["entropies"]) > 0 and max(record["logprobs"]) <= 0
            both = zip(record["logprobs"], record["rollout_logprobs"], strict=True)
            assert max(abs(policy - engine) for policy, engine in both) <= largest + 1e-7 < 1e-3
        group = [rollout.record for rollout in rollouts[:4]]
        mean = sum(record["reward"] for record in group) / 4
        assert all(
            (r["advantages"][0] > 0) == (r["reward"] > mean) for r in group if r["reward"] != mean
        )


def test_held_out_completions_of_the_evaluations_that_are_due_answer_the_same_prompts(job):
    folder, _ = job
    found: dict[int, list[str]] = {}
    for _, record in read_lines(folder / "eval_samples.jsonl"):
        found.setdefault(record["step"], []).append(record["prompt"])
        assert len(record["rollout_logprobs"]) == len(record["tokens"]) and record["score"] >= 0
    assert found.keys() == {0, 2} and found[0] == found[2] and len({*found[0]}) == 2


def test_the_profiled_step_has_a_trace_of_the_chosen_rank_and_a_line_in_the_table(job):
    folder, job = job
    (trace,) = (folder / "profile").iterdir()
    assert trace.name == "step2_rank1.json.gz"
    names = {
        event.get("name", "")
        for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    }
    for part in ("_LinearTokenLoss", "Optimizer.step", "aten::mm", "c10d::"):
        assert any(part in name for name in names), part
    (event,) = (r for _, r in read_lines(folder / "events.jsonl") if r["event"] == "profile")
    assert event["rank"] == 1 and sum(event["seconds"].values()) == pytest.approx(
        event["wall"], rel=0.2
    )
    assert all(
        event["seconds"][kind] > 0
        for kind in ("GEMM", "attention", "head", "optimizer", "communication")
    )
    assert re.search(r"step +rank +wall_s +communication .*\n +2 +1 +\d", job.text), job.text


def test_a_step_tells_what_every_rank_took(job):
    folder, _ = job
    records = [
        record for _, record in read_lines(folder / "metrics.jsonl") if "loss/policy" in record
    ]
    assert [record["step"] for record in records] == [1, 2, 3]
    for record in records:
        assert [name for name in record if not is_documented(name)] == []
        assert record["rank/slowest"] in (0, 1)
        for rank in (0, 1):
            assert 0 < record[f"rank/{rank}/time_train"] <= record["time/train"]
            assert 0 < record[f"rank/{rank}/time_logprob"] and 0 < record[f"rank/{rank}/time_sync"]
        squares = sum(
            record[f"grad_norm/{group}"] ** 2
            for group in ("embedding", "attention", "mlp", "norms")
        )
        # both are means over the two updates of a step: equal up to how much the updates differ
        assert (
            math.sqrt(squares) <= record["grad_norm"] * 1.00001 <= math.sqrt(2 * squares) * 1.00002
        )
        assert (
            0 < record["throughput/train_mfu"] == record["throughput/train_tflops_per_rank"] / 0.01
        )
        assert (
            record["throughput/train_tokens_per_second"] > 0 and record["mismatch/mean_abs"] < 1e-5
        )
        assert record["mismatch/ess_tokens"] == pytest.approx(1.0, abs=1e-4)
        assert 0.05 < record["memory/rank_max_gib"] < 20
        assert (
            record["prompts/skipped_overlong"] == 1
            and record["prompts/consumed"] == 8 * record["step"]
        )


def test_steps_with_learning_rate_zero_change_nothing(job):
    folder, job = job
    assert "drift check, step 3: weights unchanged" in job.text, job.text
    records = [
        record for _, record in read_lines(folder / "metrics.jsonl") if "loss/policy" in record
    ]
    for record in records:
        assert (
            record["drift/logprob_diff"] <= 1e-6 and record["lr"] == 0.0 and record["grad_norm"] > 0
        )
    before, after = (
        load_file(path / "model.safetensors") for path in (folder.parent / "policy", folder)
    )
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_nothing_that_a_third_party_prints_stands_on_the_terminal(job):
    lines = job[1].text.splitlines()
    assert [line for line in lines if not re.fullmatch(OURS, line)] == []
    assert any("1/3" in line for line in lines)


def test_the_card_beside_the_final_model_says_where_it_comes_from(job):
    card = (job[0] / "README.md").read_text()
    assert "Steps: 3." in card and "Estimator `grpo`" in card and "| held-out accuracy | " in card
    assert "`policy`, trained by" in card and "| data.prompt_dataset | prompts.jsonl | " in card
    assert str(job[0].parent) not in card and "t0ken" not in card


def test_it_ends_with_minutes_numbers_paths_and_the_next_commands(job):
    folder, job = job
    block = job.text[job.text.index(" INFO the run has ended: 3 steps, ") :].splitlines()
    evaluations = [
        record for _, record in read_lines(folder / "metrics.jsonl") if "eval/accuracy" in record
    ]
    rewards = [
        record["reward/mean"]
        for _, record in read_lines(folder / "metrics.jsonl")
        if "reward/mean" in record
    ]
    first, last = (
        f"{end['eval/accuracy']:.3f} +- {end['eval/accuracy_stderr']:.3f}"
        for end in evaluations[::2]
    )
    assert f"  held-out accuracy {first} after step 0, {last} after step 3" in block, block
    assert (
        f"  training reward   {rewards[0]:.3f} in the first step, {rewards[-1]:.3f} in the last "
        "step" in block
    )
    assert f"  final checkpoint  {folder}" in block and f"    openrlhf-ext report {folder}" in block
    (evaluate,) = (line for line in block if line.startswith("    openrlhf-ext evaluate "))
    assert f"--model {folder} --data {folder.parent / 'held_out.jsonl'} --reward " in evaluate


def test_the_page_about_the_run(job, tmp_path, capsys):
    folder, _ = job
    assert report([str(folder), "--output", str(tmp_path / "report.html")]) == 0
    assert capsys.readouterr().err == "", "nothing is missing"
    page = (tmp_path / "report.html").read_text()
    for part in (
        "reward/mean",
        "megatron.tensor_parallel_size",
        "step2_rank1.json.gz",
        '"state":"finished"',
    ):
        assert part in page, part
