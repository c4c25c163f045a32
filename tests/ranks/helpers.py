"""A group of ranks without processes: actors' methods run in the caller, when they are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from openrlhf_ext.driver.placement import RankGroup
from openrlhf_ext.megatron.layout import ParallelLayout


class LocalGroup(RankGroup):
    """A ``RankGroup`` whose ranks are functions: every rank of a replica runs the method on the
    replica's part."""

    def __init__(
        self, replicas: int, ranks_per_replica: int, **methods: Callable[..., Any]
    ) -> None:
        self.layout = ParallelLayout(
            replicas * ranks_per_replica, tensor_parallel_size=ranks_per_replica
        )
        self.methods = methods
        self.calls: list[tuple[str, list]] = []
        # of methods without arguments, one for each replica
        self.answers: dict[str, list[Any]] = {}

    def ask_replicas(self, method: str, parts: Sequence[Any], *shared: Any) -> list[Any]:
        assert len(parts) == self.layout.data_parallel_size, "one part for each replica"
        self.calls.append((method, list(parts)))
        return self._of_first([self.methods[method](part, *shared) for part in parts])

    def ask(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self._of_first(self.answers[method])

    def _of_first(self, answers: list[Any]) -> list[Any]:
        """One for each rank, None of those that do not answer for their replica."""
        firsts = {
            self.layout.ranks(replica=number)[0]: answer for number, answer in enumerate(answers)
        }
        return [firsts.get(rank) for rank in range(self.layout.world_size)]


def get(refs: Any, timeout: float | None = None) -> Any:
    """What stands in for ``ray.get``: the results are there already."""
    return refs
