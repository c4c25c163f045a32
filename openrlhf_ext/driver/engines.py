"""Replaces engines that die or hang; a new engine gets the current weights, and the prompts are
sampled again.

An engine is at fault if its actor died, the vLLM engine inside died, a request outlived its
deadline, a weight sync names it, it does not answer for ``vllm.hang_timeout_s``, or it is new and
does not start. Errors of the user's reward function or of a policy rank end the run. While
``vllm.min_engines`` others are left, the run does not wait for the new engine, which joins in a
weight sync. Everything here runs in the driver's one thread: weight syncs and replacements never
overlap.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayError, RayTaskError

from openrlhf_ext.config import RunConfig
from openrlhf_ext.driver.cluster import ask_about
from openrlhf_ext.driver.placement import RankGroup
from openrlhf_ext.driver.waits import Deadline, await_ranks, call_ranks
from openrlhf_ext.reporting import EventLog
from openrlhf_ext.rollout.process import machine_id, ray_frames
from openrlhf_ext.rollout.response import EngineDied, EngineStartError, GenerationTimeout
from openrlhf_ext.rollout.sync.base import EnginesAtFault
from openrlhf_ext.rollout.sync.sender import EngineCalls
from openrlhf_ext.user_code import users_frames

if TYPE_CHECKING:
    from openrlhf_ext.rollout.launch import EngineFleet

logger = logging.getLogger(__name__)

_END_S = 10.0
_ASK_AGAIN_S = 1.0
_START_AGAIN_S = 60.0  # between two starts of an engine that the run does not wait for


class EngineHangs(RuntimeError):
    """An engine does not answer."""


class EngineLost(RuntimeError):
    """An engine died or hangs, and the run's restarts are used up."""


def is_engine_fault(error: BaseException) -> bool:
    """Returns whether an error of a call to an engine means that the engine must be replaced."""
    if isinstance(error, RayTaskError):
        return isinstance(error.cause, EngineDied | GenerationTimeout | RayActorError)
    # the answer was stored on the engine's node and is lost with it
    return isinstance(
        error, RayActorError | ObjectLostError | EngineDied | GenerationTimeout | EngineHangs
    )


