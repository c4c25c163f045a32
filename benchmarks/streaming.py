"""How much of generation and training hides behind the other: synchronous, whole batches ahead, and
streaming.

    python benchmarks/streaming.py --output benchmarks/results/streaming_cpu.json     # ten minutes
    on two cores python benchmarks/streaming.py --no-real                                          #
    the simulation alone, a minute

**Simulation** (64 GPUs, heavy-tailed lengths): the driver's own code (``Rollouts``,
``PromptStream``) over a clock that jumps from event to event. An engine decodes its requests
together, one token each per step, and a step takes longer the more requests it has; training takes
a fixed time. What comes out is how much of the shorter of generation and training is hidden (above
1: the engines also do other groups while the last ones of a batch take long), how many seconds one
completion of three times the longest costs the whole run, and the staleness.

**Real engines**: short jobs of the toy policy on CPU, through the command line:
``train.max_staleness`` 0, 1, 2, and
``train.async_enable`` without partial rollouts. On two cores sampling and training share the cores,
so no more can be hidden than is idle in the synchronous run.

The whole-batch scheduler is what this project had before its groups streamed: batches are sampled
whole, one after the other, at most N ahead of training; the next batch begins when the last
completion of the one before has come.
"""

from __future__ import annotations

import argparse
import heapq
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.record import environment, load, write
from openrlhf_ext.config import RunConfig
from openrlhf_ext.driver.rollouts import PromptStream, Rollouts
from openrlhf_ext.driver.waits import Deadline
from openrlhf_ext.rollout.response import GroupRequest, Response, Sampling

NO_TOKENS = np.zeros(0, np.int32)

# --------------------------------------------------------------------------------------------------
# Simulation
# --------------------------------------------------------------------------------------------------


RECORD = "streaming_cpu.json"


@dataclass(frozen=True)
class Cluster:
    """What is simulated.

    Attributes:
        engines: each decodes up to ``slots`` completions together.
        step_s: seconds of a decoding step of an empty engine, and ``per_request_s`` more for each
        request. median_tokens, sigma, longest: of the log-normal lengths.
        sync_s: of a weight sync, in which engines stand still.
        train_s: of scoring, training and shaping a batch.
    """

    engines: int = 16
    slots: int = 256
    step_s: float = 0.012
    per_request_s: float = 6e-5
    median_tokens: float = 5900.0
    sigma: float = 0.8
    longest: int = 32768
    sync_s: float = 6.0
    train_s: float = 200.0
    groups: int = 256
    samples: int = 16


