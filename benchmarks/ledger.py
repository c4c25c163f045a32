"""Drivers killed at random moments: after every run each prompt is trained exactly once, or named
with its reason.

    python benchmarks/ledger.py /tmp/kills --output benchmarks/results/ledger_cpu.json --kills 1000
      # an hour or more

One process starts Ray, an engine and a policy rank. Every attempt of a run is a process of its own
that connects to them, goes on from the newest checkpoint and trains, until SIGKILL ends it at a
moment that the seed chooses; the attempt after the last kill ends the run. Streaming at staleness
0, 1, 2 and 4, with dynamic filtering, a held-out evaluation every two steps, and late groups
trained or dropped.

A run holds if its ledger does (``run.ledger.Audit``), and if, without the ledger, samples.jsonl
shows every prompt of the data trained once per episode, but those that the reward function has
filtered and those that were dropped late. What the killed attempt has left in engine and rank is of
no account: a checkpoint holds all that a rank keeps, and the rank has answered once more before the
next attempt begins. The file is written after every run, and a second command goes on where it
ends; FOLDER keeps the runs that do not hold.
"""

# ruff: noqa: E402  patches come before what they patch

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from openrlhf_ext import patches

patches.apply()

import ray

from benchmarks.record import environment, write
from openrlhf_ext import compat  # noqa: F401  every attempt is forked from a process that has imported it
from openrlhf_ext.config import RunConfig, load_config
from openrlhf_ext.driver import job, settings
from openrlhf_ext.driver.cluster import RaySession
from openrlhf_ext.driver.engines import EngineSupervisor
from openrlhf_ext.driver.guard import Guard
from openrlhf_ext.driver.waits import Deadline, call_ranks
from openrlhf_ext.reporting import EventLog
from openrlhf_ext.reporting.lines import read_lines
from openrlhf_ext.run.checkpoints import clean_up, own_folders, restore
from openrlhf_ext.run.ledger import LEDGER, USED_UP, Audit
from tests.e2e.jobs import ONE_RANK, Task

PROMPTS, EPISODES, BATCH, SAMPLES = 30, 2, 4, 2
FILTERED = 5  # of so many prompts one is filtered
KINDS = [(staleness, late) for staleness in (0, 1, 2, 4) for late in ("train", "drop")]
_ATTEMPT_S, _MOST_ATTEMPTS = 180.0, 200
# one prompt in seven takes its time: its group is late, and in flight when a checkpoint is written
REWARD = f"""
import time

def reward_func(queries, prompts, labels, **kwargs):
    number = int(prompts[0].split()[0])
    time.sleep(STRAGGLER_S * (number % 7 == 3))
    return {{"rewards": len(queries[0]) % 3 / 2, "scores": 1.0 if number % {FILTERED} == 2 else 0.5}}
"""
OPTIONS = {
    **ONE_RANK,
    "rollout__batch_size": BATCH,
    "rollout__n_samples_per_prompt": SAMPLES,
    "rollout__max_new_tokens": 8,
    "train__batch_size": BATCH * SAMPLES,
    "train__micro_batch_size": 8,
    "train__num_episodes": EPISODES,
    "algo__dynamic_filtering_enable": "true",
    "eval__steps": 2,
    "eval__n_samples_per_prompt": 1,
    "ckpt__save_steps": 1,
    "ckpt__max_num": 2,
    "ckpt__load_enable": "true",
    "logger__samples_every": 1,
    "logger__samples_groups": 0,
}


@dataclass
class Result:
    """Of one run; ``faults``: why it does not hold."""

    seed: int
    staleness: int
    late_groups: str
    straggler_s: float
    kills: int
    steps: int
    counts: dict[str, int]
    seconds: float
    faults: list[str]


# ---- an attempt


