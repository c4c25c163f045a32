"""Policy and engines on the same GPUs: who is in their memory when.

At any time one side has the memory and the other sleeps, except for a weight sync, where the policy's parameters and
the engines' weights (not their KV caches) are there together. A side wakes up on demand (a policy rank reloads what an
RPC needs, generation and the sync wake the engines); what is done here is to put the other side to sleep before.
docs/modes.md has the order of one step and the peaks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from openrlhf_ext.rollout.sync.engine_calls import EngineCalls

if TYPE_CHECKING:
    from openrlhf_ext.driver.engines import EngineGuard


@dataclass(frozen=True)
class Sleepers:
    """Which sides give up their memory while the other works: ``ds.enable_sleep`` and ``vllm.enable_sleep``."""

    policy: bool = False
    engines: bool = False


class GpuSharing:
    """Puts one side to sleep before the other needs the memory; without sleepers it does nothing."""

    def __init__(
        self,
        sleepers: Sleepers,
        groups: Sequence[Any],
        guard: EngineGuard,
        timeout_s: float,
    ) -> None:
        """
        Args:
            groups: actor groups that train, with a method ``offload_states``.
            guard: of the rollout engines; one that does not fall asleep or wake up is replaced.
            timeout_s: longest time in which what is trained may leave the GPUs.
        """
        self._sleepers, self._groups, self._guard = sleepers, list(groups), guard
        self._timeout_s = timeout_s

    @contextmanager
    def generation(self) -> Iterator[None]:
        """The engines have the GPUs; afterwards they sleep, whether they were used or not."""
        if self._sleepers.policy:
            refs = [ref for group in self._groups for ref in group.async_run_method("offload_states")]
            ray.get(refs, timeout=self._timeout_s)
        if self._sleepers.engines:
            self._guard.ask("wake_up")
        yield
        self.make_room_for_policy()

    def wake_weights(self) -> None:
        """The engines take back the memory of their weights, not that of their KV caches.

        Raises:
            EnginesAtFault: an engine died or hangs (a weight sync, of which this is part, is repeated without it).
        """
        if self._sleepers.engines:
            engines, timeout_s = self._guard.engines, self._guard.limits.hang_timeout_s
            doing = "waking up for new weights"
            EngineCalls.start(engines, "wake_weights", [()] * len(engines), doing, timeout_s).finish()

    def make_room_for_policy(self) -> None:
        """The engines give up weights and KV caches; the weights come back as they were."""
        if self._sleepers.engines:
            self._guard.ask("sleep")
