"""Trains asynchronously, goes on from a checkpoint, then streams with partial rollouts, on one set
of Ray actors.

The engine is killed once in the first and once in the last part, with requests in flight.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray

from openrlhf_ext.config import load_config
from openrlhf_ext.driver import job, settings
from openrlhf_ext.driver.cluster import RaySession
from openrlhf_ext.driver.loop import TrainingLoop
from openrlhf_ext.reporting import EventLog
from openrlhf_ext.rollout import launch
from openrlhf_ext.rollout.engine import RolloutEngine
from openrlhf_ext.run.checkpoints import restore
from tests.e2e.jobs import Task
from tests.patience import until

# Long responses, of one batch at a time: others are in flight whenever a batch is complete. With
# the usual rate of 1e-3 the policy may learn to end at once, and no request is in flight for long
# enough.
COMMON = {
    "actor__adam__lr": 1e-4,
    # as OpenRLHF reads it in an asynchronous run: the engines are elsewhere
    "train__colocate_all": "true",
    "data__max_len": 320,
    "rollout__max_new_tokens": 256,
    "rollout__micro_batch_size": 8,
    "vllm__max_requests": 32,
    "vllm__speculative__method": "ngram",
}
RUNS = {
    "async": {
        "train__async_enable": "true",
        "eval__steps": 2,
        "eval__n_samples_per_prompt": 1,
        "ckpt__save_steps": 2,
    },
    "resumed": {
        "train__async_enable": "true",
        "train__num_episodes": 2,
        "ckpt__load_enable": "true",
    },
    "streaming": {"train__max_staleness": 2},
}


def config_of(task: Task, name: str):
    folders = {
        "eval__dataset": task.folder / "held_out.jsonl",
        "ckpt__path": task.folder / "checkpoints",
    }
    return load_config(task.options(name, **folders, **COMMON, **RUNS[name]))


def kill_in_training(loop: TrainingLoop) -> None:
    """Right before the first update, when groups of the second batch are in flight, the engine is
    killed."""
    train = loop.train

    def kill_and_train(shards: list) -> dict:
        if loop.step == 0:
            kill_in_flight(loop)
        return train(shards)

    loop.train = kill_and_train


class Halted(RolloutEngine):
    """An engine that a test may have halted: it goes on right before it takes weights, so what was
    in flight still is.

    Defined in the main module, so Ray sends it to the engine's process by value.
    """

    async def halt(self) -> bool:
        """Halts when it has sampled something of an unfinished request; False if that does not come
        soon. Asked from outside, on a busy machine, all requests may end between two questions."""
        for _ in range(100):
            await self.pause_generation()
            if sum((await self.sampled_tokens()).values()):
                return True
            await self.resume_generation()
            await asyncio.sleep(0.005)
        return False

    async def receive_weights(self, version: int) -> Any:
        await self.resume_generation()
        return await super().receive_weights(version)


def sync_in_flight(loop: TrainingLoop) -> None:
    """The first two syncs meet requests in flight; right before the second one the engine is
    killed."""
    take, publish = loop.take, loop.publish

    def take_and_halt() -> list:
        groups = take()
        if loop.step < 2:
            until(lambda: halted_in_flight(loop), "an engine halted within a request")
        return groups

    def publish_in_flight() -> dict:
        if loop.step == 2:
            kill_in_flight(loop)
        return publish()

    loop.take, loop.publish = take_and_halt, publish_in_flight


def halted_in_flight(loop: TrainingLoop) -> bool:
    """Has the engine halt within a request; what has ended makes room for others."""
    loop.rollouts.pump()
    (engine,) = loop.supervisor.engines
    return ray.get(engine.halt.remote())


def kill_in_flight(loop: TrainingLoop) -> None:
    """SIGKILL to the engine as soon as it has sampled something of an unfinished request."""
    await_tokens(loop)
    os.kill(ray.get(loop.supervisor.engines[0].process_info.remote())["pid"], signal.SIGKILL)


def await_tokens(loop: TrainingLoop) -> None:
    """Returns when a request has begun and not ended."""
    until(lambda: tokens_in_flight(loop) > 0, "tokens of an unfinished request")


def tokens_in_flight(loop: TrainingLoop) -> int:
    """Of requests that have begun and not ended."""
    counts = ray.get([engine.sampled_tokens.remote() for engine in loop.supervisor.engines])
    return sum(sum(tokens.values()) for tokens in counts)


TROUBLES = {"async": kill_in_training, "streaming": sync_in_flight}


def main(folder: Path) -> None:
    task = Task(folder)
    base = config_of(task, "async")
    launch.RolloutEngine = Halted
    with RaySession(
        policy_ranks=2, engines=1, env=settings.worker_env(base), verbose=False
    ) as session:
        parts = job.build_parts(base, session, EventLog())
        for name in RUNS:
            config = config_of(task, name)
            resumed = restore(
                config, job.callers(parts.trained), {}, config.train.step_timeout_s, EventLog()
            )
            loop = job.build_loop(dataclasses.replace(parts, config=config, resumed=resumed))
            if name in TROUBLES:
                TROUBLES[name](loop)
            loop.run()
            loop.recorder.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
