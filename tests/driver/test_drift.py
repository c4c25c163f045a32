from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from openrlhf_ext.checkpoints.tensors import digest
from openrlhf_ext.driver import drift
from openrlhf_ext.driver.drift import DriftCheck, DriftError
from openrlhf_ext.megatron.step.batch import LogprobEntropy
from openrlhf_ext.reporting import is_documented


def scores(*logprobs: float) -> LogprobEntropy:
    return LogprobEntropy(torch.tensor(logprobs), torch.zeros(len(logprobs)))


@pytest.fixture
def check(monkeypatch):
    """A check of two ranks whose digests the test sets."""
    group = SimpleNamespace(digests=["a", "b"])
    monkeypatch.setattr(
        drift, "call_ranks", lambda group, who, method, timeout_s: list(group.digests)
    )
    check = DriftCheck(group, tolerance=1e-4, mismatch_tolerance=0.2, timeout_s=1.0)
    check.before_training()
    return check


def test_a_step_that_changes_nothing_passes(check):
    metrics = check.after_training(scores(-1.0, -2.0), scores(-1.0, -2.00005), 1e-6)
    assert metrics["drift/logprob_diff"] == pytest.approx(2.5e-5, rel=1e-2), "the mean of both"
    assert all(map(is_documented, metrics)) and check.steps == 1


@pytest.mark.parametrize(
    ("digests", "logprob", "mismatch", "message"),
    [
        (["a", "x"], -2.0, None, r"the weights changed on the policy ranks \[1\]"),
        (
            ["a", "b"],
            -2.1,
            None,
            "log-probs of the batch moved by 5.00e-02 nats, allowed are 0.0001",
        ),
        (["a", "b"], float("nan"), None, "moved by nan nats"),
        (["a", "b"], -2.0, 0.3, "policy and engines differ by 3.00e-01 nats on average"),
    ],
)
def test_what_moved_is_named(check, digests, logprob, mismatch, message):
    check.policy.digests = digests
    with pytest.raises(DriftError, match=message):
        check.after_training(scores(-1.0, -2.0), scores(-1.0, logprob), mismatch)


def test_everything_that_moved_is_in_one_error(check):
    check.policy.digests = ["x", "x"]
    with pytest.raises(
        DriftError, match=r"(?s)step 1 had learning rate 0.*ranks \[0, 1\].*moved by.*differ by"
    ):
        check.after_training(scores(-1.0, -2.0), scores(-9.0, -2.0), 1.0)


def test_the_digest_sees_one_bit_and_no_difference_of_layout():
    weights = [torch.randn(3, 5), torch.randn(4).bfloat16()]
    same = [weights[0].T.contiguous().T, weights[1].clone()]
    assert digest(weights) == digest(same)
    same[1].view(torch.int16)[2] ^= 1
    assert digest(weights) != digest(same)
    assert digest([torch.zeros(1)]) != digest([-torch.zeros(1)])
