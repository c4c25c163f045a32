"""Who has the memory of GPUs that policy and engines share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from openrlhf_ext.config import RunConfig
from openrlhf_ext.driver.engines import EngineSupervisor
from openrlhf_ext.driver.waits import await_ranks
from openrlhf_ext.rollout.sync.engine_calls import EngineCalls

if TYPE_CHECKING:
    from openrlhf_ext.driver.placement import RankGroup

logger = logging.getLogger(__name__)


class GpuSharing:
    """Policy and engines on the same GPUs: puts one side to sleep before the other needs the memory.

    At any time one side has the memory and the other sleeps, except for a weight sync, where the policy's parameters
    and the engines' weights (not their KV caches) are there together. A side wakes up on demand: a policy rank reloads
    what a call needs, generation and the sync wake the engines. docs/modes.md has the order of one step and the peaks.
    No rank is at work while an engine falls asleep: vLLM asserts that the device's free memory does not shrink
    meanwhile, whoever takes it, and the engine would count as failed (vllm 0.29.0 v1/worker/gpu_worker.py:265).
    A side whose ``ds.enable_sleep`` or ``vllm.enable_sleep`` is off is left alone.
    """

    def __init__(self, config: RunConfig, groups: Mapping[str, RankGroup], supervisor: EngineSupervisor) -> None:
        """
        Args:
            groups: ranks that train, with a method ``offload_states``, by name.
            supervisor: of the rollout engines; one that does not fall asleep or wake up is replaced.
        """
        self._groups, self._supervisor, self._timeout_s = groups, supervisor, config.train.step_timeout_s
        self._policy_sleeps, self._engines_sleep = config.ds.enable_sleep, config.vllm.enable_sleep

    @contextmanager
    def generation(self, trains: Callable[[], bool]) -> Iterator[None]:
        """The engines have the GPUs; afterwards they sleep, whether they were used or not.

        Args:
            trains: asked at the end: whether the policy is trained next, so that new weights come before anything is
                sampled again. Then the engines do not keep the old ones in host memory.
        """
        if self._policy_sleeps:
            method = "offload_states"
            calls = {name: group.async_run_method(method) for name, group in self._groups.items()}
            for name, refs in calls.items():
                await_ranks(refs, name, method, self._timeout_s)
        if self._engines_sleep:
            self._supervisor.ask("wake_up")
        yield
        if self._engines_sleep:
            self._supervisor.ask("discard_weights" if trains() else "sleep")

    def wake_weights(self) -> None:
        """The engines take back the memory of their weights, not that of their KV caches.

        Raises:
            EnginesAtFault: an engine died or hangs (a weight sync, of which this is part, is repeated without it).
        """
        if self._engines_sleep:
            engines, timeout_s = self._supervisor.engines, self._supervisor.config.vllm.hang_timeout_s
            doing = "waking up for new weights"
            EngineCalls.start(engines, "wake_weights", [()] * len(engines), doing, timeout_s).finish()

    def make_room_for_policy(self) -> None:
        """The engines give up weights and KV caches; the weights come back as they were."""
        if self._engines_sleep:
            self._supervisor.ask("sleep")
