"""Which bundle each rank takes, and ranks on the bundles of a real Ray cluster of two nodes (on one
machine)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import ray
import torch
from hypothesis import given
from hypothesis import strategies as st
from ray.cluster_utils import Cluster
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from openrlhf_ext.cli import doctor_cluster
from openrlhf_ext.cli.doctor_cluster import ClusterReport, examine_cluster
from openrlhf_ext.driver import cluster as cluster_module
from openrlhf_ext.driver.cluster import RaySession, asks_for_token, start_with_retries
from openrlhf_ext.driver.placement import PlacementError, RankGroup, blocks, place_ranks, reserve
from openrlhf_ext.megatron.layout import ParallelLayout
from tests.driver.fake_ranks import Mortal, Rank, Silent
from tests.patience import PATIENCE_S, until


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
    nodes = [
        f"node{i}" for i, groups in enumerate(groups_per_node) for _ in range(groups * tensor_size)
    ]
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


# ---- with Ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # these GPUs are made up; Ray takes them for hidden
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        nodes = Cluster()
        for _ in range(2):
            start_with_retries(lambda: nodes.add_node(num_gpus=2, num_cpus=2))
    ray.init(address=nodes.address, log_to_driver=False)
    yield
    ray.shutdown()
    nodes.shutdown()


@pytest.mark.slow
def test_tensor_parallel_neighbors_share_a_node_and_actors_share_bundles(cluster):
    places = reserve(4, PATIENCE_S, "ranks", shared=True)
    assert len(set(places.nodes)) == 2
    actor = ray.remote(Rank)
    groups = [RankGroup(actor, places, ParallelLayout(4, 2), tensor_size=2) for _ in range(2)]
    nodes = []
    for group in groups:
        found = ray.get(group.ask("where"), timeout=PATIENCE_S)
        assert [seen for _, seen in found] == [(4, 0, None, None)] + [
            (4, r, "master", 1234) for r in (1, 2, 3)
        ]
        nodes.append([node for node, _ in found])
        assert nodes[-1][0] == nodes[-1][1] != nodes[-1][2] == nodes[-1][3]
    assert nodes[0] == nodes[1], "rank i of every group is in the same bundle"
    until(
        lambda: ray.available_resources().get("GPU", 0) == 0,
        "the bundles are reserved, and Ray's tables say so",
    )
    assert places.actor_gpus == 0.2
    with pytest.raises(
        PlacementError,
        match="rank 0 of Silent on .* did not start within the 0.5 s that were "
        "left.*start_timeout_s",
    ):
        RankGroup(
            ray.remote(Silent), replace(places, until=time.monotonic() + 0.5), ParallelLayout(2)
        )
    with pytest.raises(PlacementError, match="ranks 0-3: .*, .*  <- on more than one node"):
        RankGroup(actor, places, ParallelLayout(4, 4), tensor_size=4)
    with pytest.raises(
        PlacementError, match="the critic's ranks need 1 bundles .* within 0.5 s.*free are"
    ):
        reserve(1, 0.5, "the critic's ranks")


@pytest.mark.slow
def test_the_doctor_looks_at_every_node(cluster):
    address = ray.get_runtime_context().gcs_address
    report = examine_cluster(address, ["torch"], None, [], PATIENCE_S)
    assert len(report.nodes) == 2 and not report.has_errors, report.findings
    assert {seen["versions"]["torch"] for seen in report.nodes.values()} == {torch.__version__}
    told = [found.severity for found in report.findings if "Ray requires no token" in found.text]
    # a Ray that was in this process before has switched tokens on for those that come later
    assert told == ([] if asks_for_token(address, PATIENCE_S) else ["warning"])


def test_the_doctor_tells_of_a_cluster_that_everybody_may_talk_to(monkeypatch):
    report = ClusterReport()
    monkeypatch.setattr(doctor_cluster, "asks_for_token", lambda *_: False)
    doctor_cluster.check_access("127.0.0.1:1", report)
    assert [found.severity for found in report.findings] == ["warning"]


@pytest.mark.slow
def test_a_rank_that_dies_on_another_machine_is_named_with_its_last_words(cluster, monkeypatch):
    monkeypatch.setattr(cluster_module, "_READ_S", PATIENCE_S)
    here = ray.get_runtime_context().get_node_id()
    there = next(node["NodeID"] for node in ray.nodes() if node["NodeID"] != here)
    place = NodeAffinitySchedulingStrategy(there, soft=False)
    actors = [Mortal.options(scheduling_strategy=place).remote() for _ in range(2)]
    processes = ray.get([actor.identity.remote() for actor in actors], timeout=PATIENCE_S)
    assert {process["node"] for process in processes} == {there}
    session = RaySession(policy_ranks=2, engines=0, env={}, verbose=False)
    for rank, process in enumerate(processes):
        session.remember(f"policy rank {rank}", process)
    with pytest.raises(RayActorError) as died:
        ray.get(actors[1].die.remote(), timeout=PATIENCE_S)
    name = f"policy rank 1 (pid {processes[1]['pid']} on {processes[1]['host']})"
    # whoever reports it: its own call, or another rank that waited for it (and may be faster than
    # Ray's tables)
    until(
        lambda: "dead processes" in session.describe_failure(ValueError("a peer is gone")),
        "Ray knows of the death",
    )
    for error in (died.value, ValueError("a peer is gone")):
        text = session.describe_failure(error)
        assert f"\ndead processes: {name}\n" in text, text
        assert (
            "CUDA error: an illegal memory access"
            in text.partition(f"--- last output of {name}\n")[2]
        ), text
