"""Groups of completions before training: requested, finished, filtered, queued, taken, or dropped.

``train.max_staleness`` N limits how far sampling runs ahead: a trained token may lag by N weight
versions. A group that begins at version v has at most N batches before it, so it is trained at
version v + N at the latest, unless sampling it takes longer. Such a late group holds up no others;
with ``train.late_groups wait``, batches keep the order of their prompts and wait for it. With N = 0
the driver requests one batch at a time, and the engines idle while the policy trains.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from openrlhf_ext.config import RunConfig
from openrlhf_ext.driver.engines import EngineCall, EngineSupervisor, HangWatch, is_engine_fault
from openrlhf_ext.driver.waits import Deadline
from openrlhf_ext.megatron.step.batch import SequenceBatch
from openrlhf_ext.rewards.grading import RewardFailureLimit
from openrlhf_ext.rollout.response import (
    GroupRequest,
    InvalidWeights,
    Response,
    Sampling,
    derived_seed,
    graded,
)
from openrlhf_ext.run.ledger import TIME_IS_UP, USED_UP, Entry, digest

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_TRAINING, _OTHER = 0, 1  # the seeds of a prompt number differ by purpose

Key = int | tuple[str, int]
"""Key of a requested group: the prompt's number, with the purpose if the group is not for
training."""


class FilterExhaustedError(RuntimeError):
    """Dynamic sampling went through its budget of prompts without filling a batch."""


# ---- prompts


@dataclass(frozen=True)
class Prompt:
    """A prompt from the data. ``number`` counts the prompts drawn before it; for a held-out prompt
    it is the place in the file, from 0. The engines sample from ``text``; the reward function gets
    ``label``. ``source``: the record's ``datasource``, for held-out prompts only."""

    number: int
    text: str
    label: Any
    source: str = "default"

    @property
    def entry(self) -> Entry:
        """The prompt's entry in the ledger."""
        return self.number, digest(self.text, self.label)


class PromptStream:
    """Draws prompts from OpenRLHF's resumable loader, one at a time, until the episodes are
    over."""

    def __init__(self, loader: Any, episodes: int) -> None:
        self._loader, self._episodes = loader, episodes
        self._iterator: Any = None
        self._episode = self.drawn = 0

    def draw(self) -> Prompt | None:
        """Returns the next prompt; None when there are no more."""
        while self._episode < self._episodes:
            if self._iterator is None:
                self._iterator = iter(self._loader)
            item = next(self._iterator, None)
            if item is not None:
                _, text, label = item
                self.drawn += 1
                return Prompt(self.drawn - 1, text, label)
            self._iterator, self._episode = None, self._episode + 1
        return None

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the data."""
        return {"episode": self._episode, "drawn": self.drawn, "loader": self._loader.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a place in the data."""
        self._episode, self.drawn = state["episode"], state["drawn"]
        self._loader.load_state_dict(state["loader"])
        self._iterator = None


def all_prompts(loader: Iterable[Any], places: Sequence[int] | None = None) -> list[Prompt]:
    """Returns one pass over a loader; ``places`` are the prompts' numbers, 0, 1, ... if None."""
    items = list(loader)
    numbers = range(len(items)) if places is None else places
    return [
        Prompt(number, text, label, source)
        for number, (source, text, label) in zip(numbers, items, strict=True)
    ]


# ---- groups


@dataclass(frozen=True)
class Group:
    """A prompt and its graded completions."""

    prompt: Prompt
    responses: list[Response]

    @property
    def oldest_version(self) -> int | None:
        """The oldest version of the policy's weights that sampled any of its tokens; None if the
        responses lack versions."""
        of_policy = [response for response in self.responses if not response.from_guide]
        return min((version for r in of_policy for version, _, _ in r.versions), default=None)

    def is_late(self, version: int, max_staleness: int) -> bool:
        """Returns whether a token lags ``version`` by more than ``max_staleness``."""
        return self.oldest_version is not None and version - self.oldest_version > max_staleness

    @property
    def scores(self) -> list[float]:
        """The scores that dynamic sampling and evaluations use; a run whose rewards come from a
        reward model has none."""
        return [graded(response.score) for response in self.responses]

    @property
    def mean_score(self) -> float:
        return sum(self.scores) / len(self.responses)


