"""Policy and engines on the same GPUs: who is in their memory when.

At any time one side has the memory and the other sleeps, except for a weight sync, where the policy's parameters and
the engines' weights (not their KV caches) are there together. A side wakes up on demand (a policy rank reloads what an
RPC needs, the samples generator and the sync wake the engines); what is done here is to put the other side to sleep
before. docs/modes.md has the order of one step and the peaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray


@dataclass(frozen=True)
class Sleepers:
    """Which sides give up their memory while the other works: ``ds.enable_sleep`` and ``vllm.enable_sleep``."""

    policy: bool = False
    engines: bool = False


class GpuSharing:
    """Puts one side to sleep before the other needs the memory; without sleepers it does nothing."""

    def __init__(self, sleepers: Sleepers, groups: Sequence[Any], engines: Sequence[Any], timeout_s: float) -> None:
        """
        Args:
            groups: actor groups that train, with a method ``offload_states``.
            engines: handles of the rollout engines.
            timeout_s: longest time falling asleep may take.
        """
        self._sleepers, self._groups, self._timeout_s = sleepers, list(groups), timeout_s
        self.engines = engines

    def add(self, group: Any) -> None:
        """Another group that trains on these GPUs."""
        self._groups.append(group)

    def make_room_for_engines(self) -> None:
        """What is trained leaves the GPUs."""
        if self._sleepers.policy:
            refs = [ref for group in self._groups for ref in group.async_run_method("offload_states")]
            ray.get(refs, timeout=self._timeout_s)

    def wake_weights(self) -> None:
        """The engines take back the memory of their weights, not that of their KV caches."""
        if self._sleepers.engines:
            ray.get([engine.wake_up.remote(tags=["weights"]) for engine in self.engines], timeout=self._timeout_s)

    def make_room_for_policy(self) -> None:
        """The engines give up weights and KV caches; the weights come back as they were."""
        if self._sleepers.engines:
            ray.get([engine.sleep.remote() for engine in self.engines], timeout=self._timeout_s)
