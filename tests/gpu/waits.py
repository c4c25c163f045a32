"""The host queues the micro-batches of a step without waiting for the device, whatever the
estimator."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from openrlhf_ext.megatron.policy import MegatronPolicy
from tests.gpu.alone import build, facts, tiny_folder
from tests.gpu.kit import Machine
from tests.megatron.exactness import algorithms, make_batch, rollout
from tests.models import make_tiny_model


class Unwaiting(MegatronPolicy):
    """A policy whose micro-batches fail where the host would wait for the device."""

    strict = False

    def run(self, *args: Any, **named: Any) -> list:
        with _no_waits(self.device, self.strict):
            return super().run(*args, **named)


@contextmanager
def _no_waits(device: torch.device, strict: bool) -> Iterator[None]:
    """On a CPU the same without the mode: there is nothing to wait for."""
    if device.type != "cuda" or not strict:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def micro_batches(machine: Machine) -> dict[str, Any]:
    """Forward and backward of every estimator, and the log-prob pass; the first of each kernel may
    wait, to compile."""
    if machine.on_gpu:
        the_mode_works(machine.device)
    with tiny_folder() as folder:
        make_tiny_model(folder, "qwen3", layers=2)
        policy = build({"model": str(folder), "dtype": "bf16", "micro_batch_size": 4}, Unwaiting)
    batch = make_batch(61)
    generator = torch.Generator().manual_seed(1)
    new_N = -torch.rand(batch.responses.tokens, generator=generator)
    samples = rollout(batch, new_N, torch.rand(batch.responses.tokens, generator=generator))
    seconds = {}
    for name, algorithm in algorithms().items():
        shaped = algorithm.prepare(new_N, algorithm.shape(samples)).lean()
        for strict in (False, True):
            policy.strict = strict
            start = time.perf_counter()
            try:
                policy.accumulate_gradients(batch, shaped, algorithm)
            except RuntimeError as error:
                if "synchronizing" not in str(error):
                    raise
                raise AssertionError(
                    f"the host waits for the device in the micro-batches of {name}"
                ) from error
        seconds[name] = round(time.perf_counter() - start, 4)
    for strict in (False, True):
        policy.strict = strict
        policy.logprobs(batch)
    return {
        **facts(policy),
        "mode": "error" if machine.on_gpu else "none on a CPU",
        "seconds": seconds,
    }


def the_mode_works(device: torch.device) -> None:
    """A read that waits is an error under it: otherwise this check could not fail."""
    one = torch.ones((), device=device)
    try:
        with _no_waits(device, strict=True):
            one.item()
    except RuntimeError:
        return
    raise AssertionError("torch.cuda.set_sync_debug_mode('error') let a read from the device pass")
