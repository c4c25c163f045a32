"""Grades of completions: the grader protocol, parsing of a reward function's answer, and errors.

``RewardError`` and its subclasses concern one sample: a :class:`FailurePolicy` counts and tolerates
them. The other errors concern the grader itself and always propagate. All of them pickle, because
they cross Ray actors. Grading workers import this module, so it must not import torch or numpy.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import numbers
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from openrlhf_ext.inputs import shortened

logger = logging.getLogger(__name__)

FAILED_KEY = "reward_failed"
"""Key in ``extra_logs``: 1 for a sample that could not be graded."""

LARGEST = 1e15
"""Maximum of rewards, scores and logs: advantages use their squares and sums in fp32, whose maximum
is 3.4e38."""

# Includes keys that OpenRLHF 0.11.2's samples generator and experience maker write into the same
# dictionary.
RESERVED_LOG_KEYS = frozenset(
    {
        "group_reward_std",
        "kl",
        "logprobs_diff",
        "response_clip_ratio",
        "return",
        "reward",
        "score",
        FAILED_KEY,
    }
)
_SHOWN_CHARACTERS = 2000
_END = re.compile(r"(?:<\|(?:im_end|endoftext|eot_id|end_of_text)\|>)+\Z")
_PROMPT_END_CHARACTERS = 64


def completion_of(query: str, prompt: str) -> str:
    """The part of the query after the prompt, without the end-of-text tokens of ChatML, Qwen and
    Llama.

    For reward functions that get no ``completions`` (from OpenRLHF itself, or on reward servers).
    This package passes ``completions``, cut by the tokenizer's own end token.

    Tokenizers such as Qwen2's compose accents (NFC), and truncation may have removed the beginning
    of a long prompt.
    """
    for written in (prompt, unicodedata.normalize("NFC", prompt)):
        if query.startswith(written):
            return _END.sub("", query[len(written) :])
    ending = unicodedata.normalize("NFC", prompt)[-_PROMPT_END_CHARACTERS:]
    return _END.sub("", query.partition(ending)[2] if ending in query else query)


@dataclass(frozen=True)
class RewardResult:
    """The grade of one completion; all numbers are finite.

    ``reward``: trains the policy. ``score``: correctness, for accuracy and dynamic filtering.
    ``extra_logs``: the function's own numbers. ``seconds``: time spent in the function, without
    queueing.
    """

    reward: float
    score: float
    extra_logs: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Group:
    """The completions of one prompt, for functions that take all of them at once, and for other
    functions in a trial.

    ``size``: their number; ``come``: the grader's entries of those that have arrived, by place.
    """

    size: int
    is_trial: bool = False
    come: dict[int, Any] = field(default_factory=dict)


class Grader(Protocol):
    """Grades one sample at a time, any number of them concurrently."""

    def start(self) -> None:
        """Begin any work that is needed before the first sample; returns at once."""

    async def grade(
        self,
        query: str,
        prompt: str,
        label: Any,
        completion: str | None = None,
        group: Group | None = None,
        place: int = 0,
    ) -> RewardResult:
        """Grade one sample. Raises RewardError if that fails.

        ``query``: prompt and completion as one text, with special tokens; ``completion``: without
        the token that ended it (None: the part of the query after the prompt). ``group`` and
        ``place``: the sample's group and its place in it; the grade may come only after the whole
        group has arrived.
        """

    async def aclose(self) -> None:
        """Release processes and connections."""


def settled(result: Any) -> Any:
    """The result of a call; for an async function, the awaited result."""

    async def wait() -> Any:
        return await result

    return asyncio.run(wait()) if inspect.isawaitable(result) else result


class InvalidAnswer(ValueError):
    """A reward function's answer breaks the convention; the message names the key, the rule and the
    value."""


def parse_answer(answer: Any, seconds: float = 0.0) -> RewardResult:
    """Parse a reward function's ``{"rewards": ..., "scores": ..., "extra_logs": {...}}``; the last
    two keys are optional.

    Each number may be an int, float, bool, numpy scalar, a tensor or array of one element, or a
    list of one. Raises InvalidAnswer.
    """
    if not isinstance(answer, Mapping):
        raise InvalidAnswer(
            f"returned {_described(answer)}; it must return a dict with the key 'rewards' and "
            "optionally 'scores' and 'extra_logs'"
        )
    if "rewards" not in answer:
        raise InvalidAnswer(
            f"returned a dict without the key 'rewards'; its keys are {sorted(map(str, answer))}"
        )
    reward = finite_number(answer["rewards"], "rewards")
    score = answer.get("scores")
    return RewardResult(
        reward=reward,
        score=reward if score is None else finite_number(score, "scores"),
        extra_logs=_parse_extra_logs(answer.get("extra_logs")),
        seconds=seconds,
    )


def finite_number(value: Any, name: str) -> float:
    """``value`` as a finite float; see :func:`parse_answer` for the accepted forms."""
    scalar = _only_element(value)
    if not isinstance(scalar, numbers.Real):
        raise InvalidAnswer(f"returned {name} = {_described(value)}; it must be one real number")
    number = _to_float(scalar, name)
    if not math.isfinite(number):
        raise InvalidAnswer(f"returned {name} = {number}; it must be finite")
    if abs(number) > LARGEST:
        raise InvalidAnswer(
            f"returned {name} = {number:g}; it must be at most {LARGEST:g}, whose square fp32 "
            "can hold"
        )
    return number


def _parse_extra_logs(logs: Any) -> dict[str, float]:
    if logs is None:
        return {}
    if not isinstance(logs, Mapping):
        raise InvalidAnswer(
            f"returned extra_logs = {_described(logs)}; it must be a dict of numbers"
        )
    if unnamed := [key for key in logs if not isinstance(key, str)]:
        raise InvalidAnswer(f"returned extra_logs with keys that are not strings: {unnamed}")
    if taken := sorted(RESERVED_LOG_KEYS.intersection(logs)):
        raise InvalidAnswer(f"returned extra_logs with reserved keys {taken}; rename them")
    return {key: finite_number(value, f"extra_logs[{key!r}]") for key, value in logs.items()}


def _only_element(value: Any) -> Any:
    """Unwrap a list of one element, then an array or tensor of one element; return anything else
    unchanged."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if callable(getattr(value, "item", None)) and _element_count(value) == 1:
        return value.item()
    return value


