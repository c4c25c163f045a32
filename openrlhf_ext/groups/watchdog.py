"""Tracks the activity of every rank, so that a failed collective can name the ranks that it waits
for.

    start_watchdog(timeout_s)       # once per process, after the process group exists; a collective
    with phase("training step"):    # around all code in which this rank meets the others
        ...

A thread of every rank answers status requests on its own socket: the phase, its duration, and the
current line of the main thread. No rank sends a request until a collective fails or times out; then
`phase` queries all ranks and raises `RanksMissingError`. Gloo raises in the waiting thread after
the process group's timeout. NCCL instead ends the process from its own thread, without naming the
missing ranks, so the monitor reports and ends the process shortly before. Torch's flight recorder
shows which ranks are missing: each call of a group has the same number on all of its ranks.

`Gate` and `wait_for_all` are for ranks that wait for one rank that is busy with files or engines. A
collective that outlasts its timeout would end the run, and would keep a GPU busy that an engine may
share, so they poll the store of the process group.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

OPTION = "megatron.collective_timeout_s"
EXIT_CODE = 70
"""Exit code of a process that the monitor ended."""

Address = tuple[str, int]

BUFFER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Environment variables for the number of recorded calls; torch reads either one when the first
NCCL group is created."""
_CALLS = "2000"
_ANSWER_S = 10.0
_TICK_S = 1.0
_LISTED = 16
_COLLECTIVE_CODE = ("/torch/distributed/", "/megatron/core/pipeline_parallel/p2p_communication.py")
_STILL_S = 60.0  # a call that needs no other rank may take this long
_COLLECTIVE_TEXT = (
    "gloo",
    "nccl",
    "timed out waiting",
    "connection closed by peer",
    "connection reset by peer",
)
_PAUSES_S = (0.0002, 0.005)
"""First pause between two polls, and the maximum to which it doubles: a long wait tolerates a
delay."""
_PACKAGE = str(Path(__file__).resolve().parents[1])


@dataclass(frozen=True)
class NcclCalls:
    begun: dict[str, int]  # number of the last collective that this rank has called, by group
    waiting: str | None  # the first unfinished call, in words; None: all are done


def keep_nccl_calls() -> None:
    """Makes the recorder keep the last calls, unless the environment sets their number. Call it
    before any group exists."""
    if not any(name in os.environ for name in BUFFER):
        os.environ[BUFFER[0]] = _CALLS


def nccl_calls() -> NcclCalls:
    """Returns this process's calls, without a call to the device; empty without NCCL."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return NcclCalls({}, None)
    return read_calls(json.loads(dump(True, False)))


def read_calls(trace: dict[str, Any]) -> NcclCalls:
    """Parses torch's record (torch/csrc/distributed/c10d/FlightRecorderDetail.hpp,
    ``dump_json``)."""
    begun: dict[str, int] = {}
    waiting = None
    for entry in trace.get("entries", []):
        name, description = entry["process_group"]
        group = f"{description} {name}"
        number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
        if not entry["is_p2p"]:  # sends are numbered per pair of ranks
            begun[group] = max(begun.get(group, 0), number)
        if waiting is None and entry["state"] != "completed":
            waiting = f"{entry['profiling_name']}, call {number} of group {group}"
    return NcclCalls(begun, waiting)


class RanksMissingError(RuntimeError):
    """A collective failed or timed out; the message names the missing ranks and the activity of
    each."""


@dataclass(frozen=True)
class RankState:
    """A rank's answer to a status request."""

    rank: int
    # Phases entered so far; all ranks enter the same phases, so a smaller number is behind.
    count: int
    phase: str | None  # nested phases joined by " > "; None between phases
    last: str | None  # the last phase that it left
    seconds: float  # since it entered the phase, or left the last one
    place: str  # function, file and line of its main thread
    in_collective: bool
    waited: bool  # a collective of its latest phase failed, so it waits, or has waited, for others
    error: str | None  # the exception with which it left its last phase
    begun: dict[str, int] = field(default_factory=dict)
    waiting: str | None = None
    work: str = ""  # the part of its phase, such as a micro-batch; '' = unknown

    def describe(self) -> str:
        if self.phase is not None:
            verb = "waits in a collective at" if self.in_collective or self.waited else "is at"
            call = f", {self.waiting} is not done" if self.waiting else ""
            return f"in {self.phase!r} for {self.seconds:.1f} s, {verb} {self.place}{call}"
        if self.last is None:
            return f"has entered no phase yet, is at {self.place}"
        ended = f"with {self.error}" if self.error else "in good order"
        return f"left {self.last!r} {self.seconds:.1f} s ago {ended}, is at {self.place}"


