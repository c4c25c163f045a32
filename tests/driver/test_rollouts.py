from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.driver.rollouts import FilterExhaustedError, Group, Prompt, PromptStream, Rollouts
from openrlhf_ext.driver.waits import Deadline, DeadlineExceeded
from openrlhf_ext.rewards.grading import RewardFailureLimit
from openrlhf_ext.rollout.response import GroupRequest, Response, RolloutError
from tests.driver.simulated import Loader, Requests, options


def rollouts(requests: Requests, prompts: int = 8, episodes: int = 1, **changes: Any) -> Rollouts:
    return Rollouts(
        PromptStream(Loader(prompts), episodes), requests, options(**changes), Deadline()
    )


def numbers(groups: list[Group]) -> list[int]:
    return [group.prompt.number for group in groups]


def test_on_policy_the_engines_are_asked_for_one_batch_and_stand_still_while_the_policy_trains() -> (
    None
):
    requests = Requests(at_once=True)
    made = rollouts(requests)
    assert numbers(made.take(0)) == [0, 1] and requests.asked == [0, 1]
    made.pump()
    assert requests.asked == [0, 1] and len(requests) == 0
    assert numbers(made.take(1)) == [2, 3]


def test_shared_engines_are_told_whether_the_policy_is_trained_before_they_sample_again() -> None:
    told: list[bool] = []

    @contextmanager
    def with_engines(trains: Callable[[], bool]) -> Iterator[None]:
        yield
        told.append(trains())

    made = Rollouts(
        PromptStream(Loader(2), 1), Requests(at_once=True), options(), Deadline(), with_engines
    )
    made.sample([Prompt(9, "", "")], 1, made.sampling, "evaluating")
    assert len(made.take(0)) == 2 and made.take(1) == []
    assert told == [False, True, False]


def test_batches_are_whole_until_the_prompts_of_all_episodes_are_used_up() -> None:
    made = rollouts(Requests(at_once=True), prompts=5, episodes=2, batch_size=4)
    batches = []
    while batch := made.take(0):
        batches.append([group.prompt.text for group in batch])
    assert batches == [["0", "1", "2", "3"], ["4", "0", "1", "2"], ["3", "4"]]


def test_streaming_keeps_so_many_groups_on_their_way_that_none_can_be_older_than_the_bound() -> (
    None
):
    requests = Requests()
    made = rollouts(requests, prompts=20, max_staleness=1)
    requests.at_once = True
    assert numbers(made.take(0)) == [0, 1]
    assert requests.asked == [0, 1, 2, 3], "this batch and the next one"
    requests.at_once = False
    made.pump()
    assert requests.asked == [0, 1, 2, 3], (
        "while the policy trains, one batch may be on its way or waiting"
    )
    requests.version = 1
    assert numbers(made.take(1)) == [2, 3] and requests.asked == list(range(6))


@pytest.mark.parametrize("late", ["train", "drop"])
def test_a_straggler_holds_up_nobody_and_is_trained_late_or_dropped(late: str) -> None:
    requests = Requests(at_once=True, stuck={0})
    made = rollouts(requests, prompts=20, max_staleness=1, late=late)
    for version, expected in enumerate(([1, 2], [3, 4], [5, 6])):
        requests.version = version
        assert numbers(made.take(version)) == expected, "0 takes long"
    requests.stuck.clear()
    requests.version = 3
    last = made.take(3)
    assert numbers(last) == ([0, 7] if late == "train" else [7, 8])
    gauges = made.gauges()
    assert (gauges["groups/trained_late"], gauges["groups/dropped_late"]) == (
        (1, 0) if late == "train" else (0, 1)
    )


def test_a_batch_waits_for_the_group_whose_turn_it_is_if_it_is_asked_to() -> None:
    requests = Requests(at_once=True, stuck={1})
    made = rollouts(requests, prompts=20, max_staleness=1, late="wait")
    with pytest.raises(AssertionError, match="waits for groups"):
        made.take(0)
    requests.stuck.clear()
    assert numbers(made.take(0)) == [0, 1] and numbers(made.take(0)) == [2, 3]


