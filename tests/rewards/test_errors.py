from __future__ import annotations

import logging
import pickle

import pytest

from openrlhf_ext.rewards.grading import FailurePolicy, RewardFailureLimit, RewardRaised


def failure(number: int) -> RewardRaised:
    return RewardRaised(f"failure {number}", "the prompt", "the completion", "the label")


def test_failures_are_tolerated_up_to_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    policy = FailurePolicy(max_failures=2)
    policy.tolerate(failure(1))
    policy.tolerate(failure(2))
    with pytest.raises(RewardFailureLimit) as caught:
        policy.tolerate(failure(3))
    text = str(pickle.loads(pickle.dumps(caught.value)))
    for part in (
        "3 samples",
        "tolerates 2",
        "--reward.max_failures",
        "RewardRaised: failure 3",
        "'the prompt'",
        "'the completion'",
    ):
        assert part in text
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 3
    assert (
        "failure 1" in caplog.text
        and "'the prompt'" in caplog.text
        and "'the completion'" in caplog.text
    )


def test_zero_tolerates_none() -> None:
    with pytest.raises(RewardFailureLimit):
        FailurePolicy(max_failures=0).tolerate(failure(1))


def test_very_long_samples_are_shortened_in_the_message() -> None:
    error = RewardRaised("what", "x" * 100_000, "y")
    assert len(str(error)) < 3000 and len(error.prompt) == 100_000
    assert "characters left out" in str(error)


def test_messages_are_handed_over_once() -> None:
    policy = FailurePolicy(max_failures=2)
    policy.tolerate(failure(1))
    (message,) = policy.take_messages()
    assert "failure 1" in message and "'the prompt'" in message and "'the completion'" in message
    assert policy.take_messages() == [] and policy.count == 1
