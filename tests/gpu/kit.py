"""What every check of tests/gpu is given, and how it says that it cannot run here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch


class NotHere(Exception):
    """This machine lacks what a check needs; the text says what. The check counts as skipped, not
    as passed."""


class Partly(Exception):
    """A part of what was to be measured failed; the text says what. The check has failed, the rest
    is kept."""

    def __init__(self, problem: str, measured: dict) -> None:
        super().__init__(problem)
        self.measured = measured


class TimeUp(Exception):
    """Time was up before all was measured; the text says how much was. The check counts as not run,
    the rest is kept."""

    def __init__(self, problem: str, measured: dict) -> None:
        super().__init__(problem)
        self.measured = measured


@dataclass(frozen=True)
class Machine:
    """Where a check runs.

    A check is a function ``check(machine) -> dict`` of what it measured, plain JSON values with
    units in their names. It fails by raising, and has a process of its own.

    Attributes:
        device: the GPU, or the CPU, where everything is small.
        bundle: folder with what ``bundle.sh`` made (goldens, wheels); None where nothing was
        carried.
        seconds: the check's limit; a check that measures in a loop ends earlier by itself.
    """

    device: torch.device
    bundle: Path | None
    seconds: float

    @property
    def on_gpu(self) -> bool:
        """Sizes are real; otherwise they are those of a test."""
        return self.device.type == "cuda"

    def need_gpu(self, why: str) -> None:
        """
        Raises:
            NotHere: there is no GPU.
        """
        if not self.on_gpu:
            raise NotHere(f"{why} needs a GPU")


def join_alone() -> None:
    """What a launcher tells a rank, for a process that is the only one of its run. Port 0:
    whichever is free."""
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
