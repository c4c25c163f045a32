from __future__ import annotations

import pytest
import torch

from openrlhf_ext.compat import Experience
from openrlhf_ext.controller.rollout_sample import UNSAMPLED, RolloutSample, staleness_metrics


def experience(length: int) -> Experience:
    return Experience(sequences=torch.arange(length)[None], prompts=["p"], info={"reward": torch.tensor([1.0])})


def test_versions_are_aligned_with_the_action_mask():
    sample = RolloutSample.of(experience(7), [(3, 2, 4), (4, 4, 5), (4, 6, 7)])
    assert sample.token_versions.tolist() == [[UNSAMPLED, 3, 3, 4, UNSAMPLED, 4]]
    assert sample.prompts == ["p"] and torch.equal(sample.sequences, torch.arange(7)[None])


def test_a_sequence_that_was_cut_short_cuts_its_spans():
    assert RolloutSample.of(experience(4), [(1, 2, 9)]).token_versions.tolist() == [[UNSAMPLED, 1, 1]]


def test_age_is_counted_per_token_and_mixtures_per_completion():
    samples = [
        RolloutSample.of(experience(4), [(5, 1, 4)]),
        RolloutSample.of(experience(5), [(3, 1, 2), (5, 2, 3), (6, 3, 5)]),
    ]
    metrics = staleness_metrics(samples, version=6)
    assert metrics["staleness/mean"] == pytest.approx((1 + 1 + 1 + 3 + 1 + 0 + 0) / 7)
    assert metrics["staleness/max"] == 3
    assert metrics["staleness/mixed_fraction"] == 0.5


def test_responses_that_do_not_tell_give_no_metrics():
    samples = [RolloutSample.of(experience(4), [(5, 1, 4)]), RolloutSample.of(experience(4), None)]
    assert staleness_metrics(samples, 6) == {}
    assert staleness_metrics([RolloutSample.of(experience(4), [])], 6) == {}
