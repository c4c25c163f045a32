"""Assigns ranks to bundles: reserves bundles with a deadline, and sorts them so that
tensor-parallel groups stay on one node.

Ray numbers bundles in no particular order of nodes: rank i in bundle i may put neighbors of a
tensor-parallel group, which communicate in every layer, on two nodes. Raises PlacementError, with a
table of ranks and nodes, if a group would still be split.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from openrlhf_ext.megatron.layout import ParallelLayout

logger = logging.getLogger(__name__)
T = TypeVar("T")

_SHARED_FRACTION = 0.2
"""GPUs and CPUs that an actor takes of a shared bundle, as in OpenRLHF; Ray only counts them and
does not divide memory."""


class PlacementError(RuntimeError):
    """The bundles that Ray reserved do not fit the layout."""


@dataclass(frozen=True)
class RankBlock:
    """Neighboring ranks and the nodes they are on."""

    first: int
    size: int
    nodes: tuple[str, ...]

    @property
    def is_split(self) -> bool:
        """Whether the ranks are on more than one node."""
        return len(self.nodes) > 1


def place_ranks(
    nodes: Sequence[str], *, tensor_size: int, block_size: int | None = None
) -> list[int]:
    """Returns the bundle of each rank, in rank order. Tensor- and context-parallel ranks are
    neighbors in every order of ``megatron/layout.py``, so their groups are blocks.

    Nodes that hold whole blocks come first, so that as few blocks as possible are split. Blocks
    (tensor times context parallel) should be on one node. Raises PlacementError, with the table of
    all ranks, if a tensor-parallel group is not on one node.
    """
    order = _node_order(nodes, tensor_size, block_size or tensor_size)
    if any(block.is_split for block in blocks(order, nodes, tensor_size)):
        raise PlacementError(
            f"a tensor-parallel group of {tensor_size} ranks would be on more than one node, and "
            f"every layer would wait for the network:\n{node_table(order, nodes, tensor_size)}\n"
            "Use nodes whose free GPUs are multiples of the tensor-parallel size, or a smaller "
            "one"
        )
    return order


def blocks(order: Sequence[int], nodes: Sequence[str], size: int) -> Iterator[RankBlock]:
    """Yields the ranks in blocks of ``size`` neighbors."""
    for first in range(0, len(order), size):
        members = order[first : first + size]
        yield RankBlock(
            first, len(members), tuple(dict.fromkeys(nodes[bundle] for bundle in members))
        )


def node_table(order: Sequence[int], nodes: Sequence[str], size: int) -> str:
    """Returns one line for each block of ``size`` ranks: its ranks, its nodes, and whether it is
    split."""
    return "\n".join(
        f"  ranks {block.first}-{block.first + block.size - 1}: {', '.join(block.nodes)}"
        f"{'  <- on more than one node' if block.is_split else ''}"
        for block in blocks(order, nodes, size)
    )


def _node_order(nodes: Sequence[str], tensor_size: int, block_size: int) -> list[int]:
    """Returns the bundles grouped by node: first nodes of whole blocks, then nodes of whole
    tensor-parallel groups, then the others."""
    count = Counter(nodes)
    first_bundle = {node: nodes.index(node) for node in count}

    def key(bundle: int) -> tuple:
        node = nodes[bundle]
        return (
            count[node] % block_size != 0,
            count[node] % tensor_size != 0,
            first_bundle[node],
            bundle,
        )

    return sorted(range(len(nodes)), key=key)


@dataclass(frozen=True)
class Reservation:
    """Bundles of one GPU and one CPU each, held by this job. ``nodes``: each bundle's node as text,
    by bundle index; ``shared``: several actors share a bundle in a colocated run. Rank 0 must start
    by ``until`` on the monotonic clock."""

    group: PlacementGroup
    nodes: tuple[str, ...]
    until: float
    shared: bool = False

    @property
    def actor_gpus(self) -> float:
        """GPUs and CPUs that one actor takes of its bundle."""
        return _SHARED_FRACTION if self.shared else 1.0

    def slot(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        """Returns the scheduling strategy that places an actor in this bundle."""
        return PlacementGroupSchedulingStrategy(
            placement_group=self.group, placement_group_bundle_index=bundle
        )


def reserve(count: int, timeout_s: float, what: str, *, shared: bool = False) -> Reservation:
    """Reserves ``count`` bundles on as few nodes as possible for ``what``, or raises
    PlacementError."""
    until = time.monotonic() + timeout_s
    group = placement_group([{"GPU": 1, "CPU": 1} for _ in range(count)], strategy="PACK")
    try:
        ray.get(group.ready(), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        total = {name: ray.cluster_resources().get(name, 0) for name in ("CPU", "GPU")}
        free = {name: ray.available_resources().get(name, 0) for name in ("CPU", "GPU")}
        raise PlacementError(
            f"{what} need {count} bundles of 1 GPU and 1 CPU, which Ray could not place within "
            f"{round(timeout_s, 1):g} s; the cluster has {total}, free are {free}: wait for "
            "other jobs to end, or use fewer ranks or engines"
        ) from error
    return Reservation(group, _nodes_of(group, count), until, shared)


def _nodes_of(group: PlacementGroup, count: int) -> tuple[str, ...]:
    hosts = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()}
    table = placement_group_table(group)["bundles_to_node_id"]
    return tuple(f"{hosts.get(table[i], '?')} ({table[i][:8]})" for i in range(count))


class RankGroup:
    """One actor per rank of a layout, each in its own bundle. Sizes are as in ``place_ranks``.
    Raises PlacementError as it does, and if rank 0 does not start in time."""

    def __init__(
        self,
        actor_class: Any,
        reservation: Reservation,
        layout: ParallelLayout,
        *,
        tensor_size: int = 1,
        block_size: int | None = None,
    ) -> None:
        self.actor_class, self.reservation, self.layout = actor_class, reservation, layout
        self.bundles = place_ranks(
            reservation.nodes, tensor_size=tensor_size, block_size=block_size
        )
        _log_split_blocks(self.bundles, reservation.nodes, block_size or tensor_size)
        self.actors = [self._start(0, None, None)]
        if layout.world_size > 1:
            address = self._address_of_rank_0()
            self.actors += [self._start(rank, *address) for rank in range(1, layout.world_size)]

    def ask(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls a method of every rank; returns the references of the answers, in rank order."""
        return [getattr(actor, method).remote(*args, **kwargs) for actor in self.actors]

    def ask_replicas(self, method: str, parts: Sequence[Any], *shared: Any) -> list[Any]:
        """Calls a method of every rank with its replica's part and the shared arguments; returns
        the references of the answers, in rank order. Only the first rank of a replica answers
        (``of_replicas``), but all ranks must succeed."""
        if len(parts) != self.layout.data_parallel_size:
            raise ValueError(
                f"{len(parts)} parts for {self.layout.data_parallel_size} data-parallel replicas"
            )
        sent = [ray.put(part) for part in parts]  # once per part, not once per rank
        replicas = [self.layout.place(rank).replica for rank in range(self.layout.world_size)]
        return [
            actor.for_replica.remote(method, sent[r], *shared)
            for actor, r in zip(self.actors, replicas, strict=True)
        ]

    def of_replicas(self, answers: Sequence[T]) -> list[T]:
        """Returns the answer of each replica from the answers of all ranks."""
        return [
            answers[self.layout.ranks(replica=r)[0]] for r in range(self.layout.data_parallel_size)
        ]

    def _start(self, rank: int, address: str | None, port: int | None) -> Any:
        # The names are there before the process has threads: adding one to the environment later
        # moves the array that another thread may be reading (glibc's setenv and getenv). The actor
        # sets the values.
        names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")
        options = self.actor_class.options(
            runtime_env={"env_vars": dict.fromkeys(names, "0")},
            num_cpus=self.reservation.actor_gpus,
            num_gpus=self.reservation.actor_gpus,
            scheduling_strategy=self.reservation.slot(self.bundles[rank]),
        )
        return options.remote(self.layout.world_size, rank, address, port)

    def _address_of_rank_0(self) -> tuple[str, int]:
        left, node = (
            self.reservation.until - time.monotonic(),
            self.reservation.nodes[self.bundles[0]],
        )
        try:
            return ray.get(self.actors[0].get_master_addr_port.remote(), timeout=max(0.0, left))
        except ray.exceptions.GetTimeoutError as error:
            name = self.actor_class.__ray_metadata__.class_name
            raise PlacementError(
                f"rank 0 of {name} on {node} did not start within the {round(left, 1):g} s that "
                "were left; raise --vllm.start_timeout_s if this is expected to take longer"
            ) from error


def _log_split_blocks(order: list[int], nodes: tuple[str, ...], size: int) -> None:
    if any(block.is_split for block in blocks(order, nodes, size)):
        logger.warning(
            "context-parallel ranks are on more than one node, their attention goes over the "
            "network:\n%s",
            node_table(order, nodes, size),
        )
