"""What many calls take goes to a process once."""

from __future__ import annotations

import asyncio

from openrlhf_ext.rollout.shared import Shared, SharedValues


class Reference:
    """An object reference that counts how often it is fetched."""

    def __init__(self) -> None:
        self.fetched = 0

    def __await__(self):
        self.fetched += 1
        yield from asyncio.sleep(0).__await__()
        return ["the tokenizer"]


def test_calls_that_arrive_together_fetch_the_value_once_and_all_get_it() -> None:
    reference, other, values = Reference(), Reference(), SharedValues()

    async def calls() -> list:
        await values.resolve(Shared(other))
        together = await asyncio.gather(*(values.resolve(Shared(reference)) for _ in range(5)))
        return [*together, await values.resolve(Shared(reference)), await values.resolve(None)]

    *resolved, plain = asyncio.run(calls())
    assert reference.fetched == other.fetched == 1
    assert len(resolved) == 6 and all(value is resolved[0] for value in resolved) and plain is None