def attempt(
    carried: bytes, address: str, config: RunConfig, untrained: str, told: Connection, log: Path
) -> None:
    """Goes on with a run, in a process of its own, until it ends or is killed; ``told`` when it
    begins."""
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    policy, engines, auxiliary, tokenizer, prompts, held_out = ray.cloudpickle.loads(carried)
    path, timeout_s, groups = (
        Path(str(config.logger.metrics_path)),
        config.train.step_timeout_s,
        {"policy": policy},
    )
    told.send("begins")
    with own_folders(config), EventLog(path.with_name("events.jsonl"), goes_on=True) as events:
        clean_up(config)
        of_data = {"prompts": prompts.fingerprint}
        resumed = restore(config, job.callers(groups), of_data, timeout_s, events)
        if resumed is None:
            call_ranks(policy, "policy", "load_state", timeout_s, folder=untrained, name="policy")
        deadline = Deadline(Guard(), timeout_s, config.vllm.hang_timeout_s)
        supervisor = EngineSupervisor(engines, policy, config, deadline=deadline, events=events)
        steps = settings.training_steps(config, len(prompts))
        parts = job.Parts(
            tokenizer,
            policy,
            auxiliary,
            supervisor,
            None,
            prompts,
            held_out,
            steps,
            deadline,
            SimpleNamespace(use_gpu=False, guard=Guard()),
            events,
            groups,
            resumed,
        )
        loop = job.build_loop(config, parts)
        if resumed is None:
            loop.publish()  # the engines have weights of another run
        loop.run()
        loop.close_logs()
    ray.shutdown()


# ---- runs


class Runs:
    """One set of Ray actors, and the runs that are made with them."""

    def __init__(self, task: Task, parts: job.Parts, within: float, straggler_s: float) -> None:
        """An attempt is killed after ``within`` times what it took to begin and what a step takes,
        at most; with every 50 kills of a run after so much more, so that it ends."""
        self.task, self.within, self.straggler_s = task, within, straggler_s
        self.carried = ray.cloudpickle.dumps(
            (
                parts.policy,
                list(parts.supervisor.engines),
                parts.auxiliary,
                parts.tokenizer,
                parts.prompts,
                parts.held_out,
            )
        )
        self.address = ray.get_runtime_context().gcs_address
        self.untrained, self.call = (
            task.folder / "untrained",
            partial(call_ranks, parts.policy, "policy"),
        )
        self.call("save_state", 60.0, folder=str(self.untrained), name="policy", background=False)
        self.processes = multiprocessing.get_context("forkserver")
        self.processes.set_forkserver_preload(["benchmarks.ledger"])
        first = self.processes.Process(target=os.getpid)  # the others are forked at once
        first.start()
        first.join(_ATTEMPT_S)
        self.step_s = 1.0  # as long as none has ended

    def run(self, seed: int) -> Result:
        """The run of a seed, with its kills."""
        chance, started = random.Random(seed), time.monotonic()
        (staleness, late), name = KINDS[seed % len(KINDS)], f"run{seed}"
        config = config_of(self.task, name, train__max_staleness=staleness, train__late_groups=late)
        kills = 0
        log = self.task.folder / f"{name}.log"
        while not self._ends(config, chance.uniform(0, self.within * (1 + kills / 50)), log):
            kills += 1
            if kills > _MOST_ATTEMPTS:
                raise RuntimeError(
                    f"run {seed} was killed {kills} times and has not ended; raise --within"
                )
        folder = self.task.folder / name
        audit, faults = judged(folder, config, late)
        if not faults:
            for path in (folder, Path(config.ckpt.path)):
                shutil.rmtree(path)
        counts = {reason: count for reason, count in audit.counts.items() if count}
        seconds = time.monotonic() - started
        return Result(
            seed, staleness, late, self.straggler_s, kills, audit.step, counts, seconds, faults
        )

    def _ends(self, config: RunConfig, after: float, log: Path) -> bool:
        """One attempt; whether it ended before it was to be killed. Raises RuntimeError: it
        failed."""
        started = time.monotonic()
        told, tells = self.processes.Pipe(duplex=False)
        words = (self.carried, self.address, config, str(self.untrained), tells, log)
        process = self.processes.Process(target=attempt, args=words)
        process.start()
        tells.close()
        if not told.poll(_ATTEMPT_S) or process.sentinel in multiprocessing.connection.wait(
            [process.sentinel], 0
        ):
            process.kill()
            raise RuntimeError(
                f"an attempt did not begin within {_ATTEMPT_S:g} s, or failed: {log}"
            )
        # both take longer on a busy machine
        process.join(after * (time.monotonic() - started + self.step_s))
        process.kill()
        process.join(_ATTEMPT_S)
        if process.exitcode not in (0, -signal.SIGKILL):
            raise RuntimeError(f"an attempt failed with status {process.exitcode}: {log}")
        if process.exitcode:
            # what it has asked the rank for is done, and no update is unpublished
            self.call("send_weights", 60.0)
        if (metrics := Path(str(config.logger.metrics_path))).exists():
            steps = [line["time/step"] for _, line in read_lines(metrics) if "time/step" in line]
            self.step_s = steps[-1] if steps else self.step_s
        return process.exitcode == 0


