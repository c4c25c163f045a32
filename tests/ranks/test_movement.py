"""What optimizer steps move is measured on a sample: whole numbers of small parameters, a part of
large ones."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from openrlhf_ext.megatron import checkpoint
from openrlhf_ext.megatron.checkpoint import OptimizerRange
from openrlhf_ext.options.sections import Actor, Adam
from openrlhf_ext.ranks.movement import Movement, check_gauges, movement_gauges
from openrlhf_ext.reporting import is_documented


@pytest.fixture
def policy(monkeypatch):
    """Of a large parameter in bf16 with an fp32 copy, a small one of which the rank updates a part,
    and another's."""
    chunk = torch.nn.Module()
    chunk.large = torch.nn.Parameter(torch.zeros(5000, dtype=torch.bfloat16))
    chunk.small = torch.nn.Parameter(torch.zeros(10))
    chunk.others = torch.nn.Parameter(torch.zeros(10))
    second = {"exp_avg_sq": torch.zeros(5000)}
    ranges = {
        id(chunk.large): OptimizerRange(0, 5000, {**second, "master": torch.zeros(5000)}),
        id(chunk.small): OptimizerRange(2, 6, {"exp_avg_sq": torch.zeros(4)}),
        id(chunk.others): OptimizerRange(3, 3, {"exp_avg_sq": torch.zeros(0)}),
    }
    monkeypatch.setattr(checkpoint, "optimizer_ranges", lambda optimizer: ranges)
    monkeypatch.setattr(checkpoint, "optimizer_step", lambda optimizer: 3)
    groups = [{"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": decay} for decay in (0.0, 0.1)]
    optimizer = SimpleNamespace(param_groups=groups)
    return SimpleNamespace(
        chunks=[chunk], optimizer=optimizer, ranges=ranges, gradient_square=lambda: 4.0
    )


def test_movement_of_a_sample(policy):
    movement, (large, small, _) = Movement(policy), policy.ranges.values()
    movement.begin()
    large.tensors["master"] += 1e-6  # less than bf16 shows
    with torch.no_grad():
        policy.chunks[0].small[2:4] += 2.0
        policy.chunks[0].small[9] += 100.0  # another rank's
    small.tensors["exp_avg_sq"] += 5.0
    movement.end()
    moved = movement.take()
    assert (moved.entries, moved.parameters, moved.still, moved.adam_steps) == (1024 + 4, 2, 0, 3)
    assert moved.squares == pytest.approx(1024 * 1e-12 + 2 * 4.0) and moved.second_moments == 20.0
    assert movement.take() is None, "told once"
    gauges = movement_gauges([moved, dataclasses.replace(moved, gradient_square=5.0)])
    told = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "grad_norm": 3.0}
    assert {name: gauges[f"update/{name}"] for name in told} == told and all(
        map(is_documented, gauges)
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("update/beta2", 0.5),
        ("update/weight_decay", 0.1),
        ("update/eps", 1e-5),
        ("mismatch/rewards", 1e-9),
    ],
)
def test_what_the_options_rule_out_is_named(name, value, caplog):
    options = Actor(adam=Adam(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0))
    right = {
        "update/beta1": 0.9,
        "update/beta2": 0.95,
        "update/eps": 1e-8,
        "update/weight_decay": 0.0,
    }
    for metrics in (right | {"mismatch/rewards": 0.0, "grad_norm": 1.0}, {}):
        check_gauges(3, metrics, options)
    assert caplog.messages == []
    check_gauges(3, right | {name: value}, options)
    assert caplog.messages == [
        f"step 3: {name} is {value:g}: not possible with these options (docs/faults.md)"
    ]


def test_what_stands_still_is_counted(policy):
    movement, (large, *_) = Movement(policy), policy.ranges.values()
    movement.end()
    assert movement.take() is None, "nothing was begun"
    movement.begin()
    large.tensors["master"][1] += 1.0  # between two sampled entries
    movement.end()
    assert (movement.take().still, movement.take()) == (2, None)
