"""Grades of sampled completions, and which of them vote for the same answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from openrlhf_ext import rewards
from openrlhf_ext.rewards.answers import extract_answer, normalized, surely_different
from openrlhf_ext.rewards.grading import FailurePolicy, Grader, RewardError, RewardResult

logger = logging.getLogger(__name__)
MATHS = str(Path(rewards.__file__).with_name("maths.py"))
"""The benchmarks' reward function: mathematical equality."""
SOLVED = 1.0
"""A completion is correct when its score reaches this."""
_IN_FLIGHT_PER_WORKER = 4  # enough to keep the workers busy; waiting samples would run into the pool's queue deadline


class Grading:
    """Grades and groups completions through one grader.

    Args:
        grader: where samples are graded; started and closed by the caller.
        policy: how many may fail. A completion that is not graded is wrong.
        by_equality: the grader compares the label, taken as an answer, with the stated answer, so that it can also tell
            which wrong answers are equal; else answers are equal if their normalized texts are.
    """

    def __init__(self, grader: Grader, policy: FailurePolicy, num_workers: int, *, by_equality: bool) -> None:
        self._grader, self._policy, self._by_equality = grader, policy, by_equality
        self._in_flight = asyncio.Semaphore(_IN_FLIGHT_PER_WORKER * num_workers)

    async def grade(self, query: str, prompt: str, label: Any, completion: str) -> RewardResult | RewardError:
        """The grade of one completion (arguments as of ``Grader.grade``), or why it cannot be graded.

        Raises:
            RewardFailureLimit: more failed than are tolerated.
        """
        async with self._in_flight:
            try:
                return await self._grader.grade(query, prompt, label, completion)
            except RewardError as error:
                self._policy.tolerate(error)
                return error

    async def votes(self, texts: Sequence[str], correct: Sequence[bool]) -> list[int | None]:
        """For each completion of a problem the number of the answer it votes for; ``None``: it states none.

        All correct answers are one, since each equals the label. Wrong ones are compared with the first of each group.
        """
        return await group_votes(texts, correct, self._equal if self._by_equality else _never)

    async def _equal(self, first: str, second: str) -> bool:
        if surely_different(first, second):
            return False
        async with self._in_flight:
            try:
                result = await self._grader.grade(f"<answer>{second}</answer>", "", f"<answer>{first}</answer>")
            except RewardError as error:
                logger.warning("two answers could not be compared and count as different: %s", error)
                return False
        return result.score >= SOLVED


async def group_votes(
    texts: Sequence[str], correct: Sequence[bool], equal: Callable[[str, str], Awaitable[bool]]
) -> list[int | None]:
    """:meth:`Grading.votes` with any rule of equality; answers of the same normalized text are equal in any case."""
    groups: list[str] = []  # the first answer of each; "" for the correct one, wherever it comes
    known: dict[tuple[bool, str], int] = {}
    votes: list[int | None] = []
    for text, is_correct in zip(texts, correct, strict=True):
        answer = extract_answer(text)
        if answer is None:
            votes.append(None)
            continue
        key = (is_correct, "" if is_correct else normalized(answer))
        if key not in known:
            known[key] = await _group_of("" if is_correct else answer, groups, equal)
        votes.append(known[key])
    return votes


async def _group_of(answer: str, groups: list[str], equal: Callable[[str, str], Awaitable[bool]]) -> int:
    others = [number for number, first in enumerate(groups) if first and answer]
    same = await asyncio.gather(*(equal(groups[number], answer) for number in others))
    found = next((number for number, is_same in zip(others, same, strict=True) if is_same), None)
    if found is None:
        groups.append(answer)
        return len(groups) - 1
    return found


async def _never(first: str, second: str) -> bool:
    return False
