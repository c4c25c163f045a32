"""Actors in the place of ranks. They start fast: nothing heavy is imported here."""

from __future__ import annotations

import os
import sys
import time

import ray

from openrlhf_ext.rollout.process import own_identity


class Rank:
    """What a group asks of a rank, and where it is."""

    def __init__(self, world_size: int, rank: int, address: str | None, port: int | None) -> None:
        self.seen = (world_size, rank, address, port)

    def get_master_addr_port(self) -> tuple[str, int]:
        return "master", 1234

    def where(self) -> tuple[str, tuple]:
        return ray.get_runtime_context().get_node_id(), self.seen


@ray.remote(num_cpus=0)
class Mortal:
    """A rank on the second node, which the session takes for another machine."""

    def identity(self) -> dict:
        return {**own_identity(), "machine": "another"}

    def die(self) -> None:
        print("CUDA error: an illegal memory access", file=sys.stderr, flush=True)
        os._exit(1)


class Silent:
    """A rank that does not say where to meet."""

    def __init__(self, *_: object) -> None:
        time.sleep(3600)

    def get_master_addr_port(self) -> None:
        """Never answers."""
