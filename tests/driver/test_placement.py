from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.driver.placement import PlacementError, blocks, place_ranks


def split(nodes: list[str], order: list[int], size: int) -> list[int]:
    return [block.first for block in blocks(order, nodes, size) if block.is_split]


def test_one_node_keeps_the_order_of_bundles():
    assert place_ranks(["a"] * 4, tensor_size=2) == [0, 1, 2, 3]


def test_interleaved_bundles_are_sorted_by_node():
    nodes = ["a", "b", "a", "b", "b", "a", "b", "a"]
    order = place_ranks(nodes, tensor_size=4)
    assert order == [0, 2, 5, 7, 1, 3, 4, 6]
    assert split(nodes, order, 4) == []


def test_nodes_of_whole_context_parallel_blocks_come_first():
    nodes = ["a"] * 2 + ["b"] * 4 + ["c"] * 2
    order = place_ranks(nodes, tensor_size=2, block_size=4)
    assert [nodes[bundle] for bundle in order] == ["b"] * 4 + ["a"] * 2 + ["c"] * 2
    assert split(nodes, order, 4) == [4], "one block is split, not two"


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.sampled_from([1, 2, 4, 8]),
    st.randoms(use_true_random=False),
)
def test_nodes_of_whole_groups_always_hold_whole_groups(groups_per_node, tensor_size, random):
    nodes = [f"node{i}" for i, groups in enumerate(groups_per_node) for _ in range(groups * tensor_size)]
    random.shuffle(nodes)
    order = place_ranks(nodes, tensor_size=tensor_size)
    assert sorted(order) == list(range(len(nodes)))
    assert split(nodes, order, tensor_size) == []


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=12), st.sampled_from([2, 3, 4]))
def test_a_split_group_is_refused_exactly_when_no_order_could_avoid_it(nodes, tensor_size):
    nodes = nodes[: len(nodes) // tensor_size * tensor_size]
    can_hold = all(nodes.count(node) % tensor_size == 0 for node in set(nodes))
    if can_hold:
        place_ranks(nodes, tensor_size=tensor_size)
        return
    with pytest.raises(PlacementError):
        place_ranks(nodes, tensor_size=tensor_size)


def test_the_refusal_shows_who_would_be_where():
    with pytest.raises(PlacementError) as error:
        place_ranks(["gpu-1"] * 5 + ["gpu-2"] * 3, tensor_size=4)
    assert "ranks 0-3: gpu-1\n" in str(error.value)
    assert "ranks 4-7: gpu-1, gpu-2  <- on more than one node" in str(error.value)
