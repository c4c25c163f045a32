"""Whole training jobs as a user starts them, on a tiny random policy."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil

from tests.models import make_tiny_policy
from tests.patience import PATIENCE_S

JOB_S = 3 * PATIENCE_S  # for a whole job

# where ranks are not what is tested: each one costs seconds to start
ONE_RANK = {"actor__num_gpus_per_node": 1, "megatron__tensor_parallel_size": 1}
# in the environment of `python -m ...`: it may be forked (tests/forks), and spares its imports; by the
# server of its ranks, whose environment has the second variable
FORKED = {"OPENRLHF_EXT_TESTS_FORKED": "1", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}

REWARD = """
def reward_func(queries, prompts, labels, **kwargs):
    completion = queries[0][len(prompts[0]):]
    share = sum(c.isalnum() for c in completion) / max(1, len(completion))
    return {"rewards": share, "scores": float(share > 0.4), "extra_logs": {"alnum": share}}
"""


@dataclass
class Task:
    """A folder with a policy, prompts and a reward function."""

    folder: Path

    @classmethod
    def make(cls, folder: Path, prompts: int = 24, reward: str = REWARD) -> Task:
        make_tiny_policy(folder / "policy")
        records = [
            {"question": f"{i} + {i + 1} = ", "answer": f"#### {2 * i + 1}"} for i in range(prompts)
        ]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        (folder / "reward.py").write_text(reward)
        return cls(folder)

    def options(self, name: str, **more: object) -> list[str]:
        """Command line of ``given``."""
        return [
            part
            for key, value in self.given(name, **more).items()
            for part in (f"--{key}", str(value))
        ]

    def given(self, name: str, **more: object) -> dict[str, object]:
        """Options of a small TP2 job: 8 prompts x 4 samples a step, results in
        ``<folder>/<name>``."""
        out = self.folder / name
        options = {
            "actor.model_name_or_path": self.folder / "policy",
            "actor.num_gpus_per_node": 2,
            "actor.adam.lr": 1e-3,
            "megatron.tensor_parallel_size": 2,
            "megatron.param_dtype": "fp32",
            "algo.advantage.estimator": "grpo",
            "data.prompt_dataset": self.folder / "prompts.jsonl",
            "data.input_key": "question",
            "data.label_key": "answer",
            "data.max_len": 64,
            "rollout.batch_size": 8,
            "rollout.n_samples_per_prompt": 4,
            "rollout.max_new_tokens": 12,
            "rollout.micro_batch_size": 16,
            "train.batch_size": 32,
            "train.micro_batch_size": 8,
            "reward.remote_url": self.folder / "reward.py",
            "ckpt.output_dir": out,
            "ckpt.path": self.folder / "checkpoints" / name,
        }
        return options | {key.replace("__", "."): value for key, value in more.items()}

    def metrics(self, name: str) -> list[dict]:
        return [
            json.loads(line)
            for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()
        ]


class Job:
    """A running ``openrlhf_ext.cli.train_ppo_ray``; the folder's conftest stops those that a failed
    test leaves."""

    started: ClassVar[list[Job]] = []

    def __init__(
        self,
        options: list[str],
        log: Path,
        module: str = "openrlhf_ext.cli.train_ppo_ray",
        program: Sequence[str] | None = None,
        forked: bool = True,
    ) -> None:
        """``forked``: ``process`` may stand in for the command (tests/forks)."""
        self.log = log
        command = [*(program or (sys.executable, "-m", module)), *options]
        env = os.environ | (FORKED if forked and not program else {})
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, start_new_session=True, env=env
            )
        self.seen: dict[int, psutil.Process] = {}
        Job.started.append(self)

    @property
    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, pattern: str, timeout_s: float = PATIENCE_S) -> None:
        """Returns when the job has printed a match."""
        self.wait_until(lambda: re.search(pattern, self.text), repr(pattern), timeout_s)
        self.look()

    def wait_until(
        self, happens: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S
    ) -> None:
        """Returns when ``happens`` is true; fails if the job ends before, or after the time."""
        deadline = time.monotonic() + timeout_s
        while not happens():
            ended = self.process.poll()
            # what the job did last comes before its end
            assert ended is None or happens(), (
                f"the job ended ({ended}) before {what}:\n{self.text}"
            )
            assert time.monotonic() < deadline, (
                f"{what} did not come within {timeout_s} s:\n{self.text}"
            )
            time.sleep(0.01)

    def look(self) -> None:
        """Keeps hold of every process of the job."""
        with suppress(psutil.NoSuchProcess):
            for process in children(psutil.Process(self.process.pid)):
                self.seen.setdefault(process.pid, process)

    def named(self, name: str) -> list[psutil.Process]:
        """The living processes of the job whose title contains ``name``."""
        self.look()
        return [process for process in self.living() if name in title(process)]

    def living(self) -> list[psutil.Process]:
        """The processes seen so far that have not ended."""
        return [process for process in self.seen.values() if is_alive(process)]

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """A signal to the first worker process whose title contains ``name``."""
        victims = self.named(name)
        assert victims, (
            f"no process {name!r} among {[title(process)[:60] for process in self.living()]}"
        )
        victims[0].send_signal(how)

    def finish(self, timeout_s: float = JOB_S) -> int:
        """The exit code; fails if the job does not end in time or leaves a process."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.stop()
            raise AssertionError(
                f"the job did not end within {timeout_s} s:\n{self.text}"
            ) from None
        deadline = time.monotonic() + 60  # killed processes take a moment
        while (left := self.living()) and time.monotonic() < deadline:
            time.sleep(0.05)
        names = [title(process)[:80] for process in left]
        self.stop()
        assert not left, f"processes left behind: {names}"
        return code

    def stop(self) -> None:
        """Kills everything that is left of the job."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGSTOP)  # so that it starts nothing meanwhile
            with suppress(psutil.NoSuchProcess):
                behind(psutil.Process(self.process.pid)).suspend()
        self.look()
        for process in self.living():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.wait(PATIENCE_S)


def children(process: psutil.Process) -> list[psutil.Process]:
    """Its children and theirs, also the workers that were forked for one of them (tests/forks)."""
    found = process.children(recursive=True)
    for parent in [process, *found]:
        with suppress(psutil.NoSuchProcess):
            if (other := behind(parent)) != parent:
                found += [other, *children(other)]
    return found


def behind(process: psutil.Process) -> psutil.Process:
    """The process for which this one stands in, or itself."""
    # not of pytest's: tests/gpu by itself
    if (forks := os.environ.get("OPENRLHF_EXT_TESTS_FORKS")) is not None:
        with suppress(FileNotFoundError):
            return psutil.Process(int(Path(forks, f"{process.pid}.forked").read_text()))
    return process


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def title(process: psutil.Process) -> str:
    """What the process calls itself; '' when it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
