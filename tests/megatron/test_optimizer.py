"""Norms by group are those of the whole gradient in every layout, and add up to the global norm."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer import clip_grads

from openrlhf_ext.megatron.step import optimizer
from openrlhf_ext.megatron.step.optimizer import GROUPS, build_scheduler, group_of
from openrlhf_ext.options.sections import Actor, Adam
from tests.launch import launch
from tests.models import make_tiny_model

HF_GROUPS = {  # by HF names, independently of ours
    "norm": "norms",
    "embed_tokens": "embedding",
    "lm_head": "head",
    "self_attn": "attention",
    "mlp": "mlp",
}


def expected_norms(grads: dict[str, float]) -> dict[str, float]:
    squares: dict[str, float] = {}
    for name, norm in grads.items():
        group = next(group for part, group in HF_GROUPS.items() if part in name)
        squares[group] = squares.get(group, 0.0) + norm**2
    return {f"grad_norm/{group}": math.sqrt(square) for group, square in squares.items()}


def test_groups_in_every_layout(tmp_path):
    models = {}
    for tied in (False, True):
        models[tied] = str(tmp_path / f"tied-{tied}")
        make_tiny_model(tmp_path / f"tied-{tied}", "qwen3", tied=tied)
    tp, pp, dp, cp = (
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {},
        {"context_parallel_size": 2},
    )
    chosen = [  # whole gradients come from the optimizer that is not distributed
        (False, tp, False),
        (False, tp, True),
        (False, pp, True),
        (False, dp, True),
        (False, cp, True),
        (True, pp, False),
        (True, pp, True),
        (True, dp, True),
    ]
    cases = [
        {"model": models[tied], "layout": layout, "distributed": d} for tied, layout, d in chosen
    ]
    results = launch("tests.megatron.optimizer_worker", "run_cases", 2, cases=cases, ranks=2)
    reference = {
        case["model"]: expected_norms(r["grads"])
        for case, r in zip(cases, results[0], strict=True)
        if r.get("grads")
    }
    for rank in results:
        for case, result in zip(cases, rank, strict=True):
            groups, expected = result["groups"], reference[case["model"]]
            assert groups == results[0][cases.index(case)]["groups"], "the same on every rank"
            assert groups == pytest.approx(expected, rel=1e-5), case
            total = math.sqrt(sum(norm**2 for norm in groups.values()))
            assert total == pytest.approx(result["grad_norm"], rel=1e-5), case
            behind_clip = math.sqrt(sum(other[cases.index(case)]["square"] for other in results))
            assert behind_clip == pytest.approx(min(total, 0.1), rel=1e-4), case
            assert ("grad_norm/head" in groups) == (case["model"] == models[False])
            others = {"grad_norm/head", "grad_norm/router", "grad_norm/experts"}
            assert {f"grad_norm/{g}" for g in GROUPS} - others <= set(result["step"])
            norm = (
                "nothing moved: values that are not finite: the train step gave the gradient norm"
            )
            loss = (
                "nothing moved: the train step gave values that are not finite: loss/policy = nan"
            )
            assert result["moved"] == [f"{norm} nan", f"{norm} inf", loss], case
            # how many micro-batches the others need; metrics and the norms of groups; the whole
            # norm
            assert result["reads"] == ["_most", "_sum", "get_grad_norm_fp32"], (
                f"waits for a device: {case}"
            )


def test_a_parameter_of_no_group_is_an_error():
    assert group_of("decoder.layers.3.self_attention.q_layernorm.weight") == "norms"
    assert group_of("decoder.layers.3.self_attention.linear_qkv.bias") == "attention"
    with pytest.raises(ValueError, match="router.weight belongs to none"):
        group_of("decoder.layers.3.router.weight")


def rates(**settings) -> list[float]:
    """The learning rate of each of eight updates."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    scheduler = build_scheduler(optimizer, Actor(adam=Adam(lr=1.0), **settings), updates=8)
    out = []
    for _ in range(8):
        scheduler.step(1)
        out.append(optimizer.param_groups[0]["lr"])
    return out


def test_the_warm_up_is_a_share_of_the_steps_or_a_number_of_them():
    constant = {"lr_scheduler": "constant_with_warmup"}
    assert rates(**constant, lr_warmup_ratio=0.5) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates(**constant, lr_warmup_ratio=0.5, lr_warmup_steps=2) == [0.5] + [1.0] * 7
    assert rates(**constant, lr_warmup_steps=0) == [1.0] * 8
    assert rates(lr_scheduler="constant", lr_warmup_steps=4) == [1.0] * 8


def test_norms_are_computed_by_transformer_engine_where_it_is(monkeypatch):
    kernels = SimpleNamespace(multi_tensor_applier=1, multi_tensor_l2norm=2, multi_tensor_scale=3)
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(optimizers=kernels))
    taken = ("multi_tensor_applier", "l2_norm_impl", "multi_tensor_scale_impl")
    for name in taken:
        monkeypatch.setattr(clip_grads, name, None)
    optimizer._take_its_kernels()
    assert [getattr(clip_grads, name) for name in taken] == [1, 2, 3]
