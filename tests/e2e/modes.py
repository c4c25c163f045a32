"""Trains asynchronously, goes on from a checkpoint, trains with partial rollouts, on one set of Ray actors.

The engine is killed once in the first and once in the last part, with requests in flight.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import sys
import threading
from pathlib import Path

import ray

from openrlhf_ext import compat
from openrlhf_ext.config import load_config
from openrlhf_ext.controller import job, settings
from openrlhf_ext.controller.resume import restore
from openrlhf_ext.controller.session import RaySession
from tests.e2e.jobs import Task
from tests.patience import PATIENCE_S, until

# long responses, so that weights can change in the middle of one
COMMON = {
    "train__async_enable": "true", "data__max_len": 320, "rollout__max_new_tokens": 256, "rollout__micro_batch_size": 8,
}  # fmt: skip
RUNS = {
    "async": {"eval__steps": 2, "eval__n_samples_per_prompt": 1, "ckpt__save_steps": 2},
    "resumed": {"train__num_episodes": 2, "ckpt__load_enable": "true"},
    "partial": {"train__partial_rollout_enable": "true"},
}


def config_of(task: Task, name: str):
    folders = {"eval__dataset": task.folder / "held_out.jsonl", "ckpt__path": task.folder / "checkpoints"}
    return load_config(task.options(name, **folders, **COMMON, **RUNS[name]))


def hold_batches(trainer, numbers: tuple[int, ...]) -> dict[int, threading.Event]:
    """Batches of rollouts (from 0) that do not begin before their event: neither side is too fast for the other."""
    begin, batches = {number: threading.Event() for number in numbers}, itertools.count()
    generate = trainer.rollout_generator.generate_samples

    def generate_when_told(**kwargs):
        if (number := next(batches)) in begin:
            assert begin[number].wait(PATIENCE_S), "nobody told"
        return generate(**kwargs)

    trainer.rollout_generator.generate_samples = generate_when_told
    return begin


def kill_in_training(trainer) -> None:
    """Right before the first update, when the second batch of rollouts is in flight, the engine is killed."""
    begin, train = hold_batches(trainer, (1,)), trainer.ppo_train

    def kill_and_train(global_steps: int) -> dict:
        if global_steps == 0:
            begin[1].set()
            kill_in_flight(trainer)
        return train(global_steps)

    trainer.ppo_train = kill_and_train


def sync_in_flight(trainer) -> None:
    """The first two syncs meet requests in flight; right before the second one the engine is killed."""
    begin, syncs, sync = hold_batches(trainer, (1, 2)), itertools.count(1), trainer.broadcast_to_vllm

    def sync_in_batch() -> None:
        if (number := next(syncs)) in begin:
            begin[number].set()
            await_tokens(trainer)
        if number == 2:
            kill_in_flight(trainer)
        sync()

    trainer.broadcast_to_vllm = sync_in_batch


def kill_in_flight(trainer) -> None:
    """SIGKILL to the engine as soon as it has sampled something of an unfinished request."""
    await_tokens(trainer)
    os.kill(ray.get(trainer.vllm_engines[0].process_info.remote())["pid"], signal.SIGKILL)


def await_tokens(trainer) -> None:
    """Returns when a request has begun and not ended."""
    until(lambda: tokens_in_flight(trainer) > 0, "tokens of an unfinished request")


def tokens_in_flight(trainer) -> int:
    """Of requests that have begun and not ended."""
    counts = ray.get([engine.sampled_tokens.remote() for engine in trainer.vllm_engines])
    return sum(sum(tokens.values()) for tokens in counts)


TROUBLES = {"async": kill_in_training, "partial": sync_in_flight}


def main(folder: Path) -> None:
    task = Task(folder)
    base = config_of(task, "async")
    with RaySession(policy_ranks=2, engines=1, env=settings.worker_env(base), verbose=False) as session:
        parts = job.build_parts(base, session)
        for name in RUNS:
            config = config_of(task, name)
            resumed = restore(config, job.checkpointed_groups(parts.policy, parts.companions))
            strategy = compat.DriverStrategy(config.upstream_args())
            trainer = job.build_trainer(config, dataclasses.replace(parts, resumed=resumed, strategy=strategy))
            if name in TROUBLES:
                TROUBLES[name](trainer)
            trainer.fit()
            trainer.recorder.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
