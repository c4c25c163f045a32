"""Profiles of a rank's step: what kind of work an operation is, and that nothing is hooked outside
of them."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.profiler import profile

from openrlhf_ext.ranks.timers import IDLE, KINDS, OTHER, StepProfile, seconds_by_kind


class _LinearTokenLoss(torch.autograd.Function):
    """Named like the head's."""

    @staticmethod
    def forward(ctx, x):
        return x @ x

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ gradient


def work(kind: str) -> None:
    x = torch.ones(256, 256, requires_grad=True)
    if kind == "GEMM":
        x @ x
    elif kind == "head":
        _LinearTokenLoss.apply(x).sum().backward()
    elif kind == "attention":
        q = x.view(1, 4, 64, 256)
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    elif kind == "optimizer":
        x.grad = torch.ones_like(x)
        torch.optim.AdamW([x]).step()
    else:
        torch.sort(x.detach())


@pytest.mark.parametrize("kind", ["GEMM", "head", "attention", "optimizer", OTHER])
def test_work_counts_as_what_it_is(kind, tmp_path):
    work(kind)  # what is done once is not measured
    step = StepProfile()
    for _ in range(100):  # a pause of the scheduler's within other work counts little beside it
        work(kind)
    told = step.finish(tmp_path / "profile/step1_rank0.json.gz")
    seconds = told["seconds"]
    assert set(seconds) == {*KINDS, OTHER, IDLE}
    busiest = max((k for k in seconds if k not in (IDLE, OTHER)), key=seconds.__getitem__)
    assert busiest == kind or (kind == OTHER and seconds[OTHER] > seconds[busiest]), seconds
    assert seconds[kind] > 0 and sum(seconds.values()) == pytest.approx(told["wall"], rel=0.2)
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["step1_rank0.json.gz"]


def test_time_in_which_nothing_runs_is_idle():
    assert seconds_by_kind([], 2.0)[IDLE] == 2.0


def test_no_profiler_outlives_its_step(tmp_path):
    step = StepProfile()
    step.finish(tmp_path / "trace.json.gz")
    del step
    gc.collect()
    assert not [found for found in gc.get_objects() if type(found) is profile]
    assert not torch.autograd.profiler._is_profiler_enabled
