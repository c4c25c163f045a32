"""Numbers about examples are what they should be, and another mask, order, or held-out set changes
them."""

from __future__ import annotations

import numpy as np
import pytest

from openrlhf_ext.megatron.step.batch import SequenceBatch, sequence_batch
from openrlhf_ext.sft.gauges import ExampleGauges, known_fraction

END, LINE = 2, 9


def examples_of(*rows: tuple[list[int], list[tuple[int, int]]]) -> SequenceBatch:
    return sequence_batch(
        [np.array(ids, np.int32) for ids, _ in rows], [ranges for _, ranges in rows]
    )


CHATS = examples_of(
    # a line end behind an answer that is not the last
    ([1, 5, 6, END, LINE, 7, 8, END], [(2, 5), (6, 8)]),
    ([1, 5, 6, END], [(2, 4)]),
    ([1, 4, 4, 4], [(3, 3)]),  # nothing is left of its answer
)


def test_answers_end_where_an_end_token_is_trained():
    gauges = ExampleGauges(CHATS, 3, {END})
    assert gauges.step(0, [0, 1])["answers/ended"] == 1.0
    assert "answers/ended" not in gauges.step(1, [2]), "there is no answer"
    masked = examples_of(
        ([1, 5, 6, END, LINE, 7, 8, END], [(2, 3), (6, 8)]), ([1, 5, 6, END], [(2, 3)])
    )
    assert ExampleGauges(masked, 3, {END}).step(0, [0, 1])["answers/ended"] == pytest.approx(1 / 3)
    assert ExampleGauges(CHATS, 3, {END + 1}).step(0, [0, 1])["answers/ended"] == 0.0, (
        "another end token"
    )


def test_sizes_are_of_all_examples_whatever_the_step_has():
    gauges = ExampleGauges(CHATS, 3, {END})
    for step, rows in enumerate(([0], [1], [2])):
        got = gauges.step(step, rows)
        assert got["examples/length_mean"] == pytest.approx(16 / 3)
        assert got["examples/trained_mean"] == pytest.approx(7 / 3)


def test_examples_are_repeated_within_a_pass_only():
    gauges = ExampleGauges(CHATS, 2, {END})
    counts = [
        gauges.step(step, rows)["examples/repeated"]
        for step, rows in enumerate(([0, 1], [2], [1, 2], [1, 0], [0, 0]))
    ]
    assert counts == [0.0, 0.0, 0.0, 1.0, 1.0], "of steps of three passes; the last has one twice"


def test_a_run_that_goes_on_knows_what_was_trained():
    before = ExampleGauges(CHATS, 2, {END})
    before.step(0, [0, 1])
    after, other = (
        ExampleGauges(CHATS, 2, {END}, before.trained),
        ExampleGauges(CHATS, 2, {END}, None),
    )
    assert after.step(1, [0, 2])["examples/repeated"] == 1.0, "the examples began anew"
    assert other.step(1, [0, 2])["examples/repeated"] == 0.0, "an earlier release does not tell"
    assert not before.trained[2], "a copy"


def test_held_out_examples_that_are_trained_are_counted():
    held_out = examples_of(([1, 5, 6, END], [(2, 4)]), ([1, 5, 6, 6], [(2, 4)]))
    assert known_fraction(held_out, CHATS) == 0.5
    assert known_fraction(held_out.select([1]), CHATS) == 0.0
    assert known_fraction(CHATS, CHATS) == 1.0