class GroupRequests:
    """Requests groups from the engines, up to what they can batch, each from the least loaded one.

    Further requests wait here, so that short calls and weight updates never wait behind prompts in
    an engine's queue (an asynchronous Ray actor takes 1,000 calls at a time). One call of one
    engine returns a whole group. If the call fails, the whole group is requested again, so no group
    is lost or counted twice. With full determinism the seeds depend on the prompt and the weights
    only, so the repeated call draws the same completions.
    """

    def __init__(
        self, supervisor: EngineSupervisor, max_requests: int, routed: bool = False
    ) -> None:
        """Requests at most ``max_requests`` completions from an engine at a time; a larger group
        goes to an idle engine. ``routed``: the engines return experts, which stay where they are
        (``Response.experts_at``)."""
        self._supervisor, self._max_requests, self._routed = supervisor, max_requests, routed
        self._backlog: deque[tuple[Key, GroupRequest]] = deque()
        self._calls: dict[Any, tuple[EngineCall, Key, GroupRequest]] = {}
        self._load = [0] * len(supervisor.engines)
        self._watch = HangWatch(supervisor)
        self._looked = time.monotonic()

    @property
    def pending(self) -> list[Any]:
        """The outstanding calls."""
        return list(self._calls)

    @property
    def pause_s(self) -> float:
        """The longest time between two calls of ``answers`` that still detects hanging engines in
        time."""
        return self._watch.pause_s

    def ask(self, key: Key, request: GroupRequest, first: bool = False) -> None:
        """Requests a group and returns at once; ``key`` comes back with it. ``first``: in front of
        the waiting requests."""
        (self._backlog.appendleft if first else self._backlog.append)((key, request))
        self._deal()

    def answers(self, timeout_s: float) -> list[tuple[Key, list[Response]]]:
        """Returns the groups that have come; may be empty after ``timeout_s`` seconds or after a
        check of the engines. Raises EngineLost; RayTaskError if a call failed for a reason that is
        not the engine's."""
        if not self._calls:
            return []
        ready, _ = ray.wait(
            list(self._calls), num_returns=1, timeout=min(timeout_s, self._watch.pause_s)
        )
        if ready:  # and all other calls that are done
            ready, _ = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        answered = [answer for reference in ready if (answer := self._take(reference)) is not None]
        if time.monotonic() - self._looked > self._watch.pause_s:
            self._look()
        self._deal()
        return answered

    def _deal(self) -> None:
        while self._backlog:
            index = min(self._supervisor.there, key=self._load.__getitem__)
            key, request = self._backlog[0]
            if self._load[index] and self._load[index] + request.samples > self._max_requests:
                return
            self._backlog.popleft()
            call = self._supervisor.call(index, "generate_group", request, others=int(self._routed))
            self._calls[call.reference] = call, key, request
            self._load[index] += request.samples

    def _take(self, reference: Any) -> tuple[Key, list[Response]] | None:
        """Returns an answer, or None if the group must be requested again."""
        call, key, request = self._calls.pop(reference)
        self._load[call.index] -= request.samples
        try:
            responses = ray.get(reference)
            for place in call.others:
                responses = [
                    dataclasses.replace(r, experts_at=(place, i)) for i, r in enumerate(responses)
                ]
            return key, responses
        except (RayTaskError, RayActorError, ObjectLostError) as error:
            if not self._failed_with_sync(call, error):
                if not is_engine_fault(error):
                    raise
                # does nothing if another call of this engine has replaced it
                self._supervisor.replace({call.index: call.engine}, error)
        self._backlog.appendleft((key, request))
        return None

    def _failed_with_sync(self, call: EngineCall, error: BaseException) -> bool:
        """Returns whether the call failed because of a failed weight sync on another engine that
        has been repeated since."""
        is_void = isinstance(error, RayTaskError) and isinstance(error.cause, InvalidWeights)
        return is_void and self._supervisor.changes != call.changes

    def _look(self) -> None:
        """Replaces hanging engines; their calls then fail and are repeated."""
        self._looked = time.monotonic()
        if silent := self._watch.silent({call.index for call, _, _ in self._calls.values()}):
            self._supervisor.replace(silent, self._supervisor.silence(silent))


