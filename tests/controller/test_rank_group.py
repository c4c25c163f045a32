"""Ranks on the bundles of a real Ray cluster of two nodes (on one machine), and waits inside Ray that must end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import ray
from ray.cluster_utils import Cluster

from openrlhf_ext.controller.deadline import Deadline, DeadlineExceeded
from openrlhf_ext.controller.interrupt import MainThreadInterrupt
from openrlhf_ext.controller.placement import PlacementError
from openrlhf_ext.controller.rank_group import SHARE, RankGroup, reserve

pytestmark = pytest.mark.slow


class Rank:
    """What a group asks of a rank, and where it is."""

    def __init__(self, world_size: int, rank: int, address: str | None, port: int | None) -> None:
        self.seen = (world_size, rank, address, port)

    def get_master_addr_port(self) -> tuple[str, int]:
        return "master", 1234

    def where(self) -> tuple[str, tuple]:
        return ray.get_runtime_context().get_node_id(), self.seen


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    nodes = Cluster(initialize_head=True, head_node_args={"num_gpus": 2, "num_cpus": 2})
    nodes.add_node(num_gpus=2, num_cpus=2)
    ray.init(address=nodes.address, log_to_driver=False)
    yield
    ray.shutdown()
    nodes.shutdown()


def test_tensor_parallel_neighbours_share_a_node_and_actors_share_bundles(cluster):
    places = reserve(4, 30, "ranks", shared=True)
    assert len(set(places.nodes)) == 2
    actor = ray.remote(Rank)
    groups = [RankGroup(actor, places, world_size=4, model_parallel_size=2, tensor_size=2) for _ in range(2)]
    nodes = []
    for group in groups:
        found = ray.get(group.async_run_method("where"), timeout=60)
        assert [seen for _, seen in found] == [(4, 0, None, None)] + [(4, r, "master", 1234) for r in (1, 2, 3)]
        nodes.append([node for node, _ in found])
        assert nodes[-1][0] == nodes[-1][1] != nodes[-1][2] == nodes[-1][3]
    assert nodes[0] == nodes[1], "rank i of every group is in the same bundle"
    assert ray.available_resources().get("GPU", 0) == 0, "the bundles are reserved"
    assert places.share == SHARE
    with pytest.raises(PlacementError, match="ranks 0-3: .*, .*  <- on more than one node"):
        RankGroup(actor, places, world_size=4, model_parallel_size=4, tensor_size=4)
    with pytest.raises(PlacementError, match="the critic's ranks need 1 bundles .* within 0.5 s.*free are"):
        reserve(1, 0.5, "the critic's ranks")


@ray.remote(num_cpus=0)
def slow() -> None:
    time.sleep(60)


@pytest.mark.parametrize("wait", [ray.get, lambda ref: ray.wait([ref], timeout=60)], ids=["get", "wait"])
def test_deadlines_and_errors_of_other_threads_end_a_wait_inside_ray(cluster, wait: Callable):
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="waited 0.5 s while training"):
        with Deadline().limit(0.5, "training", "train.step_timeout_s"):
            wait(slow.remote())
    with pytest.raises(ZeroDivisionError, match="of another thread"), MainThreadInterrupt() as interrupt:
        threading.Timer(0.5, interrupt.raise_in_main, args=(ZeroDivisionError("of another thread"),)).start()
        wait(slow.remote())
    assert time.monotonic() - started < 20
