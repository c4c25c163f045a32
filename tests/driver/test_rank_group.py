"""Ranks on the bundles of a real Ray cluster of two nodes (on one machine)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from openrlhf_ext.driver import cluster as cluster_module
from openrlhf_ext.driver.cluster import RaySession, start_with_retries
from openrlhf_ext.driver.placement import PlacementError, RankGroup, reserve
from tests.driver.fake_ranks import Mortal, Rank, Silent
from tests.patience import PATIENCE_S, until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    nodes = Cluster()
    for _ in range(2):
        start_with_retries(lambda: nodes.add_node(num_gpus=2, num_cpus=2))
    ray.init(address=nodes.address, log_to_driver=False)
    yield
    ray.shutdown()
    nodes.shutdown()


def test_tensor_parallel_neighbors_share_a_node_and_actors_share_bundles(cluster):
    places = reserve(4, PATIENCE_S, "ranks", shared=True)
    assert len(set(places.nodes)) == 2
    actor = ray.remote(Rank)
    groups = [RankGroup(actor, places, world_size=4, model_parallel_size=2, tensor_size=2) for _ in range(2)]
    nodes = []
    for group in groups:
        found = ray.get(group.async_run_method("where"), timeout=PATIENCE_S)
        assert [seen for _, seen in found] == [(4, 0, None, None)] + [(4, r, "master", 1234) for r in (1, 2, 3)]
        nodes.append([node for node, _ in found])
        assert nodes[-1][0] == nodes[-1][1] != nodes[-1][2] == nodes[-1][3]
    assert nodes[0] == nodes[1], "rank i of every group is in the same bundle"
    until(lambda: ray.available_resources().get("GPU", 0) == 0, "the bundles are reserved, and Ray's tables say so")
    assert places.actor_gpus == 0.2
    with pytest.raises(PlacementError, match="rank 0 of Silent on .* did not start within 0.5 s.*start_timeout_s"):
        RankGroup(ray.remote(Silent), replace(places, timeout_s=0.5), world_size=2, model_parallel_size=1)
    with pytest.raises(PlacementError, match="ranks 0-3: .*, .*  <- on more than one node"):
        RankGroup(actor, places, world_size=4, model_parallel_size=4, tensor_size=4)
    with pytest.raises(PlacementError, match="the critic's ranks need 1 bundles .* within 0.5 s.*free are"):
        reserve(1, 0.5, "the critic's ranks")


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
    # whoever reports it: its own call, or another rank that waited for it (and may be faster than Ray's tables)
    until(lambda: "dead processes" in session.describe_failure(ValueError("a peer is gone")), "Ray knows of the death")
    for error in (died.value, ValueError("a peer is gone")):
        text = session.describe_failure(error)
        assert f"\ndead processes: {name}\n" in text, text
        assert "CUDA error: an illegal memory access" in text.partition(f"--- last output of {name}\n")[2], text
