"""A group of ranks without processes: actors' methods run in the caller, when they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class LocalGroup:
    """Has the shape of OpenRLHF's ``RayActorGroup``: every rank of a replica runs the method on the replica's share."""

    def __init__(self, replicas: int, ranks_per_replica: int, **methods: Callable[..., Any]) -> None:
        self.replicas, self.duplicate_actors, self.methods = replicas, ranks_per_replica, methods
        self.calls: list[tuple[str, list]] = []
        self.answers: dict[str, list[Any]] = {}  # of methods without arguments, one for each replica

    def async_run_method_batch(self, method: str, **batched: list) -> list[list[Any]]:
        ((name, values),) = batched.items()
        assert len(values) == self.replicas, "one share for each replica"
        self.calls.append((method, values))
        return [[self.methods[method](**{name: value})] for value in values for _ in range(self.duplicate_actors)]

    def async_run_method(self, method: str) -> list[Any]:
        others = [None] * (self.duplicate_actors - 1)
        return [each for answer in self.answers[method] for each in (answer, *others)]


def get(refs: Any, timeout: float | None = None) -> Any:
    """What stands in for ``ray.get``: the results are there already."""
    return refs
