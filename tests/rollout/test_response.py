"""Seeds of requests, and which weights the tokens of a response come from."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.rollout.response import SPANS_KEY, ResponseRecorder, derived_seed

seeds = st.integers(0, 2**63 - 1)


@given(st.lists(seeds, min_size=1, max_size=4), st.lists(seeds, min_size=1, max_size=4))
def test_other_numbers_give_another_seed_and_the_same_ones_the_same(one: list[int], other: list[int]) -> None:
    assert (derived_seed(*one) == derived_seed(*other)) == (one == other)
    assert 0 <= derived_seed(derived_seed(*one), 3) < 2**63


def test_seeds_do_not_change_with_a_release() -> None:
    assert derived_seed(1, 0) == 5983670273984330465


class Engine:
    """Gives out prepared completions."""

    name = "engine"

    def __init__(self, *completions: tuple[list[int], list[tuple[int, int, int]]]) -> None:
        self.completions = list(completions)

    async def generate(self, prompt: Any, params: Any) -> Any:
        tokens, spans = self.completions.pop(0)
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, weight_versions=spans)])


def record(engine: Engine, response: Any, calls: int) -> Any:
    async def run() -> Any:
        recorder = ResponseRecorder(engine)
        assert recorder.name == "engine"
        for _ in range(calls):
            await recorder.generate("prompt", SimpleNamespace(seed=None))
        return recorder.annotate(response)

    return asyncio.run(run())


def test_spans_of_several_turns_are_moved_to_their_places():
    engine = Engine(([5, 6, 7], [(1, 0, 2), (2, 2, 3)]), ([8, 9], [(3, 0, 2)]))
    response = {"observation_tokens": [0, 5, 6, 7, 1, 1, 8, 9], "action_ranges": [(1, 4), (6, 8)]}
    assert record(engine, response, 2)[SPANS_KEY] == [(1, 1, 3), (2, 3, 4), (3, 6, 8)]


@pytest.mark.parametrize(
    ("tokens", "spans"),
    [([5, 6], [(1, 1, 3)]), ([5, 6, 7], [(1, 1, 3), (2, 3, 4)]), ([5, 9], [(1, 1, 3)])],
    ids=["cut short", "whole", "altered: the oldest counts"],
)
def test_actions_that_are_not_what_was_sampled(tokens, spans):
    engine = Engine(([5, 6, 7], [(1, 0, 2), (2, 2, 3)]))
    response = {"observation_tokens": [0, *tokens], "action_ranges": [(1, 1 + len(tokens))]}
    assert record(engine, response, 1)[SPANS_KEY] == spans


@pytest.mark.parametrize("response", [None, {"text": "x"}, {"observation_tokens": [1], "action_ranges": [(0, 1)]}])
def test_responses_of_another_form_or_without_a_request_are_left_alone(response):
    engine = Engine(([5], [(0, 0, 1)]))
    expected = dict(response) if isinstance(response, dict) else response
    calls = 0 if response and "action_ranges" in response else 1
    assert record(engine, response, calls) == expected
