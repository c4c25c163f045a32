"""How far this rank is in NCCL's calls, by torch's flight recorder.

Under NCCL a collective returns at once, and the rank later waits at some line that reads a value from the device. Who
has not come is seen in the numbers: each call of a group has the same number on all of its ranks.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

import torch

BUFFER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""The last calls that are kept; torch reads either when the first NCCL group is made."""
_CALLS = "2000"


@dataclass(frozen=True)
class NcclCalls:
    """What the recorder holds.

    Attributes:
        begun: number of the last collective that this rank has called, by group.
        waiting: the first call that is not done, in words; None: all are.
    """

    begun: dict[str, int]
    waiting: str | None


def keep_nccl_calls() -> None:
    """Lets the recorder keep the last calls, unless the environment says how many; before any group is made."""
    if not any(name in os.environ for name in BUFFER):
        os.environ[BUFFER[0]] = _CALLS


def nccl_calls() -> NcclCalls:
    """This process's calls; without NCCL there are none. Takes the Python part of torch only, no call to the device."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return NcclCalls({}, None)
    return read_calls(json.loads(dump(True, False)))


def read_calls(trace: dict[str, Any]) -> NcclCalls:
    """What torch's record says (torch/csrc/distributed/c10d/FlightRecorderDetail.hpp, ``dump_json``)."""
    begun: dict[str, int] = {}
    waiting = None
    for entry in trace.get("entries", []):
        name, description = entry["process_group"]
        group = f"{description} {name}"
        number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
        if not entry["is_p2p"]:  # sends are numbered by pairs of ranks
            begun[group] = max(begun.get(group, 0), number)
        if waiting is None and entry["state"] != "completed":
            waiting = f"{entry['profiling_name']}, call {number} of group {group}"
    return NcclCalls(begun, waiting)
