"""What the runs of ``flight`` have in common: policy and data, the command that a user types, what
is kept of it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.jobs import REWARD, Job
from tests.gpu.kit import Machine
from tests.gpu.node import measured
from tests.models import make_tiny_policy

ROOT = Path(__file__).resolve().parents[2]
AGREE = "policy and engines agree"
NOT_ON_CPU = (
    "CUDA IPC",
    "memory of a sleeping engine",
    "Model Runner V2",
    "FlashAttention 3",
    "Triton kernels",
)
"""What no rehearsal touches."""
REAL_MODEL = "OPENRLHF_EXT_REAL_MODEL"
_TOY, _OUT = "OPENRLHF_EXT_TOY", "OUT"
_TAIL = 2500  # characters of a run's output in an error
_SPARE_S = 6.0  # before a check's limit: to say where its run is, and to end it
_LOOK_S = 0.25


@dataclass(frozen=True)
class Run:
    """A run that has ended: its ``metrics.jsonl``, its output, what it left, and what its whole
    command took."""

    name: str
    folder: Path
    records: list[dict[str, Any]]
    text: str
    seconds: float

    def measured(self) -> dict[str, Any]:
        """One number for each of the metrics that a node's page has too, and steps' own seconds by
        phase."""
        phases = ("generate", "logprob", "train", "sync", "step")
        steps = {
            f"{phase}_seconds": [
                round(record[f"time/{phase}"], 3)
                for record in self.records
                if f"time/{phase}" in record
            ]
            for phase in phases
        }
        rates = [record["throughput/tokens_per_second"] for record in self.records]
        return {
            "command_seconds": self.seconds,
            **measured(self.records),
            **steps,
            "tokens_per_second": rates,
        }

    def samples(self) -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in (self.folder / "samples.jsonl").read_text().splitlines()
        ]


@dataclass
class Runs:
    """A folder with a policy, prompts and a reward function, in which the runs of one check take
    place.

    Attributes:
        steps: updates of a run.
        largest_kl: of any step, nats: what rounding in bf16 leaves between policy and engine,
        several times over.
    """

    machine: Machine
    check: str
    folder: Path
    policy: Path
    prompts: Path
    reward: Path
    steps: int = 3
    largest_kl: float = 5e-3
    options: dict[str, object] = field(default_factory=dict)
    deadline: float = 0.0
    kept: set[str] = field(default_factory=set)

    @classmethod
    @contextmanager
    def open(cls, machine: Machine, check: str) -> Iterator[Runs]:
        """With the toy policy that the bundle brings (OPENRLHF_EXT_TOY names a folder with start/
        and data/), otherwise with one of its shape and random weights."""
        # the limit counts from the start of the process
        deadline = psutil.Process().create_time() + machine.seconds - _SPARE_S
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            toy = os.environ.get(_TOY)
            if toy:
                reward = ROOT / "examples/python/reward_arithmetic.py"
                found = (
                    Path(toy).resolve() / "start",
                    Path(toy).resolve() / "data/train.jsonl",
                    reward,
                )
                missing = [str(path) for path in found if not path.exists()]
                if missing:
                    raise FileNotFoundError(
                        f"{_TOY} must name a folder with start/ and data/: {missing} are missing"
                    )
            else:
                found = (folder / "start", folder / "train.jsonl", folder / "reward.py")
                # the toy's shape
                make_tiny_policy(found[0], num_hidden_layers=4, intermediate_size=384)
                write_problems(found[1], 96, "{a} + {b} = ")
                write_reward(found[2])
            yield cls(machine, check, folder, *found, deadline=deadline)

    def given(self, name: str, more: Mapping[str, object]) -> dict[str, object]:
        """Options of a run: policy and engine take turns on one GPU. On a CPU it is an eighth of
        the samples."""
        small = (
            {}
            if self.machine.on_gpu
            else {
                "rollout.batch_size": 8,
                "rollout.n_samples_per_prompt": 4,
                "train.batch_size": 32,
                "rollout.max_new_tokens": 16,
            }
        )
        prompts = 32 if self.machine.on_gpu else 8  # of a step, configs/quickstart.yaml
        return {
            "config": "configs/quickstart.yaml",
            "actor.model_name_or_path": self.policy,
            "data.prompt_dataset": self.prompts,
            "data.max_samples": prompts * self.steps,
            "reward.remote_url": self.reward,
            "ckpt.output_dir": self.folder / name,
            "ckpt.path": self.folder / f"{name}.ckpt",
            "actor.num_gpus_per_node": 1,
            "vllm.num_engines": 1,
            "train.colocate_all": "true",
            "ds.enable_sleep": "true",
            "vllm.enable_sleep": "true",
            "vllm.gpu_memory_utilization": 0.3,
            "vllm.enforce_eager": "true",
            "megatron.param_dtype": "bf16",
            "train.full_determinism_enable": "false",
            **small,
            **self.options,
            **more,
        }

    def run(
        self,
        name: str,
        *,
        module: str = "openrlhf_ext.cli.train_ppo_ray",
        said: str = AGREE,
        **more: object,
    ) -> Run:
        """A whole run that ends well, with the proofs that every run has.

        Raises:
            AssertionError: it ended with another status than 0, did not say what it should, or its
                metrics are not those of so many updates that moved the weights, with policy and
                engine in agreement; with the end of its output.
        """
        given = self.given(name, {key.replace("__", "."): value for key, value in more.items()})
        words = [word for option, value in given.items() for word in (f"--{option}", str(value))]
        log, started = self.folder / f"{name}.log", time.monotonic()
        job = Job(words, log, module)
        try:
            code = self._wait(job)
        finally:
            job.stop()
            self._keep(name)
        run = Run(
            name,
            self.folder / name,
            self._records(name),
            job.text,
            round(time.monotonic() - started, 2),
        )
        problems = [f"it ended with {code}"] if code else [*self._problems(run, said)]
        if problems:
            raise AssertionError(f"{tail(job.text)}\nrun {name!r}: {'; '.join(problems)}")
        return run

    def _problems(self, run: Run, said: str) -> Iterator[str]:
        if said not in run.text:
            yield f"it never said {said!r}"
        steps = [record["step"] for record in run.records]
        if steps != list(range(1, self.steps + 1)):
            yield f"steps 1 to {self.steps} were to be recorded, got {steps}"
        for record in run.records:
            # the run itself ends where checksums differ, or the probe by more than its tolerance
            if "weight_sync/probe_diff" not in record:
                yield f"step {record['step']} has no probe"
            if not record["kl/rollout"] <= self.largest_kl:
                yield (
                    f"kl/rollout of step {record['step']} is {record['kl/rollout']:.3g}, at most "
                    f"{self.largest_kl:g}"
                )
            if not record.get("offload/freed_mib", 0.0) > 0:
                yield f"the policy freed nothing for the engine in step {record['step']}"
        if (
            not any(record["grad_norm"] > 0 for record in run.records)
            and "drift/logprob_diff" not in run.records[-1]
        ):
            yield "no step had a gradient"

    def _wait(self, job: Job) -> int:
        """The exit code; where time is up, the run is ended, and this process waits to be
        (``run.Process``)."""
        while job.process.poll() is None:
            job.look()
            if time.time() > self.deadline:
                print(f"{self.check}: a run is not done:\n{tail(job.text)}", flush=True)
                job.stop()
                self._keep(job.log.stem)
                time.sleep(10 * _SPARE_S)
            time.sleep(_LOOK_S)
        return job.finish()

    def _records(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / name / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def _keep(self, name: str) -> None:
        """Log, metrics, events and Ray's own logs of a run go into ``$OUT/flight.zip``."""
        if not (out := os.environ.get(_OUT)) or name in self.kept:
            return
        self.kept.add(name)
        rays = (
            []
            if (ray := os.environ.get("RAY_TMPDIR")) is None
            else Path(ray).glob("ray/session_latest/logs/*")
        )
        kept = {
            self.folder / f"{name}.log": "log",
            **{file: file.name for file in (self.folder / name).glob("*.jsonl")},
        }
        kept |= {file: f"ray/{file.name}" for file in rays if file.is_file()}
        with zipfile.ZipFile(Path(out) / "flight.zip", "a", zipfile.ZIP_DEFLATED) as archive:
            for file, as_name in kept.items():
                archive.write(file, f"{self.check}/{name}/{as_name}")