class Engine:
    """Completions that are decoded together; events are those that end next."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.progress, self.at = cluster, 0.0, 0.0
        # heap of (progress at the end, _, request)
        self.running: list[tuple[float, int, tuple[Hashable, int]]] = []
        self.busy_s = 0.0

    def _pace(self) -> float:
        """Seconds for each token of every request."""
        return self.cluster.step_s + self.cluster.per_request_s * len(self.running)

    def advance(self, now: float) -> None:
        if self.running:
            self.progress += (now - self.at) / self._pace()
            self.busy_s += now - self.at
        self.at = now

    def add(self, request: tuple[Hashable, int], tokens: int, order: int) -> None:
        heapq.heappush(self.running, (self.progress + tokens, order, request))

    def next_end(self) -> float:
        if not self.running:
            return math.inf
        return self.at + max(0.0, self.running[0][0] - self.progress) * self._pace()

    def pop(self) -> tuple[Hashable, int]:
        return heapq.heappop(self.running)[2]


class SimulatedRequests:
    """In the place of ``GroupRequests``, with the same dealing, on a simulated clock."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster, self.now, self.version = cluster, 0.0, 0
        self.engines = [Engine(cluster) for _ in range(cluster.engines)]
        self._random, self._order = random.Random(seed), 0
        self._backlog: list[tuple[Hashable, GroupRequest]] = []
        # group -> completions to come, engine, version at begin
        self._open: dict[Hashable, tuple[int, int, int]] = {}
        self._load = [0] * cluster.engines
        self._done: list[tuple[Hashable, list[Response]]] = []
        self.lengths: dict[Hashable, list[int]] = {}  # of every group that began
        # number of the completion that takes three times the longest
        self.straggler: int | None = None

    def length(self) -> int:
        tokens = self.cluster.median_tokens * math.exp(
            self.cluster.sigma * self._random.gauss(0, 1)
        )
        if self._order == self.straggler:
            return 3 * self.cluster.longest
        return max(1, min(self.cluster.longest, round(tokens)))

    def ask(self, key: Hashable, request: GroupRequest) -> None:
        self._backlog.append((key, request))
        self._deal()

    def _deal(self) -> None:
        while self._backlog:
            index = min(range(len(self._load)), key=self._load.__getitem__)
            key, request = self._backlog[0]
            if self._load[index] and self._load[index] + request.samples > self.cluster.slots:
                return
            del self._backlog[0]
            self._load[index] += request.samples
            self._open[key] = request.samples, index, self.version
            self.engines[index].advance(self.now)
            self.lengths[key] = []
            for _ in range(request.samples):
                self._order += 1
                self.lengths[key].append(self.length())
                self.engines[index].add((key, self._order), self.lengths[key][-1], self._order)

    def advance(self, until: float) -> None:
        """Time goes on; completions end."""
        while True:
            ends = [engine.next_end() for engine in self.engines]
            first = min(range(len(ends)), key=ends.__getitem__)
            if ends[first] > until:
                break
            self.now = ends[first]
            self.engines[first].advance(self.now)
            self._end(self.engines[first].pop()[0])
        self.now = max(self.now, until) if math.isfinite(until) else self.now
        for engine in self.engines:
            engine.advance(self.now)

    def stand_still(self, seconds: float) -> None:
        """A weight sync."""
        self.now += seconds
        for engine in self.engines:
            engine.at = self.now

    def _end(self, key: Hashable) -> None:
        left, index, begun = self._open[key]
        self._load[index] -= 1
        if left > 1:
            self._open[key] = left - 1, index, begun
        else:
            del self._open[key]
            spans = (
                ((begun, 0, 1),) if begun == self.version else ((begun, 0, 1), (self.version, 1, 2))
            )
            made = Response(NO_TOKENS, None, ((0, 2),), spans, 0.0, 0.5, False, {})
            self._done.append((key, [made]))
        self._deal()

    def answers(self, timeout_s: float) -> list[tuple[Hashable, list[Response]]]:
        while timeout_s and not self._done and self._open:
            self.advance(min(engine.next_end() for engine in self.engines))
        done, self._done = self._done, []
        return done


class EndlessLoader(list):
    """A loader of so many prompts."""

    def __init__(self, count: int) -> None:
        super().__init__(("s", "p", "l") for _ in range(count))

    def state_dict(self) -> dict:
        return {}


@dataclass
class Outcome:
    """Of one scheduler: seconds of its steps, and what was idle."""

    step_s: list[float] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    engine_busy: float = 0.0
    late: float = 0.0


def streaming(cluster: Cluster, staleness: int, steps: int, requests: SimulatedRequests) -> Outcome:
    """The driver's own code; ``staleness`` 0 is synchronous."""
    rollout = {
        "batch_size": cluster.groups,
        "n_samples_per_prompt": cluster.samples,
        "timeout_s": 1e9,
    }
    config = RunConfig(
        rollout=rollout, train={"max_staleness": staleness}, data={"max_len": cluster.longest}
    )
    prompts = PromptStream(EndlessLoader(cluster.groups * (steps + staleness + 2)), 1)
    rollouts, out, version = Rollouts(prompts, requests, config, Deadline()), Outcome(), 0
    for _ in range(steps):
        began = requests.now
        groups = rollouts.take(version)
        out.staleness += [version - group.oldest_version for group in groups]
        out.late += rollouts.gauges()["groups/trained_late"]
        ends = requests.now + cluster.train_s
        while requests.now < ends:  # the driver looks after the rollouts meanwhile
            requests.advance(min(ends, requests.now + 1.0))
            rollouts.pump()
        requests.stand_still(cluster.sync_s)
        version += 1
        requests.version = version
        out.step_s.append(requests.now - began)
    out.engine_busy = (
        sum(engine.busy_s for engine in requests.engines) / cluster.engines / requests.now
    )
    return out


