"""vLLM's real scheduler and output processor, with log-probs that leave at a completion's end."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from vllm.logprobs import Logprob
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus

from benchmarks import record
from benchmarks.engine_side import RESULT, SCHEDULING
from benchmarks.engine_steps import Collector, Engine, params_of
from openrlhf_ext.rollout.scheduler import _Step, ask_at_end, unpack

LENGTHS = {"long": 40, "short": 7, "stepwise": 12, "silent": 9}
WAYS = {"long": "end", "short": "end", "stepwise": "step", "silent": "none"}


class Model:
    """Samples made-up tokens, and remembers of each request what it told."""

    def __init__(self, entropies: bool) -> None:
        self.told: dict[str, list[tuple[float, float]]] = {name: [] for name in LENGTHS}
        self._random, self._kind = np.random.default_rng(0), np.float32 if entropies else np.int64

    def tokens(self, names: list[str]) -> list[list[int]]:
        return [[7] for _ in names]

    def logprobs(self, names: list[str]) -> LogprobsLists:
        logprobs = -self._random.random((len(names), 1), dtype=np.float32)
        ranks = (9 * self._random.random(len(names))).astype(self._kind)
        for name, logprob, rank in zip(names, logprobs[:, 0].tolist(), ranks.tolist(), strict=True):
            self.told[name].append((logprob, rank))
        return LogprobsLists(np.full((len(names), 1), 7, np.int32), logprobs, ranks)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[bool], tuple[Engine, dict[str, Collector]]]]:
    def made(asynchronous: bool) -> tuple[Engine, dict[str, Collector]]:
        engine = Engine(str(tmp_path), 8, asynchronous)
        return engine, {name: engine.add(name, [3] * 20, params_of(n, WAYS[name])) for name, n in LENGTHS.items()}

    yield made


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("entropies", [False, True])
def test_every_completion_gets_what_was_told_of_its_tokens(make, asynchronous: bool, entropies: bool) -> None:
    engine, collectors = make(asynchronous)
    model, steps = Model(entropies), 0
    while engine.scheduler.get_num_unfinished_requests():
        engine.step(model.tokens, model.logprobs)
        steps += 1
        if steps == 5:  # as a weight sync does in the middle of requests
            assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert not engine.scheduler._kept
    for name, length in LENGTHS.items():
        (completion,) = collectors[name].output.outputs
        unpack(completion, params_of(length, WAYS[name]))
        assert len(completion.token_ids) == length
        if WAYS[name] == "none":
            assert completion.logprobs is None
            continue
        logprobs, ranks = zip(*model.told[name], strict=True)
        assert completion.logprobs.logprobs == [*logprobs]
        assert completion.logprobs[3][7].logprob == logprobs[3]
        if WAYS[name] == "step" or entropies:
            assert completion.logprobs.ranks == [*ranks]
        assert completion.routed_experts is None


def test_an_aborted_request_leaves_nothing_behind(make) -> None:
    engine, _ = make(False)
    model = Model(entropies=False)
    engine.step(model.tokens, model.logprobs)
    engine.scheduler.finish_requests(["long"], RequestStatus.FINISHED_ABORTED)
    assert set(engine.scheduler._kept) == {"short"}


def test_a_completion_whose_logprobs_are_missing_is_refused(make) -> None:
    engine, collectors = make(False)
    model = Model(entropies=False)
    while engine.scheduler.get_num_unfinished_requests():
        engine.step(model.tokens, model.logprobs)
    (completion,) = collectors["short"].output.outputs
    completion.routed_experts = completion.routed_experts[:-1]
    with pytest.raises(RuntimeError, match="7 tokens and told 6 log-probs"):
        unpack(completion, params_of(7, "end"))


def test_log_probs_that_are_not_asked_for_flat_have_vllms_usual_form(make) -> None:
    engine, collectors = make(False)
    model, params = Model(entropies=False), params_of(7, "end")
    while engine.scheduler.get_num_unfinished_requests():
        engine.step(model.tokens, model.logprobs)
    params.flat_logprobs = False
    (completion,) = collectors["short"].output.outputs
    unpack(completion, params)
    assert completion.logprobs == [{7: Logprob(logprob)} for logprob, _ in model.told["short"]]


def test_stop_strings_end_a_request_elsewhere() -> None:
    params = params_of(4, "step")
    params.stop = ["x"]
    ask_at_end(params)
    assert params.extra_args is None


def test_rows_of_several_tokens_a_step() -> None:
    """Speculative decoding: the second request has two rows."""
    values = -np.arange(1, 5, dtype=np.float32)[:, None]
    told = LogprobsLists(np.zeros((4, 1), np.int32), values, np.ones(4), [0, 1, 3])
    kept = {"two": (array("f"), array("f"))}
    step = _Step(told, ["one", "two", "three"], kept)
    assert step.slice_request(1, 2) is None and kept["two"][0].tolist() == [-2, -3]
    assert step.slice_request(2, 1).logprobs.tolist() == [[-4]]


def test_all_but_vllms_scheduling_takes_at_most_4_microseconds_a_token() -> None:
    """As measured (benchmarks/engine_side.py)."""
    ways = record.load(RESULT.name)["microseconds"]
    scheduling = sum(ways["none"][part] for part in SCHEDULING)
    assert sum(ways["end"].values()) - scheduling <= 4 < sum(ways["step"].values()) - scheduling
