"""Trains asynchronously, goes on from a checkpoint, trains with partial rollouts, on one set of Ray actors."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import threading
import time
from pathlib import Path

import ray

from openrlhf_ext import compat
from openrlhf_ext.config import load_config
from openrlhf_ext.controller import job, settings
from openrlhf_ext.controller.resume import restore
from openrlhf_ext.controller.session import RaySession
from tests.e2e.jobs import Task

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


def meet_in_the_middle(trainer) -> None:
    """Makes the first sync find requests in flight, whichever side is faster: each waits for the other."""
    about_to_sync, batches = threading.Event(), itertools.count()
    generate, sync = trainer.rollout_generator.generate_samples, trainer.broadcast_to_vllm

    def generate_second_at_sync(**kwargs):
        if next(batches) == 1:
            assert about_to_sync.wait(300), "no sync came"
        return generate(**kwargs)

    def sync_in_second_batch() -> None:
        if not about_to_sync.is_set():
            about_to_sync.set()
            deadline = time.monotonic() + 300
            while tokens_in_flight(trainer) == 0:
                assert time.monotonic() < deadline, "no requests came"
        sync()

    trainer.rollout_generator.generate_samples = generate_second_at_sync
    trainer.broadcast_to_vllm = sync_in_second_batch


def tokens_in_flight(trainer) -> int:
    """Of requests that have begun and not ended."""
    counts = ray.get([engine.sampled_tokens.remote() for engine in trainer.vllm_engines])
    return sum(sum(tokens.values()) for tokens in counts)


def main(folder: Path) -> None:
    task = Task(folder)
    base = config_of(task, "async")
    with RaySession(policy_ranks=2, engines=1, env=settings.worker_env(base), verbose=False) as session:
        parts = job.build_parts(base, session)
        for name in RUNS:
            config = config_of(task, name)
            resumed = restore(config, job.checkpointed_groups(parts.policy, parts.companions))
            strategy = compat.get_strategy(config.upstream_args())
            trainer = job.build_trainer(config, dataclasses.replace(parts, resumed=resumed, strategy=strategy))
            if config.train.partial_rollout_enable:
                meet_in_the_middle(trainer)
            trainer.fit()
            trainer.recorder.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
