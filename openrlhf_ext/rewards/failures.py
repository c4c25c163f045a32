"""What happens to a sample that could not be graded."""

from __future__ import annotations

import logging

from openrlhf_ext.rewards.errors import RewardError, RewardFailureLimit

logger = logging.getLogger(__name__)


class FailurePolicy:
    """Reports each failure with its prompt and completion, counts it, and ends the run when there are too many.

    Args:
        max_failures: failures tolerated over the whole run; one more raises. 0 tolerates none.
        failure_value: reward of a sample that could not be graded. Its score is 0.
    """

    def __init__(self, max_failures: int, failure_value: float = 0.0) -> None:
        if max_failures < 0:
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
        """Log and count a failure.

        Raises:
            RewardFailureLimit: this failure is one too many.
        """
        self.count += 1
        self._unreported.append(f"{type(error).__name__}: {error}")
        logger.error("grading failed (%d of %d tolerated): %s", self.count, self._max_failures, error)
        if self.count > self._max_failures:
            raise RewardFailureLimit(
                f"{self.count} samples could not be graded; the run tolerates {self._max_failures} "
                f"(--reward.max_failures). The last failure: {type(error).__name__}: {error}"
            ) from error
