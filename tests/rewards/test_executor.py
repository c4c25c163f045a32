from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openrlhf_ext.rewards import (
    FailurePolicy,
    GradedSingleTurnExecutor,
    RewardFailureLimit,
    RewardImportError,
    RewardRaised,
    RewardResult,
    RewardSettings,
    make_executor,
)

REWARD_FILE = """
def reward_func(queries, prompts, labels, **kwargs):
    completion = queries[0][len(prompts[0]):]
    if "!" in completion:
        raise ValueError("cannot parse")
    correct = float(labels[0] in completion)
    return {"rewards": correct + 0.5, "scores": correct, "extra_logs": {"length": len(completion)}}
"""


class CharTokenizer:
    """One token per character; ``$`` stands for the end-of-sequence token."""

    def __call__(self, text: str, add_special_tokens: bool, return_tensors: str) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[ord(c) for c in text]])}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(map(chr, ids))


@dataclass
class Sampling:
    max_tokens: int = 16
    logprobs: int | None = 1


@dataclass
class FakeEngine:
    """Answers each prompt with the next completion, as vLLM's request output."""

    completions: list[str]
    delay_s: float = 0.0
    prompts: list[list[int]] = field(default_factory=list)

    async def generate(self, prompt_ids: list[int], params: Sampling, multi_modal_data: Any = None) -> SimpleNamespace:
        self.prompts.append(prompt_ids)
        ids = [ord(c) for c in self.completions.pop(0)]
        await asyncio.sleep(self.delay_s)
        logprobs = [{i: SimpleNamespace(logprob=-0.25)} for i in ids]
        stopped = "stop" if ids[-1] == ord("$") else "length"
        output = SimpleNamespace(token_ids=ids, text="", finish_reason=stopped, logprobs=logprobs)
        return SimpleNamespace(outputs=[output])


class FakeGrader:
    """Grades with a Python function, after a pause."""

    def __init__(self, function: Callable[[str], dict[str, float]], delay_s: float = 0.0) -> None:
        self.function, self.delay_s, self.started = function, delay_s, 0

    def start(self) -> None:
        self.started += 1

    async def grade(self, query: str, prompt: str, label: str) -> RewardResult:
        await asyncio.sleep(self.delay_s)
        return RewardResult(1.0, 1.0, self.function(query))

    async def aclose(self) -> None: ...


def execute_all(executor: GradedSingleTurnExecutor, engine: FakeEngine, count: int) -> list[Any]:
    async def run() -> list[Any]:
        tasks = [
            executor.execute("2+2=", "4", Sampling(), 64, CharTokenizer(), engine) for _ in range(count)
        ]  # fmt: skip
        return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(run())


@pytest.fixture
def reward_path(tmp_path: Path) -> Path:
    path = tmp_path / "reward.py"
    path.write_text(REWARD_FILE)
    return path


def graded_run(reward_path: Path, completions: list[str], **settings: float) -> tuple[list[Any], dict[str, float]]:
    factory = make_executor(RewardSettings(remote_url=str(reward_path), num_workers=1, **settings))
    executor = pickle.loads(pickle.dumps(factory))()
    try:
        outputs = execute_all(executor, FakeEngine(list(completions)), len(completions))
        return outputs, executor.grading_stats()
    finally:
        asyncio.run(executor.aclose())


def test_output_is_upstreams_with_the_grade_filled_in(reward_path: Path) -> None:
    (output,), stats = graded_run(reward_path, ["4$"])
    assert output["observation_tokens"] == [ord(c) for c in "2+2=4$"]
    assert output["action_ranges"] == [(4, 6)]
    assert output["rollout_log_probs"] == [0.0] * 4 + [-0.25] * 2
    assert (output["prompt"], output["label"], output["truncated"]) == ("2+2=", "4", False)
    assert (output["reward"], output["scores"]) == (1.5, 1.0)
    assert output["extra_logs"] == {"length": 2.0, "reward_failed": 0.0}
    assert (stats["calls"], stats["failures"]) == (1, 0)


