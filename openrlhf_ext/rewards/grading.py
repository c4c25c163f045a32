"""Grades of completions: what grades them, how a reward function's answer becomes one, and what can
go wrong.

``RewardError`` and its subclasses concern one sample: a :class:`FailurePolicy` counts and tolerates
them. The other errors concern the grader itself and always propagate. All of them pickle, because
they cross Ray actors. Grading workers import this: no torch, no numpy here.
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
"""In ``extra_logs``: 1 for a sample that could not be graded."""

LARGEST = 1e15
"""Of rewards, scores and logs: advantages are made of their squares and sums in fp32, which ends at
3.4e38."""

# and keys that OpenRLHF 0.11.2's samples generator and experience maker write into the same
# dictionary
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
    """What follows the prompt in the query, without the tokens that end a text in ChatML, Qwen's
    and Llama's: for reward functions where nobody passes ``completions`` (OpenRLHF itself, reward
    servers). This package does, cut by the tokenizer's own end.

    Tokenizers such as Qwen2's compose accents (NFC), and a long prompt may have lost its beginning
    to truncation.
    """
    for written in (prompt, unicodedata.normalize("NFC", prompt)):
        if query.startswith(written):
            return _END.sub("", query[len(written) :])
    ending = unicodedata.normalize("NFC", prompt)[-_PROMPT_END_CHARACTERS:]
    return _END.sub("", query.partition(ending)[2] if ending in query else query)


@dataclass(frozen=True)
class RewardResult:
    """The grade of one completion, all of it finite: what the policy is trained on; correctness,
    for accuracy and dynamic filtering; the function's own numbers; the time spent in it, without
    queueing."""

    reward: float
    score: float
    extra_logs: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Group:
    """The completions of one prompt, for functions that want all of them at once, and in a trial
    for others: how many there will be, and what the grader keeps of those that have come, by their
    place."""

    size: int
    is_trial: bool = False
    come: dict[int, Any] = field(default_factory=dict)


class Grader(Protocol):
    """Grades one sample at a time, any number of them concurrently."""

    def start(self) -> None:
        """Begin whatever takes time before the first sample; returns at once."""

    async def grade(
        self,
        query: str,
        prompt: str,
        label: Any,
        completion: str | None = None,
        group: Group | None = None,
        place: int = 0,
    ) -> RewardResult:
        """Grade one sample; RewardError if that cannot be. ``query``: prompt and completion as one
        text, special tokens kept; ``completion``: without the token that ended it; None: what
        follows the prompt in the query. ``group`` and
        ``place``: of which it is one; the grade may come when all of them have come."""

    async def aclose(self) -> None:
        """Release processes and connections."""


def settled(result: Any) -> Any:
    """The result of a call, of an async function once it is there."""

    async def wait() -> Any:
        return await result

    return asyncio.run(wait()) if inspect.isawaitable(result) else result


class InvalidAnswer(ValueError):
    """A reward function's answer breaks the convention; the text names the key, the rule and the
    value."""


def parse_answer(answer: Any, seconds: float = 0.0) -> RewardResult:
    """A reward function's ``{"rewards": ..., "scores": ..., "extra_logs": {...}}``, of which the
    last two are optional. Each number may be an int, float, bool, numpy scalar, a tensor or array
    of one element, or a list of one. Raises InvalidAnswer."""
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
    """Unwrap a list of one element, then an array or tensor of one element; anything else is
    returned as it is."""
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
    """A completion could not be graded. Carries the sample, special tokens kept, to reproduce the
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
    """The reward function returned something that is not a finite reward in the agreed form."""


class RewardTimeout(RewardError):
    """The reward function passed its deadline, or the sample waited too long for a free worker."""


class RewardWorkerDied(RewardError):
    """The worker process ended while it graded this sample (segmentation fault, ``os._exit``, out
    of memory)."""


class RewardServerError(RewardError):
    """A reward server could not be reached or answered with an error, retries included."""


class RewardImportError(RuntimeError):
    """The user's reward file cannot be used: it does not import, or has no ``reward_func``."""


class RewardPoolClosed(RuntimeError):
    """The grader was closed while the sample waited or was being graded."""


class Failure(Exception):
    """What becomes a ``RewardError`` of that kind: when prompt and completion are known, or unless
    a request succeeds that is sent again."""

    def __init__(self, kind: type[RewardError], message: str) -> None:
        super().__init__(message)
        self.kind = kind


class RewardFailureLimit(RuntimeError):
    """More samples failed to be graded than the run tolerates; the message holds the last
    failure."""


class FailurePolicy:
    """Reports each failure with its prompt and completion, counts it, and ends the run at one more
    than ``max_failures`` (None tolerates any number). The reward of a failed sample is
    ``failure_value``, its score 0."""

    def __init__(self, max_failures: int | None, failure_value: float = 0.0) -> None:
        self._max_failures = max_failures
        self.failure_value = failure_value
        self.count = 0
        self._unreported: list[str] = []

    def take_messages(self) -> list[str]:
        """What failed since the last call, with prompt and completion, for the process that the
        user watches."""
        messages, self._unreported = self._unreported, []
        return messages

    def tolerate(self, error: RewardError) -> None:
        """Log and count a failure. Raises RewardFailureLimit: this failure is one too many."""
        self.count += 1
        self._unreported.append(f"{type(error).__name__}: {error}")
        tolerated = "any number" if self._max_failures is None else self._max_failures
        logger.error("grading failed (%d of %s tolerated): %s", self.count, tolerated, error)
        if self._max_failures is not None and self.count > self._max_failures:
            raise RewardFailureLimit(
                f"{self.count} samples could not be graded; the run tolerates {self._max_failures} "
                f"(--reward.max_failures). The last failure: {type(error).__name__}: {error}"
            ) from error
