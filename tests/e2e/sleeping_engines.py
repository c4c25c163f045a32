"""A colocated training job whose engines fail in their sleep: in step 2 one is killed, in step 3 one stops."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import ray

from openrlhf_ext.cli.train_ppo_ray import main
from openrlhf_ext.controller import job

TROUBLES = {1: (0, signal.SIGKILL), 2: (1, signal.SIGSTOP)}
build_trainer = job.build_trainer


def sabotaged(config: Any, parts: job.Parts) -> Any:
    """The job's trainer, which does the harm right before it trains, when the engines sleep."""
    trainer = build_trainer(config, parts)
    train = trainer.ppo_train

    def harm_and_train(global_steps: int) -> dict:
        if global_steps in TROUBLES:
            index, how = TROUBLES[global_steps]
            os.kill(ray.get(trainer.vllm_engines[index].process_info.remote())["pid"], how)
        return train(global_steps)

    trainer.ppo_train = harm_and_train
    return trainer


if __name__ == "__main__":
    job.build_trainer = sabotaged
    sys.exit(main())
