"""A rollout engine that died or hangs is replaced, gets the present weights, and its prompts are sampled again.

What counts as the engine's fault: its actor died, the vLLM engine inside died, a request outlived its deadline, a
weight sync names it, it does not answer for ``hang_timeout_s``, or, being a new one, it does not start. Errors of the
user's reward function or of a policy rank are not: they end the run.

A group of completions comes whole from one call of one engine. Either that call returns and its completions count, or
it fails and the whole group is asked for again, so none is lost or counted twice. With full determinism the seeds
depend on the prompt and the weights only, and the repeated call draws the same completions.

Everything here happens in the driver's one thread: no two weight syncs or replacements meet.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from openrlhf_ext.driver.waiting import Deadline
from openrlhf_ext.rollout.errors import EngineDied, EngineStartError, GenerationTimeout, InvalidWeights
from openrlhf_ext.rollout.process import machine_id
from openrlhf_ext.rollout.response import GroupRequest, Response
from openrlhf_ext.rollout.sync.base import EnginesAtFault

if TYPE_CHECKING:
    from openrlhf_ext.rollout.launch import EngineFleet

logger = logging.getLogger(__name__)

_END_S = 10.0
_ASK_AGAIN_S = 1.0


class EngineHangs(RuntimeError):
    """An engine does not answer."""


class EngineLost(RuntimeError):
    """An engine died or hangs, and the run's restarts are used up."""


@dataclass(frozen=True)
class RecoveryLimits:
    """Options of recovery, see ``vllm.*``.

    Attributes:
        max_restarts: of all engines together, over the run.
        hang_timeout_s: an engine that does not answer for so long hangs.
        start_timeout_s: longest wait for a new engine to be ready.
        policy_timeout_s: longest wait for the policy to give it the weights; the policy may be in the middle of a step.
    """

    max_restarts: int
    hang_timeout_s: float
    start_timeout_s: float
    policy_timeout_s: float


def is_engine_fault(error: BaseException) -> bool:
    """Whether an error of a call to an engine means that the engine has to be replaced."""
    if isinstance(error, RayTaskError):
        return isinstance(error.cause, EngineDied | GenerationTimeout | RayActorError)
    return isinstance(error, RayActorError | EngineDied | GenerationTimeout | EngineHangs)


