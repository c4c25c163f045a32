"""A colocated training job whose engines fail in their sleep: in step 2 one is killed, in step 3 one stops."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import ray

from openrlhf_ext.cli.train_ppo_ray import main
from openrlhf_ext.driver import job

TROUBLES = {1: (0, signal.SIGKILL), 2: (1, signal.SIGSTOP)}
build_loop = job.build_loop


def sabotaged(config: Any, parts: job.Parts) -> Any:
    """The job's loop, which does the harm right before it trains, when the engines sleep."""
    loop = build_loop(config, parts)
    train = loop.train

    def harm_and_train(shards: list) -> dict:
        if loop.step in TROUBLES:
            index, how = TROUBLES[loop.step]
            os.kill(ray.get(loop.supervisor.engines[index].process_info.remote())["pid"], how)
        return train(shards)

    loop.train = harm_and_train
    return loop


if __name__ == "__main__":
    job.build_loop = sabotaged
    sys.exit(main())