def engines_at_fault(error: BaseException) -> tuple[int, ...]:
    """Returns the positions of the engines that an error of the policy's ranks, or of starting
    engines, blames."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return cause.engines if isinstance(cause, EnginesAtFault | EngineStartError) else ()


@dataclass(frozen=True)
class EngineCall:
    """A method call on an engine, with ``EngineSupervisor.changes`` at that time. ``others``:
    references of the values that the method returns besides the answer."""

    index: int
    engine: Any
    reference: Any
    changes: int
    others: tuple[Any, ...] = ()


class EngineSupervisor:
    """Replaces engines. ``restarts`` counts replaced engines; ``changes`` counts weight syncs and
    the replacements that the run waited for. At most ``max_restarts`` are allowed, not counting
    engines that joined later. Engines keep their positions; ``there`` holds the working ones."""

    def __init__(
        self,
        engines: EngineFleet,
        policy: RankGroup | None,
        config: RunConfig,
        remember: Callable[[str, dict[str, Any]], None] = lambda *_: None,
        deadline: Deadline | None = None,
        name: str = "rollout engine",
        events: EventLog | None = None,
    ) -> None:
        """Args:
        engines: the run's engines, ready; replaced in place.
        policy: actor group whose ranks have ``replace_engines``; None: the engines keep the weights
        from disk.
        remember: called with the name and ``process_info`` of every new engine.
        deadline: of the driver's phases; restarts after a replacement, which has its own deadline.
        """
        self.engines, self.config, self.restarts, self.changes = engines, config, 0, 0
        self._policy, self._remember, self._deadline = policy, remember, deadline or Deadline()
        self._name, self._events = name, events or EventLog()
        self._processes: dict[int, list[psutil.Process]] = {}
        self._infos: dict[int, dict[str, Any]] = {}
        fewest = None if policy is None else config.vllm.min_engines
        self._fewest = len(engines) if fewest is None else fewest
        self._present, self._ranks_know, self._joined = list(range(len(engines))), True, 0
        # new engines that the run does not wait for, by position: the reference of their first
        # call, and when they were started
        self._starts: dict[int, tuple[Any, float]] = {}
        self._note_processes(self.there)

    @property
    def there(self) -> dict[int, Any]:
        """The working engines by position, in the order in which the policy's ranks count them."""
        return {index: self.engines[index] for index in self._present}

    # ---- calls

    def ask(self, method: str) -> list[Any]:
        """Calls a method that answers quickly on every working engine. An engine that dies or hangs
        is replaced and called again, or left out. Raises EngineLost if no restart is left."""
        asked = [self.call(index, method) for index in self.there]
        return [answer for call in asked for answer in self._answers(call, method)]

    def call(self, index: int, method: str, *arguments: Any, others: int = 0) -> EngineCall:
        """Calls a method of an engine. ``others``: how many values the method returns besides its
        answer; the call keeps only their references."""
        engine = self.engines[index]
        if not others:
            return EngineCall(
                index, engine, getattr(engine, method).remote(*arguments), self.changes
            )
        reference, *more = (
            getattr(engine, method).options(num_returns=1 + others).remote(*arguments)
        )
        return EngineCall(index, engine, reference, self.changes, tuple(more))

    def _answers(self, call: EngineCall, method: str) -> list[Any]:
        """Returns one answer, or none if the engine is lost."""
        while call.index in self.there:
            try:
                return [ray.get(call.reference, timeout=self.config.vllm.hang_timeout_s)]
            except (GetTimeoutError, ObjectLostError, RayTaskError, RayActorError) as error:
                fault = self.silence([call.index]) if isinstance(error, GetTimeoutError) else error
                if not is_engine_fault(fault):
                    raise
                self.replace({call.index: call.engine}, fault)
            call = self.call(call.index, method)
        return []

    def silence(self, indexes: Iterable[int]) -> EngineHangs:
        """Returns the error of engines that do not answer, with the lines of user code that block
        one of them."""
        silent = sorted(indexes)
        frames = (
            users_frames(ask_about(self._infos[index], ray_frames))
            for index in silent
            if index in self._infos
        )
        blocked = next(filter(None, frames), "")
        where = (
            f", in code that blocks the engine (await, or give it a thread):\n{blocked}"
            if blocked
            else ""
        )
        return EngineHangs(
            f"{self._name}s {silent} did not answer within {self.config.vllm.hang_timeout_s:g} "
            f"s: they hang{where}"
        )

    def end_engines(self) -> None:
        """Ends all engines for good."""
        for index in range(len(self.engines)):
            self._end(index)

    # ---- weight sync

    def repeat_until_sent(self, sync: Callable[[], Any]) -> Any:
        """Runs a weight sync, which includes new engines. While it blames engines, replaces these
        and runs it again."""
        while True:
            self._take_in()
            handles = list(self.there.items())
            try:
                sent = sync()
                for index in [index for index in self._present if index in self._starts]:
                    self._welcome(index)
                return sent
            except Exception as error:
                faulty = engines_at_fault(error)
                if not faulty:
                    raise
                # without weights: the repeated sync brings them
                self.replace(dict(handles[place] for place in faulty), error, with_weights=False)
            finally:
                self.changes += 1

    # ---- replacing

    def replace(
        self, faulty: dict[int, Any], fault: BaseException, with_weights: bool = True
    ) -> None:
        """Replaces the engines in ``faulty`` (position -> handle), unless that has been done. Does
        not wait for engines that the run can do without. Raises EngineLost, caused by ``fault``, if
        no restart is left; with ``max_restarts`` 0 raises ``fault`` itself."""
        lost = sorted(index for index, handle in faulty.items() if self.there.get(index) is handle)
        spare = len(self._present) - self._fewest
        indexes = to_start = lost[spare:]
        for index in lost[:spare]:
            self._do_without(index, fault)
        if not to_start:
            return
        # the old processes end, new ones start, and the policy may be in the middle of a step
        seconds = (
            _END_S * len(indexes)
            + self.config.vllm.start_timeout_s
            + self.config.train.step_timeout_s
        )
        while to_start:
            with self._deadline.suspended(seconds, f"replacing {self._name}s {indexes}"):
                self._spend(to_start, fault)
                for index in to_start:
                    self._end(index)
                    self.engines.start_anew(index)
                try:
                    self._bring_up(indexes, with_weights)
                    to_start = []
                except Exception as error:
                    places = indexes if isinstance(error, EngineStartError) else self._present
                    to_start, fault = (
                        sorted(places[place] for place in engines_at_fault(error)),
                        error,
                    )
                    if not to_start:
                        raise
        self.changes += 1

    def _spend(self, indexes: Sequence[int], fault: BaseException) -> None:
        if self.config.vllm.max_restarts == 0:
            raise fault
        if self.restarts - self._joined + len(indexes) > self.config.vllm.max_restarts:
            raise EngineLost(
                f"{self._name}s {list(indexes)} have to be replaced, and all restarts are used up "
                f"(--vllm.max_restarts {self.config.vllm.max_restarts}): {fault}"
            ) from fault
        self.restarts += len(indexes)
        logger.warning(
            "replacing %ss %s (restart %d of at most %d): %s",
            self._name,
            list(indexes),
            self.restarts - self._joined,
            self.config.vllm.max_restarts,
            _one_line(fault),
        )
        self._events.note(
            "engine_replaced",
            engines=list(indexes),
            of=self._name,
            restarts=self.restarts,
            why=str(fault),
        )

    def _end(self, index: int) -> None:
        """Kills the actor and, on this host, its processes: a hanging process does not listen to
        Ray."""
        ray.kill(self.engines[index])
        victims = self._processes.pop(index, [])  # empty if the engine did not start
        for process in list(victims):
            with suppress(psutil.NoSuchProcess):
                victims += process.children(recursive=True)
        for process in victims:
            # also covers a pid that belongs to another process by now
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(victims, timeout=_END_S)

    def _bring_up(self, indexes: Sequence[int], with_weights: bool) -> None:
        # not at the top of the file: it imports OpenRLHF
        from openrlhf_ext.rollout.launch import wait_until_ready

        start = time.monotonic()
        fresh = [self.engines[index] for index in indexes]
        wait_until_ready(fresh, self.config.vllm.start_timeout_s, self._name)
        self._note_processes(dict(zip(indexes, fresh, strict=True)))
        self._tell_ranks(indexes if with_weights else ())
        logger.info(
            "%ss %s are back after %.1f s", self._name, list(indexes), time.monotonic() - start
        )

    def _tell_ranks(self, fresh: Sequence[int] = ()) -> None:
        """Sends the policy's ranks the list of engines; the ``fresh`` ones get the current
        weights."""
        if self._policy is not None:
            told = {
                "engines": list(self.there.values()),
                "fresh": [self._present.index(index) for index in fresh],
            }
            # the policy may be in the middle of a step
            call_ranks(
                self._policy, "policy", "replace_engines", self.config.train.step_timeout_s, **told
            )
        self._ranks_know = True

    def _note_processes(self, engines: dict[int, Any]) -> None:
        """Looks up the engines' processes; leaves those on other machines to Ray."""
        questions = [engine.process_info.remote() for engine in engines.values()]
        for index, info in zip(
            engines, ray.get(questions, timeout=self.config.vllm.hang_timeout_s), strict=True
        ):
            self._remember(f"{self._name} {index}", info)
            self._processes[index], self._infos[index] = [], info
            if info["machine"] == machine_id():
                for pid in (info["pid"], *info["children"]):
                    with suppress(psutil.NoSuchProcess):
                        self._processes[index].append(psutil.Process(pid))

    # ---- fewer engines, and more again

    def _do_without(self, index: int, fault: BaseException) -> None:
        """Continues with fewer engines until a weight sync takes a new one in. The ranks learn of
        it then: now they may be in the middle of a step."""
        self._present.remove(index)
        self._ranks_know = False
        with self._deadline.suspended(_END_S, f"ending {self._name} {index}"):
            self._end(index)
        self._starts[index] = None, self._starts.get(index, (None, -math.inf))[1]
        self._has_arrived(index)
        said = "%s %d is lost, the others go on (%d, vllm.min_engines %d): %s"
        logger.warning(said, self._name, index, len(self._present), self._fewest, _one_line(fault))
        self._events.note(
            "engine_lost", engine=index, of=self._name, alive=len(self._present), why=str(fault)
        )

    def _has_arrived(self, index: int) -> bool:
        """Returns whether a new engine is ready. Starts an engine that is not started or failed to
        start, at most once a minute. Ray keeps the request until there is room: a node may have to
        come back."""
        asked, since = self._starts[index]
        waited = time.monotonic() - since
        if asked is None:
            if waited >= _START_AGAIN_S:
                self._starts[index] = (
                    self.engines.start_anew(index).process_info.remote(),
                    time.monotonic(),
                )
            return False
        if waited < self.config.vllm.start_timeout_s and not ray.wait([asked], timeout=0)[0]:
            return False
        try:
            ray.get(asked, timeout=0)
            self._note_processes({index: self.engines[index]})
            return True
        except RayError as error:
            said = "%s %d has not started in %.0f s, and is tried again: %s"
            logger.warning(said, self._name, index, waited, _one_line(error))
            ray.kill(self.engines[index])
            self._starts[index] = None, since
            return False

    def _take_in(self) -> None:
        """Adds new engines before a weight sync; they sample only after it has brought the
        weights."""
        arrived = [
            index
            for index in self._starts
            if index not in self._present and self._has_arrived(index)
        ]
        self._present = sorted([*self._present, *arrived])
        if arrived or not self._ranks_know:
            self._tell_ranks()

    def _welcome(self, index: int) -> None:
        """Counts a new engine as working, after a weight sync that verified its weights."""
        del self._starts[index]
        self.restarts, self._joined = self.restarts + 1, self._joined + 1
        logger.info("%s %d is taken in: %d work", self._name, index, len(self._present))
        self._events.note("engine_joined", engine=index, of=self._name, alive=len(self._present))


