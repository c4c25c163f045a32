"""The steps of ``run_node.sh``, each in a process of its own, and the page that is sent in."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.gpu.kit import NotHere
from tests.gpu.run import commit, hardware, versions

ROOT = Path(__file__).resolve().parent.parent.parent
# metric -> how its values of all steps become one number
METRICS: dict[str, Callable[[list[float]], float]] = {
    "kl/rollout": max,
    "kl/rollout_max_abs": max,
    "mismatch/mean_abs": max,
    "mismatch/entropy_mean_abs": max,
    "weight_sync/probe_diff": max,
    "drift/logprob_diff": max,
    "weight_sync/seconds": statistics.median,
    "weight_sync/bytes": max,
    "time/step": statistics.median,
    "memory/rank_max_gib": max,
    "memory/device_max_gib": max,
    "offload/freed_mib": min,
    "reward/mean": lambda values: values[-1],
    "eval/accuracy": lambda values: values[-1],
}
_SKIPPED = 77  # exit status of a step's process
_SLEEP = {"ds__enable_sleep": "true", "vllm__enable_sleep": "true"}


@dataclass(frozen=True)
class Node:
    """Where the steps run.

    Attributes:
        gpus: a power of two, at most 8; on a CPU 2, which are processes. On one GPU policy and
            engine take turns, and what needs two is skipped.
        model: Hugging Face checkpoint for ``convert --check``; None for the tiny one.
    """

    out: Path
    on_cpu: bool
    gpus: int
    model: Path | None

    def need_gpus(self, why: str) -> None:
        if self.on_cpu:
            raise NotHere(f"{why}: needs GPUs")
        self.need_two(why)

    def need_two(self, why: str) -> None:
        if self.gpus < 2:
            raise NotHere(f"{why}: needs two GPUs, there is one")


# ---- steps: each returns what it measured, raises NotHere, or fails by raising


def doctor(node: Node) -> dict:
    _command([sys.executable, "-m", "openrlhf_ext.cli.doctor"])
    return {}


def nccl(node: Node) -> dict:
    node.need_gpus("NCCL between two GPUs")
    module = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "tests.gpu.nccl_pair",
    ]
    return json.loads(_command([sys.executable, *module]).splitlines()[-1])


def engine_tp1(node: Node) -> dict:
    return _job(node, "engine_tp1", actor__num_gpus_per_node=1, megatron__tensor_parallel_size=1)


def engine_tp2(node: Node) -> dict:
    node.need_gpus("an engine whose two workers talk over NCCL")
    if node.gpus > 2:
        ranks: dict[str, Any] = {"actor__num_gpus_per_node": 1, "megatron__tensor_parallel_size": 1}
    else:
        ranks = {
            "train__colocate_all": "true",
            "actor__num_gpus_per_node": 2,
            "megatron__tensor_parallel_size": 2,
        }
    return _job(node, "engine_tp2", vllm__tensor_parallel_size=2, **ranks)


def colocated(node: Node) -> dict:
    return _job(node, "colocated", **_colocated(node))


def separate_engines(node: Node) -> dict:
    node.need_two("an engine on a GPU of its own")
    half = node.gpus // 2
    return _job(
        node,
        "separate_engines",
        actor__num_gpus_per_node=half,
        megatron__tensor_parallel_size=half,
        vllm__num_engines=half,
        vllm__sync_backend="gloo" if node.on_cpu else "nccl",
    )


def sleep_and_wake(node: Node) -> dict:
    found = _job(node, "sleep_and_wake", **_SLEEP, **_colocated(node))
    if not found.get("offload/freed_mib", 0.0) > 0:
        raise AssertionError(f"the policy freed nothing while the engines worked: {found}")
    return found


def kill_and_resume(node: Node) -> dict:
    """SIGKILL to everything once there is a checkpoint; the next job must go on from it."""
    from openrlhf_ext.checkpoints import CheckpointStore
    from tests.e2e.jobs import Job

    task, checkpoints = _task(node), node.out / "kill_and_resume_ckpt"
    more = {"ckpt__path": checkpoints, "ckpt__save_steps": 1}
    options = task.options("kill_and_resume", **_settings(node), **more)
    job = Job(options, node.out / "kill_and_resume.killed.log")
    try:
        job.wait_until(lambda: CheckpointStore(checkpoints, keep=1).checkpoints(), "a checkpoint")
        job.look()
        assert job.process.poll() is None, (
            f"the job ended before it could be killed:\n{job.text[-3000:]}"
        )
    finally:
        job.stop()
    _train(
        [*options, "--ckpt.load_enable"], node.out / "kill_and_resume.resumed.log", "resumed from"
    )
    steps = [record["step"] for record in task.metrics("kill_and_resume")]
    if steps != sorted(set(steps)) or steps[-1] != 3:
        raise AssertionError(f"steps 1 to 3 were to be recorded once each, got {steps}")
    return measured(task.metrics("kill_and_resume"))


def convert_check(node: Node) -> dict:
    model = node.model or _task(node).folder / "policy"
    command = [sys.executable, "-m", "openrlhf_ext.cli.convert", "--check", str(model), "--tp", "2"]
    _command([*command, "--dtype", "fp32" if node.on_cpu else "bf16"])
    return {}


def drift_check(node: Node) -> dict:
    return _job(node, "drift_check", "--train.drift_check", said="weights unchanged")


def quickstart(node: Node) -> dict:
    """The commands of examples/scripts/quickstart.sh; not the script, which makes the CPU
    environment first."""
    if node.on_cpu:
        raise NotHere("on a CPU it is bash examples/scripts/quickstart.sh, which takes minutes")
    out, reward = node.out / "quickstart", ROOT / "examples/python/reward_arithmetic.py"
    data = out / "data"
    _command(
        [
            sys.executable,
            "examples/python/toy_policy.py",
            "--output_dir",
            f"{out}/start",
            "--data_dir",
            str(data),
        ]
    )
    grade = [sys.executable, "-m", "openrlhf_ext.cli.evaluate", "--data", f"{data}/heldout.jsonl"]
    grade += ["--reward", str(reward), "--n_samples", "2", "--max_new_tokens", "48"]
    _command([*grade, "--model", f"{out}/start", "--json", f"{out}/before.json"])
    options = {
        "config": "configs/quickstart.yaml",
        "actor.model_name_or_path": out / "start",
        "data.max_samples": 1280,
        **_of_quickstart(node),
        "data.prompt_dataset": data / "train.jsonl",
        "eval.dataset": data / "heldout.jsonl",
        "reward.remote_url": reward,
        "ckpt.output_dir": out / "policy",
        "logger.metrics_path": out / "metrics.jsonl",
    }
    _train(
        [part for name, value in options.items() for part in (f"--{name}", str(value))],
        node.out / "quickstart.job",
    )
    compare = ["--compare", f"{out}/before.json", "--min_gain", "0.25"]
    _command([*grade, "--model", f"{out}/policy", "--json", f"{out}/after.json", *compare])
    return measured([json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()])


def _of_quickstart(node: Node) -> dict[str, Any]:
    """Data-parallel ranks, and as many engines."""
    if node.gpus == 1:
        return {name.replace("__", "."): value for name, value in _settings(node).items()}
    half = node.gpus // 2
    return {
        "megatron.param_dtype": "bf16",
        "actor.num_gpus_per_node": half,
        "vllm.num_engines": half,
    }


# step -> function, seconds it may take
STEPS: dict[str, tuple[Callable[[Node], dict], float]] = {
    "doctor": (doctor, 300), "nccl": (nccl, 300), "engine_tp1": (engine_tp1, 900), "engine_tp2": (engine_tp2, 900),
    "colocated": (colocated, 900), "separate_engines": (separate_engines, 900),
    "sleep_and_wake": (sleep_and_wake, 900), "kill_and_resume": (kill_and_resume, 1500),
    "convert_check": (convert_check, 600), "drift_check": (drift_check, 900), "quickstart": (quickstart, 2400),
}  # fmt: skip


# ---- jobs


def _task(node: Node) -> Any:
    """The tiny policy, prompts and reward that all jobs share."""
    from tests.e2e.jobs import Task

    folder = node.out / "task"
    if not (folder / "reward.py").exists():  # what is written last
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return Task.make(folder)
    return Task(folder)


def _settings(node: Node) -> dict[str, Any]:
    """What a job has unless it says otherwise: half of the GPUs for the policy, an engine on one of
    the others; where there is one GPU, they take turns."""
    if node.on_cpu:
        return {"megatron__param_dtype": "fp32"}
    if node.gpus == 1:
        return {"megatron__param_dtype": "bf16", **_colocated(node), **_SLEEP}
    half = node.gpus // 2
    return {
        "megatron__param_dtype": "bf16",
        "actor__num_gpus_per_node": half,
        "megatron__tensor_parallel_size": half,
    }


def _colocated(node: Node) -> dict[str, Any]:
    """All GPUs for both: two pipeline stages, the rest tensor-parallel; an engine on each. On a CPU
    one stage less, and on one GPU."""
    stages = 1 if node.on_cpu or node.gpus == 1 else 2
    return {
        "train__colocate_all": "true",
        "actor__num_gpus_per_node": node.gpus,
        "vllm__num_engines": node.gpus,
        "megatron__pipeline_parallel_size": stages,
        "megatron__tensor_parallel_size": node.gpus // stages,
    }


def _job(
    node: Node, name: str, *flags: str, said: str = "policy and engines agree", **more: Any
) -> dict:
    """A whole training job of three steps; the policy's log-probs are compared with the engine's at
    every sync."""
    task = _task(node)
    _train(
        [*task.options(name, **(_settings(node) | more)), *flags], node.out / f"{name}.job", said
    )
    return measured(task.metrics(name))


def _train(options: Sequence[str], log: Path, said: str = "policy and engines agree") -> None:
    """Runs the job; what it printed is in the step's log too."""
    from tests.e2e.jobs import Job

    job = Job(list(options), log)
    code = job.finish()
    print(job.text)
    if code or said not in job.text:
        raise AssertionError(
            f"the job ended with {code}" + ("" if code else f" and never said {said!r}")
        )


