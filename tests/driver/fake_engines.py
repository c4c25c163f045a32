"""Actors in the place of rollout engines. They start fast: nothing heavy is imported here."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import ray

from openrlhf_ext.rollout.process import answer_where, own_identity
from openrlhf_ext.rollout.response import (
    EngineDied,
    EngineStartError,
    GroupRequest,
    InvalidWeights,
    Response,
)


class _Process:
    """What the supervisor asks of every engine."""

    def ping(self) -> None:
        """Answers while the process lives."""

    def process_info(self) -> dict[str, Any]:
        """As `RolloutEngine`."""
        return {**own_identity(), "children": [], "logs": []}


@ray.remote(num_cpus=0.1, max_concurrency=8)
class MisbehavingEngine(_Process):
    """Answers with its prompt and its own start; the first engine 0 misbehaves at the prompts that
    say so."""

    def __init__(self, index: int, life: int) -> None:
        self.index, self.life, self.void_before = index, life, False
        answer_where()

    def generate_group(self, request: GroupRequest) -> list[str]:
        prompt, is_first = request.prompt, (self.index, self.life) == (0, 0)
        time.sleep(0.05)
        if is_first and prompt == "die" or prompt == "die always":
            os._exit(1)
        if is_first and prompt == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(3600)  # this thread may run on for a moment
        if is_first and prompt == "lose the engine":
            raise EngineDied("the vLLM engine of this actor died")
        if prompt == "void" and not self.void_before:
            self.void_before = True
            raise InvalidWeights("update to version 3 is not complete")
        if prompt == "cannot grade":
            raise ValueError("reward_func failed")
        if prompt.endswith(".py"):
            exec(compile(open(prompt).read(), prompt, "exec"))
        return [prompt, f"engine {self.index}.{self.life}"]


@ray.remote(num_cpus=0.1, max_concurrency=8)
class SamplingEngine(_Process):
    """Answers with responses of one token, its number; in its first life it dies, or stops, at the
    prompt "trouble"."""

    def __init__(self, number: int, life: int, how: int = signal.SIGKILL) -> None:
        self.number, self.life, self.how = number, life, how

    def generate_group(self, request: GroupRequest) -> list[Response]:
        if self.life == 0 and request.prompt == "trouble":
            os.kill(os.getpid(), self.how)
            time.sleep(3600)  # this thread may run on for a moment
        one = Response(
            np.array([7, self.number], np.int32), None, ((1, 2),), ((0, 1, 2),), 0.5, 0.5, False, {}
        )
        return [one] * request.samples


@ray.remote(num_cpus=0.1, max_concurrency=8)
class RoutingEngine(_Process):
    """Answers with completions of one token, and with the experts of their prompt's one: the
    sample's number."""

    def generate_group(self, request: GroupRequest) -> tuple[list[Response], list[np.ndarray]]:
        tokens_S = np.array([int(request.prompt), 5], np.int32)
        one = Response(
            tokens_S, np.zeros(1, np.float32), ((1, 2),), ((0, 1, 2),), 0.5, 0.5, False, {}
        )
        experts = [np.full((1, 3, 2), 300 + sample, np.uint16) for sample in range(request.samples)]
        return [one] * request.samples, experts


@ray.remote(num_cpus=0.1, max_concurrency=8)
class SleepyEngine(_Process):
    """Notes when it is told to sleep and to wake up; in its first life it dies, or stops, when told
    the one given."""

    def __init__(self, life: int, trouble: str = "", how: int = signal.SIGKILL) -> None:
        self.trouble, self.how, self.told = trouble if life == 0 else "", how, []

    def _note(self, what: str) -> None:
        if what == self.trouble:
            os.kill(os.getpid(), self.how)
            time.sleep(3600)  # this thread may run on for a moment
        self.told.append(what)

    def sleep(self) -> None:
        self._note("sleep")

    def discard_weights(self) -> None:
        self._note("discard_weights")

    def wake_up(self) -> None:
        self._note("wake_up")

    def wake_weights(self) -> None:
        self._note("wake_weights")

    def what_it_was_told(self) -> list[str]:
        return self.told


@ray.remote(num_cpus=0.1)
class NotStarting(_Process):
    """An engine that cannot start, and never answers."""

    def __init__(self) -> None:
        raise EngineStartError("vLLM did not start: no memory is left")


@ray.remote(num_cpus=0.1)
def outcome(error: Exception | None) -> None:
    if error is not None:
        raise error