class HangWatch:
    """Pings engines while long calls are pending."""

    def __init__(self, supervisor: EngineSupervisor) -> None:
        self._supervisor = supervisor
        self._asked: dict[int, tuple[Any, Any, float]] = {}
        self._changes = supervisor.changes

    @property
    def pause_s(self) -> float:
        """The time to wait between two checks."""
        return min(_ASK_AGAIN_S, self._supervisor.config.vllm.hang_timeout_s / 4)

    def silent(self, busy: set[int]) -> dict[int, Any]:
        """Pings the engines in ``busy``; returns position and handle of those that have not
        answered for too long. A weight sync or a replacement has its own deadline: after it, the
        time of silence restarts at 0."""
        now = time.monotonic()
        if self._supervisor.changes != self._changes:
            self._changes = self._supervisor.changes
            self._asked.clear()
        silent = {}
        for index in sorted(busy & self._supervisor.there.keys()):
            engine = self._supervisor.engines[index]
            handle, question, since = self._asked.get(index, (None, None, 0.0))
            if handle is not engine:
                self._asked[index] = (engine, engine.ping.remote(), now)
            elif ray.wait([question], timeout=0)[0]:
                # an error in the answer also appears in the pending calls, with more detail
                if now - since > self.pause_s:
                    self._asked[index] = (engine, engine.ping.remote(), now)
            elif now - since > self._supervisor.config.vllm.hang_timeout_s:
                silent[index] = engine
        return silent


