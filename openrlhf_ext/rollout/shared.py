"""A large constant that many calls to engines take, such as the tokenizer: stored once, fetched once by each engine.

A fast tokenizer of 150,000 tokens takes a third of a second to pickle and two thirds to unpickle. OpenRLHF sends it
with every prompt: with a thousand of them, the driver alone would be busy for minutes before the last one is sampled.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import ray


@dataclass(frozen=True)
class Shared:
    """Stands for a value in the arguments of calls; `SharedValues` of the process that is called has the value."""

    reference: ray.ObjectRef

    @classmethod
    def of(cls, value: Any) -> Shared:
        """Put ``value`` into Ray's object store, where it stays as long as the result lives."""
        return cls(ray.put(value))


class SharedValues:
    """The values that a process has fetched; they stay."""

    def __init__(self) -> None:
        self._values: dict[ray.ObjectRef, Any] = {}
        self._fetching = asyncio.Lock()

    async def resolve(self, argument: Any) -> Any:
        """What ``argument`` stands for; an argument that is not `Shared` stands for itself."""
        if not isinstance(argument, Shared):
            return argument
        async with self._fetching:  # of calls that arrive together, one fetches
            if argument.reference not in self._values:
                self._values[argument.reference] = await argument.reference
            return self._values[argument.reference]
