"""A training run whose actors do, when a file in the run's folder asks for it, what nobody outside
can do to them.

`benchmarks/faults.py` starts it in place of the training command. Ray sends classes of the main
module by value, so what they change is in the ranks and engines alone. They have the names of the
classes that they stand for: process titles name them.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
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
        factor = next((_FACTORS[name] for name in _FACTORS if asked(name)), None)
        hooks = []
        if factor is not None:
            spoiled = [parameter for parameter in self._parameters if parameter.requires_grad][-1]
            hooks = [spoiled.register_hook(lambda gradient: gradient * factor)]
        try:
            return super()._update(*arguments)
        finally:
            for hook in hooks:
                hook.remove()

    def send_weights(self) -> dict[str, float]:
        if asked("inside_exit_send"):
            os._exit(7)
        return super().send_weights()

    def save_state(self, *arguments: Any, **options: Any) -> Any:
        if not asked("inside_disk_slow"):
            return super().save_state(*arguments, **options)
        with patch.object(os, "fsync", _slow(os.fsync)):
            return super().save_state(*arguments, **options)


_FACTORS = {"inside_nan_gradient": math.nan, "inside_spike_gradient": 1e6}
_SLOW_S, _FOR_EVER_S = 3.0, 86400.0


def _slow(function: Any) -> Any:
    def slow(*arguments: Any) -> Any:
        time.sleep(_SLOW_S)
        return function(*arguments)

    return slow


class RolloutEngine(engine.RolloutEngine):
    """An engine."""

    async def generate_group(self, request: Any) -> Any:
        for name, lasts_s in {"inside_block": _FOR_EVER_S, "inside_block_gap": _SLOW_S}.items():
            if asked(name):
                time.sleep(lasts_s)  # as an agent's code that does not give the event loop back
        responses = await super().generate_group(request)
        if asked("inside_nan_logprob"):
            logprobs = responses[0].logprobs_T.copy()
            logprobs[0] = math.nan
            responses[0] = replace(responses[0], logprobs_T=logprobs)
        return responses

    async def receive_weights(self, version: int) -> Any:
        if asked("inside_exit_receive"):
            os._exit(7)
        frame = next((name for name in _FRAMES if asked(name)), "")
        load = WeightSyncExtension._load

        def spoiled(worker: Any, stream: Any) -> Any:
            return load(worker, _spoiled(frame, worker, stream))

        with patch.object(WeightSyncExtension, "_load", spoiled):
            return await super().receive_weights(version)


_FRAMES = tuple(f"inside_frame_{how}" for how in ("lost", "twice", "flipped", "late", "old"))


def _spoiled(
    frame: str, worker: Any, stream: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """What an engine gets: the second tensor of an update is not there, comes twice or late, or is
    another one."""
    for number, (name, tensor) in enumerate(stream):
        if number != 1:
            yield name, tensor
            continue
        before, worker.second = getattr(worker, "second", tensor), tensor.clone()
        sent = {"inside_frame_flipped": _flipped(tensor), "inside_frame_old": before}.get(
            frame, tensor
        )
        if frame == "inside_frame_late":
            time.sleep(_SLOW_S)
        yield from [(name, sent)] * {"inside_frame_lost": 0, "inside_frame_twice": 2}.get(frame, 1)


def _flipped(tensor: torch.Tensor) -> torch.Tensor:
    flipped = tensor.clone()
    flipped.view(-1).view(torch.uint8)[0] ^= 1
    return flipped


if __name__ == "__main__":
    processes.PolicyActor = PolicyActor
    launch.RolloutEngine = RolloutEngine
    sys.exit(main())
