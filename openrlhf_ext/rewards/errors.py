"""What can go wrong while grading one completion, how often that is tolerated, and what stops a run.

``RewardError`` and its subclasses concern one sample: a :class:`FailurePolicy` counts and tolerates them. The other
errors concern the grader itself and always propagate. All of them pickle, because they cross Ray actors.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)

_SHOWN_CHARACTERS = 2000


class RewardError(Exception):
    """A completion could not be graded. Carries the sample, so that the failure can be reproduced.

    Attributes:
        message: what happened, with the option and the remedy where there is one.
        prompt, completion: the texts that were graded, special tokens kept.
    """

    def __init__(self, message: str, prompt: str = "", completion: str = "", label: Any = None) -> None:
        super().__init__(message, prompt, completion, label)
        self.message = message
        self.prompt = prompt
        self.completion = completion
        self.label = label

    def __str__(self) -> str:
        sample = (("prompt", self.prompt), ("completion", self.completion), ("label", self.label))
        return "\n".join([self.message, *(f"  {name}: {_shown(value)}" for name, value in sample)])


class RewardRaised(RewardError):
    """The reward function raised; the message holds its traceback."""


class RewardInvalid(RewardError):
    """The reward function returned something that is not a finite reward in the agreed form."""


class RewardTimeout(RewardError):
    """The reward function passed its deadline, or the sample waited too long for a free worker."""


class RewardWorkerDied(RewardError):
    """The worker process ended while it graded this sample (segmentation fault, ``os._exit``, out of memory)."""


class RewardServerError(RewardError):
    """A reward server could not be reached or answered with an error, retries included."""


class RewardImportError(RuntimeError):
    """The user's reward file cannot be used: it does not import, or has no ``reward_func``."""


class RewardPoolClosed(RuntimeError):
    """The grader was closed while the sample waited or was being graded."""


class RewardFailureLimit(RuntimeError):
    """More samples failed to be graded than the run tolerates; the message holds the last failure."""


class FailurePolicy:
    """Reports each failure with its prompt and completion, counts it, and ends the run when there are too many.

    Args:
        max_failures: failures tolerated over the whole run; one more raises. 0 tolerates none, None any number.
        failure_value: reward of a sample that could not be graded. Its score is 0.
    """

    def __init__(self, max_failures: int | None, failure_value: float = 0.0) -> None:
        if max_failures is not None and max_failures < 0:
            raise ValueError(f"--reward.max_failures must be at least 0, got {max_failures}")
        self._max_failures = max_failures
        self.failure_value = failure_value
        self.count = 0
        self._unreported: list[str] = []

    def take_messages(self) -> list[str]:
        """What failed since the last call, with prompt and completion, for the process that the user watches."""
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


def _shown(value: Any) -> str:
    """``repr`` of a value, its middle left out where it is very long."""
    text = repr(value)
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    half = _SHOWN_CHARACTERS // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters left out) ... {text[-half:]}"
