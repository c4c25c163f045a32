"""Waits of ranks for one that is busy with something else: files, engines.

A collective that outlasts its timeout ends the run (``watchdog``), and a disk may well be slower than that. And a rank
that waits in one on a GPU keeps that GPU busy, which an engine may share.
Here the ranks ask the store of the process group, a question that is answered at once, until they may go on; how long
that may take is for who called all ranks to say.
"""

from __future__ import annotations

import itertools
import time

import torch.distributed as dist

from openrlhf_ext.megatron.deadlines.watchdog import progress

_PAUSES_S = (0.0002, 0.005)
"""The first between two questions, doubled up to the last: who waits long need not know at once."""
_numbers = itertools.count()


class Counter:
    """A number that all ranks of the default process group see. Each of them has to make as many of these."""

    def __init__(self) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._key = f"openrlhf_ext/counter/{next(_numbers)}"

    def add_one(self) -> None:
        self._store.add(self._key, 1)

    def wait_for(self, number: int) -> None:
        pause_s, longest_s = _PAUSES_S
        while self._store.add(self._key, 0) < number:
            progress()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)


class Gate:
    """Rank 0 says when it goes on, so that no rank waits for it in a collective."""

    def __init__(self) -> None:
        self._opened, self._count = Counter(), 0

    def next(self) -> None:
        """On rank 0: opens the gate once more. On the others: returns when it is open."""
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