def whole_batches(cluster: Cluster, ahead: int, steps: int, requests: SimulatedRequests) -> Outcome:
    """Whole batches, at most ``ahead`` finished or under way beside the one in training; syncs
    between batches."""
    out = Outcome()
    sampling = Sampling(1.0, 1.0, None, cluster.longest)
    request = GroupRequest("p", "l", cluster.samples, sampling)
    number, finished, train_ends, training = 0, [], None, None
    batch_left, batch_began, last_end, want_sync = 0, 0, 0.0, False
    taken = 0
    while taken < steps or train_ends is not None:
        if batch_left == 0 and want_sync:  # goes before the next batch
            requests.stand_still(cluster.sync_s)
            requests.version += 1
            want_sync, train_ends = False, None
            out.step_s.append(requests.now - last_end)
            last_end = requests.now
            continue
        if train_ends is None and finished and taken < steps:
            training = finished.pop(0)
            out.staleness.append(requests.version - training)
            train_ends, taken = requests.now + cluster.train_s, taken + 1
        if batch_left == 0 and not want_sync and len(finished) < ahead + (train_ends is None):
            batch_left, batch_began = cluster.groups, requests.version
            for _ in range(cluster.groups):
                number += 1
                requests.ask(number, request)
        ends = min((engine.next_end() for engine in requests.engines), default=math.inf)
        if train_ends is not None and not want_sync and train_ends <= ends:
            requests.advance(train_ends)
            want_sync = True
        else:
            requests.advance(ends)
        done = requests.answers(0.0)
        batch_left -= len(done)
        if done and batch_left == 0:
            finished.append(batch_began)
    out.engine_busy = (
        sum(engine.busy_s for engine in requests.engines) / cluster.engines / requests.now
    )
    return out


SCHEDULERS: dict[str, Callable[[Cluster, int, SimulatedRequests], Outcome]] = {
    "synchronous": lambda cluster, steps, requests: streaming(cluster, 0, steps, requests),
    "whole batches, 1 ahead": lambda cluster, steps, requests: whole_batches(
        cluster, 1, steps, requests
    ),
    "streaming, N = 1": lambda cluster, steps, requests: streaming(cluster, 1, steps, requests),
    "streaming, N = 2": lambda cluster, steps, requests: streaming(cluster, 2, steps, requests),
}


def simulate(cluster: Cluster, steps: int, seeds: int) -> dict[str, Any]:
    """All schedulers on the same cluster; means over seeds, and over the steps after the first
    two."""
    runs = [simulate_once(cluster, steps, seed) for seed in range(seeds)]
    rows = {
        name: {key: statistics.fmean(run["schedulers"][name][key] for run in runs) for key in row}
        for name, row in runs[0]["schedulers"].items()
    }
    for name, row in rows.items():
        row["one_straggler_costs_s_of_each_seed"] = [
            run["schedulers"][name]["one_straggler_costs_s"] for run in runs
        ]
    return {
        "generation_s": statistics.fmean(run["generation_s"] for run in runs),
        "cluster": vars(cluster),
        "steps": steps,
        "seeds": seeds,
        "schedulers": rows,
    }


def simulate_once(cluster: Cluster, steps: int, seed: int) -> dict[str, Any]:
    """One seed."""
    outcomes = {
        name: run(cluster, steps, SimulatedRequests(cluster, seed))
        for name, run in SCHEDULERS.items()
    }
    alone = statistics.fmean(outcomes["synchronous"].step_s[2:])
    generation = alone - cluster.train_s - cluster.sync_s
    rows = {}
    for name, out in outcomes.items():
        step, delayed = statistics.fmean(out.step_s[2:]), SimulatedRequests(cluster, seed)
        # in the fifth batch
        delayed.straggler = 4 * cluster.groups * cluster.samples + cluster.samples // 2
        straggler = SCHEDULERS[name](cluster, steps, delayed)
        rows[name] = {
            "step_s": step,
            "speedup": alone / step,
            "policy_waits_s": step - cluster.train_s - cluster.sync_s,
            "hidden": (alone - step) / min(generation, cluster.train_s),
            "engines_busy": out.engine_busy,
            "one_straggler_costs_s": sum(straggler.step_s) - sum(out.step_s),
            "staleness_mean": statistics.fmean(out.staleness),
            "staleness_max": max(out.staleness),
            "late_groups_per_step": out.late / steps,
        }
    return {"generation_s": generation, "schedulers": rows}


# --------------------------------------------------------------------------------------------------
# Real engines
# --------------------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parent.parent
JOBS = {
    "synchronous": [],
    "async_enable (syncs wait for groups in flight)": ["--train.async_enable"],
    "streaming, N = 1": ["--train.max_staleness", "1"],
    "streaming, N = 2": ["--train.max_staleness", "2"],
}
MEASURED = (
    "time/step",
    "time/generate",
    "time/logprob",
    "time/train",
    "time/sync",
    "time/wait_rollouts",
    "time/idle_engines",
    "staleness/mean",
    "staleness/max",
    "throughput/tokens_per_second",
)


