"""A rollout engine that died or hangs is replaced, gets the present weights, and its prompts are sampled again.

What counts as the engine's fault: its actor died, the vLLM engine inside died, a request outlived its deadline, a
weight sync names it, it does not answer for ``hang_timeout_s``, or, being a new one, it does not start. Errors of the
user's reward function or of a policy rank are not: they end the run.

A prompt's group of responses comes whole from one call of one engine. Either that call returns and its samples count,
or it fails and the whole group is asked for again, so no sample is lost or counted twice. With full determinism the
seeds depend on the prompt and the weights only, and the repeated call draws the same samples.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from openrlhf_ext.rollout.errors import EngineDied, EngineStartError, GenerationTimeout, InvalidWeights
from openrlhf_ext.rollout.fleet import EngineFleet
from openrlhf_ext.rollout.identity import machine_id
from openrlhf_ext.rollout.weight_sync.base import EnginesAtFault

logger = logging.getLogger(__name__)

_END_S = 10.0
_ASK_AGAIN_S = 1.0


class EngineHangs(RuntimeError):
    """An engine does not answer."""


class RunEnding(RuntimeError):
    """Something else has ended the run."""


class EngineLost(RuntimeError):
    """An engine died or hangs, and the run's restarts are used up."""


@dataclass(frozen=True)
class RecoveryLimits:
    """Options of recovery, see ``vllm.*``.

    Attributes:
        max_restarts: of all engines together, over the run.
        hang_timeout_s: an engine that does not answer for so long hangs.
        start_timeout_s: longest wait for a new engine to be ready.
        policy_timeout_s: longest wait for the policy to give it the weights; in asynchronous training the policy may be
            in the middle of a step.
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
    """A method that has been called on an engine, and `EngineGuard.changes` at that time."""

    index: int
    arguments: dict[str, Any]
    engine: Any
    reference: Any
    changes: int


class EngineGuard:
    """Replaces engines, at most ``max_restarts`` times; may be used from several threads.

    Attributes:
        restarts: engines replaced so far.
    """

    def __init__(
        self,
        engines: EngineFleet,
        policy: Any,
        limits: RecoveryLimits,
        remember: Callable[[str, dict[str, Any]], None] = lambda *_: None,
    ) -> None:
        """
        Args:
            engines: the run's engines, ready; replaced in place.
            policy: actor group whose ranks have ``replace_engines``; None: weights stay those of the disk.
            limits: when and how often.
            remember: told the name and ``process_info`` of every new engine.
        """
        self.engines, self.limits, self.restarts = engines, limits, 0
        self._policy, self._remember = policy, remember
        self._lock = threading.RLock()
        self._changes = 0
        self.has_given_up = False
        self._processes: dict[int, list[psutil.Process]] = {}
        self._note_processes(dict(enumerate(engines)))

    def give_up(self) -> None:
        """The run is ending: nothing is replaced any more, and waits for responses end with ``RunEnding``."""
        self.limits = replace(self.limits, max_restarts=0)
        self.has_given_up = True

    # ---- asking -----------------------------------------------------------------------------------------------------

    def ask(self, method: str, suspended: Callable[[], AbstractContextManager] = nullcontext) -> list[Any]:
        """Call a method that answers quickly on every engine; one that dies or hangs is replaced, and asked anew.

        Args:
            suspended: the deadline of whatever is going on stands still in this context: replacing has its own.

        Raises:
            EngineLost: and no restart is left.
        """
        asked = [self.call(index, method, {}, suspended) for index in range(len(self.engines))]
        return [self._answer(call, method, suspended) for call in asked]

    def call(
        self, index: int, method: str, arguments: dict[str, Any], suspended: Callable[[], AbstractContextManager]
    ) -> EngineCall:
        """Call a method of engine ``index`` as soon as it is neither being replaced nor getting weights.

        A new engine has the weights of the disk until it gets the policy's, and does not answer before it has started.
        """
        with self._alone(suspended):
            engine = self.engines[index]
            return EngineCall(index, arguments, engine, getattr(engine, method).remote(**arguments), self._changes)

    def _answer(self, call: EngineCall, method: str, suspended: Callable[[], AbstractContextManager]) -> Any:
        while True:
            try:
                return ray.get(call.reference, timeout=self.limits.hang_timeout_s)
            except (GetTimeoutError, RayTaskError, RayActorError) as error:
                fault = self.silence([call.index]) if isinstance(error, GetTimeoutError) else error
                if not is_engine_fault(fault):
                    raise
                with suspended():
                    self.replace({call.index: call.engine}, fault)
            call = self.call(call.index, method, call.arguments, suspended)

    def silence(self, indexes: Iterable[int]) -> EngineHangs:
        """The fault of engines that do not answer."""
        return EngineHangs(
            f"rollout engines {sorted(indexes)} did not answer within {self.limits.hang_timeout_s:g} s: they hang"
        )

    # ---- weight sync ------------------------------------------------------------------------------------------------

    def repeated(self, sync: Callable[[], Any], suspended: Callable[[], AbstractContextManager] = nullcontext) -> Any:
        """Run a weight sync; as long as it blames engines, replace these and run it again.

        Args:
            suspended: the deadline of the step stands still in this context: replacing has deadlines of its own.
        """
        with self._changing(suspended):
            while True:
                handles = dict(enumerate(self.engines))
                try:
                    return sync()
                except Exception as error:
                    faulty = engines_at_fault(error)
                    if not faulty:
                        raise
                    with suspended():  # without weights: the sync that is repeated brings them
                        self.replace({index: handles[index] for index in faulty}, error, with_weights=False)

    @property
    def changes(self) -> int:
        """Odd while a weight sync or a replacement is under way."""
        return self._changes

    @contextmanager
    def _alone(self, suspended: Callable[[], AbstractContextManager]) -> Iterator[None]:
        """No other thread sends weights or replaces engines; who has to wait for that is not late for it."""
        if not self._lock.acquire(blocking=False):
            with suspended():
                self._lock.acquire()  # syncs and replacements have deadlines
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def _changing(self, suspended: Callable[[], AbstractContextManager] = nullcontext) -> Iterator[None]:
        with self._alone(suspended):
            outermost = self._changes % 2 == 0
            self._changes += outermost
            try:
                yield
            finally:
                self._changes += outermost

    # ---- replacing --------------------------------------------------------------------------------------------------

    def replace(self, faulty: dict[int, Any], fault: BaseException, with_weights: bool = True) -> None:
        """Put new engines in the place of ``faulty`` (position -> handle), unless another thread has done so.

        Args:
            fault: what they did.
            with_weights: give them the policy's present weights, and prove it.

        Raises:
            EngineLost: no restart is left; caused by ``fault``. With ``max_restarts`` 0 ``fault`` itself is raised.
        """
        with self._changing():
            indexes = to_start = sorted(index for index, handle in faulty.items() if self.engines[index] is handle)
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

    def _spend(self, indexes: Sequence[int], fault: BaseException) -> None:
        if self.limits.max_restarts == 0:
            raise fault
        if self.restarts + len(indexes) > self.limits.max_restarts:
            raise EngineLost(
                f"rollout engines {list(indexes)} have to be replaced, and all restarts are used up "
                f"(--vllm.max_restarts {self.limits.max_restarts}): {fault}"
            ) from fault
        self.restarts += len(indexes)
        logger.warning(
            "replacing rollout engines %s (restart %d of at most %d): %s",
            list(indexes), self.restarts, self.limits.max_restarts, _one_line(fault),
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
        from openrlhf_ext.rollout import wait_until_ready  # not at the top: it imports OpenRLHF and vLLM

        start = time.monotonic()
        fresh = [self.engines[index] for index in indexes]
        try:
            wait_until_ready(fresh, self.limits.start_timeout_s)
        except EngineStartError as error:
            raise EngineStartError(str(error), [indexes[i] for i in error.engines]) from error
        self._note_processes(dict(zip(indexes, fresh, strict=True)))
        if self._policy is not None:
            self._tell_policy(indexes if with_weights else [])
        logger.info("rollout engines %s are back after %.1f s", list(indexes), time.monotonic() - start)

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
            self._remember(f"rollout engine {index}", info)
            self._processes[index] = []
            if info["machine"] == machine_id():
                for pid in (info["pid"], *info["children"]):
                    with suppress(psutil.NoSuchProcess):
                        self._processes[index].append(psutil.Process(pid))

    def watch(self) -> HangWatch:
        """A watch over the engines while calls to them are pending."""
        return HangWatch(self)


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

        A weight sync or a replacement in the middle of calls has a deadline of its own: after it, the time of silence
        counts anew.
        """
        now = time.monotonic()
        if self._guard.changes != self._changes or self._changes % 2:
            self._changes = self._guard.changes
            self._asked.clear()
            return {}
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
    """Pending calls of ``generate_responses``, each of which ends in exactly one list of responses."""

    def __init__(self, guard: EngineGuard, suspended: Callable[[], AbstractContextManager] = nullcontext) -> None:
        """
        Args:
            guard: of the engines.
            suspended: the deadline of the batch stands still in this context: replacing has deadlines of its own.
        """
        self._guard, self._suspended = guard, suspended
        self._calls: dict[Any, EngineCall] = {}
        self._watch = guard.watch()

    def send(self, index: int, arguments: dict[str, Any]) -> Any:
        """Ask engine ``index``; the reference may be waited for here and nowhere else."""
        call = self._guard.call(index, "generate_responses", arguments, self._suspended)
        self._calls[call.reference] = call
        return call.reference

    def next_finished(self, pending: list[Any]) -> tuple[list[dict[str, Any]], list[Any]]:
        """Wait for one of the pending references; its responses, and the references still pending.

        References of engines that failed are exchanged for new ones.

        Raises:
            EngineLost: see `EngineGuard.replace`.
            RayTaskError: the call failed for a reason that is not the engine's.
        """
        pending = list(pending)
        while True:
            ready, pending = ray.wait(pending, num_returns=1, timeout=self._watch.pause_s)
            if self._guard.has_given_up:
                raise RunEnding("the run ends before the rollouts under way")
            if not ready:
                self._look({self._calls[reference].index for reference in pending})
                continue
            call = self._calls.pop(ready[0])
            try:
                return ray.get(ready[0]), pending
            except (RayTaskError, RayActorError) as error:
                if not self._met_a_void_sync(call, error):
                    if not is_engine_fault(error):
                        raise
                    if self._guard.engines[call.index] is call.engine:  # the first of its calls to fail
                        self._replace({call.index: call.engine}, error)
            pending.append(self.send(call.index, call.arguments))

    def _met_a_void_sync(self, call: EngineCall, error: BaseException) -> bool:
        """Whether a weight sync that failed on another engine, and is repeated, spoiled the call (partial rollouts)."""
        is_void = isinstance(error, RayTaskError) and isinstance(error.cause, InvalidWeights)
        return is_void and self._guard.changes != call.changes

    def _look(self, busy: set[int]) -> None:
        """Replace what hangs; its calls then fail, and are repeated."""
        if silent := self._watch.silent(busy):
            self._replace(silent, self._guard.silence(silent))

    def _replace(self, faulty: dict[int, Any], fault: BaseException) -> None:
        with self._suspended():
            self._guard.replace(faulty, fault)


def _one_line(error: BaseException) -> str:
    """What a person needs of an error to go on reading elsewhere."""
    if isinstance(error, RayActorError):
        return "its process died"
    cause = error.cause if isinstance(error, RayTaskError) else error
    first, *others = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {' '.join([first, *others[:1]] if first.endswith(':') else [first])[:300]}"