def tail(text: str) -> str:
    return text[-_TAIL:]


def write_problems(file: Path, count: int, question: str) -> None:
    """Sums of small numbers, as GSM8K writes its answers."""
    draw = random.Random(1)
    pairs = [(draw.randint(1, 20), draw.randint(1, 9)) for _ in range(count)]
    lines = [
        json.dumps({"question": question.format(a=a, b=b), "answer": f"#### {a + b}"})
        for a, b in pairs
    ]
    file.write_text("".join(f"{line}\n" for line in lines))


def real_checkpoint(scratch: Path) -> Path:
    """The checkpoint that OPENRLHF_EXT_REAL_MODEL names, or one made in ``scratch`` from the GGUF
    file in that folder.

    Raises:
        FileNotFoundError: there is no model.
    """
    path = Path(os.environ[REAL_MODEL]).resolve()
    if (path / "config.json").is_file():
        return path
    if not list(path.glob("*.gguf")):
        raise FileNotFoundError(f"{REAL_MODEL}={path} has neither a config.json nor a GGUF file")
    target = scratch / "real"
    command = [sys.executable, "examples/python/real_model.py", "--convert", str(path), str(target)]
    subprocess.run(command, cwd=ROOT, check=True)
    return target


def write_reward(file: Path) -> None:
    """A reward that differs between most completions, those of a random model too. Half of them are
    right by score and by ``algo.success_threshold``: where a group has only failures, gtpo_entropy
    has no gradient."""
    file.write_text(
        REWARD.replace("share > 0.4", "share > 0.27").replace(
            ': share, "sc', ': share + (share > 0.27) / 2, "sc'
        )
    )


def report(
    machine: Machine, found: dict[str, Any], not_touched: Sequence[str] = ()
) -> dict[str, Any]:
    """What a check returns: what it measured, and on a CPU what that cannot have touched."""
    return found if machine.on_gpu else {**found, "not_touched": [*NOT_ON_CPU, *not_touched]}
