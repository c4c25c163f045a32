from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.rollout.response import SPANS_KEY, ResponseRecorder
from openrlhf_ext.rollout.token_versions import TokenVersions, count_tokens


@given(
    begun=st.integers(0, 5),
    steps=st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=8),
)
def test_spans_say_what_an_observer_of_every_token_would(begun, steps):
    """Tokens arrive in small runs; after some of them the weights change."""
    versions, version, observed = TokenVersions(), begun, []
    for tokens, changes in steps:
        observed += [version] * tokens
        if changes:
            version += 1
            versions.change(version, {"r": len(observed), "other": 3})
    spans = versions.take("r", begun, len(observed))
    assert [v for v, start, end in spans for _ in range(start, end)] == observed
    assert all(end > start for _, start, end in spans)
    assert [start for _, start, _ in spans] == [0, *(end for _, _, end in spans)][: len(spans)], "no gaps"


def test_a_request_that_had_finished_before_an_update_does_not_get_its_version():
    versions = TokenVersions()
    versions.change(4, {})  # its output was ready but not collected: it is no longer among the unfinished
    assert versions.take("done", begun_with=3, num_tokens=7) == [(3, 0, 7)]


def test_a_request_is_forgotten_once_taken():
    versions = TokenVersions()
    versions.change(1, {"r": 2})
    assert versions.take("r", 0, 5) == [(0, 0, 2), (1, 2, 5)]
    assert versions.take("r", 1, 5) == [(1, 0, 5)]


def test_counts_are_by_the_id_the_request_was_made_with():
    def state(name: str, count: int | None) -> Any:
        detokenizer = None if count is None else SimpleNamespace(num_output_tokens=lambda: count)
        return SimpleNamespace(external_req_id=name, detokenizer=detokenizer)

    processor = SimpleNamespace(request_states={"a-1f": state("a", 3), "b-2e": state("b", 0), "p": state("p", None)})
    assert count_tokens(processor) == {"a": 3, "b": 0}


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
