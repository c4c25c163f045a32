"""A colocated training job one of whose engines is killed in its sleep, in step 2."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import ray

from openrlhf_ext.cli.train_ppo_ray import main
from openrlhf_ext.driver import job
from openrlhf_ext.driver.loop import Parts

build_loop = job.build_loop


def sabotaged(parts: Parts) -> Any:
    """The job's loop, which does the harm right before it trains, when the engines sleep."""
    loop = build_loop(parts)
    train = loop.train

    def harm_and_train(shards: list) -> dict:
        if loop.step == 1:
            os.kill(
                ray.get(loop.supervisor.engines[0].process_info.remote())["pid"], signal.SIGKILL
            )
        return train(shards)

    loop.train = harm_and_train
    return loop


if __name__ == "__main__":
    job.build_loop = sabotaged
    sys.exit(main())