def _one_line(error: BaseException) -> str:
    """Returns a short description of an error; the full text is elsewhere."""
    if isinstance(error, RayActorError):
        return "its process died"
    cause = error.cause if isinstance(error, RayTaskError) else error
    first, *others = str(cause).strip().splitlines()
    return (
        f"{type(cause).__name__}: "
        f"{' '.join([first, *others[:1]] if first.endswith(':') else [first])[:300]}"
    )


class GpuSharing:
    """Runs policy and engines on the same GPUs: puts one side to sleep before the other needs the
    memory (docs/modes.md).

    Both are in memory only for a weight sync: the policy's parameters and the engines' weights, not
    their KV caches. A policy rank reloads the states that a call needs; generation and the sync
    wake the engines. No rank may work while an engine falls asleep: vLLM asserts that the device's
    free memory does not shrink meanwhile, whoever takes it, and the engine would count as failed
    (vllm 0.32.0 v1/worker/gpu_worker.py:325).
    """

    def __init__(
        self, config: RunConfig, groups: Mapping[str, RankGroup], supervisor: EngineSupervisor
    ) -> None:
        """``groups``: the groups of ranks that train, by name."""
        self._groups, self._supervisor, self._timeout_s = (
            groups,
            supervisor,
            config.train.step_timeout_s,
        )
        self._policy_sleeps, self._engines_sleep = config.ds.enable_sleep, config.vllm.enable_sleep

    @contextmanager
    def generation(self, trains: Callable[[], bool]) -> Iterator[None]:
        """Gives the GPUs to the engines in the body; afterwards the engines sleep, used or not.
        ``trains`` returns at the end whether the policy trains next: then the engines do not keep
        the old weights in host memory."""
        if self._policy_sleeps:
            method = "offload_states"
            calls = {name: group.ask(method) for name, group in self._groups.items()}
            for name, refs in calls.items():
                await_ranks(refs, name, method, self._timeout_s)
        if self._engines_sleep:
            self._supervisor.ask("wake_up")
        yield
        if self._engines_sleep:
            self._supervisor.ask("discard_weights" if trains() else "sleep")

    def wake_weights(self) -> None:
        """Restores the memory of the engines' weights, not of their KV caches. Raises
        EnginesAtFault if an engine died or hangs; the weight sync, which includes this call, is
        repeated without it."""
        if self._engines_sleep:
            engines, timeout_s = (
                [*self._supervisor.there.values()],
                self._supervisor.config.vllm.hang_timeout_s,
            )
            doing = "waking up for new weights"
            EngineCalls.start(
                engines, "wake_weights", [()] * len(engines), doing, timeout_s
            ).finish()

    def make_room_for_policy(self) -> None:
        """Frees the engines' weights and KV caches; the weights return unchanged."""
        if self._engines_sleep:
            self._supervisor.ask("sleep")
