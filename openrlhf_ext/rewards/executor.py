"""Executors that cannot lose a reward, and OpenRLHF's single-turn executor as one of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from openrlhf_ext.compat import SingleTurnAgentExecutor
from openrlhf_ext.rewards.clock import GradingClock
from openrlhf_ext.rewards.errors import RewardError, RewardInvalid
from openrlhf_ext.rewards.failures import FailurePolicy
from openrlhf_ext.rewards.grader import Grader, RewardSettings, open_grader
from openrlhf_ext.rewards.result import RewardResult

FAILED_KEY = "reward_failed"
_KEYS_WAIT_S = 60.0
_KEYS_POLL_S = 0.02


class GradedExecutor:
    """What every sample leaves with: a finite reward, and the same keys in ``extra_logs``.

    A sample that cannot be graded gets ``failures.failure_value``, score 0 and ``extra_logs["reward_failed"] = 1``,
    until the policy stops the run. Upstream batches ``extra_logs``, so all have ``reward_failed`` and the keys of the
    first graded sample. A later answer with other keys is a ``RewardInvalid``; a failed sample has 0 there.

    Args:
        failures: what happens to samples that cannot be graded.
    """

    def __init__(self, failures: FailurePolicy) -> None:
        self._failures = failures
        self._clock = GradingClock()
        self._log_keys: frozenset[str] | None = None

    def take_failures(self) -> list[str]:
        """Messages of the gradings that failed since the last call."""
        return self._failures.take_messages()

    async def _settle(
        self,
        grading: Awaitable[RewardResult],
        prompt: str,
        completion: Callable[[], str],
        label: Any,
    ) -> RewardResult:
        """The sample's grade, or what takes its place."""
        try:
            result = await grading
            self._check_log_keys(result, prompt, completion, label)
        except RewardError as error:
            self._failures.tolerate(error)
            keys = await self._known_log_keys()
            return RewardResult(self._failures.failure_value, 0.0, {**dict.fromkeys(keys, 0.0), FAILED_KEY: 1.0})
        return RewardResult(result.reward, result.score, {**result.extra_logs, FAILED_KEY: 0.0}, result.seconds)

    def _check_log_keys(self, result: RewardResult, prompt: str, completion: Callable[[], str], label: Any) -> None:
        keys = frozenset(result.extra_logs)
        if self._log_keys is None:
            self._log_keys = keys
        if keys != self._log_keys:
            raise RewardInvalid(
                "the reward came with extra_logs of other keys than before: every sample needs the same ones. "
                f"Missing: {sorted(self._log_keys - keys)}; new: {sorted(keys - self._log_keys)}",
                prompt, completion(), label,
            )  # fmt: skip

    async def _known_log_keys(self) -> frozenset[str]:
        """The keys of ``extra_logs``; waits for the first graded sample while one may still come."""
        deadline = time.monotonic() + _KEYS_WAIT_S
        while self._log_keys is None and self._clock.active and time.monotonic() < deadline:
            await asyncio.sleep(_KEYS_POLL_S)
        return self._log_keys or frozenset()


class GradedSingleTurnExecutor(GradedExecutor, SingleTurnAgentExecutor):
    """Generates as OpenRLHF 0.11.2 does, and grades through a :class:`Grader` under a :class:`FailurePolicy`.

    Upstream swallows a failing reward call and goes on with a reward of ``None``.

    Args:
        grader: where samples are graded; started here.
        failures: what happens to samples that cannot be graded.
    """

    def __init__(self, grader: Grader, failures: FailurePolicy) -> None:
        SingleTurnAgentExecutor.__init__(self, remote_rm_url=None)
        GradedExecutor.__init__(self, failures)
        self._grader = grader
        self._calls = 0
        self._failed_before_reset = 0
        grader.start()

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """Generate and grade one sample; arguments and result as upstream's ``execute``.

        Raises:
            RewardFailureLimit: more samples failed than the run tolerates.
            RewardImportError: the user's reward file cannot be used.
        """
        with self._clock.generating():
            output = await super().execute(
                prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=images
            )
        query = hf_tokenizer.decode(output["observation_tokens"], skip_special_tokens=False)
        result = await self._settle(
            self._grade(query, prompt, label), prompt, lambda: query.removeprefix(prompt), label
        )
        output.update(reward=result.reward, scores=result.score, extra_logs=result.extra_logs)
        return output

    def grading_stats(self, reset: bool = False) -> dict[str, float]:
        """Calls, failures and wall seconds of grading since the last reset.

        Args:
            reset: start counting anew. The failures counted against the limit of the run are not reset.

        Returns:
            ``calls``, ``failures``, ``busy_seconds`` (at least one sample being graded) and ``exposed_seconds`` (and
            none being generated in this executor).
        """
        stats = {
            "calls": self._calls,
            "failures": self._failures.count - self._failed_before_reset,
            "busy_seconds": self._clock.busy_seconds,
            "exposed_seconds": self._clock.exposed_seconds,
        }
        if reset:
            self._calls, self._failed_before_reset = 0, self._failures.count
            self._clock.reset()
        return stats

    async def aclose(self) -> None:
        """Release the grader's processes and connections."""
        await self._grader.aclose()

    async def _grade(self, query: str, prompt: str, label: Any) -> RewardResult:
        self._calls += 1
        with self._clock.grading():
            return await self._grader.grade(query, prompt, label)


def make_executor(settings: RewardSettings) -> Callable[[], GradedSingleTurnExecutor]:
    """A picklable factory that builds the executor inside the rollout engine's process.

    Raises:
        ValueError: see :func:`open_grader`.
    """
    open_grader(settings)  # a wrong address fails here, not inside a Ray actor
    return partial(_build_executor, settings)


def _build_executor(settings: RewardSettings) -> GradedSingleTurnExecutor:
    policy = FailurePolicy(settings.max_failures, settings.failure_value)
    return GradedSingleTurnExecutor(open_grader(settings), policy)
