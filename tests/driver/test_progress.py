"""Learning rates go by the share of the run that is completed, and end where training ends."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.driver.progress import Progress
from openrlhf_ext.driver.rollouts import PromptStream, Rollouts
from tests.driver.simulated import Loader, Requests, options
from tests.driver.test_loop import Ready


@given(
    steps=st.integers(1, 40),
    batch=st.integers(1, 9),
    missing=st.integers(0, 8),
    updates=st.integers(1, 5),
)
def test_each_full_batch_is_as_many_steps_of_the_schedule_as_it_has_updates(
    steps, batch, missing, updates
):
    """In whole numbers, so that rates have the bits of a schedule that counts updates."""
    prompts = max(1, steps * batch - missing % batch)
    progress = Progress(prompts, batch)
    for step in range(1, steps + 1):
        progress.take(min(step * batch, prompts), 0.0, True)
        assert [share * steps * updates for share in progress.of_run] == [
            (step - 1) * updates,
            step * updates,
        ]
        assert progress.of_policy == progress.of_run


def test_prompts_that_are_given_up_count():
    progress, ends = Progress(36, 4), []
    for used in (6, 14, 23, 30, 36):
        progress.take(used, 0.0, True)
        ends.append(progress.of_run[1])
    assert ends == [Fraction(used, 36) for used in (6, 14, 23, 30, 36)]


def test_a_head_start_of_the_critic_is_no_part_of_the_policys_schedule():
    progress, seen = Progress(20, 4), []
    for step in range(5):
        progress.take(4 * step + 4, 0.0, step >= 2)
        seen.append((progress.of_run[1], progress.of_policy))
    assert [critic for critic, _ in seen] == [Fraction(n, 5) for n in range(1, 6)]
    assert [policy for _, policy in seen[2:]] == [
        (Fraction(n, 3), Fraction(n + 1, 3)) for n in range(3)
    ]


def test_minutes_complete_what_is_left_of_the_run():
    progress = Progress(100, 10, minutes=2.0)
    progress.take(10, 0.0, True)
    assert progress.of_run == (0, Fraction(1, 10))
    progress.take(20, 60.0, True)
    assert progress.of_run == (Fraction(1, 10), Fraction(1, 2)), "half of the time is over"
    state = json.loads(json.dumps(progress.state_dict()))
    resumed = Progress(100, 10, minutes=2.0)
    resumed.load_state_dict(state)
    resumed.start()
    resumed.take(30, 60.0, True)
    assert resumed.of_run == (Fraction(1, 2), Fraction(3, 4)), (
        "on the curve, to its end when the time ends"
    )
    progress.take(30, 200.0, True)
    assert progress.of_run[1] == 1


@pytest.mark.parametrize("ahead", [0, 1])
def test_rollouts_count_what_is_used_up(ahead):
    """Filtered prompts among the trained ones, whatever is in flight; all of them when nothing is
    left."""
    config = options(
        more={
            "train": {"max_staleness": ahead},
            "rollout": {"batch_size": 2},
            "algo": {"dynamic_filtering_enable": True, "dynamic_filtering_range": (0.0, 1.0)},
        }
    )
    requests = Requests(at_once=True, score=lambda text: 1.0 if int(text) % 3 == 1 else 0.5)
    rollouts = Rollouts(PromptStream(Loader(10), 1), requests, config, Ready())
    seen = []
    while batch := rollouts.take(version=0):
        seen.append(([group.prompt.number for group in batch], rollouts.used_up))
    assert seen == [([0, 2], 3), ([3, 5], 6), ([6, 8], 9), ([9], 10)]
    again = Rollouts(PromptStream(Loader(10), 1), Requests(at_once=True), config, Ready())
    state, finished, in_flight = rollouts.snapshot()
    again.restore(state, finished, in_flight)
    assert again.used_up == 10
