"""Groups of completions on their way to training: asked for, finished, filtered, queued, taken, or dropped.

How far sampling may be ahead is one number, ``max_staleness`` N: the weight versions that a trained token may lag. A
group that begins at version v has at most N batches before it, so it is trained at version v + N at the latest, unless
it takes longer to sample than that: a straggler holds up nobody, its own group is late. With N = 0 the engines are
asked for one batch at a time and stand still while the policy trains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from openrlhf_ext.driver.engines import GroupRequests
from openrlhf_ext.driver.guided import GuidedRequests
from openrlhf_ext.driver.prompts import Prompt, PromptStream
from openrlhf_ext.driver.waiting import Deadline
from openrlhf_ext.rollout.response import GroupRequest, Response, Sampling, derived_seed

_LOOK_S = 1.0
_TRAINING, _OTHER = 0, 1  # groups of one number have different seeds


class FilterExhaustedError(RuntimeError):
    """Dynamic sampling went through its budget of prompts without filling a batch."""


@dataclass(frozen=True)
class Group:
    """A prompt and its graded completions."""

    prompt: Prompt
    responses: list[Response]

    @property
    def oldest_version(self) -> int | None:
        """Of the policy's weights that sampled any of its tokens; None if the responses do not tell."""
        of_policy = [response for response in self.responses if not response.from_guide]
        return min((version for r in of_policy for version, _, _ in r.versions), default=None)

    def is_late(self, version: int, max_staleness: int) -> bool:
        """Whether a token lags ``version`` by more than ``max_staleness``."""
        return self.oldest_version is not None and version - self.oldest_version > max_staleness

    @property
    def mean_score(self) -> float:
        """What dynamic sampling goes by."""
        return sum(response.score for response in self.responses) / len(self.responses)


@dataclass(frozen=True)
class RolloutOptions:
    """How groups are sampled and taken.

    Attributes:
        batch_size: groups of a training step.
        samples: completions of a group.
        guide_samples: how many of them a guide's engines make.
        sampling: of training.
        max_staleness: see the module.
        late: what happens to a group that exceeds it: it is trained all the same, with the importance correction, or
            dropped.
        filter_range: mean scores (exclusive) between which dynamic sampling keeps a group; None: all are kept.
        max_filter_batches: batches' worth of groups sampled for one step before dynamic sampling gives up.
        timeout_s: longest wait for a batch, or for an evaluation.
        seed: every group has one of its own that follows from it; None: the engines' own random numbers.
    """

    batch_size: int
    samples: int
    sampling: Sampling
    max_staleness: int
    late: Literal["train", "drop"]
    filter_range: tuple[float, float] | None
    max_filter_batches: int
    timeout_s: float
    seed: int | None = None
    guide_samples: int = 0


