"""The same method called on every rollout engine, watched while the caller does its own part of a collective."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NoReturn

from openrlhf_ext.rollout.sync.base import (
    EngineFailed,
    WeightStreamAborted,
    WeightSyncTimeout,
    WeightTransferFailed,
)

_CONSEQUENCES = (WeightTransferFailed, WeightStreamAborted)
_GRACE_S = 5.0


class EngineCalls:
    """Remote calls under way, one per engine, with one deadline.

    A collective with a dead peer fails with "connection closed" on every rank, or not at all before its timeout. What
    happened is in the remote call of the engine that it happened to: so that is looked at while the collective runs,
    and an engine that only lost its connection is not blamed.
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
        self._consequences: dict[int, Exception] = {}
        self._results: dict[int, Any] = {}

    @classmethod
    def start(
        cls, engines: Sequence[Any], method: str, arguments: Sequence[tuple], what: str, timeout_s: float
    ) -> EngineCalls:
        """Call `method` with `arguments[i]` on engine i."""
        calls = zip(engines, arguments, strict=True)
        return cls(what, [getattr(engine, method).remote(*args) for engine, args in calls], timeout_s)

    def check(self) -> None:
        """Raise `EngineFailed` if an engine has failed by itself, `WeightSyncTimeout` once the deadline has passed."""
        self._collect(0.0)
        if self._pending and time.monotonic() > self._deadline:
            raise self._late()

    def watch(self) -> None:
        """As `check`, while a transfer is under way.

        Then engines that are well wait too. `WeightTransferFailed` lets the caller break the connection, after which
        `explain` can tell who does not answer even so.
        """
        self._collect(0.0)
        if self._pending and time.monotonic() > self._deadline:
            raise WeightTransferFailed(f"{self._what} took longer than {self._timeout_s:g} s")

    def finish(self) -> list[Any]:
        """Wait until every engine has done its part; their results, in engine order.

        Raises as `check`, or what broke the connection.
        """
        while self._pending and not self._consequences:
            self._collect(min(1.0, max(0.0, self._deadline - time.monotonic())))
            self.check()
        if self._consequences:
            index, error = next(iter(self._consequences.items()))
            self.explain(WeightTransferFailed(f"rollout engine {index} failed while {self._what}:\n{error}"))
        return [result for _, result in sorted(self._results.items())]

    def explain(self, error: WeightTransferFailed) -> NoReturn:
        """Raise what lies behind a broken connection: an engine's own failure, engines that hang, else `error`."""
        if not self.settle():
            raise self._late() from error
        raise error

    def settle(self) -> bool:
        """Give the calls a little time to end; whether all of them did. Raises if an engine fails by itself."""
        end = time.monotonic() + _GRACE_S
        while self._pending and time.monotonic() < end:
            self._collect(max(0.0, end - time.monotonic()))
        return not self._pending

    def _late(self) -> WeightSyncTimeout:
        silent = sorted(self._pending.values())
        return WeightSyncTimeout(
            f"rollout engines {silent} did not answer within {self._timeout_s:g} s while {self._what}: they hang, or "
            "the timeout is too small for this model",
            silent,
        )

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
                if not _is_consequence(error):
                    message = f"rollout engine {index} failed while {self._what}:\n{error}"
                    raise EngineFailed(message, [index]) from error
                self._consequences[index] = error


def _is_consequence(error: Exception) -> bool:
    """Whether an engine only saw the connection break, or the sender give up.

    The text counts as well as the type: from an engine in a process of its own, vLLM passes on nothing else.
    """
    return isinstance(error, _CONSEQUENCES) or any(kind.MARK in str(error) for kind in _CONSEQUENCES)
