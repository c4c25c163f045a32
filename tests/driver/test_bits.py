"""Which tokens count in the proof of exact mode, and what a step that is not exact leads to."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from openrlhf_ext.algorithms.segments import Segments
from openrlhf_ext.driver.bits import BitJudge, compared_bits, said_difference
from openrlhf_ext.exact import NotExact
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.step.batch import LogprobEntropy
from openrlhf_ext.reporting import EventLog
from openrlhf_ext.reporting.lines import read_lines
from openrlhf_ext.rollout.response import Response

VERSION = 7


def completion(actions, versions, from_guide=False) -> Response:
    tokens_S = np.arange(20, 32, dtype=np.int32)
    return Response(tokens_S, None, actions, versions, 1.0, 1.0, False, {}, from_guide)


def compared(samples, policy, engine, old=None, first=None):
    lengths = torch.tensor([sample.sampled for sample in samples])
    scored = SimpleNamespace(
        samples=samples,
        seen_before=slice(0, len(samples) if first is None else first),
        rollout=SimpleNamespace(
            rollout_logprobs=None if engine is None else torch.tensor(engine),
            segments=Segments(lengths),
        ),
    )
    logprobs_N = torch.tensor(policy)
    return compared_bits(scored, LogprobEntropy(logprobs_N, logprobs_N), VERSION)


def test_tokens_of_other_weights_of_a_guide_and_of_later_updates_do_not_count():
    samples = [
        # two turns, the weights changed within the second
        completion(((4, 6), (8, 11)), ((VERSION, 4, 10), (VERSION - 1, 10, 11))),
        completion(((5, 7),), ((VERSION, 5, 7),), from_guide=True),
        completion(((5, 7),), ()),
        completion(((9, 12),), ((VERSION, 9, 12),)),
        completion(((9, 12),), ((VERSION, 9, 12),)),
    ]
    engine = [-float(number) for number in range(1, 16)]
    policy = list(engine)
    for not_counted in (4, 5, 6, 7, 8, 12, 13, 14):
        policy[not_counted] -= 1.0
    found = compared(samples, policy, engine, first=4)
    assert (found.tokens, found.differing) == (4 + 3, 0)
    policy[3], policy[10] = policy[3] - 0.25, policy[10] - 0.5
    found = compared(samples, policy, engine, first=4)
    assert (found.tokens, found.differing) == (7, 2)
    assert (found.response, found.place) == (samples[3], 10)
    assert (found.policy, found.engine) == (engine[10] - 0.5, engine[10])
    assert found.facts["token"] == 30


def test_one_bit_and_a_number_that_is_none_differ():
    sample = [completion(((4, 6),), ((VERSION, 4, 6),))]
    near = float(np.nextafter(np.float32(-1.0), np.float32(0.0)))
    assert compared(sample, [near, -2.0], [-1.0, -2.0]).differing == 1
    found = compared(sample, [-1.5, float("nan")], [-1.0, -2.0])
    assert (found.differing, found.place) == (2, 5)


def test_nothing_is_compared_where_no_token_counts():
    old = [completion(((4, 6),), ((VERSION - 1, 4, 6),))]
    assert compared(old, [-1.0, -2.0], [-1.0, -2.0]) is None
    assert compared(old, [-1.0, -2.0], None) is None


def test_the_first_step_that_is_not_exact_ends_the_run_and_a_later_one_is_told(tmp_path, caplog):
    sample = [completion(((4, 6),), ((VERSION, 4, 6),))]
    right, wrong = (compared(sample, [-1.0, last], [-1.0, -2.0]) for last in (-2.0, -3.0))
    walked = []

    def walk(tokens):
        walked.append(tokens)
        return "it is module 'x'"

    events = EventLog(tmp_path / "events.jsonl")
    judge = BitJudge(events, walk)
    judge.judge(1, None)
    said = "in step 2 the log-probs of 1 of 2 tokens .* token 25 at place 5 .* -3.0, engine -2.0"
    with pytest.raises(NotExact, match=f"{said}\nit is module 'x'"):
        judge.judge(2, wrong)
    assert walked == [sample[0].tokens_S.tolist()]

    judge = BitJudge(events, walk)
    judge.judge(1, right)
    with caplog.at_level(logging.WARNING):
        judge.judge(2, wrong)
    assert "step 2 is not exact: the log-probs of 1 of 2 tokens" in caplog.text
    (event,) = [record for _, record in read_lines(tmp_path / "events.jsonl")]
    assert (event["event"], event["differing"], event["tokens"]) == ("not_exact", 1, 2)
    assert len(walked) == 1, "later steps cost no walk"


def test_the_module_is_looked_for_on_the_same_part_of_both_sides():
    """Two tensor-parallel ranks in two stages, and a second replica that nobody asks."""
    layout = ParallelLayout(8, tensor_parallel_size=2, pipeline_parallel_size=2)
    names = ["embedding", "0 qkv", "1 qkv", "norm"]

    def digests(part, *only):
        return {name: np.array([part, 2, 3]) for name in names if name in (only or names)}

    ranks = []
    for place in layout.places:
        own = names[:2] if place.stage == 0 else names[2:]
        ranks.append(digests(place.tensor + 10 * place.replica, *own))
    engines = {0: [digests(0), digests(1)], 2: [digests(0), digests(1)]}
    assert "all modules compute the same bits" in said_difference(layout, ranks, engines)
    engines[2][1]["1 qkv"][1] += 1
    engines[2][1]["norm"][0] += 1
    said = said_difference(layout, ranks, engines)
    assert "'1 qkv', from token 1 on (engine 2, worker 1)" in said