# ---- one rank's side


class Watchdog:
    """Tracks the phase of the thread that creates it, answers status requests, and explains a
    failed collective.

    ``addresses``: listeners of all ranks, by rank. ``timeout_s``: timeout of collective calls, for
    messages. ``stuck_s``: the process ends with a report after the thread has made no progress in a
    phase for this long; None: never.
    """

    def __init__(
        self,
        listener: socket.socket,
        addresses: Sequence[Address],
        rank: int,
        timeout_s: float,
        stuck_s: float | None = None,
    ) -> None:
        self.addresses = list(addresses)
        self.rank = rank
        self.timeout_s = timeout_s
        self.stuck_s = stuck_s
        self._names: list[str] = []
        self._count = self._progress = 0
        self._work = ""
        self._last: str | None = None
        self._error: str | None = None
        self._waited_at: str | None = None
        self._since = time.monotonic()
        self._thread_id = threading.get_ident()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._listener = listener
        self._thread = threading.Thread(target=self._serve, name="phases", daemon=True)
        self._thread.start()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Runs the body as a phase; phases may be nested. Raises RanksMissingError if a collective
        in it failed."""
        self._enter(name)
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            if is_collective_failure(raised):
                error = RanksMissingError(self._explain(raised))
                raise error from raised
            raise
        finally:
            self._leave(error)

    def progress(self, work: str = "") -> None:
        """Reports progress of the phase, which the thread's current line may not show (a loop
        around a long call)."""
        self._progress += 1
        self._work = work

    def _enter(self, name: str) -> None:
        with self._lock:
            if not self._names:
                self._count += 1
                self._since = time.monotonic()
                self._error = self._waited_at = None
            self._names.append(name)
            self._work = ""

    def _leave(self, error: BaseException | None) -> None:
        with self._lock:
            self._last = " > ".join(self._names)
            self._names.pop()
            if error is not None and self._error is None:
                self._error = _one_line(error)
            if not self._names:
                self._since = time.monotonic()

    def _explain(self, error: BaseException) -> str:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        with self._lock:
            self._waited_at = _place(frames[::-1])
        state = self.state()
        return (
            f"rank {self.rank} waited in vain in {state.phase!r}, {state.seconds:.1f} s after it "
            f"entered it ({_one_line(error)}).\n{self.report()}\nIf these ranks only need more "
            f"time, raise --{OPTION} (now {self.timeout_s:g})."
        )

    def state(self) -> RankState:
        frames = _stack(self._thread_id)
        calls = nccl_calls()
        files = "\n".join(frame.f_code.co_filename for frame in frames)
        in_collective = calls.waiting is not None or any(part in files for part in _COLLECTIVE_CODE)
        with self._lock:
            place = _place(frames)
            if self._waited_at and self._names:
                place = self._waited_at
            return RankState(
                rank=self.rank,
                count=self._count,
                phase=" > ".join(self._names) or None,
                last=self._last,
                seconds=round(time.monotonic() - self._since, 1),
                place=place,
                in_collective=in_collective,
                waited=self._waited_at is not None,
                error=self._error,
                begun=calls.begun,
                waiting=calls.waiting,
                work=self._work,
            )

    def report(self) -> str:
        return describe_ranks(self.addresses)

    def close(self) -> None:
        self._closing.set()
        # This does not work on every system; where it works, it wakes the thread at once.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=5 * _TICK_S)
        self._listener.close()

    # ---- the thread ----

    def _serve(self) -> None:
        self._listener.settimeout(_TICK_S)
        trace = None
        still_since = time.monotonic()
        while not self._closing.is_set():
            with contextlib.suppress(OSError):  # no request, or the requester disconnected
                self._answer()
            now = self._trace()
            if now is None or now != trace:
                trace = now
                still_since = time.monotonic()
            elif self.stuck_s is not None and time.monotonic() - still_since > self.stuck_s:
                self._end_process(time.monotonic() - still_since)

    def _answer(self) -> None:
        asker, _ = self._listener.accept()
        with asker:
            asker.settimeout(_ANSWER_S)
            asker.sendall(json.dumps(asdict(self.state())).encode())

    def _trace(self) -> list[tuple[int, int]] | None:
        """Returns identity and position of the watched thread's frames; None between phases. Equal
        traces mean no progress."""
        if not self._names:
            return None
        return [
            (self._count, self._progress),
            *((id(frame), frame.f_lasti) for frame in _stack(self._thread_id)),
        ]

    def _end_process(self, seconds: float) -> None:
        # the other ranks report at about the same time, and query this one too
        threading.Thread(
            target=self._answer_forever, name="phases during the report", daemon=True
        ).start()
        logger.error(
            "rank %d has stood still for %.1f s in %r, so it ends (--%s is %g).\n%s",
            self.rank,
            seconds,
            self.state().phase,
            OPTION,
            self.timeout_s,
            self.report(),
        )
        logging.shutdown()
        os._exit(EXIT_CODE)

    def _answer_forever(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                self._answer()


# ---- queries to all ranks


def describe_ranks(addresses: Sequence[Address]) -> str:
    """Queries all ranks and returns a report: the first line names the suspects, then one line per
    rank."""
    states = ask_ranks(addresses)
    reasons = []
    suspects = []
    for why, ranks in find_suspects(states).items():
        named = ", ".join(f"rank {rank}" for rank in ranks)
        reasons.append(f"{why}: {named}.")
        suspects += ranks
    head = " ".join(reasons) or (
        "All ranks are in a collective: perhaps not the same one, or the network is slow."
    )

    others = [rank for rank in range(len(states)) if rank not in suspects]
    order = suspects + others
    lines = [f"rank {rank}: {_describe(states[rank])}" for rank in order[:_LISTED]]
    if len(order) > _LISTED:
        lines.append(f"and {len(order) - _LISTED} more ranks")
    return "\n  ".join([head, *lines])


def ask_ranks(addresses: Sequence[Address]) -> list[RankState | OSError]:
    with ThreadPoolExecutor(max_workers=min(64, max(1, len(addresses)))) as pool:
        return list(pool.map(ask_rank, addresses))


def ask_rank(address: Address, timeout_s: float = _ANSWER_S) -> RankState | OSError:
    try:
        with socket.create_connection(address, timeout=timeout_s) as connection:
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
    except OSError as error:
        return error
    if not answer:
        return ConnectionResetError("it ended while it was asked")
    return RankState(**json.loads(answer))


def find_suspects(states: Sequence[RankState | OSError]) -> dict[str, list[int]]:
    """Returns the ranks that the others wait for, by the reason for the suspicion.

    Being behind in NCCL's calls, or not being in a collective, counts only if there is no stronger
    reason to suspect any rank: such a rank may be about to enter a collective. Ranks whose own
    collective failed are never suspects.
    """
    answers = [state for state in states if isinstance(state, RankState)]
    others = [state for state in answers if not state.waited]
    most = max((state.count for state in answers), default=0)
    furthest: dict[str, int] = {}
    for state in answers:
        for group, number in state.begun.items():
            furthest[group] = max(number, furthest.get(group, 0))

    failed = []
    not_arrived = []
    for state in others:
        if state.phase is None and state.error is not None:
            failed.append(state.rank)
        elif state.phase is None or state.count < most:
            not_arrived.append(state.rank)
    found = {
        "Not answering": [
            rank for rank, state in enumerate(states) if not isinstance(state, RankState)
        ],
        "Failed": failed,
        "Not arrived": not_arrived,
    }
    if not any(found.values()):
        behind = []
        for state in others:
            if any(number < furthest[group] for group, number in state.begun.items()):
                behind.append(state.rank)
        found = {"Behind in NCCL's calls": behind}
    if not any(found.values()):
        outside = [state.rank for state in others if not state.in_collective]
        found = {"Arrived, but not in a collective": outside}
    return {why: ranks for why, ranks in found.items() if ranks}


def is_collective_failure(error: BaseException) -> bool:
    """Whether an exception comes from a collective: a timeout, or a peer that disconnected."""
    if isinstance(error, RanksMissingError) or getattr(error, "explained", False):
        return False
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(
        text in str(error).lower() for text in _COLLECTIVE_TEXT
    )


def _describe(state: RankState | OSError) -> str:
    if isinstance(state, RankState):
        return state.describe()
    if isinstance(state, ConnectionError):
        return f"its process has ended ({_one_line(state)})"
    return (
        f"its process is stopped or blocked, or its machine cannot be reached ({_one_line(state)})"
    )


def _stack(thread_id: int) -> list[FrameType]:
    frame = sys._current_frames().get(thread_id)
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _place(frames: Sequence[FrameType]) -> str:
    """Returns the innermost line of this package, which shows the activity, and the innermost line
    of all."""
    ours = next((frame for frame in frames if frame.f_code.co_filename.startswith(_PACKAGE)), None)
    shown = dict.fromkeys(frame for frame in (ours, *frames[:1]) if frame is not None)
    return " -> ".join(_line(frame) for frame in shown) or "an unknown place"


def _line(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{frame.f_code.co_name} ({path.parent.name}/{path.name}:{frame.f_lineno})"


def _one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


# ---- the process's monitor

_monitor: Watchdog | None = None


def start_watchdog(timeout_s: float) -> Address:
    """Starts this process's monitor and returns its address. A collective over the default process
    group."""
    global _monitor
    stop_watchdog()
    listener = _listen_towards(os.environ["MASTER_ADDR"])
    addresses: list[Address] = [("", 0)] * dist.get_world_size()
    dist.all_gather_object(addresses, listener.getsockname()[:2])
    # Before NCCL ends the process. Gloo's collectives time out by themselves, but a call to an
    # unreachable store does not.
    stuck_s = None  # one rank waits for nobody
    if len(addresses) > 1:
        is_nccl = dist.get_backend() == "nccl"
        stuck_s = 0.9 * timeout_s if is_nccl else max(_STILL_S, 2 * timeout_s)
    rank = dist.get_rank()
    _monitor = Watchdog(listener, addresses, rank, timeout_s, stuck_s)
    atexit.register(stop_watchdog)
    return addresses[rank]


def stop_watchdog() -> None:
    global _monitor
    if _monitor is not None:
        _monitor.close()
        _monitor = None


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Runs the body as a phase of this process's monitor (``Watchdog.phase``), or without a phase
    if there is no monitor."""
    if _monitor is None:
        yield
        return
    with _monitor.phase(name):
        yield