def engines_at_fault(error: BaseException) -> tuple[int, ...]:
    """Positions of the engines that an error of the policy's ranks, or of starting engines, blames."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return cause.engines if isinstance(cause, EnginesAtFault | EngineStartError) else ()


@dataclass(frozen=True)
class EngineCall:
    """A method that has been called on an engine, and ``EngineGuard.changes`` at that time."""

    index: int
    engine: Any
    reference: Any
    changes: int


class EngineGuard:
    """Replaces engines, at most ``max_restarts`` times.

    Attributes:
        restarts: engines replaced so far.
        changes: weight syncs and replacements so far.
    """

    def __init__(
        self,
        engines: EngineFleet,
        policy: Any,
        limits: RecoveryLimits,
        remember: Callable[[str, dict[str, Any]], None] = lambda *_: None,
        deadline: Deadline | None = None,
        name: str = "rollout engine",
    ) -> None:
        """
        Args:
            engines: the run's engines, ready; replaced in place.
            policy: actor group whose ranks have ``replace_engines``; None: weights stay those of the disk.
            limits: when and how often.
            remember: told the name and ``process_info`` of every new engine.
            deadline: of the driver's phases; it stands still while engines are replaced, which has its own.
            name: what messages call an engine.
        """
        self.engines, self.limits, self.restarts, self.changes = engines, limits, 0, 0
        self._policy, self._remember, self._deadline = policy, remember, deadline or Deadline()
        self._name = name
        self._processes: dict[int, list[psutil.Process]] = {}
        self._note_processes(dict(enumerate(engines)))

    # ---- asking -----------------------------------------------------------------------------------------------------

    def ask(self, method: str) -> list[Any]:
        """Call a method that answers quickly on every engine; one that dies or hangs is replaced, and asked anew.

        Raises:
            EngineLost: and no restart is left.
        """
        asked = [self.call(index, method) for index in range(len(self.engines))]
        return [self._answer(call, method) for call in asked]

    def call(self, index: int, method: str, *arguments: Any) -> EngineCall:
        """Call a method of engine ``index``."""
        engine = self.engines[index]
        return EngineCall(index, engine, getattr(engine, method).remote(*arguments), self.changes)

    def _answer(self, call: EngineCall, method: str) -> Any:
        while True:
            try:
                return ray.get(call.reference, timeout=self.limits.hang_timeout_s)
            except (GetTimeoutError, RayTaskError, RayActorError) as error:
                fault = self.silence([call.index]) if isinstance(error, GetTimeoutError) else error
                if not is_engine_fault(fault):
                    raise
                self.replace({call.index: call.engine}, fault)
            call = self.call(call.index, method)

    def silence(self, indexes: Iterable[int]) -> EngineHangs:
        """The fault of engines that do not answer."""
        return EngineHangs(
            f"{self._name}s {sorted(indexes)} did not answer within {self.limits.hang_timeout_s:g} s: they hang"
        )

    # ---- weight sync ------------------------------------------------------------------------------------------------

    def repeated(self, sync: Callable[[], Any]) -> Any:
        """Run a weight sync; as long as it blames engines, replace these and run it again."""
        while True:
            handles = dict(enumerate(self.engines))
            try:
                return sync()
            except Exception as error:
                faulty = engines_at_fault(error)
                if not faulty:
                    raise
                # without weights: the sync that is repeated brings them
                self.replace({index: handles[index] for index in faulty}, error, with_weights=False)
            finally:
                self.changes += 1

    # ---- replacing --------------------------------------------------------------------------------------------------

    def replace(self, faulty: dict[int, Any], fault: BaseException, with_weights: bool = True) -> None:
        """Put new engines in the place of ``faulty`` (position -> handle), unless that has been done.

        Args:
            fault: what they did.
            with_weights: give them the policy's present weights, and prove it.

        Raises:
            EngineLost: no restart is left; caused by ``fault``. With ``max_restarts`` 0 ``fault`` itself is raised.
        """
        indexes = to_start = sorted(index for index, handle in faulty.items() if self.engines[index] is handle)
        if not to_start:
            return
        with self._deadline.suspended():
            while to_start:
                self._spend(to_start, fault)
                for index in to_start:
                    self._end(index)
                    self.engines.start_anew(index)
                try:
                    self._bring_up(indexes, with_weights)
                    to_start = []
                except Exception as error:
                    to_start, fault = sorted(engines_at_fault(error)), error
                    if not to_start:
                        raise
        self.changes += 1

    def _spend(self, indexes: Sequence[int], fault: BaseException) -> None:
        if self.limits.max_restarts == 0:
            raise fault
        if self.restarts + len(indexes) > self.limits.max_restarts:
            raise EngineLost(
                f"{self._name}s {list(indexes)} have to be replaced, and all restarts are used up "
                f"(--vllm.max_restarts {self.limits.max_restarts}): {fault}"
            ) from fault
        self.restarts += len(indexes)
        logger.warning(
            "replacing %ss %s (restart %d of at most %d): %s",
            self._name, list(indexes), self.restarts, self.limits.max_restarts, _one_line(fault),
        )  # fmt: skip

    def _end(self, index: int) -> None:
        """Kill the actor and, on this host, its processes: one that hangs does not listen to Ray."""
        ray.kill(self.engines[index])
        victims = self._processes.pop(index, [])  # none are known of one that did not start
        for process in list(victims):
            with suppress(psutil.NoSuchProcess):
                victims += process.children(recursive=True)
        for process in victims:
            with suppress(psutil.NoSuchProcess):  # also if the pid belongs to another process by now
                process.kill()
        psutil.wait_procs(victims, timeout=_END_S)

    def _bring_up(self, indexes: Sequence[int], with_weights: bool) -> None:
        from openrlhf_ext.rollout.launch import wait_until_ready  # not at the top: it imports OpenRLHF

        start = time.monotonic()
        fresh = [self.engines[index] for index in indexes]
        try:
            wait_until_ready(fresh, self.limits.start_timeout_s, self._name)
        except EngineStartError as error:
            raise EngineStartError(str(error), [indexes[i] for i in error.engines]) from error
        self._note_processes(dict(zip(indexes, fresh, strict=True)))
        if self._policy is not None:
            self._tell_policy(indexes if with_weights else [])
        logger.info("%ss %s are back after %.1f s", self._name, list(indexes), time.monotonic() - start)

    def _tell_policy(self, fresh: Sequence[int]) -> None:
        calls = self._policy.async_run_method("replace_engines", engines=list(self.engines), fresh=list(fresh))
        try:
            ray.get(calls, timeout=self.limits.policy_timeout_s)
        except GetTimeoutError as error:
            raise TimeoutError(
                f"the policy did not give new rollout engines its weights within {self.limits.policy_timeout_s:g} s; "
                "raise --train.step_timeout_s if its steps take longer"
            ) from error

    def _note_processes(self, engines: dict[int, Any]) -> None:
        """Find out which processes the engines are; those of other machines are left to Ray."""
        questions = [engine.process_info.remote() for engine in engines.values()]
        for index, info in zip(engines, ray.get(questions, timeout=self.limits.hang_timeout_s), strict=True):
            self._remember(f"{self._name} {index}", info)
            self._processes[index] = []
            if info["machine"] == machine_id():
                for pid in (info["pid"], *info["children"]):
                    with suppress(psutil.NoSuchProcess):
                        self._processes[index].append(psutil.Process(pid))


class HangWatch:
    """Asks engines whether they are there, while calls that may take long are pending."""

    def __init__(self, guard: EngineGuard) -> None:
        self._guard = guard
        self._asked: dict[int, tuple[Any, Any, float]] = {}
        self._changes = guard.changes

    @property
    def pause_s(self) -> float:
        """How long to wait between two looks."""
        return min(_ASK_AGAIN_S, self._guard.limits.hang_timeout_s / 4)

    def silent(self, busy: set[int]) -> dict[int, Any]:
        """Ask the engines in ``busy``; position and handle of those that have not answered for too long.

        A weight sync or a replacement has a deadline of its own: after it, the time of silence counts anew.
        """
        now = time.monotonic()
        if self._guard.changes != self._changes:
            self._changes = self._guard.changes
            self._asked.clear()
        silent = {}
        for index in sorted(busy):
            engine = self._guard.engines[index]
            handle, question, since = self._asked.get(index, (None, None, 0.0))
            if handle is not engine:
                self._asked[index] = (engine, engine.ping.remote(), now)
            elif ray.wait([question], timeout=0)[0]:
                # an answer that is an error is seen in the pending calls too, with more to say
                if now - since > self.pause_s:
                    self._asked[index] = (engine, engine.ping.remote(), now)
            elif now - since > self._guard.limits.hang_timeout_s:
                silent[index] = engine
        return silent


class GroupRequests:
    """Groups that the engines are asked for: as many as they can batch, each from the engine with the least to do.

    What is more waits here, so that questions and weight updates never wait behind prompts in an engine's queue (an
    asynchronous Ray actor takes 1,000 calls at a time).
    """

    def __init__(self, guard: EngineGuard, max_requests: int) -> None:
        """
        Args:
            guard: of the engines.
            max_requests: completions that an engine is asked for at a time; a larger group goes to an idle one.
        """
        self._guard, self._max_requests = guard, max_requests
        self._backlog: deque[tuple[Hashable, GroupRequest]] = deque()
        self._calls: dict[Any, tuple[EngineCall, Hashable, GroupRequest]] = {}
        self._load = [0] * len(guard.engines)
        self._watch = HangWatch(guard)
        self._looked = time.monotonic()

    def __len__(self) -> int:
        """Groups asked for and not answered."""
        return len(self._backlog) + len(self._calls)

    @property
    def pending(self) -> list[Any]:
        """The calls of which one will be answered next."""
        return list(self._calls)

    @property
    def pause_s(self) -> float:
        """The longest time between two calls of ``answers`` in which engines that hang are noticed in time."""
        return self._watch.pause_s

    @property
    def load(self) -> tuple[int, ...]:
        """Completions that each engine has been asked for."""
        return tuple(self._load)

    def ask(self, key: Hashable, request: GroupRequest) -> None:
        """Ask for a group; ``key`` comes back with it."""
        self._backlog.append((key, request))
        self._deal()

    def answers(self, timeout_s: float) -> list[tuple[Hashable, list[Response]]]:
        """Groups that have come; after ``timeout_s`` seconds without any, or a look after the engines, maybe none.

        Groups of engines that failed are asked for again.

        Raises:
            EngineLost: see ``EngineGuard.replace``.
            RayTaskError: a call failed for a reason that is not the engine's.
        """
        if not self._calls:
            return []
        ready, _ = ray.wait(list(self._calls), num_returns=1, timeout=min(timeout_s, self._watch.pause_s))
        if ready:  # and whatever else is there
            ready, _ = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        answered = [answer for reference in ready if (answer := self._take(reference)) is not None]
        if time.monotonic() - self._looked > self._watch.pause_s:
            self._look()
        self._deal()
        return answered

    def _deal(self) -> None:
        while self._backlog:
            index = min(range(len(self._load)), key=self._load.__getitem__)
            key, request = self._backlog[0]
            if self._load[index] and self._load[index] + request.samples > self._max_requests:
                return
            self._backlog.popleft()
            call = self._guard.call(index, "generate_group", request)
            self._calls[call.reference] = call, key, request
            self._load[index] += request.samples

    def _take(self, reference: Any) -> tuple[Hashable, list[Response]] | None:
        """An answer; None if the group has to be asked for again."""
        call, key, request = self._calls.pop(reference)
        self._load[call.index] -= request.samples
        try:
            return key, ray.get(reference)
        except (RayTaskError, RayActorError) as error:
            if not self._met_a_void_sync(call, error):
                if not is_engine_fault(error):
                    raise
                self._guard.replace({call.index: call.engine}, error)  # once, for all of its calls
        self._backlog.appendleft((key, request))
        return None

    def _met_a_void_sync(self, call: EngineCall, error: BaseException) -> bool:
        """Whether a weight sync that failed on another engine, and was repeated, spoiled the call."""
        is_void = isinstance(error, RayTaskError) and isinstance(error.cause, InvalidWeights)
        return is_void and self._guard.changes != call.changes

    def _look(self) -> None:
        """Replace what hangs; its calls then fail, and are repeated."""
        self._looked = time.monotonic()
        if silent := self._watch.silent({call.index for call, _, _ in self._calls.values()}):
            self._guard.replace(silent, self._guard.silence(silent))


def _one_line(error: BaseException) -> str:
    """What a person needs of an error to go on reading elsewhere."""
    if isinstance(error, RayActorError):
        return "its process died"
    cause = error.cause if isinstance(error, RayTaskError) else error
    first, *others = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {' '.join([first, *others[:1]] if first.endswith(':') else [first])[:300]}"