class GuidedRequests:
    """Replaces ``GroupRequests`` in a run with a guide: splits a request with ``guide_samples``
    between two sets of engines. The policy's completions come first; ``Response.from_guide`` marks
    the guide's. Other requests go to the policy's engines whole."""

    def __init__(self, policy: GroupRequests, guide: GroupRequests) -> None:
        self._sources = (policy, guide)
        # the parts of each group that have come, by number of the source
        self._parts: dict[Key, dict[int, list[Response]]] = {}

    def ask(self, key: Key, request: GroupRequest, first: bool = False) -> None:
        policy, guide = self._sources
        of_guide = request.guide_samples
        of_policy = request.samples - of_guide
        policy.ask(key, dataclasses.replace(request, samples=of_policy, guide_samples=0), first)
        if of_guide:
            self._parts[key] = {}
            seed = request.seed_of(of_policy)  # other seeds than those of the policy's completions
            numbers = None if seed is None else (seed,)
            guide.ask(
                key, dataclasses.replace(request, samples=of_guide, guide_samples=0, seed=numbers)
            )

    def answers(self, timeout_s: float) -> list[tuple[Key, list[Response]]]:
        """Returns the groups whose two parts have come, as ``GroupRequests.answers`` does."""
        if pending := [call for source in self._sources for call in source.pending]:
            pause = min(source.pause_s for source in self._sources)
            ray.wait(pending, num_returns=1, timeout=min(timeout_s, pause))
        finished = []
        for number, source in enumerate(self._sources):
            for key, responses in source.answers(0.0):
                if (group := self._whole(key, number, responses)) is not None:
                    finished.append((key, group))
        return finished

    def _whole(self, key: Key, number: int, responses: list[Response]) -> list[Response] | None:
        if key not in self._parts:
            return responses
        parts = self._parts[key]
        parts[number] = [dataclasses.replace(r, from_guide=bool(number)) for r in responses]
        if len(parts) < len(self._sources):
            return None
        del self._parts[key]
        return [*parts[0], *parts[1]]


Requests = GroupRequests | GuidedRequests

# ---- queue