def measured(records: list[dict]) -> dict[str, float]:
    values = {name: [record[name] for record in records if name in record] for name in METRICS}
    return {name: combine(values[name]) for name, combine in METRICS.items() if values[name]}


def _command(command: Sequence[str]) -> str:
    """What it printed, which is shown too.

    Raises:
        AssertionError: it ended with another status than 0.
    """
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(done.stdout)
    if done.returncode:
        last = (done.stdout.strip().splitlines() or ["(nothing printed)"])[-1]
        raise AssertionError(f"{' '.join(command[1:4])} ... ended with {done.returncode}: {last}")
    return done.stdout.strip()


# ---- running the steps


@dataclass(frozen=True)
class Result:
    """What came of a step."""

    name: str
    status: str  # PASS, FAIL or SKIP
    seconds: float
    why: str
    measured: dict[str, Any]

    def line(self) -> str:
        return f"{self.status}  {self.name:18} {self.seconds:7.1f} s  {self.why}".rstrip()


def run_step(node: Node, name: str) -> Result:
    """In a process of its own, which is ended with everything that it started when its time is
    up."""
    limit, log, result = STEPS[name][1], node.out / f"{name}.log", node.out / f"{name}.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.gpu.node", "--out", str(node.out), "--step", name]
    command += ["--cpu"] * node.on_cpu + (["--model", str(node.model)] if node.model else [])
    started = time.perf_counter()
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    seconds = time.perf_counter() - started
    found = json.loads(result.read_text()) if result.exists() else {}
    if code == _SKIPPED:
        return Result(name, "SKIP", seconds, found["why"], {})
    if code is None:
        return Result(name, "FAIL", seconds, f"not done after its limit of {limit:g} s; {log}", {})
    if code:
        return Result(name, "FAIL", seconds, f"{found.get('why', f'ended with {code}')}; {log}", {})
    return Result(name, "PASS", seconds, "", found)