def test_a_failure_is_logged_counted_and_never_none(reward_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    outputs, stats = graded_run(reward_path, ["4$", "!$", "5$"], failure_value=-1.0)
    assert [output["reward"] for output in outputs] == [1.5, -1.0, 0.5]
    assert [output["scores"] for output in outputs] == [1.0, 0.0, 0.0]
    assert [output["extra_logs"]["reward_failed"] for output in outputs] == [0.0, 1.0, 0.0]
    assert stats["failures"] == 1
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    for part in ("ValueError: cannot parse", "'2+2='", "'!$'"):
        assert part in record.getMessage()


def test_a_failure_before_the_first_grade_waits_for_the_keys(reward_path: Path) -> None:
    outputs, _ = graded_run(reward_path, ["!$", "!$", "4$"])
    assert {frozenset(output["extra_logs"]) for output in outputs} == {frozenset({"length", "reward_failed"})}


def test_failures_alone_do_not_wait_for_ever(reward_path: Path) -> None:
    outputs, _ = graded_run(reward_path, ["!$", "!$"])
    assert [output["extra_logs"] for output in outputs] == [{"reward_failed": 1.0}] * 2


def test_the_run_stops_after_too_many_failures(reward_path: Path) -> None:
    outputs, _ = graded_run(reward_path, ["4$", "!$", "!$", "!$"], max_failures=2)
    assert outputs[0]["reward"] == 1.5
    (error,) = [output for output in outputs if isinstance(output, Exception)]
    assert isinstance(error, RewardFailureLimit)
    for part in ("3 samples", "tolerates 2", "--reward.max_failures", "cannot parse", "'!$'"):
        assert part in str(error)


def test_a_broken_reward_file_stops_the_run_at_once(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text("import no_such_package")
    outputs, stats = graded_run(path, ["4$"])
    assert isinstance(outputs[0], RewardImportError) and "no_such_package" in str(outputs[0])
    assert stats["failures"] == 0


def test_changing_log_keys_are_a_failure_that_names_them() -> None:
    keys = iter([{"a": 1.0}, {"b": 1.0}])
    executor = GradedSingleTurnExecutor(FakeGrader(lambda _: next(keys)), FailurePolicy(0))
    first, second = execute_all(executor, FakeEngine(["4$", "4$"]), 2)
    assert first["extra_logs"] == {"a": 1.0, "reward_failed": 0.0}
    assert isinstance(second, RewardFailureLimit)
    assert "Missing: ['a']; new: ['b']" in str(second)


def test_exposed_time_is_the_grading_after_generation() -> None:
    executor = GradedSingleTurnExecutor(FakeGrader(lambda _: {}, delay_s=0.2), FailurePolicy(0))
    execute_all(executor, FakeEngine(["4$"] * 4, delay_s=0.1), 4)
    stats = executor.grading_stats(reset=True)
    assert stats["calls"] == 4
    assert 0.19 < stats["exposed_seconds"] <= stats["busy_seconds"]
    assert executor.grading_stats() == {"calls": 0, "failures": 0, "busy_seconds": 0.0, "exposed_seconds": 0.0}


def test_resetting_the_statistics_does_not_reset_the_limit() -> None:
    def fail(_: str) -> dict[str, float]:
        raise RewardRaised("no")

    executor = GradedSingleTurnExecutor(FakeGrader(fail), FailurePolicy(1))
    assert execute_all(executor, FakeEngine(["4$"]), 1)[0]["reward"] == 0.0
    assert executor.grading_stats(reset=True)["failures"] == 1
    assert executor.grading_stats()["failures"] == 0
    assert isinstance(execute_all(executor, FakeEngine(["4$"]), 1)[0], RewardFailureLimit)


def test_sampling_parameters_are_not_changed() -> None:
    sampling = Sampling()
    before = deepcopy(sampling)
    executor = GradedSingleTurnExecutor(FakeGrader(lambda _: {}), FailurePolicy(0))
    asyncio.run(executor.execute("2+2=", "4", sampling, 64, CharTokenizer(), FakeEngine(["4$"])))
    assert sampling == before


def test_a_wrong_address_fails_before_any_engine_starts() -> None:
    with pytest.raises(ValueError, match="--reward.remote_url"):
        make_executor(RewardSettings(remote_url="reward.txt"))
