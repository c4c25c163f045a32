"""Waits of ranks for one that reads or writes files, which may take longer than a collective may wait.

A collective that outlasts its timeout ends the run (``watchdog``), and a disk may well be slower than that.
Here the ranks ask the store of the process group, a question that is answered at once, until they may go on; how long
that may take is for who called all ranks to say.
"""

from __future__ import annotations

import itertools
import time

import torch.distributed as dist

from openrlhf_ext.megatron.deadlines.watchdog import progress

_PAUSE_S = 0.005
_numbers = itertools.count()


class Counter:
    """A number that all ranks of the default process group see. Each of them has to make as many of these."""

    def __init__(self) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._key = f"openrlhf_ext/counter/{next(_numbers)}"

    def add_one(self) -> None:
        """Adds 1."""
        self._store.add(self._key, 1)

    def wait_for(self, number: int) -> None:
        """Returns when the number has been reached."""
        while self._store.add(self._key, 0) < number:
            progress()
            time.sleep(_PAUSE_S)


class Gate:
    """Rank 0 says when it wants the next tensor, so that no rank waits in a collective while it writes a file."""

    def __init__(self) -> None:
        self._opened, self._count = Counter(), 0

    def next(self) -> None:
        """On rank 0: opens the gate for the next tensor. On the others: returns when it is open."""
        self._count += 1
        if dist.get_rank() == 0:
            self._opened.add_one()
        else:
            self._opened.wait_for(self._count)


def wait_for_all() -> None:
    """Returns when all ranks have come here, like a barrier."""
    arrived = Counter()
    arrived.add_one()
    arrived.wait_for(dist.get_world_size())