def progress(work: str = "") -> None:
    if _monitor is not None:
        _monitor.progress(work)


def _listen_towards(peer: str) -> socket.socket:
    family, *_, target = socket.getaddrinfo(peer, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        own = probe.getsockname()[0]
    return socket.create_server((own, 0), family=family)


# ---- waits without collectives

_numbers = itertools.count()


class Counter:
    """A counter shared by all ranks of the default process group. Every rank must create the same
    number of counters."""

    def __init__(self, name: str = "") -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._key = f"openrlhf_ext/counter/{next(_numbers)}/{name}"

    def add_one(self) -> None:
        self._store.add(self._key, 1)

    def wait_for(self, number: int) -> None:
        pause_s, longest_s = _PAUSES_S
        while self._store.add(self._key, 0) < number:
            progress()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)


class Gate:
    """One rank signals when it continues, so the other ranks need not wait for it in a
    collective."""

    def __init__(self, leader: int = 0) -> None:
        self._opened = Counter(str(leader))
        self._count = 0
        self._leader = leader

    def next(self) -> None:
        self._count += 1
        if dist.get_rank() == self._leader:
            self._opened.add_one()
        else:
            self._opened.wait_for(self._count)


def wait_for_all() -> None:
    arrived = Counter()
    arrived.add_one()
    arrived.wait_for(dist.get_world_size())
