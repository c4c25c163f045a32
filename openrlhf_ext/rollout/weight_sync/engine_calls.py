"""The same method called on every rollout engine, watched while the caller does its own part of a collective."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from openrlhf_ext.rollout.weight_sync.base import EngineFailed, WeightSyncTimeout

logger = logging.getLogger(__name__)


class EngineCalls:
    """Remote calls under way, one per engine, with one deadline.

    A collective with a dead peer fails with "connection closed", or not at all before its timeout. The engine's own
    error is in its remote call; so that is looked at while the collective runs, and preferred.
    """

    def __init__(self, what: str, references: Sequence[Any], timeout_s: float) -> None:
        """
        Args:
            what: the phase, for messages: "receiving weights of version 3".
            references: Ray object references, one per engine, in engine order.
            timeout_s: seconds from now until the calls must have returned.
        """
        self._what = what
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._pending = {reference: index for index, reference in enumerate(references)}
        self._results: list[Any] = [None] * len(references)

    @classmethod
    def start(
        cls, engines: Sequence[Any], method: str, arguments: Sequence[tuple], what: str, timeout_s: float
    ) -> EngineCalls:
        """Call `method` with `arguments[i]` on engine i."""
        calls = zip(engines, arguments, strict=True)
        return cls(what, [getattr(engine, method).remote(*args) for engine, args in calls], timeout_s)

    def raise_if_failed(self, grace_s: float = 0.0) -> None:
        """Raise the error of an engine whose call has failed.

        Args:
            grace_s: seconds to wait for such an error, when it is known that one is on its way.
        """
        end = time.monotonic() + grace_s
        self._collect(0.0)
        while self._pending and time.monotonic() < end:
            self._collect(max(0.0, end - time.monotonic()))

    def settle(self, grace_s: float) -> bool:
        """Let the calls end, with errors that are already known to be the caller's own fault.

        Returns:
            Whether all of them ended within `grace_s` each.
        """
        try:
            self.raise_if_failed(grace_s)
        except EngineFailed as error:
            logger.debug("%s", error)
            return self.settle(grace_s)
        return not self._pending

    def check(self) -> None:
        """Raise an engine's error, or `WeightSyncTimeout` once the deadline has passed."""
        self.raise_if_failed()
        if self._pending and time.monotonic() > self._deadline:
            raise WeightSyncTimeout(
                f"rollout engines {sorted(self._pending.values())} have not answered within {self._timeout_s:g} s "
                f"while {self._what}; they hang, or the timeout is too small for this model"
            )

    def results(self) -> list[Any]:
        """Wait for every engine; what they returned, in engine order."""
        while self._pending:
            self._collect(min(1.0, max(0.0, self._deadline - time.monotonic())))
            self.check()
        return self._results

    def _collect(self, timeout_s: float) -> None:
        import ray  # not at the top: vLLM's worker processes import this package too and have no use for Ray

        if not self._pending:
            return
        ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=timeout_s)
        for reference in ready:
            index = self._pending.pop(reference)
            try:
                self._results[index] = ray.get(reference)
            except Exception as error:
                raise EngineFailed(f"rollout engine {index} failed while {self._what}:\n{error}") from error
