"""A rank that shares its GPU holds its model there only while it is needed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openrlhf_ext.megatron import checkpoint
from openrlhf_ext.megatron import critic as critic_model
from openrlhf_ext.megatron.host_memory import KINDS
from openrlhf_ext.ranks.auxiliary import CriticActor


class FakeCritic:
    def __init__(self, _settings: Any) -> None:
        self.models, self.optimizer, self.device = (
            [torch.nn.Linear(2, 2)],
            None,
            torch.device("cpu"),
        )
        self.settings = SimpleNamespace(converters=())


class Snapshot:
    """Notes where the model is when it is written."""

    def __init__(self, critic: CriticActor) -> None:
        self.critic, self.resident = critic, frozenset()

    def write(self, *_: Any) -> list:
        self.resident = self.critic.states.resident
        return []


@pytest.fixture(params=[True, False], ids=["sleeps", "stays"])
def critic(request, monkeypatch) -> CriticActor:
    monkeypatch.setattr(CriticActor, "join", lambda *_: {})
    monkeypatch.setattr(critic_model, "MegatronCritic", FakeCritic)
    monkeypatch.setattr(checkpoint, "load_checkpoint", lambda *_: {})
    actor = CriticActor.__new__(CriticActor)
    actor.init_model(SimpleNamespace(model=None), max_epochs=1, sleeps=request.param)
    return actor


def rests(critic: CriticActor) -> bool:
    return critic.states.resident == (frozenset() if critic.sleeps else frozenset(KINDS))


def test_after_it_is_built_and_loaded_it_makes_room(critic: CriticActor, tmp_path: Path) -> None:
    assert rests(critic)
    critic.load_state(str(tmp_path), "critic")
    assert rests(critic)


@pytest.mark.parametrize("background", [True, False])
def test_after_it_is_saved_it_makes_room(
    critic: CriticActor, tmp_path: Path, monkeypatch, background: bool
) -> None:
    snapshot = Snapshot(critic)
    monkeypatch.setattr(checkpoint, "take_snapshot", lambda *_, copy: snapshot)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    critic.save_state(str(tmp_path), "critic", background)
    assert rests(critic)
    assert not background or critic.has_saved(wait=True)
    assert background or snapshot.resident == frozenset(KINDS), (
        "without a copy the states are written from the device"
    )