def real_jobs(folder: Path, steps: int) -> dict[str, Any]:
    """Medians over the steps of each job after the first four; the quickstart's policy and
    configuration."""
    from openrlhf_ext.reporting import read_metrics

    toy = [sys.executable, ROOT / "examples/python/toy_policy.py"]
    run([*toy, "--output_dir", folder / "policy", "--data_dir", folder / "data"])
    rows = {}
    for number, (name, options) in enumerate(JOBS.items()):
        out = folder / str(number)
        run(
            [
                sys.executable,
                "-m",
                "openrlhf_ext.cli.train_ppo_ray",
                "--config",
                ROOT / "configs/quickstart.yaml",
                "--actor.model_name_or_path",
                folder / "policy",
                "--data.prompt_dataset",
                folder / "data/train.jsonl",
                "--data.max_samples",
                str(32 * steps),
                "--reward.remote_url",
                ROOT / "examples/python/reward_arithmetic.py",
                "--ckpt.output_dir",
                out,
                "--eval.steps",
                "-1",
                "--vllm.num_engines",
                "1",
                *options,
            ]
        )
        records = [record for record in read_metrics(out / "metrics.jsonl") if record["step"] > 4]
        rows[name] = {key: statistics.median(record[key] for record in records) for key in MEASURED}
    base = rows["synchronous"]
    for row in rows.values():
        row["speedup"] = base["time/step"] / row["time/step"]
    return rows


def run(command: list[Any]) -> None:
    """A command that must succeed."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    subprocess.run([str(part) for part in command], check=True, env=environment, timeout=1800)


def cluster_table() -> str:
    """docs/performance.md: the simulation."""
    lines = [
        "| training takes | scheduler | s/step | speedup | engines busy | one completion of "
        "98,304 tokens costs the run | staleness (mean) | late groups per step |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    simulation = load(RECORD)["simulation"]
    for name, part in simulation.items():
        takes = name.removeprefix("training takes ")
        for scheduler, row in part["schedulers"].items():
            late = row["late_groups_per_step"]
            lines.append(
                f"| {takes} | {scheduler} | {row['step_s']:.0f} | {row['speedup']:.2f} | "
                f"{row['engines_busy']:.0%} | {row['one_straggler_costs_s']:.0f} s | "
                f"{row['staleness_mean']:.2f} | {late:.{0 if late == 0 or late >= 1 else 1}f} of "
                f"{part['cluster']['groups']} |"
            )
            takes = ""
    alone = next(iter(simulation.values()))["generation_s"]
    return "\n".join([*lines, "", f"Generation alone takes {alone:.0f} s."])


def real_table() -> str:
    """docs/performance.md: the jobs."""
    lines = [
        "| scheduler | s/step | speedup | policy idle | engine idle | staleness (mean) |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {name} | {row['time/step']:.2f} | {row['speedup']:.2f} | "
        f"{row['time/wait_rollouts']:.2f} s | {row['time/idle_engines']:.2f} s | "
        f"{row['staleness/mean']:.1f} |"
        for name, row in load(RECORD)["real"].items()
    ]
    return "\n".join(lines)


TEXTS = {"cluster": cluster_table, "real": real_table}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=14, help="training steps that are simulated")
    parser.add_argument("--seeds", type=int, default=5, help="of the simulated lengths")
    parser.add_argument(
        "--real", action=argparse.BooleanOptionalAction, default=True, help="run the real jobs too"
    )
    parser.add_argument("--real_steps", type=int, default=20, help="training steps of a real job")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {"environment": environment(), "simulation": {}}
    for train_s in (100.0, 200.0, 400.0):
        result = simulate(Cluster(train_s=train_s), args.steps, args.seeds)
        found["simulation"][f"training takes {train_s:g} s"] = result
        print(
            f"simulated: generation alone {result['generation_s']:.0f} s, training {train_s:.0f} s"
        )  # noqa: T201
        show(result["schedulers"])
    if args.real:
        with tempfile.TemporaryDirectory() as folder:
            found["real"] = real_jobs(Path(folder), args.real_steps)
        print("real engines, toy policy")  # noqa: T201
        show(found["real"])
    if args.output:
        write(args.output, found)


def show(rows: dict[str, dict[str, float]]) -> None:
    for name, row in rows.items():
        print(
            f"  {name:48s}"
            + "  ".join(f"{k} {v:.2f}" for k, v in row.items() if isinstance(v, float))
        )  # noqa: T201


if __name__ == "__main__":
    main()
