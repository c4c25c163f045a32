"""Which bundle of a placement group each rank takes, so that tensor-parallel groups stay within one node.

Ray packs bundles onto few nodes but numbers them in no particular order of nodes: rank i in bundle i may put neighbours
of a tensor-parallel group, which talk in every layer, on two nodes. Here bundles are sorted by node first. What cannot
be sorted into place is refused with the table of who would be where. Pure functions: nothing is asked of Ray.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


class PlacementError(RuntimeError):
    """The bundles that Ray gave cannot hold the ranks as the layout needs them."""


@dataclass(frozen=True)
class RankBlock:
    """Neighbouring ranks and the nodes they are on."""

    first: int
    size: int
    nodes: tuple[str, ...]

    @property
    def is_split(self) -> bool:
        """Whether the ranks are on more than one node."""
        return len(self.nodes) > 1


def place_ranks(nodes: Sequence[str], *, tensor_size: int, block_size: int | None = None) -> list[int]:
    """The bundle of each rank, in rank order; rank order is tp-cp-ep-pp-dp, so groups are blocks of neighbours.

    Nodes that hold whole blocks come first, so that as few blocks as possible are split.

    Args:
        nodes: node of each bundle, by bundle index.
        tensor_size: ranks of a tensor-parallel group, which must be on one node.
        block_size: ranks that should be on one node if that can be, a multiple of ``tensor_size`` (tensor times context
            parallel); None = ``tensor_size``.

    Raises:
        PlacementError: a tensor-parallel group would be on two nodes; with the table of all groups.
    """
    order = _node_order(nodes, tensor_size, block_size or tensor_size)
    if any(block.is_split for block in blocks(order, nodes, tensor_size)):
        raise PlacementError(
            f"a tensor-parallel group of {tensor_size} ranks would be on more than one node, and every layer would "
            f"wait for the network:\n{placement_table(order, nodes, tensor_size)}\nUse nodes whose free GPUs are "
            f"multiples of the tensor-parallel size, or a smaller one"
        )
    return order


def blocks(order: Sequence[int], nodes: Sequence[str], size: int) -> Iterator[RankBlock]:
    """The ranks in blocks of ``size`` neighbours."""
    for first in range(0, len(order), size):
        members = order[first : first + size]
        yield RankBlock(first, len(members), tuple(dict.fromkeys(nodes[bundle] for bundle in members)))


def placement_table(order: Sequence[int], nodes: Sequence[str], size: int) -> str:
    """One line for each block of ``size`` ranks: its ranks, its nodes, and whether it is split."""
    return "\n".join(
        f"  ranks {block.first}-{block.first + block.size - 1}: {', '.join(block.nodes)}"
        f"{'  <- on more than one node' if block.is_split else ''}"
        for block in blocks(order, nodes, size)
    )


def _node_order(nodes: Sequence[str], tensor_size: int, block_size: int) -> list[int]:
    """Bundles grouped by node: first nodes of whole blocks, then of whole tensor-parallel groups, then the others."""
    count = Counter(nodes)
    first_bundle = {node: nodes.index(node) for node in count}

    def key(bundle: int) -> tuple:
        node = nodes[bundle]
        return (count[node] % block_size != 0, count[node] % tensor_size != 0, first_bundle[node], bundle)

    return sorted(range(len(nodes)), key=key)