def _end(process: subprocess.Popen) -> None:
    """Kills the process and all that it started, jobs in sessions of their own too."""
    if process.poll() is not None:
        return
    children: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        root.suspend()  # so that it starts nothing meanwhile
        children = root.children(recursive=True)
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()  # before the others are waited for: who is suspended buries none of them
    process.wait()
    psutil.wait_procs(children, timeout=30)  # the next step needs the GPUs that they have


def _in_this_process(node: Node, name: str) -> int:
    """The step itself; what it measured, or why it did not pass, goes into ``<name>.json``."""
    try:
        found, code = STEPS[name][0](node), 0
    except NotHere as skip:
        found, code = {"why": str(skip)}, _SKIPPED
    except Exception as error:
        import traceback

        traceback.print_exc()
        found, code = (
            {"why": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"},
            1,
        )
    (node.out / f"{name}.json").write_text(json.dumps(found))
    return code


# ---- the page


def page(node: Node, results: Sequence[Result]) -> str:
    rows = [
        f"| {r.name} | {r.status} | {r.seconds:.0f} | {r.why.replace('|', '/')} |" for r in results
    ]
    numbers = [
        f"| {result.name} | {name} | {value:.6g} |"
        for result in results
        for name, value in result.measured.items()
    ]
    return "\n".join(
        [
            "# A node's first contact with openrlhf_ext",
            "",
            *(f"* {name}: {value}" for name, value in environment(node).items()),
            "",
            "| step | result | seconds | why |",
            "|---|---|---|---|",
            *rows,
            "",
            "| step | metric (docs/metrics.md) | value |",
            "|---|---|---|",
            *numbers,
            "",
        ]
    )


def environment(node: Node) -> dict[str, str]:
    machine, made = hardware(), commit()
    gpus = [", ".join(gpu.values()) for gpu in machine["gpus"]]
    counted = sorted({f"{gpus.count(gpu)} x {gpu}" for gpu in gpus})
    links = _said(["nvidia-smi", "topo", "-m"]).splitlines() if gpus else []
    return {
        "GPUs": "none used (--cpu)"
        if node.on_cpu
        else f"{'; '.join(counted)}; {node.gpus} of them used",
        "links": " / ".join(
            " ".join(line.split()) for line in links if line.lstrip().startswith("GPU")
        )
        or "-",
        "processor": f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{platform.platform()}",
        "versions": ", ".join(f"{name} {number}" for name, number in versions().items() if number),
        "commit": f"{made['commit'] or 'unknown'}{' (dirty)' if made['dirty'] else ''}",
    }


def _said(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"({error})"
    return done.stdout.strip()


# ---- command line


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the steps in order, whatever becomes of each; the page is written after every one."""
    args = _parse(arguments)
    node = _node(args)
    if args.step:
        return _in_this_process(node, args.step)
    results: list[Result] = []
    for name in STEPS:
        if name in (args.only or STEPS):
            results.append(run_step(node, name))
            print(results[-1].line(), flush=True)
            (node.out / "results.md").write_text(page(node, results))
    print(f"written: {node.out / 'results.md'}")
    return int(
        any(result.status == "FAIL" for result in results)
        or not any(r.status == "PASS" for r in results)
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bash tests/gpu/run_node.sh", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs" / "node", help="folder for logs and results.md"
    )
    parser.add_argument(
        "--only", nargs="+", choices=STEPS, metavar="STEP", help=f"some of {', '.join(STEPS)}"
    )
    parser.add_argument(
        "--model",
        type=Path,
        help="Hugging Face checkpoint for convert_check, instead of a tiny one",
    )
    parser.add_argument("--cpu", action="store_true", help="no GPUs: tries the script itself")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _node(args: argparse.Namespace) -> Node:
    """
    Raises:
        SystemExit: there is no GPU.
    """
    if args.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        count = 2
    else:
        import torch  # takes seconds, and nothing else here needs it

        count = torch.cuda.device_count()
    if count < 1:
        raise SystemExit("torch sees no GPU, 1 to 8 are needed; --cpu tries the script without any")
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    return Node(
        out,
        args.cpu,
        max(n for n in (1, 2, 4, 8) if n <= count),
        args.model and args.model.resolve(),
    )


if __name__ == "__main__":
    sys.exit(main())
