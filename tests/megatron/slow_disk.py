"""A disk slower than any timeout: rank 0 goes on only when no other rank waits for it in a
collective."""

from __future__ import annotations

import torch.distributed as dist

from openrlhf_ext.groups import watchdog
from tests.patience import PATIENCE_S, until


def monitors() -> list[watchdog.Address]:
    """Starts the monitor of every rank and returns where they answer. A collective."""
    addresses: list = [None] * dist.get_world_size()
    dist.all_gather_object(addresses, watchdog.start_watchdog(PATIENCE_S))
    return addresses


def let_others_wait(addresses: list[watchdog.Address]) -> None:
    """On rank 0: returns when the others wait for it without a timeout, or have nothing more to
    do."""

    def patiently() -> bool:
        states = watchdog.ask_ranks(addresses[1:])
        return all(
            (s.phase is None or "wait_for (" in s.place) and not s.in_collective for s in states
        )

    until(patiently, "the other ranks do not wait in a collective")
