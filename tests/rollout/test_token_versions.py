from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.rollout.response import TokenVersions, count_tokens


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
    assert [start for _, start, _ in spans] == [0, *(end for _, _, end in spans)][: len(spans)], (
        "no gaps"
    )


def test_a_request_that_had_finished_before_an_update_does_not_get_its_version():
    versions = TokenVersions()
    # its output was ready but not collected: it is no longer among the unfinished
    versions.change(4, {})
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

    processor = SimpleNamespace(
        request_states={"a-1f": state("a", 3), "b-2e": state("b", 0), "p": state("p", None)}
    )
    assert count_tokens(processor) == {"a": 3, "b": 0}
