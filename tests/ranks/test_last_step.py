"""After a fit the parameters are read by everybody: only its last step may leave nothing to a next
forward pass."""

from __future__ import annotations

from contextlib import nullcontext
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openrlhf_ext.megatron.step import schedule
from openrlhf_ext.megatron.step.optimizer import NoGradientError
from openrlhf_ext.ranks.auxiliary import CriticActor
from openrlhf_ext.ranks.policy import PolicyActor, SleepModes
from openrlhf_ext.ranks.timers import PhaseTimers

MEASURED = {"lr": 1.0, "grad_norm": 1.0, "value/lr": 1.0}


class FakeModel:
    """Notes for each train step whether more were announced."""

    def __init__(self) -> None:
        self.announced: list[bool] = []

    def train_step(self, *_: Any, more: bool = False) -> dict[str, float]:
        self.announced.append(more)
        return MEASURED

    def plan_rates(self, before: Fraction, after: Fraction, updates: int) -> None:
        assert (before, after) == (0, 1)


class Batch(list):
    """A replica's sequences."""

    def select(self, rows: slice) -> list:
        return self[rows]


class MiniBatch(list):
    """One step's part of them."""

    algorithm = SimpleNamespace(needs_prepare=False)


def awake(actor: Any, max_epochs: int) -> FakeModel:
    model = FakeModel()
    actor.sleeps, actor.max_epochs, actor.reloads = False, max_epochs, []
    actor.states = SimpleNamespace(reload=lambda *_: None)
    return model


def policy_actor(epochs: int, numbers: int = 0) -> tuple[PolicyActor, FakeModel]:
    """A policy's actor with so many parameters, and the model that it trains."""
    actor = PolicyActor.__new__(PolicyActor)
    model = awake(actor, epochs)
    chunks = [torch.nn.Linear(numbers, 1, bias=False)] if numbers else []
    whole = SimpleNamespace(is_beside_weights=False)
    step = {
        "train_step": lambda *step: model.train_step(more=step[-2]),
        "plan_rates": model.plan_rates,
    }
    actor.policy = SimpleNamespace(chunks=chunks, trained=whole, device=torch.device("cpu"), **step)
    actor.timers, actor.has_moved, actor.version, actor.seen = PhaseTimers(), False, 0, None
    actor.movement = SimpleNamespace(begin=lambda: None, end=lambda: None)
    actor.sleeping, actor.offloads = SleepModes(), []
    return actor, model


def fit(actor: PolicyActor) -> None:
    actor.batch = Batch(range(6))
    actor.shard = SimpleNamespace(mini_batches=[MiniBatch(range(3)), MiniBatch(range(3))], seed=1)
    actor.fit(Fraction(0), Fraction(1))


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_policys_last_step_announces_no_other(epochs: int) -> None:
    actor, model = policy_actor(epochs)
    fit(actor)
    assert model.announced == [True] * (2 * epochs - 1) + [False]


@pytest.mark.parametrize(
    ("rate", "norm", "moved"),
    [(1e-3, 1.0, True), (0.0, 1.0, False), (1e-3, 0.0, False), (1e-5, 1.0, False)],
)
def test_a_sync_after_a_fit_says_whether_some_weight_must_have_changed(
    monkeypatch, rate, norm, moved
) -> None:
    """``WeightPublisher.publish`` ends the run if not a bit has."""
    monkeypatch.setitem(MEASURED, "lr", rate)
    monkeypatch.setitem(MEASURED, "grad_norm", norm)
    actor, _ = policy_actor(epochs=1, numbers=100)
    told: list[tuple[int, bool]] = []
    actor.publisher = SimpleNamespace(
        publish=lambda *what: told.append(what), prove=lambda *_, **__: 0.0
    )
    fit(actor)
    actor.send_weights()
    actor.send_weights()
    assert told == [(1, moved), (2, False)], "once sent, they have not moved"


@pytest.mark.parametrize(("advantages", "ends"), [([0.0, 0.5], True), ([0.0, 0.0], False)])
def test_adapters_without_a_gradient_end_the_run_where_there_are_advantages(
    monkeypatch, advantages, ends
) -> None:
    monkeypatch.setitem(MEASURED, "grad_norm", 0.0)
    monkeypatch.setattr(MiniBatch, "advantages", torch.tensor(advantages), raising=False)
    monkeypatch.setattr(schedule, "sum_over_replicas", lambda tensor, device: tensor)
    actor, _ = policy_actor(epochs=1, numbers=100)
    fit(actor)
    actor.policy.trained = SimpleNamespace(is_beside_weights=True)
    with (
        pytest.raises(NoGradientError, match="1 tokens of the mini-batch have")
        if ends
        else nullcontext()
    ):
        fit(actor)


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_critics_last_step_announces_no_other(epochs: int) -> None:
    actor = CriticActor.__new__(CriticActor)
    actor.critic = awake(actor, epochs)
    actor.fit([SimpleNamespace(batch=None, targets=None)] * 2, Fraction(0), Fraction(1))
    assert actor.critic.announced == [True] * (2 * epochs - 1) + [False]
