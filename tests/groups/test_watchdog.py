"""A collective that waits in vain names the ranks it waits for."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from openrlhf_ext.groups import watchdog
from openrlhf_ext.groups.watchdog import RankState, Watchdog, describe_ranks, find_suspects
from tests.groups.watchdog_worker import TIMEOUT_S
from tests.launch import launch
from tests.patience import PATIENCE_S, SOONER_S

WORLD = 4


@pytest.fixture(scope="module")
def seen() -> list[dict[str, str]]:
    return launch("tests.groups.watchdog_worker", "all_cases", WORLD)


def test_phases_without_trouble_change_nothing(seen) -> None:
    assert [rank["all_is_well"] for rank in seen] == ["no error"] * WORLD


@pytest.mark.parametrize(
    ("case", "phase", "culprit", "why", "doing"),
    [
        (
            "one_rank_sleeps",
            "training step",
            1,
            "Arrived, but not in a collective",
            r"in 'training step' for [\d.]+ s, is at one_rank_sleeps "
            r"\(groups/watchdog_worker.py:\d+\)",
        ),
        (
            "one_rank_lags",
            "training step",
            2,
            "Not arrived",
            r"in 'forward > reading a file' for [\d.]+ s, is at one_rank_lags",
        ),
        (
            "one_rank_raises",
            "loading",
            0,
            "Failed",
            r"left 'loading' [\d.]+ s ago with ValueError: the 3rd expert is missing, is at "
            r"one_rank_raises",
        ),
        (
            "one_rank_is_stopped",
            "saving",
            3,
            "Not answering",
            r"its process is stopped or blocked, or its machine cannot be reached",
        ),
    ],
)
def test_the_waiting_ranks_name_the_one_they_wait_for(
    seen, case, phase, culprit, why, doing
) -> None:
    for rank in set(range(WORLD)) - {culprit}:
        message = seen[rank][case]
        assert message.startswith(f"RanksMissingError: rank {rank} waited in vain in '{phase}'"), (
            message
        )
        assert f"{why}: rank {culprit}.\n  rank {culprit}: " in message, message
        assert re.search(doing, message), message
        assert f"--megatron.collective_timeout_s (now {TIMEOUT_S:g})" in message
        assert f"rank {rank}: in '{phase}' for" in message and "waits in a collective at" in message
        assert float(seen[rank][f"seconds of {case}"]) < SOONER_S, (
            "it waited for more than its collective"
        )
    assert "RanksMissingError" not in seen[culprit][case]


# ---- ranks as threads
# -----------------------------------------------------------------------------------------------


@contextmanager
def monitors(count: int) -> Iterator[list[Watchdog]]:
    """Monitors of ranks that all live in this thread."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [listener.getsockname() for listener in listeners]
    made = [Watchdog(listener, addresses, rank, 5.0) for rank, listener in enumerate(listeners)]
    try:
        yield made
    finally:
        for monitor in made:
            monitor.close()


def test_an_error_of_the_body_passes_unchanged() -> None:
    with monitors(1) as (monitor,), pytest.raises(ZeroDivisionError), monitor.phase("shaping"):
        1 / 0  # noqa: B018


def test_a_rank_whose_process_has_ended_is_named() -> None:
    with monitors(3) as made:
        made[1].close()
        with made[0].phase("forward"), made[2].phase("forward"):
            report = describe_ranks(made[0].addresses)
    assert report.splitlines()[0] == "Not answering: rank 1."
    assert "rank 1: its process has ended (ConnectionRefusedError" in report


def test_only_the_first_ranks_are_listed_and_the_suspects_always() -> None:
    with monitors(40) as made:
        for monitor in made:
            if monitor.rank != 37:
                monitor._enter("forward")
        report = describe_ranks(made[0].addresses)
    lines = report.splitlines()
    assert (
        lines[:2] == ["Not arrived: rank 37.", lines[1]]
        and "rank 37: has entered no phase yet" in lines[1]
    )
    assert lines[-1].strip() == "and 24 more ranks" and len(lines) == 1 + 16 + 1


def test_two_ranks_that_give_up_together_do_not_accuse_each_other() -> None:
    def fail(monitor: Watchdog, messages: list[str], other: threading.Barrier) -> None:
        with pytest.raises(watchdog.RanksMissingError) as caught, monitor.phase("training step"):
            other.wait(timeout=PATIENCE_S)
            raise dist.DistBackendError("Timed out waiting 1000ms for recv operation to complete")
        messages.append(str(caught.value))

    messages: list[str] = []
    together = threading.Barrier(2)
    with monitors(3) as made:
        threads = [threading.Thread(target=fail, args=(m, messages, together)) for m in made[:2]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=PATIENCE_S)
    assert len(messages) == 2 and all(
        "\nNot arrived: rank 2.\n" in message for message in messages
    ), messages


def state(rank: int, **fields) -> RankState:
    common = {
        "count": 3,
        "phase": "forward",
        "last": None,
        "seconds": 1.0,
        "place": "x",
        "in_collective": True,
        "waited": False,
        "error": None,
    }
    return RankState(rank=rank, **{**common, **fields})


