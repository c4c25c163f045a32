"""Groups of which a guide samples a part: with simulated engines, and with actors that die and
hang."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import ray

from openrlhf_ext.driver.engines import EngineSupervisor
from openrlhf_ext.driver.rollouts import (
    Group,
    GroupRequests,
    GuidedRequests,
    PromptStream,
    Rollouts,
)
from openrlhf_ext.driver.waits import Deadline
from openrlhf_ext.rollout.launch import EngineFleet
from openrlhf_ext.rollout.response import GroupRequest
from tests.cluster import start_local_ray
from tests.driver.fake_engines import SamplingEngine
from tests.driver.simulated import SAMPLING, Loader, Requests, options, run_config
from tests.patience import PATIENCE_S


class TwoSources:
    """Rollouts of groups of three completions, one of them the guide's."""

    def __init__(self, prompts: int = 20, **changes) -> None:
        self.policy, self.guide = Requests(), Requests()
        stream = PromptStream(Loader(prompts), 1)
        requests = GuidedRequests(self.policy, self.guide)
        self.rollouts = Rollouts(
            stream, requests, options(samples=3, guide_samples=1, **changes), Deadline()
        )

    def at_once(self) -> TwoSources:
        self.policy.at_once = self.guide.at_once = True
        return self


def sources(group: Group) -> list[bool]:
    return [response.from_guide for response in group.responses]


def test_a_group_is_finished_when_both_parts_are_there() -> None:
    world = TwoSources(max_staleness=1)
    made = world.rollouts
    world.at_once()
    world.policy.stuck = world.guide.stuck = {2, 3}
    assert [sources(group) for group in made.take(0)] == [[False, False, True]] * 2
    world.policy.at_once = world.guide.at_once = False
    made.pump()
    assert world.policy.asked == world.guide.asked == [0, 1, 2, 3]
    assert {request.samples for request, _ in world.guide.waiting.values()} == {1}
    assert {request.samples for request, _ in world.policy.waiting.values()} == {2}
    for first, second in ((world.policy, world.guide), (world.guide, world.policy)):
        queued = made.gauges()["groups/queued"]
        key = next(iter(first.waiting))
        first.finish(key)
        made.pump()
        assert made.gauges()["groups/queued"] == queued, (
            "one part of a group was taken for the group"
        )
        second.finish(key)
        made.pump()
        assert made.gauges()["groups/queued"] == queued + 1


def test_the_parts_of_a_group_have_seeds_of_their_own() -> None:
    def seeds() -> list[int]:
        world = TwoSources(seed=3, max_staleness=1)
        world.at_once()
        world.policy.stuck = world.guide.stuck = {2, 3}
        world.rollouts.take(0)
        world.rollouts.pump()
        return [
            request.seed
            for source in (world.policy, world.guide)
            for request, _ in source.waiting.values()
        ]

    assert len(set(seeds())) == 4 and seeds() == seeds()


def test_completions_of_the_guide_are_not_stale() -> None:
    world = TwoSources(max_staleness=1).at_once()
    made = world.rollouts
    for version in range(4):
        world.policy.version = version  # the guide's stays 0
        groups = made.take(version)
        assert all(group.oldest_version >= version - 1 for group in groups)
        assert made.gauges()["groups/trained_late"] == 0


def test_filtering_goes_by_the_whole_group() -> None:
    world = TwoSources(filter_range=(0.3, 1.0), prompts=6).at_once()
    world.policy.score = lambda prompt: 0.0
    world.guide.score = lambda prompt: float(prompt in "024")
    assert [group.prompt.number for group in world.rollouts.take(0)] == [0, 2]


def test_evaluations_use_the_policys_engines_only() -> None:
    world = TwoSources().at_once()
    held_out = list(iter(PromptStream(Loader(2, first=100), 1).draw, None))
    groups = world.rollouts.sample(held_out, 5, SAMPLING, "evaluating")
    assert [sources(group) for group in groups] == [[False] * 5] * 2 and world.guide.asked == []


def test_what_is_half_there_when_the_run_is_cut_is_asked_for_again_whole() -> None:
    world = TwoSources(max_staleness=1).at_once()
    world.guide.stuck = {2}
    world.rollouts.take(0)
    world.rollouts.pump()
    state, finished, in_flight = world.rollouts.snapshot()
    assert [prompt.number for prompt in in_flight] == [2]
    again = TwoSources(max_staleness=1).at_once()
    again.rollouts.restore(state, finished, in_flight)
    again.rollouts.take(1)
    assert again.policy.asked[0] == again.guide.asked[0] == 2


# ---- with Ray


@pytest.fixture(scope="module")
def ray_session() -> Iterator[None]:
    start_local_ray()
    yield
    ray.shutdown()


def requests(number: int, name: str, how: int = 0) -> tuple[GroupRequests, EngineSupervisor]:
    """To one engine, which ends or stops by the signal ``how`` at the prompt "trouble"."""
    lives = iter(range(9))
    fleet = EngineFleet(
        lambda index: SamplingEngine.remote(number, next(lives) if how else 1, how), 1
    )
    ray.get([engine.ping.remote() for engine in fleet], timeout=PATIENCE_S)
    vllm = {"max_restarts": 2, "hang_timeout_s": 5.0, "start_timeout_s": PATIENCE_S}
    supervisor = EngineSupervisor(fleet, None, run_config(vllm=vllm), name=name)
    return GroupRequests(supervisor, max_requests=4), supervisor


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_of_the_guide_that_dies_or_hangs_is_replaced(
    ray_session: None, how: int, caplog
) -> None:
    (policy, of_policy), (guide, of_guide) = (
        requests(1, "rollout engine"),
        requests(2, "guide engine", how),
    )
    both = GuidedRequests(policy, guide)
    prompts = ["a", "trouble", "b"]
    for prompt in prompts:
        both.ask(prompt, GroupRequest(prompt, "", 3, SAMPLING, guide_samples=1))
    got = {}
    while len(got) < len(prompts):
        got |= {
            key: [(r.tokens_S[1], r.from_guide) for r in group] for key, group in both.answers(1.0)
        }
    assert got == dict.fromkeys(prompts, [(1, False), (1, False), (2, True)])
    assert (of_policy.restarts, of_guide.restarts) == (0, 1)
    assert "replacing guide engines [0] (restart 1 of at most 2)" in caplog.text
    for supervisor in (of_policy, of_guide):
        supervisor._end(0)