class SomeEmpty(Requests):
    """The policy wrote nothing in one response of each of these groups."""

    empty: frozenset[int] = frozenset()

    def answers(self, timeout_s: float) -> list:
        nothing = Response.empty([1, 2], 0.0, {"reward_failed": 1.0})
        return [
            (key, [nothing, *made[1:]] if key in self.empty else made)
            for key, made in super().answers(timeout_s)
        ]


def test_groups_in_which_the_policy_wrote_nothing_are_replaced_until_there_are_too_many() -> None:
    requests = SomeEmpty(at_once=True)
    requests.empty = frozenset({1, 3})
    made = rollouts(requests, prompts=12, batch_size=3)
    assert numbers(made.take(0)) == [0, 2, 4] and made.gauges()["groups/dropped_unstarted"] == 2
    requests.empty = frozenset(range(1000))
    with pytest.raises(
        RewardFailureLimit, match="the agent failed before the policy had written anything"
    ):
        rollouts(requests, prompts=1000, batch_size=3).take(0)


def test_a_completion_with_a_nan_ends_the_run_before_a_checkpoint_has_it() -> None:
    class Spoiled(Requests):
        def answers(self, timeout_s: float) -> list:
            for key, made in (answers := super().answers(timeout_s)):
                if key == 2:
                    made[-1] = replace(made[-1], logprobs_T=np.array([-0.5, np.nan], np.float32))
            return answers

    requests = Spoiled(at_once=True)
    made = rollouts(requests, prompts=8, max_staleness=1)
    with pytest.raises(RolloutError, match="log-probs that are not finite"):
        made.take(0)
    _, finished, _ = made.snapshot()
    assert 2 not in numbers(finished)


def test_filtered_groups_are_replaced_at_once() -> None:
    """By the score, and not by the reward; groups that are all right or all wrong are on the
    range's borders."""
    requests = Requests(
        at_once=True, score=lambda prompt: {"2": 0.0, "3": 1.0}.get(prompt, 0.25 * (prompt < "6"))
    )
    made = rollouts(requests, prompts=10, batch_size=3, filter_range=(0.0, 1.0))
    assert numbers(made.take(0)) == [0, 1, 4]
    assert (
        made.gauges()["groups/kept_fraction"] == pytest.approx(3 / 5)
        and made.dropped["filtered"] == 2
    )
    assert numbers(made.take(1)) == [5], "the rest was filtered"
    assert made.take(2) == []


def test_whatever_is_given_up_is_counted_and_named_once() -> None:
    """By whichever reason: a batch that is passed over, too."""
    made = rollouts(
        Requests(at_once=True, score=lambda prompt: float(prompt == "1")), filter_range=(-1.0, 1.0)
    )
    batch = made.take(0)
    made.give_up("skipped", [group.prompt for group in batch])
    assert made.dropped == {"filtered": 1, "late": 0, "unstarted": 0, "skipped": 2}
    assert made.place == {"drawn": 3, "waiting": [0, 1, 2]}, "until a line has them"
    named = made.account()
    assert named["skipped"] == [group.prompt.entry for group in batch]
    assert [number for number, _ in named["filtered"]] == [1] and named["waiting"] == []
    assert made.account() == {"drawn": 3, "waiting": []}


def test_going_back_counts_what_was_given_up_once() -> None:
    """As often as a run goes back: the counts are those of the checkpoint, whatever came after
    it."""
    made = rollouts(Requests(at_once=True), prompts=20)
    for gone_back in range(1, 4):
        state, finished, in_flight = made.snapshot()
        spoiled = made.take(0)
        made.skip(group.prompt.number for group in spoiled)
        made.restore(state, finished, in_flight)
        made.take(0)
        named = made.account()["skipped"]
        assert made.dropped == {"filtered": 0, "late": 0, "unstarted": 0, "skipped": 2 * gone_back}
        assert [number for number, _ in named] == numbers(spoiled)


def test_filtering_that_leaves_nothing_ends_the_run() -> None:
    made = rollouts(
        Requests(at_once=True), prompts=99, filter_range=(0.6, 1.0), max_filter_batches=3
    )
    words = (
        "used 7 prompts for one batch of 2.*between 0.6 and 1, 0 have unlike "
        "scores.*--rollout.max_filter_batches"
    )
    with pytest.raises(FilterExhaustedError, match=words):
        made.take(0)