@pytest.mark.parametrize(
    ("states", "wanted"),
    [
        ([state(0), state(1)], {}),
        ([state(0), state(1, in_collective=False)], {"Arrived, but not in a collective": [1]}),
        ([state(0, waited=True, in_collective=False), state(1)], {}),
        ([state(0), state(1, count=2), state(2, phase=None)], {"Not arrived": [1, 2]}),
        (
            [state(0), state(1, phase=None, error="ValueError: no"), state(2, in_collective=False)],
            {"Failed": [1]},
        ),
        (
            [state(0), TimeoutError("timed out"), state(2, count=2)],
            {"Not answering": [1], "Not arrived": [2]},
        ),
        ([ConnectionRefusedError()], {"Not answering": [0]}),
        (
            [state(0, begun={"tp 3": 7}), state(1, begun={"tp 3": 6}), state(2, begun={"tp 4": 2})],
            {"Behind in NCCL's calls": [1]},
        ),
        ([state(0, begun={"tp 3": 7}), state(1, begun={"tp 3": 6}, count=2)], {"Not arrived": [1]}),
        (
            [state(0, begun={"tp 3": 7}), state(1, begun={"tp 3": 7}, in_collective=False)],
            {"Arrived, but not in a collective": [1]},
        ),
    ],
    ids=[
        "all wait",
        "busy",
        "gave up",
        "late",
        "failed",
        "silent and late",
        "all gone",
        "behind",
        "behind and late",
        "busy beside NCCL",
    ],
)
def test_who_is_suspected(states, wanted) -> None:
    assert find_suspects(states) == wanted


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (dist.DistBackendError("NCCL error"), True),
        (
            RuntimeError(
                "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:6"
            ),
            True,
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (watchdog.RanksMissingError("gloo timed out waiting"), False),
        (KeyError("nccl"), False),
    ],
)
def test_what_counts_as_the_failure_of_a_collective(error, wanted) -> None:
    assert watchdog.is_collective_failure(error) is wanted


def test_without_a_monitor_a_phase_is_only_its_body() -> None:
    with pytest.raises(RuntimeError, match="gloo"), watchdog.phase("alone"):
        raise RuntimeError("gloo")


def test_a_process_that_stands_still_ends_with_a_report() -> None:
    """What happens on NCCL, whose collectives do not raise in the thread that waits."""
    script = (
        "import socket, time\n"
        "from openrlhf_ext.groups.watchdog import Watchdog\n"
        "listener = socket.create_server(('127.0.0.1', 0))\n"
        "monitor = Watchdog(listener, [listener.getsockname()], 0, timeout_s=3.0, stuck_s=1.0)\n"
        "time.sleep(1.5)  # outside of a phase nobody is stuck\n"
        "with monitor.phase('training step'):\n"
        "    until = time.monotonic() + 1.5\n"
        "    while time.monotonic() < until:\n"
        "        time.sleep(0.1)\n"
        "        monitor.progress()  # slow, but going on\n"
        "    print('not stuck', flush=True)\n"
        "    time.sleep(600)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert run.returncode == watchdog.EXIT_CODE and "not stuck" in run.stdout, run.stderr
    assert (
        "rank 0 has stood still for" in run.stderr
        and "in 'training step', so it ends" in run.stderr
    )
    assert "(--megatron.collective_timeout_s is 3)" in run.stderr and "is at <module>" in run.stderr


def entry(group: str, number: int, state: str, p2p: int | None = None) -> dict:
    """A call as torch 2.13 records it (FlightRecorderDetail.hpp, ``dump_json``)."""
    return {
        "process_group": [group, "TENSOR_MODEL_PARALLEL_GROUP"],
        "collective_seq_id": number,
        "is_p2p": p2p is not None,
        "p2p_seq_id": p2p or 0,
        "profiling_name": "nccl:send 0->1" if p2p else "nccl:all_reduce",
        "state": state,
    }


def test_a_rank_that_waits_at_a_line_of_its_own_says_which_call_of_nccl_is_not_done(
    monkeypatch,
) -> None:
    trace = {
        "entries": [
            entry("3", 6, "completed"),
            entry("3", 7, "started"),
            entry("3", 7, "scheduled", p2p=9),
        ]
    }

    def dump(calls, only_active):
        return json.dumps(trace).encode() if calls and not only_active else b"{}"

    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", dump, raising=False)
    with monitors(1) as (monitor,), monitor.phase("training"):
        report = monitor.report()
    assert report.startswith("All ranks are in a collective")
    assert "in 'training'" in report and "waits in a collective at" in report
    assert "nccl:all_reduce, call 7 of group TENSOR_MODEL_PARALLEL_GROUP 3 is not done" in report
    assert watchdog.nccl_calls().begun == {"TENSOR_MODEL_PARALLEL_GROUP 3": 7}
    assert watchdog.read_calls({}) == watchdog.NcclCalls({}, None)


def test_torch_keeps_the_last_calls_unless_it_is_told_how_many(monkeypatch) -> None:
    for given, kept in ((None, "2000"), ("0", None)):
        monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
        if given is not None:
            monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", given)
        watchdog.keep_nccl_calls()
        assert os.environ.get("TORCH_FR_BUFFER_SIZE") == kept
