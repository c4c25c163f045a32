"""vLLM's real scheduler and output processor, with log-probs that leave at a completion's end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus

from openrlhf_ext.rollout.scheduler import _Kept, _Step, ask_at_end, unpack
from tests.rollout.engine_steps import Collector, Engine, params_of
from tests.rollout.routed_engine import RoutedEngine, scenario

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
        return engine, {
            name: engine.add(name, [3] * 20, params_of(n, WAYS[name]))
            for name, n in LENGTHS.items()
        }

    yield made


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("entropies", [False, True])
def test_every_completion_gets_what_was_told_of_its_tokens(
    make, asynchronous: bool, entropies: bool
) -> None:
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
        unpack(completion, params_of(length, WAYS[name]), 20)
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


def finished(make: Any, name: str) -> CompletionOutput:
    engine, collectors = make(False)
    model = Model(entropies=False)
    while engine.scheduler.get_num_unfinished_requests():
        engine.step(model.tokens, model.logprobs)
    return collectors[name].output.outputs[0]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            lambda told: told[:-1],
            r"7 tokens and told 7 log-probs and 0 entropies of them, in 51 bytes, should be 52",
        ),
        (lambda told: None, "7 tokens and told nothing of them"),
        (lambda told: told[:10], r"7 tokens and told uint8 \(10,\) of them"),
        (
            lambda told: np.zeros((26, 3, 2), np.uint8),
            r"7 tokens and told uint8 \(26, 3, 2\) of them",
        ),
    ],
    ids=["cut", "none", "shorter than its header", "experts, by vLLM's own scheduler"],
)
def test_a_completion_whose_numbers_are_missing_is_refused(
    make, spoil: Callable, says: str
) -> None:
    completion = finished(make, "short")
    completion.routed_experts = spoil(completion.routed_experts)
    with pytest.raises(
        RuntimeError, match=f"{says}.*was it openrlhf_ext.rollout.scheduler.make_scheduler"
    ):
        unpack(completion, params_of(7, "end"), 20)


def test_a_completion_of_other_tokens_is_refused(make) -> None:
    completion = finished(make, "short")
    completion.token_ids = completion.token_ids[:-1]
    with pytest.raises(RuntimeError, match="sampled 6 tokens and told 7 log-probs"):
        unpack(completion, params_of(6, "end"), 20)


def test_log_probs_that_are_not_asked_for_flat_have_vllms_usual_form(make) -> None:
    engine, collectors = make(False)
    model, params = Model(entropies=False), params_of(7, "end")
    while engine.scheduler.get_num_unfinished_requests():
        engine.step(model.tokens, model.logprobs)
    params.flat_logprobs = False
    (completion,) = collectors["short"].output.outputs
    unpack(completion, params, 20)
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
    kept = {"two": _Kept()}
    step = _Step(told, ["one", "two", "three"], kept)
    assert step.slice_request(1, 2) is None and kept["two"].logprobs.tolist() == [-2, -3]
    assert step.slice_request(2, 1).logprobs.tolist() == [[-4]]


ROOMY, CROWDED = 1000, 14
"""Blocks of the cache."""


def routed(
    folder: Path, seed: int, ours: bool, updates: tuple[int, ...], **settings: Any
) -> tuple[RoutedEngine, dict[str, CompletionOutput]]:
    """A whole scenario, with updates of the weights before these steps, in the middle of
    requests."""
    engine, way = RoutedEngine(str(folder), ours=ours, **settings), "end" if ours else "step"
    for name, prompt, length in scenario(seed):
        engine.ask(name, prompt, params_of(length, way))
    engine.run(updates)
    completions = {name: engine.collectors[name].output.outputs[0] for name, _, _ in scenario(seed)}
    for name, prompt, length in scenario(seed):
        unpack(completions[name], params_of(length, way), len(prompt), experts=True)
    return engine, completions


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("experts", "dtype"), [(256, np.uint8), (257, np.uint16)])
@pytest.mark.parametrize(
    ("blocks", "updates"), [(ROOMY, (4, 9, 30)), (CROWDED, (4, 9, 30)), (CROWDED, ())]
)
def test_experts_come_with_log_probs_as_from_vllms_own_scheduler(
    tmp_path: Path,
    asynchronous: bool,
    experts: int,
    dtype: type,
    blocks: int,
    updates: tuple[int, ...],
) -> None:
    """Rows of a token that was sampled are those of the weights that sampled the next one."""
    seen = set()
    for seed in range(6):
        settings = {
            "asynchronous": asynchronous,
            "experts": experts,
            "blocks": blocks,
            "updates": updates,
        }
        _, stock = routed(tmp_path, seed, ours=False, **settings)
        engine, ours = routed(tmp_path, seed, ours=True, **settings)
        assert not engine.scheduler._kept
        seen |= engine.seen
        for name, prompt, _ in scenario(seed):
            mine, theirs = ours[name], stock[name]
            assert (
                list(mine.token_ids) == list(theirs.token_ids) == engine.tokens[name][len(prompt) :]
            )
            assert mine.logprobs.logprobs == theirs.logprobs.logprobs
            assert mine.routed_experts.dtype == theirs.routed_experts.dtype == dtype
            assert np.array_equal(mine.routed_experts, theirs.routed_experts)
            assert np.array_equal(mine.routed_experts, engine.truth(name, len(prompt)))
    assert seen == {"cached", "chunked", "resumed"}


def test_rows_that_do_not_fit_the_tokens_are_refused(tmp_path: Path) -> None:
    """Whoever counts a prompt otherwise than vLLM, or has it left out in part, without saying so,
    is told."""
    name, prompt, length = scenario(0)[0]
    engine = RoutedEngine(str(tmp_path), ours=True, asynchronous=False, experts=8, blocks=ROOMY)
    params = params_of(length, "end")
    engine.ask(name, prompt, params)
    engine.run()
    (completion,) = engine.collectors[name].output.outputs
    rows = len(prompt) + length - 1
    with pytest.raises(
        RuntimeError,
        match=f"told {rows} rows of routed experts, should be {rows + 1}: of {len(prompt) + 1}",
    ):
        unpack(completion, params, len(prompt) + 1, experts=True)


@pytest.mark.parametrize("way", ["end", "step"])
def test_rows_of_the_first_tokens_of_a_prompt_may_be_left_out(tmp_path: Path, way: str) -> None:
    prompt = [3] * 40
    engine = RoutedEngine(str(tmp_path), ours=True, asynchronous=False, experts=8, blocks=ROOMY)
    params = params_of(6, way)
    params.routed_experts_prompt_start = 17
    engine.ask("a", prompt, params)
    engine.run()
    (completion,) = engine.collectors["a"].output.outputs
    unpack(completion, params, 40, experts=True)
    assert np.array_equal(completion.routed_experts, engine.truth("a", 40)[17:])
