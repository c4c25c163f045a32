"""Seeds of requests, and which weights the tokens of a response come from."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.rollout.response import (
    ROUTING_KEY,
    SPANS_KEY,
    Response,
    ResponseRecorder,
    RolloutError,
    derived_seed,
)

seeds = st.integers(0, 2**63 - 1)


@given(st.lists(seeds, min_size=1, max_size=4), st.lists(seeds, min_size=1, max_size=4))
def test_other_numbers_give_another_seed_and_the_same_ones_the_same(
    one: list[int], other: list[int]
) -> None:
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
        completion = SimpleNamespace(token_ids=tokens, weight_versions=spans, routed_experts=None)
        return SimpleNamespace(outputs=[completion])


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


@pytest.mark.parametrize(
    "response", [None, {"text": "x"}, {"observation_tokens": [1], "action_ranges": [(0, 1)]}]
)
def test_responses_of_another_form_or_without_a_request_are_left_alone(response):
    engine = Engine(([5], [(0, 0, 1)]))
    expected = dict(response) if isinstance(response, dict) else response
    calls = 0 if response and "action_ranges" in response else 1
    assert record(engine, response, calls) == expected


class Router:
    """An engine that tells of each token but the last, as its experts, how many tokens there are up
    to it and their sum; and of the first ones of a prompt only if it is asked to."""

    def __init__(self, *completions: list[int]) -> None:
        self.completions, self.asked = list(completions), []

    async def generate(self, prompt: list[int], params: Any) -> Any:
        self.asked.append(params.routed_experts_prompt_start)
        tokens = self.completions.pop(0)
        completion = SimpleNamespace(
            token_ids=tokens,
            weight_versions=[(1, 0, len(tokens))],
            routed_experts=rows_of([*prompt, *tokens])[params.routed_experts_prompt_start : -1],
        )
        return SimpleNamespace(outputs=[completion])


def rows_of(tokens: list[int]) -> np.ndarray:
    counts = np.arange(1, len(tokens) + 1)
    return np.stack([counts, np.cumsum(tokens)], 1)[:, None].astype(np.uint8)


class Params(SimpleNamespace):
    def clone(self) -> Params:
        return Params(**vars(self))


def routed(
    turns: list[tuple[list[int], list[int]]], tokens: list[int], max_len: int = 99
) -> tuple[Response, list[int]]:
    """The response of these tokens after requests of (prompt, completion); where the prompts' rows
    were asked from."""

    async def run() -> Any:
        router = Router(*(said for _, said in turns))
        recorder = ResponseRecorder(router)
        for prompt, _ in turns:
            await recorder.generate(prompt, Params(seed=None, routed_experts_prompt_start=0))
        response = {
            "observation_tokens": tokens,
            "action_ranges": [(2, len(tokens))],
            "rollout_log_probs": None,
            "reward": 1.0,
            "scores": 1.0,
            "extra_logs": {},
        }
        annotated = recorder.annotate(response)
        assert ROUTING_KEY in annotated
        return Response.of_agent(annotated, max_len), router.asked

    return asyncio.run(run())


def test_rows_of_a_turn_go_on_where_those_of_the_last_one_ended():
    first, feedback, second = [5, 6, 7], [8, 9, 10], [11, 12]
    response, asked = routed(
        [([1, 2], first), ([1, 2, *first, *feedback], second)], [1, 2, *first, *feedback, *second]
    )
    assert np.array_equal(response.experts_RLK, rows_of(response.tokens_S.tolist())[:-1])
    assert asked == [0, 4], "of the token that the first turn ended with, and what follows"


def test_what_was_written_behind_the_last_action_has_no_rows():
    response, _ = routed([([1, 2], [5, 6])], [1, 2, 5, 6, 20, 21])
    assert np.array_equal(response.experts_RLK, rows_of([1, 2, 5, 6])[:-1])


@pytest.mark.parametrize(("max_len", "rows"), [(5, 4), (6, 5), (7, 5), (99, 5)])
def test_rows_are_cut_with_the_tokens(max_len: int, rows: int):
    response, _ = routed([([1, 2], [5, 6, 7, 8])], [1, 2, 5, 6, 7, 8, 20, 21], max_len)
    assert np.array_equal(response.experts_RLK, rows_of([1, 2, 5, 6, 7, 8])[:rows])


@pytest.mark.parametrize(
    ("turns", "tokens", "rows"),
    [
        ([([1, 2], [5, 6, 7])], [1, 2, 5, 9, 7], 3),
        ([([1, 2], [5, 6]), ([1, 2, 5, 9, 3], [4, 4])], [1, 2, 5, 9, 3, 4, 4], 6),
        ([([1, 2], [5, 6]), ([1, 2], [7, 8])], [1, 2, 7, 8], 3),
        ([([1, 2], [5, 6]), ([1, 2], [7, 8]), ([1, 2, 5, 6], [3])], [1, 2, 5, 6, 3], 4),
        ([([1, 2, 3, 4], [5]), ([1, 2], [7, 8])], [1, 2, 7, 8], 3),
        ([([9, 9, 9], [5]), ([1, 2], [7, 8])], [1, 2, 7, 8], 3),
    ],
    ids=[
        "altered",
        "altered, and gone on with",
        "sampled twice",
        "a branch left",
        "a longer prompt before",
        "another text before",
    ],
)
def test_rows_are_of_what_the_engine_has_seen(turns: list, tokens: list[int], rows: int):
    response, _ = routed(turns, tokens)
    assert np.array_equal(response.experts_RLK, rows_of(tokens)[:rows])


words = st.lists(st.integers(0, 3), min_size=1, max_size=6)


@given(prompt=words, turns=st.lists(st.tuples(words, words), min_size=1, max_size=5))
def test_rows_of_any_conversation_have_no_hole(
    prompt: list[int], turns: list[tuple[list[int], list[int]]]
) -> None:
    """(what the policy says, what the environment answers) at each turn."""
    requests, tokens = [], prompt
    for said, answered in turns:
        requests.append((tokens, said))
        tokens = [*tokens, *said, *answered]
    tokens = tokens[: -len(turns[-1][1])]
    response, asked = routed(requests, tokens)
    assert np.array_equal(response.experts_RLK, rows_of(tokens)[:-1])
    assert asked == [0] + [len(request) + len(said) - 1 for request, said in requests[:-1]]


def test_a_receipt_binds_a_reward_to_its_tokens():
    answer = {
        "observation_tokens": [1, 2, 3],
        "action_ranges": [(1, 3)],
        "rollout_log_probs": None,
        "reward": 0.5,
        "scores": 1.0,
        "extra_logs": {},
    }
    made = Response.of_agent(answer, max_len=8)
    made.check_reward()
    dataclasses.replace(made, score=0.0, extra_logs={"x": 1.0}).check_reward()
    for other in (
        {"reward": 0.25},
        {"tokens_S": made.tokens_S[::-1]},
        {"tokens_S": made.tokens_S[:2]},
    ):
        with pytest.raises(RolloutError, match="not the one that it was graded with"):
            dataclasses.replace(made, **other).check_reward()
    dataclasses.replace(made, reward=0.25, receipt=None).check_reward()  # a reward model's
    spoiled = dataclasses.replace(made, logprobs_T=np.array([-1.0, np.nan], np.float32))
    with pytest.raises(RolloutError, match="log-probs that are not finite"):
        spoiled.check_logprobs()
