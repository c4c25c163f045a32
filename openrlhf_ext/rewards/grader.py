"""What grades a sample: a reward function in a file, or a reward server."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from openrlhf_ext.rewards.result import RewardResult


class Grader(Protocol):
    """Grades one sample at a time, any number of them concurrently."""

    def start(self) -> None:
        """Begin whatever takes time before the first sample; returns at once."""

    async def grade(self, query: str, prompt: str, label: Any) -> RewardResult:
        """Grade one sample; raises a ``RewardError`` if that sample cannot be graded."""

    async def aclose(self) -> None:
        """Release processes and connections."""


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """The ``--reward.*`` options that concern grading.

    Attributes:
        remote_url: a Python file with ``reward_func``, or one or more http(s) addresses of reward servers.
        num_workers: grading processes of each rollout engine.
        timeout_s: deadline of one call of the reward function, or of one request to a server.
        start_timeout_s: deadline for importing the file.
        max_failures: failures each rollout engine tolerates over the run.
        failure_value: reward of a sample that could not be graded.
    """

    remote_url: str | tuple[str, ...]
    num_workers: int = 2
    timeout_s: float = 30.0
    start_timeout_s: float = 120.0
    max_failures: int = 10
    failure_value: float = 0.0

    def __post_init__(self) -> None:
        if not self.addresses:
            raise ValueError("--reward.remote_url: give a Python file with reward_func, or http(s) addresses")
        if not math.isfinite(self.failure_value):
            raise ValueError(f"--reward.failure_value must be finite, got {self.failure_value}")

    @property
    def addresses(self) -> tuple[str, ...]:
        """``remote_url`` as a tuple; a comma in a string separates addresses."""
        urls = self.remote_url.split(",") if isinstance(self.remote_url, str) else self.remote_url
        return tuple(url.strip() for url in urls if url.strip())


def open_grader(settings: RewardSettings) -> Grader:
    """The grader ``settings.remote_url`` asks for, not started.

    Raises:
        ValueError: the addresses are neither one Python file nor http(s) only.
    """
    addresses = settings.addresses
    if all(address.startswith(("http://", "https://")) for address in addresses):
        from openrlhf_ext.rewards.http_reward import HttpReward

        return HttpReward(addresses, timeout_s=settings.timeout_s)
    if len(addresses) == 1 and addresses[0].endswith(".py"):
        from openrlhf_ext.rewards.pool import RewardPool

        return RewardPool(
            addresses[0], settings.num_workers, settings.timeout_s, start_timeout_s=settings.start_timeout_s
        )
    raise ValueError(
        f"--reward.remote_url must be one Python file (.py) or http(s) addresses separated by commas, got {addresses}"
    )