class Unlike(Requests):
    """Completions of a group have scores of -1 and 1."""

    def answers(self, timeout_s: float) -> list:
        return [
            (
                key,
                [
                    replace(one, score=float(2 * (i % 2) - 1), receipt=None)
                    for i, one in enumerate(made)
                ],
            )
            for key, made in super().answers(timeout_s)
        ]


@pytest.mark.parametrize("given", [(0.0, 1.0), (-1.0, 1.0)])
def test_a_range_that_is_not_that_of_the_scores_is_said_at_the_first_group(caplog, given) -> None:
    made = rollouts(Unlike(at_once=True), prompts=99, filter_range=given, max_filter_batches=3)
    if given == (-1.0, 1.0):
        assert len(made.take(0)) == 2 and not caplog.text
        return
    with pytest.raises(FilterExhaustedError, match="5 have unlike scores"):
        made.take(0)
    (said,) = caplog.messages
    assert (
        "a group has scores from -1 to 1, mean 0, and algo.dynamic_filtering_range is 0 1" in said
    )
    assert "dropped, though its scores are unlike" in said


def test_while_groups_are_waited_for_it_is_told_how_many_have_come() -> None:
    class Telling(Deadline):
        def progress(self, detail: str) -> None:
            told.append(detail)

    told: list[str] = []
    requests = Requests(at_once=True)
    made = Rollouts(PromptStream(Loader(6), 1), requests, options(batch_size=3), Telling())
    made.take(0)
    assert re.fullmatch(r"3 of 3 groups generated and graded, [\d,]+ tokens/s", told[-1]), told
    held_out = [Prompt(number, "", "") for number in range(90, 95)]
    made.sample(held_out, 1, made.sampling, "evaluating")
    assert told[-1].startswith("5 of 5 groups "), told


def test_other_prompts_are_sampled_beside_those_of_training() -> None:
    requests = Requests(at_once=True)
    made = rollouts(requests, prompts=20, max_staleness=1)
    made.take(0)
    stream = PromptStream(Loader(3, first=100), 1)
    held_out = list(iter(stream.draw, None))
    groups = made.sample(held_out, 5, made.sampling, "evaluating")
    assert [group.prompt.text for group in groups] == ["100", "101", "102"]
    assert all(len(group.responses) == 5 for group in groups)
    assert numbers(made.take(1)) == [2, 3], "training's groups were not lost to the evaluation"


def test_with_full_determinism_evaluations_draw_with_other_seeds_than_training() -> None:
    class Noting(Requests):
        def ask(self, key: Any, request: GroupRequest, first: bool = False) -> None:
            seeds.append(request.seed)
            super().ask(key, request, first)

    seeds: list[tuple[int, ...] | None] = []
    for seed in (1, 2):
        made = rollouts(Noting(at_once=True), prompts=2, seed=seed)
        made.sample(
            list(iter(PromptStream(Loader(2), 1).draw, None)), 2, made.sampling, "evaluating"
        )
        made.take(0)
    assert len(set(seeds)) == 8 and None not in seeds, (
        "two prompts twice, with two seeds of the run"
    )


def test_without_partial_rollouts_a_sync_waits_until_nothing_is_in_flight() -> None:
    requests = Requests()
    made = rollouts(requests, prompts=20, max_staleness=2)
    requests.at_once = True
    made.take(0)
    requests.at_once = False
    made.pump()
    asked = list(requests.asked)
    requests.at_once = True
    made.drain()
    assert len(requests) == 0 and requests.asked == asked, "new groups began before the sync"


def test_a_batch_that_does_not_come_ends_the_wait() -> None:
    class Silent(Requests):
        def answers(self, timeout_s: float) -> list:
            return []

    made = rollouts(Silent(), timeout_s=0.2)
    with pytest.raises(
        DeadlineExceeded, match="waiting for a batch of rollouts; raise --rollout.timeout_s"
    ):
        made.take(0)