class Rollouts:
    """Keeps the engines busy and hands out batches of groups. ``dropped`` counts dropped groups by
    reason since the start.

    ``with_engines`` gives shared GPUs to the engines. Its argument is a function that says, at the
    end, whether the policy trains next (``GpuSharing.generation``).
    """

    def __init__(
        self,
        prompts: PromptStream,
        requests: Requests,
        config: RunConfig,
        deadline: Deadline,
        with_engines: Callable[[Callable[[], bool]], AbstractContextManager] = lambda _: (
            nullcontext()
        ),
    ) -> None:
        rollout = config.rollout
        self.prompts = prompts
        self.sampling = Sampling(
            rollout.temperature, rollout.top_p, rollout.max_new_tokens, config.data.max_len
        )
        self._config, self._batch_size = config, config.rollout.batch_size
        self._max_staleness, self._timeout_s = config.max_staleness, config.rollout.timeout_s
        self.dropped = {"filtered": 0, "late": 0, "unstarted": 0, "skipped": 0}
        self._skip: set[int] = set()  # numbers of the prompts of rejected steps
        self._requests, self._deadline, self._with_engines = requests, deadline, with_engines
        self._in_flight: dict[int, Prompt] = {}
        self._again: list[Prompt] = []  # in flight when the checkpoint was written
        self._finished: list[Group] = []
        # given up since the ledger's last line
        self._given_up: defaultdict[str, list[Entry]] = defaultdict(list)
        self._others: dict[tuple[str, int], list[Response]] = {}  # finished evaluation groups
        self._awaited: set[tuple[str, int]] = set()
        self._batches_wanted = 0
        self._filtered_for_batch = self._unlike_for_batch = self._unstarted_for_batch = 0
        self._range_said = self._exhausted = False
        self._last = -1  # the largest number of a trained prompt
        self._taken: dict[str, float] = {}

    # ---- training

    def take(self, version: int) -> list[Group]:
        """Returns the next batch, oldest groups first, to train with the weights ``version``;
        smaller and finally empty when the prompts are used up. Raises DeadlineExceeded;
        FilterExhaustedError if dynamic sampling drops almost everything."""
        self._batches_wanted = self._max_staleness + 1
        with (
            self._deadline.limit(
                self._timeout_s, "waiting for a batch of rollouts", "rollout.timeout_s"
            ),
            self._with_engines(lambda: bool(self._finished)),
        ):
            started, have = time.monotonic(), 0
            while not self._has_batch(version):
                have += self._collect(min(self._deadline.remaining, _LOOK_S))
                self._tell(len(self._finished), self._batch_size, have, started)
        self._batches_wanted = self._max_staleness
        self._finished.sort(key=self._turn)
        batch, self._finished = (
            self._finished[: self._batch_size],
            self._finished[self._batch_size :],
        )
        if batch:
            self._taken = {
                "groups/kept_fraction": len(batch) / (len(batch) + self._filtered_for_batch),
                "groups/trained_late": float(
                    sum(g.is_late(version, self._max_staleness) for g in batch)
                ),
            }
            self._last = max(self._last, *(group.prompt.number for group in batch))
        self._filtered_for_batch = self._unlike_for_batch = self._unstarted_for_batch = 0
        return batch

    @property
    def _open(self) -> list[int]:
        """Numbers of the prompts that are neither trained nor given up."""
        return [
            *self._in_flight,
            *(p.number for p in self._again),
            *(g.prompt.number for g in self._finished),
        ]

    @property
    def used_up(self) -> int:
        """The number of prompts that are trained, with the batch last taken, or given up. Counts
        only prompts up to the last trained one, so that it does not depend on engine speed; all
        prompts when nothing is left."""
        waiting = self._open
        if self._exhausted and not waiting:
            return self.prompts.drawn
        return self._last + 1 - sum(number < self._last for number in waiting)

    def pump(self) -> None:
        """Collects finished groups and requests more, without waiting; call it while the policy
        works."""
        self._collect(0.0)

    def drain(self) -> None:
        """Waits until nothing is in flight, without new requests. Raises DeadlineExceeded after
        ``rollout.timeout_s``."""
        self._batches_wanted, doing = 0, "waiting for the groups in flight before the weight sync"
        with self._deadline.limit(self._timeout_s, doing, "rollout.timeout_s"):
            while self._in_flight:
                self._collect(min(self._deadline.remaining, _LOOK_S))
        self._batches_wanted = self._max_staleness

    def give_up(self, reason: str, prompts: Iterable[Prompt]) -> None:
        """Gives up these prompts: ``dropped`` counts them, and the next ledger line lists them
        under the reason, one of ``run.ledger.REASONS``."""
        entries = [prompt.entry for prompt in prompts]
        self.dropped[reason] += len(entries)
        self._given_up[reason] += entries

    def _has_batch(self, version: int) -> bool:
        self._fill()
        if self._config.train.late_groups == "drop":
            self._drop_late(version)
        if self._exhausted and not self._in_flight:
            return True
        return len(self._finished) >= self._batch_size and not self._is_held_up()

    def _turn(self, group: Group) -> tuple[int, int]:
        """Returns the sort key of a finished group; groups with smaller keys train first."""
        oldest = 0 if self._config.train.late_groups == "wait" else group.oldest_version or 0
        return oldest, group.prompt.number

    def _is_held_up(self) -> bool:
        """Returns whether a missing group comes before the last group of the batch."""
        if self._config.train.late_groups != "wait":
            return False
        last = sorted(group.prompt.number for group in self._finished)[self._batch_size - 1]
        return any(number < last for number in self._in_flight)

    def _drop_late(self, version: int) -> None:
        self.give_up(
            "late", [g.prompt for g in self._finished if g.is_late(version, self._max_staleness)]
        )
        self._finished = [
            group for group in self._finished if not group.is_late(version, self._max_staleness)
        ]
        self._fill()

    def _fill(self) -> None:
        """Requests groups up to the allowed number."""
        wanted = self._batches_wanted * self._batch_size
        while not self._exhausted and len(self._in_flight) + len(self._finished) < wanted:
            prompt = self._again.pop(0) if self._again else self.prompts.draw()
            if prompt is None:
                self._exhausted = True
                return
            if prompt.number in self._skip:
                self.give_up("skipped", [prompt])
                continue
            self._in_flight[prompt.number] = prompt
            samples, of_guide = (
                self._config.rollout.n_samples_per_prompt,
                self._config.guide_samples,
            )
            self._requests.ask(
                prompt.number,
                self._request(prompt, samples, self.sampling, _TRAINING, guide_samples=of_guide),
            )

    def _request(
        self, prompt: Prompt, samples: int, sampling: Sampling, purpose: int, guide_samples: int = 0
    ) -> GroupRequest:
        train = self._config.train
        seed = (
            (derived_seed(train.seed, purpose, prompt.number),)
            if train.full_determinism_enable
            else None
        )
        return GroupRequest(prompt.text, prompt.label, samples, sampling, seed, guide_samples)

    def _tell(self, groups: int, wanted: int, tokens: int, started: float) -> None:
        rate = f", {tokens / max(time.monotonic() - started, 1e-3):,.0f} tokens/s" if tokens else ""
        self._deadline.progress(
            f"{min(groups, wanted)} of {wanted} groups generated and graded{rate}"
        )

    def _collect(self, timeout_s: float) -> int:
        """Takes the groups that have come; returns how many tokens they have. Raises RolloutError
        if an engine's log-probs are not finite, before they reach a checkpoint that no run could
        resume from."""
        tokens = 0
        for key, responses in self._requests.answers(timeout_s):
            for response in responses:
                response.check_logprobs()
            tokens += sum(response.sampled for response in responses)
            if isinstance(key, tuple):
                self._others[key] = responses
                self._awaited.discard(key)
                continue
            group = Group(self._in_flight.pop(key), responses)
            if not all(response.sampled for response in responses):
                self.give_up("unstarted", [group.prompt])
                self._count_unstarted()
            elif self._is_kept(group):
                self._finished.append(group)
            else:
                self.give_up("filtered", [group.prompt])
                self._count_filtered()
        self._fill()
        return tokens

    def _is_kept(self, group: Group) -> bool:
        algo = self._config.algo
        if not algo.dynamic_filtering_enable:
            return True
        low, high = algo.dynamic_filtering_range
        is_kept, scores = low < group.mean_score < high, group.scores
        least, most = min(scores), max(scores)
        self._unlike_for_batch += not is_kept and least < most
        if not self._range_said and ((least < most and not is_kept) or least < low or most > high):
            self._range_said = True
            logger.warning(
                "dynamic sampling: a group has scores from %g to %g, mean %g, and "
                "algo.dynamic_filtering_range is %g %g, of mean scores: it is %s. Groups that "
                "are neither all right nor all wrong are kept if the range is that of the "
                "reward function's scores",
                least,
                most,
                group.mean_score,
                low,
                high,
                "kept"
                if is_kept
                else "dropped, though its scores are unlike"
                if least < most
                else "dropped",
            )
        return is_kept

    def _count_unstarted(self) -> None:
        """Counts a group with an episode in which the policy wrote nothing. Such a group has no
        baseline, so another prompt replaces it."""
        self._unstarted_for_batch += 1
        most = self._config.rollout.max_filter_batches * self._batch_size
        if self._unstarted_for_batch > most:
            raise RewardFailureLimit(
                f"{self._unstarted_for_batch} groups for one batch of {self._batch_size} were "
                "dropped, as the agent failed before the policy had written anything; their "
                "failures are in the log above. Mend the agent, lower --reward.max_failures to "
                "end sooner, or raise --rollout.max_filter_batches (now "
                f"{self._config.rollout.max_filter_batches})"
            )

    def _count_filtered(self) -> None:
        self._filtered_for_batch += 1
        size, most = self._batch_size, self._config.rollout.max_filter_batches
        if size + self._filtered_for_batch > most * size:
            low, high = self._config.algo.dynamic_filtering_range
            raise FilterExhaustedError(
                f"dynamic sampling used {size + self._filtered_for_batch} prompts for one batch "
                f"of {size}: of the {self._filtered_for_batch} groups that were dropped, whose "
                f"mean scores are not between {low:g} and {high:g}, {self._unlike_for_batch} "
                "have unlike scores. Where that is none, use easier or harder prompts; else a "
                "--algo.dynamic_filtering_range of the reward function's scores. Or raise "
                f"--rollout.max_filter_batches (now {most})."
            )

    # ---- other prompts

    def sample(
        self, prompts: Sequence[Prompt], samples: int, sampling: Sampling, doing: str
    ) -> list[Group]:
        """Samples groups of prompts with the policy, not for training; returns them in the prompts'
        order. See :meth:`sample_others`."""
        requests = {
            (doing, prompt.number): self._request(prompt, samples, sampling, _OTHER)
            for prompt in prompts
        }
        answers = self.sample_others(requests, doing)
        return [Group(prompt, answers[key]) for prompt, key in zip(prompts, requests, strict=True)]

    def sample_others(
        self, requests: Mapping[tuple[str, int], GroupRequest], doing: str
    ) -> dict[Any, list[Response]]:
        """Returns the policy's answers to requests that are not for training, while training
        requests continue. Raises DeadlineExceeded after ``rollout.timeout_s``."""
        with (
            self._deadline.limit(self._timeout_s, doing, "rollout.timeout_s"),
            self._with_engines(lambda: False),
        ):
            self.ask_others(requests)
            answers = self.await_others(requests.keys(), doing)
        assert answers is not None  # never given up: give_up is always False
        return answers

    def ask_others(self, requests: Mapping[tuple[str, int], GroupRequest]) -> None:
        """Requests groups that are not for training, in front of all requests that wait for an
        engine."""
        self._awaited |= requests.keys()
        for key in reversed(list(requests)):
            self._requests.ask(key, requests[key], first=True)

    def await_others(
        self,
        keys: Collection[tuple[str, int]],
        doing: str,
        give_up: Callable[[], bool] = lambda: False,
    ) -> dict[Any, list[Response]] | None:
        """Returns the answers to the requests of ``ask_others``, or None if ``give_up`` returned
        True. Raises DeadlineExceeded after ``rollout.timeout_s``."""
        with self._deadline.limit(self._timeout_s, doing, "rollout.timeout_s"):
            started, have = time.monotonic(), 0
            while self._awaited:
                if give_up():
                    return None
                have += self._collect(min(self._deadline.remaining, _LOOK_S))
                self._tell(len(self._others), len(keys), have, started)
        return {key: self._others.pop(key) for key in keys}

    # ---- records and checkpoints

    def gauges(self) -> dict[str, float]:
        """Returns the numbers of groups in flight and queued, and gauges of the last batch
        taken."""
        return {
            **self._taken,
            "groups/in_flight": float(len(self._in_flight)),
            "groups/queued": float(len(self._finished)),
            **{f"groups/dropped_{reason}": float(count) for reason, count in self.dropped.items()},
        }

    @property
    def place(self) -> dict[str, Any]:
        """The place in the data for a ledger line: the number of prompts drawn, and the numbers of
        those that no line has settled yet."""
        given_up = [number for entries in self._given_up.values() for number, _ in entries]
        return {"drawn": self.prompts.drawn, "waiting": sorted(self._open + given_up)}

    def account(self, ended: bool = False) -> dict[str, Any]:
        """Returns the ledger's next line: the prompts given up since the last line, by reason, and
        the place in the data. If the run has ``ended``, also where the other prompts are and why it
        ended."""
        given_up, self._given_up = self._given_up, defaultdict(list)
        if not ended:
            return {**given_up, **self.place}
        in_flight = [prompt.entry for prompt in (*self._in_flight.values(), *self._again)]
        queued = [group.prompt.entry for group in self._finished]
        why = USED_UP if self._exhausted and not in_flight + queued else TIME_IS_UP
        return {
            "why": why,
            **given_up,
            "in_flight": in_flight,
            "queued": queued,
            **self.place,
            "waiting": [],
        }

    def snapshot(self) -> tuple[dict[str, Any], list[Group], list[Prompt]]:
        """Returns the state with place, counts, and prompts given up since the last ledger line;
        the finished groups that are not taken; and the prompts in flight."""
        given_up = {reason: list(entries) for reason, entries in self._given_up.items()}
        place, skip = self.prompts.state_dict(), sorted(self._skip)
        counts = {"dropped": dict(self.dropped), "given_up": given_up, "last": self._last}
        state = {"prompts": place, "skip": skip, **counts}
        return state, list(self._finished), [*self._in_flight.values(), *self._again]

    def skip(self, numbers: Iterable[int]) -> None:
        """Marks these prompts: they are dropped when they are drawn again or restored."""
        self._skip.update(numbers)

    def restore(
        self, state: Mapping[str, Any], finished: Iterable[Group], in_flight: Iterable[Prompt]
    ) -> None:
        """Continues from a snapshot. Prompts in flight are requested again. So are finished groups
        without experts if this run replays routing and the earlier one did not."""
        self.prompts.load_state_dict(state["prompts"])
        self.dropped.update(state["dropped"])
        # earlier releases saved no ledger entries
        self._given_up = defaultdict(list, state.get("given_up", {}))
        self._skip.update(state.get("skip", ()))  # nor skipped prompts
        self._finished, self._again, self._exhausted = [], list(in_flight), False
        self._last = state.get("last", state["prompts"]["drawn"] - 1)  # not in earlier releases
        for group in finished:
            if group.prompt.number in self._skip:
                self.give_up("skipped", [group.prompt])
            elif self._config.replays_rollout and any(
                r.experts_at is None for r in group.responses
            ):
                self._again.append(group.prompt)
            else:
                self._finished.append(group)


