"""What chaos puts around a user's reward function: it counts the samples, and misbehaves once if a
file asks for it."""

from __future__ import annotations

import math
import os
import struct
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from openrlhf_ext.rewards.worker import call_reward, load_reward_function


def _raise() -> None:
    raise RuntimeError("chaos raised this in the reward function")


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)


MISDEEDS: Mapping[str, Callable[[], Any]] = {
    "raises": _raise,
    "hangs": lambda: time.sleep(1e9),
    "forks": _fork,
    "fills": lambda: bytearray(1 << 45),
    "prints": lambda: sys.stdout.write("chaos " * (1 << 20)),
    "nan": lambda: {"rewards": math.nan, "scores": 0.0},
    "closes": lambda: os.closerange(0, 1 << 10),
}


class Spoiled:
    """The function of the user's file; ``folder`` has ``calls``, the time of each call, and
    whatever is asked for."""

    def __init__(self, path: str, folder: str) -> None:
        self._grade, self._folder = load_reward_function(path), Path(folder)

    def __call__(
        self, queries: Any, prompts: Any, labels: Any, completions: Any = ("",), **_: Any
    ) -> Any:
        with open(self._folder / "calls", "ab", buffering=0) as calls:
            calls.write(struct.pack("d", time.time()))
        for name, misdeed in MISDEEDS.items():
            try:
                (self._folder / name).unlink()  # of several workers one gets it
            except FileNotFoundError:
                continue
            if isinstance(answer := misdeed(), dict):
                return answer
        return call_reward(self._grade, queries[0], prompts[0], labels[0], completions[0])
