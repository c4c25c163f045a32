"""Which bundles engines take; the GPU half of `launch` as far as a machine without GPUs can
tell."""

from __future__ import annotations

from types import SimpleNamespace

from openrlhf_ext.options.sections import Vllm
from openrlhf_ext.rollout import launch

PLACES = launch.EnginePlaces(SimpleNamespace(bundle_count=4), [3, 1, 0, 2])


def engines(count: int, workers: int) -> Vllm:
    return Vllm(num_engines=count, tensor_parallel_size=workers)


def places(placements: list) -> list[tuple]:
    """(bundle of the actor, bundles of its workers) of each engine."""
    return [
        (options["scheduling_strategy"].placement_group_bundle_index, extra.get("bundle_indices"))
        for options, extra in placements
    ]


def test_an_engine_takes_neighbors_in_the_order_it_is_given():
    placements = launch._gpu_placements(engines(2, 2), PLACES)
    assert places(placements) == [(3, [3, 1]), (0, [0, 2])]
    assert [extra["num_gpus"] for _, extra in placements] == [0.2, 0.2], (
        "as OpenRLHF's colocated engines"
    )
    assert [options["num_gpus"] for options, _ in placements] == [0, 0], "the workers take the GPUs"


def test_an_engine_with_one_worker_takes_its_own_bundle():
    placements = launch._gpu_placements(engines(4, 1), PLACES)
    assert places(placements) == [(3, None), (1, None), (0, None), (2, None)]
    assert [options["num_gpus"] for options, _ in placements] == [0.2] * 4


def test_without_gpus_a_colocated_engine_sits_in_its_first_bundle():
    placements = launch._cpu_placements(engines(2, 2), PLACES)
    assert places(placements) == [(3, None), (0, None)]
    assert all(options["num_cpus"] == 0.2 and options["num_gpus"] == 0 for options, _ in placements)