class Rollouts:
    """Keeps the engines busy and hands out batches of groups.

    Args:
        prompts: of training.
        requests: to the engines, or to those of policy and guide (``driver.guided``).
        deadline: of the driver's phases.
        with_engines: context in which the engines may be used; shared GPUs change hands there.

    Attributes:
        dropped: groups that were not trained, by reason, since the start.
    """

    def __init__(
        self,
        prompts: PromptStream,
        requests: GroupRequests | GuidedRequests,
        options: RolloutOptions,
        deadline: Deadline,
        with_engines: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        self.prompts, self.options = prompts, options
        self.dropped = Counter(filtered=0, late=0)
        self._requests, self._deadline, self._with_engines = requests, deadline, with_engines
        self._in_flight: dict[int, Prompt] = {}
        self._again: list[Prompt] = []  # in flight when the checkpoint was written
        self._finished: list[Group] = []
        self._others: dict[tuple[str, int], list[Response]] = {}  # of evaluations
        self._batches_wanted = 0
        self._filtered_for_batch = 0
        self._exhausted = False
        self._taken: dict[str, float] = {}

    # ---- training ---------------------------------------------------------------------------------------------------

    def take(self, version: int) -> list[Group]:
        """The next batch, oldest groups first; smaller, in the end empty, when the prompts are used up.

        Args:
            version: of the policy's weights, with which the batch will be trained.

        Raises:
            DeadlineExceeded: with ``rollout.timeout_s``.
            FilterExhaustedError: dynamic sampling drops almost everything.
        """
        options = self.options
        self._batches_wanted = options.max_staleness + 1
        with (
            self._deadline.limit(options.timeout_s, "waiting for a batch of rollouts", "rollout.timeout_s"),
            self._with_engines(),
        ):
            while not self._has_batch(version):
                self._collect(min(self._deadline.remaining, _LOOK_S))
        self._batches_wanted = options.max_staleness
        self._finished.sort(key=lambda group: (group.oldest_version or 0, group.prompt.number))
        batch, self._finished = self._finished[: options.batch_size], self._finished[options.batch_size :]
        if batch:
            self._taken = {
                "groups/kept_fraction": len(batch) / (len(batch) + self._filtered_for_batch),
                "groups/trained_late": float(sum(g.is_late(version, options.max_staleness) for g in batch)),
            }
        self._filtered_for_batch = 0
        return batch

    def pump(self) -> None:
        """Collects what has finished and asks for more, without waiting: call it while the policy is at work."""
        self._collect(0.0)

    def drain(self) -> None:
        """Waits until nothing is in flight, and asks for nothing meanwhile.

        Raises:
            DeadlineExceeded: with ``rollout.timeout_s``.
        """
        self._batches_wanted, doing = 0, "waiting for the groups in flight before the weight sync"
        with self._deadline.limit(self.options.timeout_s, doing, "rollout.timeout_s"):
            while self._in_flight:
                self._collect(min(self._deadline.remaining, _LOOK_S))
        self._batches_wanted = self.options.max_staleness

    def _has_batch(self, version: int) -> bool:
        self._fill()
        if self.options.late == "drop":
            self._drop_late(version)
        return len(self._finished) >= self.options.batch_size or (self._exhausted and not self._in_flight)

    def _drop_late(self, version: int) -> None:
        in_time = [group for group in self._finished if not group.is_late(version, self.options.max_staleness)]
        self.dropped["late"] += len(self._finished) - len(in_time)
        self._finished = in_time
        self._fill()

    def _fill(self) -> None:
        """Asks for as many groups as may be on their way."""
        wanted = self._batches_wanted * self.options.batch_size
        while not self._exhausted and len(self._in_flight) + len(self._finished) < wanted:
            prompt = self._again.pop(0) if self._again else self.prompts.draw()
            if prompt is None:
                self._exhausted = True
                return
            self._in_flight[prompt.number] = prompt
            options = self.options
            request = self._request(prompt, options.samples, options.sampling, _TRAINING, options.guide_samples)
            self._requests.ask(prompt.number, request)

    def _request(
        self, prompt: Prompt, samples: int, sampling: Sampling, purpose: int, guide_samples: int = 0
    ) -> GroupRequest:
        base = self.options.seed
        seed = None if base is None else derived_seed(base, purpose, prompt.number)
        return GroupRequest(prompt.text, prompt.label, samples, sampling, seed, guide_samples)

    def _collect(self, timeout_s: float) -> None:
        for key, responses in self._requests.answers(timeout_s):
            if key in self._others:
                self._others[key] = responses
                continue
            group = Group(self._in_flight.pop(key), responses)
            if self._is_kept(group):
                self._finished.append(group)
            else:
                self._count_filtered()
        self._fill()

    def _is_kept(self, group: Group) -> bool:
        if self.options.filter_range is None:
            return True
        low, high = self.options.filter_range
        return low < group.mean_score < high

    def _count_filtered(self) -> None:
        self.dropped["filtered"] += 1
        self._filtered_for_batch += 1
        size = self.options.batch_size
        if size + self._filtered_for_batch > self.options.max_filter_batches * size:
            raise FilterExhaustedError(
                f"dynamic sampling used {size + self._filtered_for_batch} prompts for one batch of {size}: almost all "
                "groups are all right or all wrong. Use easier or harder prompts, a wider "
                "--algo.dynamic_filtering_range, or raise --rollout.max_filter_batches "
                f"(now {self.options.max_filter_batches})."
            )

    # ---- other prompts ----------------------------------------------------------------------------------------------

    def sample(self, prompts: Sequence[Prompt], samples: int, sampling: Sampling, doing: str) -> list[Group]:
        """Groups of prompts that are not trained on, by the policy, in their order; training's go on beside them.

        Raises:
            DeadlineExceeded: with ``rollout.timeout_s``.
        """
        keys = [(doing, prompt.number) for prompt in prompts]
        with self._deadline.limit(self.options.timeout_s, doing, "rollout.timeout_s"), self._with_engines():
            self._others = dict.fromkeys(keys)
            for key, prompt in zip(keys, prompts, strict=True):
                self._requests.ask(key, self._request(prompt, samples, sampling, _OTHER))
            while not all(self._others.values()):
                self._collect(min(self._deadline.remaining, _LOOK_S))
        groups = [Group(prompt, self._others[key]) for key, prompt in zip(keys, prompts, strict=True)]
        self._others = {}
        return groups

    # ---- records and checkpoints ------------------------------------------------------------------------------------

    def gauges(self) -> dict[str, float]:
        """What is where, and what the batch last taken was like."""
        return {
            **self._taken,
            "groups/in_flight": float(len(self._in_flight)),
            "groups/queued": float(len(self._finished)),
            **{f"groups/dropped_{reason}": float(count) for reason, count in self.dropped.items()},
        }

    def snapshot(self) -> tuple[dict[str, Any], list[Group], list[Prompt]]:
        """The place in the data and counts; groups that are finished and not taken; prompts in flight."""
        state = {"prompts": self.prompts.state_dict(), "dropped": dict(self.dropped)}
        return state, list(self._finished), [*self._in_flight.values(), *self._again]

    def restore(self, state: Mapping[str, Any], finished: Iterable[Group], in_flight: Iterable[Prompt]) -> None:
        """Goes on from a snapshot; what was in flight is asked for again."""
        self.prompts.load_state_dict(state["prompts"])
        self.dropped.update(state["dropped"])
        self._finished, self._again = list(finished), list(in_flight)