def _element_count(array: Any) -> int:
    size: Any = getattr(array, "numel", None) or getattr(array, "size", None)
    return size() if callable(size) else size


def _to_float(scalar: numbers.Real, name: str) -> float:
    try:
        return float(scalar)
    except OverflowError as error:
        raise InvalidAnswer(f"returned {name} = an integer too large for a float") from error


def _described(value: Any) -> str:
    """The value for an error message; sizes instead of contents for arrays."""
    shape = getattr(value, "shape", None)
    if shape is not None and tuple(shape):
        return f"a {type(value).__name__} of shape {tuple(shape)}"
    return f"{str(value)[:200]!r} ({type(value).__name__})"


class RewardError(Exception):
    """A completion could not be graded. Includes the sample, with special tokens, to reproduce the
    failure."""

    def __init__(
        self, message: str, prompt: str = "", completion: str = "", label: Any = None
    ) -> None:
        super().__init__(message, prompt, completion, label)
        self.message = message
        self.prompt = prompt
        self.completion = completion
        self.label = label

    def __str__(self) -> str:
        sample = (("prompt", self.prompt), ("completion", self.completion), ("label", self.label))
        shown = (f"  {name}: {shortened(repr(value), _SHOWN_CHARACTERS)}" for name, value in sample)
        return "\n".join([self.message, *shown])


class RewardRaised(RewardError):
    """The reward function raised; the message holds its traceback."""


class RewardInvalid(RewardError):
    """The reward function did not return a finite reward in the agreed form."""


class RewardTimeout(RewardError):
    """The reward function passed its deadline, or the sample waited too long for a free worker."""


class RewardWorkerDied(RewardError):
    """The worker process ended while it graded this sample (segmentation fault, ``os._exit``, out
    of memory)."""


class RewardServerError(RewardError):
    """A reward server could not be reached or answered with an error, even after retries."""


class RewardImportError(RuntimeError):
    """The user's reward file cannot be used: it does not import, or has no ``reward_func``."""


class RewardPoolClosed(RuntimeError):
    """The grader was closed while the sample waited or was being graded."""


class Failure(Exception):
    """Becomes a ``RewardError`` of this kind when prompt and completion are known, unless a retried
    request succeeds."""

    def __init__(self, kind: type[RewardError], message: str) -> None:
        super().__init__(message)
        self.kind = kind


class RewardFailureLimit(RuntimeError):
    """More samples could not be graded than the run tolerates; the message includes the last
    failure."""


class FailurePolicy:
    """Reports and counts failures, and ends the run at failure ``max_failures`` + 1 (None tolerates
    any number).

    A report includes prompt and completion. A failed sample gets the reward ``failure_value`` and
    score 0.
    """

    def __init__(self, max_failures: int | None, failure_value: float = 0.0) -> None:
        self._max_failures = max_failures
        self.failure_value = failure_value
        self.count = 0
        self._unreported: list[str] = []

    def take_messages(self) -> list[str]:
        """The failures since the last call, with prompt and completion, for the process that the
        user watches."""
        messages, self._unreported = self._unreported, []
        return messages

    def tolerate(self, error: RewardError) -> None:
        """Log and count a failure. Raises RewardFailureLimit if it exceeds the limit."""
        self.count += 1
        self._unreported.append(f"{type(error).__name__}: {error}")
        tolerated = "any number" if self._max_failures is None else self._max_failures
        logger.error("grading failed (%d of %s tolerated): %s", self.count, tolerated, error)
        if self._max_failures is not None and self.count > self._max_failures:
            raise RewardFailureLimit(
                f"{self.count} samples could not be graded; the run tolerates {self._max_failures} "
                f"(--reward.max_failures). The last failure: {type(error).__name__}: {error}"
            ) from error
