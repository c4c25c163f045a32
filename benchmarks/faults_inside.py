"""A training run whose actors do, when a file in the run's folder asks for it, what nobody outside can do to them.

`benchmarks/faults.py` starts it in place of the training command. Ray sends classes of the main module by value, so
what they change is in the ranks and engines alone. They have the names of the classes that they stand for: process
titles name them.
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from openrlhf_ext.cli.train_ppo_ray import main
from openrlhf_ext.driver import processes
from openrlhf_ext.ranks import policy
from openrlhf_ext.rollout import engine, launch
from openrlhf_ext.rollout.worker_extension import WeightSyncExtension


def asked(name: str) -> bool:
    """Whether this process is the one to do it: of several that look, one can remove the file."""
    try:
        (Path(os.environ["OPENRLHF_EXT_CHAOS"]) / name).unlink()
    except FileNotFoundError:
        return False
    return True


class PolicyActor(policy.PolicyActor):
    """A rank."""

    def _update(self, *arguments: Any) -> dict[str, float]:
        if asked("inside_exit_update"):
            os._exit(7)
        hooks = []
        if asked("inside_nan_gradient"):
            spoiled = [parameter for parameter in self._parameters if parameter.requires_grad][-1]
            hooks = [spoiled.register_hook(lambda gradient: gradient * math.nan)]
        try:
            return super()._update(*arguments)
        finally:
            for hook in hooks:
                hook.remove()

    def send_weights(self) -> dict[str, float]:
        if asked("inside_exit_send"):
            os._exit(7)
        return super().send_weights()


class RolloutEngine(engine.RolloutEngine):
    """An engine."""

    async def generate_group(self, request: Any) -> Any:
        responses = await super().generate_group(request)
        if asked("inside_nan_logprob"):
            logprobs = responses[0].logprobs_T.copy()
            logprobs[0] = math.nan
            responses[0] = replace(responses[0], logprobs_T=logprobs)
        return responses

    async def receive_weights(self, version: int) -> Any:
        if asked("inside_exit_receive"):
            os._exit(7)
        frame = next((name for name in _FRAMES if asked(name)), None)
        if frame is None:
            return await super().receive_weights(version)
        load = WeightSyncExtension._load

        def spoiled(worker: Any, stream: Any) -> Any:
            return load(worker, (sent for number, sent in enumerate(stream) for sent in _spoiled(frame, number, sent)))

        with patch.object(WeightSyncExtension, "_load", spoiled):
            return await super().receive_weights(version)


_FRAMES = ("inside_frame_lost", "inside_frame_twice", "inside_frame_flipped")


def _spoiled(frame: str, number: int, sent: tuple[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """What an engine gets in the place of the second tensor of an update."""
    if number != 1:
        return [sent]
    if frame == "inside_frame_flipped":
        name, tensor = sent
        flipped = tensor.clone()
        flipped.view(-1).view(torch.uint8)[0] ^= 1
        return [(name, flipped)]
    return [] if frame == "inside_frame_lost" else [sent, sent]


if __name__ == "__main__":
    processes.PolicyActor = PolicyActor
    launch.RolloutEngine = RolloutEngine
    sys.exit(main())