@given(
    data=st.data(),
    staleness=st.integers(0, 3),
    batch=st.integers(1, 4),
    prompts=st.integers(0, 30),
    late=st.sampled_from(["train", "drop", "wait"]),
)
def test_every_group_is_trained_once_or_dropped_and_only_stragglers_exceed_the_bound(
    data, staleness: int, batch: int, prompts: int, late: str
) -> None:
    """Groups finish in any order, also while the policy trains; the run is cut and resumed at any
    place."""

    class Adversary(Requests):
        def answers(self, timeout_s: float) -> list:
            waiting = list(self.waiting)
            at_least = 1 if timeout_s and waiting else 0
            chosen = data.draw(st.integers(at_least, len(waiting)))
            self.finish(*data.draw(st.permutations(waiting))[:chosen])
            return super().answers(timeout_s)

    requests, version, trained = Adversary(), 0, []
    made = rollouts(requests, prompts, batch_size=batch, max_staleness=staleness, late=late)
    begun_at: dict[int, int] = {}
    while True:
        groups = made.take(version)
        if not groups:
            break
        for group in groups:
            begun_at.setdefault(group.prompt.number, group.oldest_version)
            lag = version - group.oldest_version
            assert lag <= staleness or (late == "train" and staleness > 0)
        trained += numbers(groups)
        made.pump()
        version += 1
        requests.version = version
        if data.draw(st.booleans()):  # killed, and resumed from here
            state, finished, in_flight = made.snapshot()
            fresh = Adversary()
            fresh.version = version
            made, requests = (
                rollouts(fresh, prompts, batch_size=batch, max_staleness=staleness, late=late),
                fresh,
            )
            made.restore(state, finished, in_flight)
    assert len(set(trained)) == len(trained), "a group was trained twice"
    assert len(trained) + made.dropped["late"] == prompts, "a group was lost"
    if late == "wait":
        assert trained == sorted(trained), (
            "whatever takes how long, batches are in the order of their prompts"
        )


def test_prompts_that_are_given_up_are_dropped_wherever_they_are_when_the_run_goes_back() -> None:
    """Streaming: of the batch some were finished when the checkpoint was written, in flight, or not
    drawn."""
    requests = Requests(at_once=True, stuck={3})
    made = rollouts(requests, prompts=9, max_staleness=2)
    assert numbers(made.take(0)) == [0, 1]
    state, finished, in_flight = made.snapshot()
    assert (numbers(finished), [prompt.number for prompt in in_flight]) == ([2, 4, 5], [3])
    assert numbers(made.take(1)) == [2, 4]
    requests.stuck.clear()
    made.drain()
    made.skip([2, 3, 6])
    made.restore(state, finished, in_flight)
    assert [numbers(made.take(1)) for _ in range(3)] == [[4, 5], [7, 8], []] and made.dropped[
        "skipped"
    ] == 3
    # and in what goes on from a later checkpoint
    again = rollouts(Requests(at_once=True), prompts=9)
    again.restore(
        made.snapshot()[0] | {"prompts": {**state["prompts"], "drawn": 0, "loader": {"drawn": 0}}},
        [],
        [],
    )
    assert numbers(again.take(0)) == [0, 1] and numbers(again.take(0)) == [4, 5]


def test_groups_without_the_experts_that_are_to_be_replayed_are_asked_for_again() -> None:
    made = rollouts(Requests(at_once=True), max_staleness=1)
    made.take(0)
    made.pump()
    state, finished, in_flight = made.snapshot()
    assert numbers(finished) == [2, 3] and in_flight == []
    requests = Requests(at_once=True)
    resumed = rollouts(requests, max_staleness=1, more={"train": {"routing_replay": "rollout"}})
    resumed.restore(state, finished, in_flight)
    assert numbers(resumed.take(1)) == [2, 3] and requests.asked[:2] == [2, 3]


@pytest.mark.parametrize("drawn", [0, 3, 5, 6, 9])
def test_the_prompts_go_on_at_their_place(drawn: int) -> None:
    whole, cut = (PromptStream(Loader(5), episodes=2) for _ in range(2))
    expected = [whole.draw() for _ in range(11)]
    assert expected[-1] is None and [prompt.number for prompt in expected[:-1]] == list(range(10))
    got = [cut.draw() for _ in range(drawn)]
    resumed = PromptStream(Loader(5), episodes=2)
    resumed.load_state_dict(cut.state_dict())
    assert [*got, *(resumed.draw() for _ in range(11 - drawn))] == expected