def config_of(task: Task, name: str, **more: object) -> RunConfig:
    folders = {
        "eval__dataset": task.folder / "held_out.jsonl",
        "ckpt__path": task.folder / f"{name}_ckpt",
    }
    return load_config(task.options(name, **OPTIONS, **folders, **more))


def judged(folder: Path, config: RunConfig, late: str) -> tuple[Audit, list[str]]:
    """What the ledger says, and everything that is wrong with it or with what was trained."""
    audit = Audit(folder / LEDGER)
    faults = list(audit.faults)
    if audit.end != USED_UP or audit.proved != EPISODES:
        faults.append(f"the ledger's end is {audit.end!r}, {audit.proved} episodes are proved")
    trained: Counter[str] = Counter()
    for _, sample in read_lines(folder / "samples.jsonl"):
        trained[sample["prompt"]] += 1
    texts = [
        json.loads(line)["question"]
        for line in Path(str(config.data.prompt_dataset)).read_text().splitlines()
    ]
    missing = 0
    for number, text in enumerate(texts):
        times, left = divmod(trained.pop(text, 0), SAMPLES)
        due = 0 if number % FILTERED == 2 else EPISODES
        if left or times > due or (late != "drop" and times < due):
            faults.append(
                f"{text!r} was trained {times} times, {due} are due, and {left} completions besides"
            )
        missing += due - times
    if trained:
        faults.append(f"prompts that are not in the data were trained: {sorted(trained)}")
    if missing != audit.counts["late"]:
        faults.append(
            f"{missing} were not trained, the ledger has {audit.counts['late']} late ones"
        )
    return audit, faults


def runs_with_kills(
    folder: Path, within: float, straggler_s: float, seeds: Iterator[int]
) -> Iterator[Result]:
    """The run of each seed; FOLDER keeps policy and data."""
    task = Task(folder) if (folder / "policy").exists() else Task.make(folder, prompts=PROMPTS)
    (folder / "reward.py").write_text(REWARD.replace("STRAGGLER_S", str(straggler_s)))
    held_out = [{"question": f"{i} - 1 = ", "answer": ""} for i in (100, 101)]
    (folder / "held_out.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in held_out)
    )
    base = config_of(task, "base", train__max_staleness=1)
    with RaySession(
        policy_ranks=1, engines=1, env=settings.worker_env(base), verbose=False
    ) as session:
        shutil.rmtree(folder / "untrained", ignore_errors=True)
        runs = Runs(task, job.build_parts(base, session, EventLog()), within, straggler_s)
        for seed in seeds:
            # the command was stopped in it
            for left in (folder / f"run{seed}", folder / f"run{seed}_ckpt"):
                shutil.rmtree(left, ignore_errors=True)
            yield runs.run(seed)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of the runs")
    parser.add_argument("--kills", type=int, default=1000, help="as many at least")
    about = (
        "an attempt is killed after so many times the seconds of its beginning and of a step, "
        "at most"
    )
    parser.add_argument("--within", type=float, default=3.0, help=about)
    parser.add_argument(
        "--straggler",
        type=float,
        default=0.3,
        help="seconds that the graders need for some prompts",
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no run begins later")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    given = {
        "prompts": PROMPTS,
        "episodes": EPISODES,
        "batch": BATCH,
        "samples": SAMPLES,
        "within": args.within,
    }
    found: dict[str, Any] = {"settings": given, "environments": [], "runs": []}
    if args.output.exists():
        found = json.loads(args.output.read_text())
        if found["settings"] != given:
            parser.error(f"{args.output} has other settings: {found['settings']}")
    # of each command
    found["environments"].append({"from_seed": len(found["runs"]), **environment("ray", "torch")})
    until, first = time.monotonic() + args.seconds, len(found["runs"])
    seeds = iter(range(first, 10**9))
    for result in runs_with_kills(args.folder, args.within, args.straggler, seeds):
        found["runs"].append(asdict(result))
        kills, held = (
            sum(run["kills"] for run in found["runs"]),
            sum(not run["faults"] for run in found["runs"]),
        )
        found |= {"kills": kills, "held": held, "failed": len(found["runs"]) - held}
        write(args.output, found, kept=True)
        print(f"{result}; {kills} kills, {held} of {len(found['runs'])} runs hold", flush=True)  # noqa: T201
        if kills >= args.kills or time.monotonic() > until:
            break
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
