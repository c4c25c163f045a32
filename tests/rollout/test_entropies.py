"""The entropies that an engine's sampler tells (``algo.entropies engine``);
tests/e2e/test_estimators.py compares those of whole runs with the policy's."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

from openrlhf_ext.rollout import worker_extension
from openrlhf_ext.rollout.worker_extension import WeightSyncExtension, entropies


def worker(sampler: object) -> WeightSyncExtension:
    made = WeightSyncExtension()
    made.model_runner = SimpleNamespace(sampler=sampler)
    return made


def logits(rows: int = 7) -> torch.Tensor:
    scores_nV = 4 * torch.randn(rows, 50, generator=torch.Generator().manual_seed(rows))
    scores_nV[0, 10:] = -torch.inf  # tokens that a request may not take
    scores_nV[1, 1:] = -torch.inf
    return scores_nV


def truth(scores_nV: torch.Tensor) -> torch.Tensor:
    p_nV = scores_nV.double().softmax(-1)
    return -torch.where(p_nV > 0, p_nV * p_nV.log(), 0.0).sum(-1)


@pytest.mark.parametrize("at_once", [1, 120, 1 << 24])
def test_entropies_of_logits_and_of_log_probs_however_many_rows_at_once(
    monkeypatch, at_once: int
) -> None:
    monkeypatch.setattr(worker_extension, "_AT_ONCE", at_once)
    scores_nV = logits()
    for scores in (scores_nV, scores_nV.log_softmax(-1)):
        torch.testing.assert_close(
            entropies(scores).double(), truth(scores_nV), atol=1e-6, rtol=1e-6
        )
    assert float(entropies(scores_nV)[1]) == 0 and len(entropies(scores_nV[:0])) == 0


def test_the_sampler_tells_them_where_it_told_ranks() -> None:
    sampler, logprobs_nV = Sampler(), logits().log_softmax(-1)
    sampled_n = torch.arange(7) % 2
    before = sampler.gather_logprobs(logprobs_nV, 0, sampled_n)
    worker(sampler).tell_entropies()
    after = sampler.gather_logprobs(logprobs_nV, 0, sampled_n)
    beside_a_probe = sampler.gather_specific_token_logprobs(logprobs_nV, {2: [4]}, sampled_n)
    assert torch.equal(after.logprobs, before.logprobs)
    for told in (after, beside_a_probe):
        torch.testing.assert_close(
            told.selected_token_ranks.double(), truth(logprobs_nV), atol=1e-6, rtol=1e-6
        )
    assert sampler.gather_specific_token_logprobs(logprobs_nV, {}, sampled_n) is None


def test_vllms_second_runner_has_a_function_in_the_place_of_methods(monkeypatch) -> None:
    """It needs Triton, so that here its module is made up: a name and a result are what is known of
    it."""
    module = ModuleType("second_runner")
    module.compute_topk_scores = lambda scores_nV, count, *_, **__: LogprobsTensors(
        scores_nV[:, :1], scores_nV[:, :1], torch.ones(len(scores_nV))
    )
    monkeypatch.setitem(sys.modules, "second_runner", module)
    worker(type("Sampler", (), {"__module__": "second_runner"})()).tell_entropies()
    told = module.compute_topk_scores(logits(), 0, None, None, logits_mode=False)
    torch.testing.assert_close(
        told.selected_token_ranks.double(), truth(logits()), atol=1e-6, rtol=1e-6
    )
