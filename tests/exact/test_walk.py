"""The walk over the modules of policy and engine, on stand-ins of both. The real ones are compared
by the rehearsal of call 6 (tests/gpu/exactness.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from openrlhf_ext.exact.walk import (
    engine_modules,
    policy_modules,
    recorded,
)
from tests.gpu.exactness import Difference, differences

TOKENS, GROUPS, PER_GROUP, SIZE = 5, 2, 3, 4
EACH = ["qkv", "attention", "o_proj", "gate_up", "activation", "down"]


class Gives(nn.Module):
    """Answers with what it was made of."""

    def __init__(self, out: Any) -> None:
        super().__init__()
        self.out = out

    def forward(self, *_: torch.Tensor) -> Any:
        return self.out


def heads_beside_each_other(qkv: torch.Tensor) -> torch.Tensor:
    """vLLM's rows (all queries, all keys, all values) as Megatron has them."""
    queries, keys, values = qkv.split(
        [GROUPS * PER_GROUP * SIZE, GROUPS * SIZE, GROUPS * SIZE], dim=1
    )
    parts = [
        torch.cat([q.flatten(1), k, v], 1)
        for q, k, v in zip(
            queries.unflatten(1, (GROUPS, PER_GROUP, SIZE)).unbind(1),
            keys.unflatten(1, (GROUPS, SIZE)).unbind(1),
            values.unflatten(1, (GROUPS, SIZE)).unbind(1),
            strict=True,
        )
    ]
    return torch.cat(parts, 1)[:, None]


def pair(first: int = 0) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """A policy's chunk of one layer and an engine's model, which compute the same, and the states
    of the engine."""
    qkv = torch.randn(TOKENS, (PER_GROUP + 2) * GROUPS * SIZE)
    sizes = {"attention": GROUPS * PER_GROUP * SIZE, "gate_up": 20, "activation": 10}
    states = {"embedding": torch.randn(TOKENS, 8)} | {
        f"{first} {name}": qkv if name == "qkv" else torch.randn(TOKENS, sizes.get(name, 8))
        for name in EACH
    }
    states["norm"] = torch.randn(TOKENS, 8)

    def of(name: str) -> torch.Tensor:
        return states[f"{first} {name}"]

    policys = {name: of(name)[:, None] for name in EACH}
    attention = SimpleNamespace(
        linear_qkv=Gives((heads_beside_each_other(qkv), None)),
        core_attention=Gives(of("attention").view(TOKENS, -1, SIZE)),
        linear_proj=Gives((policys["o_proj"], None)),
        num_query_groups_per_partition=GROUPS,
        config=SimpleNamespace(kv_channels=SIZE),
    )
    mlp = SimpleNamespace(
        linear_fc1=Gives((policys["gate_up"], None)), linear_fc2=Gives((policys["down"], None))
    )
    layer = SimpleNamespace(layer_number=first + 1, self_attention=attention, mlp=mlp)
    chunk = SimpleNamespace(
        embedding=SimpleNamespace(word_embeddings=Gives(states["embedding"][:, None])),
        decoder=SimpleNamespace(layers=[layer], final_layernorm=Gives(states["norm"][:, None])),
        input_of_fc2=policys["activation"].clone(),
    )
    of_engine = SimpleNamespace(
        self_attn=SimpleNamespace(
            qkv_proj=Gives((qkv, None)), attn=Gives(of("attention")), o_proj=Gives((of("o_proj"),))
        ),
        mlp=SimpleNamespace(
            gate_up_proj=Gives((of("gate_up"), None)),
            act_fn=Gives(of("activation")),
            down_proj=Gives((of("down"), None)),
        ),
    )
    engine = SimpleNamespace(
        embed_tokens=Gives(states["embedding"]),
        layers=[of_engine],
        norm=Gives((states["norm"], torch.randn(TOKENS, 8))),
    )
    return chunk, SimpleNamespace(model=engine), states


def walked(modules: Any, given: torch.Tensor) -> dict[str, torch.Tensor]:
    """What is recorded while each module computes once."""
    modules = [*modules]
    each = dict.fromkeys(module for _, module, _ in modules)
    with recorded(modules) as states:
        for module in each:
            module(given)
    given.zero_()  # what is recorded stays
    for module in each:
        module(given)
    return states


def test_policy_and_engine_have_one_name_and_one_layout_for_each_state() -> None:
    chunk, engine, states = pair()
    of_engine = walked(engine_modules(engine), torch.zeros(1))
    of_policy = walked(policy_modules(chunk), chunk.input_of_fc2)
    assert [*of_engine] == [*states] and of_policy.keys() == states.keys()
    for name, state in of_engine.items():
        assert torch.equal(state, states[name]), name
    assert differences(of_policy, of_engine) == [Difference(name, 0.0, 0.0) for name in states]


def test_a_part_of_the_layers_has_their_own_numbers() -> None:
    chunk, _, _ = pair(first=3)
    del chunk.embedding
    chunk.decoder.final_layernorm = None
    assert [name for name, _, _ in policy_modules(chunk)] == [f"3 {name}" for name in EACH]


@pytest.mark.parametrize(
    ("change", "share", "largest"),
    [
        (lambda x: x[:4], 0.0, torch.inf),
        (lambda x: torch.where(x == x.max(), x * (1 + 2**-23), x), 0.025, None),
        (lambda x: -x, 1.0, None),
    ],
)
def test_one_unit_in_the_last_place_is_a_difference(
    change: Any, share: float, largest: Any
) -> None:
    state = torch.randn(5, 8)
    (same, found) = differences(
        {"a": state, "only the policy's": state, "b": change(state)},
        {"a": state, "b": state, "only the engine's": state},
    )
    assert same == Difference("a", 0.0, 0.0)
    assert (found.name, found.share) == ("b", pytest.approx(share))
    assert found.largest == largest if largest else 0 < found.largest < 20


def test_a_nan_is_a_difference() -> None:
    state = torch.full((2, 2), torch.nan)
    (found,) = differences({"a": state}, {"a": state})
    assert found.share == 1.0