# ---- groups that wait for training, in a checkpoint


_ARRAYS = {
    "tokens": ("tokens_S", np.int32),
    "logprobs": ("logprobs_T", np.float32),
    "entropies": ("entropies_T", np.float32),
}
"""A response's attribute and type, by the name in a checkpoint."""


_EXPERTS = "experts"
"""Name of the array with the bytes of all experts, and of a response's key for their type and
shape."""


def plain_groups(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Returns groups as plain values, and their arrays, with the responses concatenated. Fetches
    experts one group at a time."""
    parts: dict[str, list[np.ndarray]] = {
        name: [np.zeros(0, kind)] for name, (_, kind) in _ARRAYS.items()
    }

    def plain(response: Response) -> dict[str, Any]:
        values = dict(vars(response))
        del values["experts_RLK"]
        if (at := values.pop("experts_at")) is not None:
            experts_RLK = ray.get(at[0])[at[1]]
            values[_EXPERTS] = [experts_RLK.dtype.str, *experts_RLK.shape]
            parts.setdefault(_EXPERTS, []).append(experts_RLK.reshape(-1).view(np.uint8))
        for name, (attribute, _) in _ARRAYS.items():
            array = values.pop(attribute)
            values[name] = None if array is None else len(array)
            parts[name] += [] if array is None else [array]
        return values

    made = [
        {"prompt": vars(group.prompt), "responses": [*map(plain, group.responses)]}
        for group in groups
    ]
    return made, {name: np.concatenate(arrays) for name, arrays in parts.items()}


def groups_from_plain(
    plain: Sequence[Mapping[str, Any]], arrays: Mapping[str, np.ndarray]
) -> list[Group]:
    """Reverses :func:`plain_groups`; puts experts where ranks fetch them."""
    used = dict.fromkeys([*_ARRAYS, _EXPERTS], 0)

    def experts(kind: str, *shape: int) -> tuple[Any, int]:
        start, size = used[_EXPERTS], np.dtype(kind).itemsize * math.prod(shape)
        used[_EXPERTS] += size
        return ray.put([arrays[_EXPERTS][start : start + size].view(kind).reshape(shape)]), 0

    def response(values: dict[str, Any]) -> Response:
        if (told := values.pop(_EXPERTS, None)) is not None:
            values["experts_at"] = experts(*told)
        for name, (attribute, _) in _ARRAYS.items():
            count, start = values.pop(name, None), used[name]  # earlier releases saved fewer arrays
            used[name] += count or 0
            values[attribute] = None if count is None else arrays[name][start : start + count]
        return Response(**values)

    return [
        Group(Prompt(**g["prompt"]), [response(dict(r)) for r in g["responses"]]) for g in plain
    ]


def routed_by_engines(batch: SequenceBatch, samples: Sequence[Response]) -> SequenceBatch:
    """Returns the batch with references to the experts of every completion. Raises ValueError if a
    completion has none."""
    routed = [sample.experts_at for sample in samples if sample.experts_at is not None]
    if len(routed) < len(samples):
        raise ValueError(
            "train.routing_replay rollout: a completion came without experts of its engine"
        )
    return dataclasses.replace(batch, routed_B=tuple(routed))
