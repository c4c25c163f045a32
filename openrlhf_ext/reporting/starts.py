"""The starts of a run: a run that goes on with other options has trained with those of each
start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_SAME_RUN = "ckpt.load_enable"  # says that a start goes on, nothing else


@dataclass
class Start:
    """``options`` of the steps after ``begun``, until ``ended``; None: the last start."""

    begun: int
    options: dict[str, Any]
    ended: int | None = None

    @property
    def steps(self) -> str:
        return (
            f"steps {self.begun + 1} to {self.ended}"
            if self.ended is not None
            else f"from step {self.begun + 1}"
        )


def starts_of(events: Iterable[Mapping[str, Any]]) -> list[Start]:
    """Those whose steps are in the run, in order; consecutive ones with the same options are one.
    ``events``: lines of events.jsonl."""
    starts: list[Start] = []
    for event in events:
        if event.get("event") == "start":
            options = {
                name: value for name, value in event.get("options", {}).items() if name != _SAME_RUN
            }
            starts.append(Start(event.get("resume_step", 0), options))
        elif event.get("event") == "resumed" and starts:
            # an older checkpoint, where the newest was damaged
            starts[-1].begun = min(starts[-1].begun, event.get("resume_step", 0))
    kept: list[Start] = []
    for start in starts:
        while kept and kept[-1].begun >= start.begun:
            kept.pop()  # its steps were made again
        if not kept or kept[-1].options != start.options:
            kept.append(start)
    for start, following in zip(kept, kept[1:], strict=False):
        start.ended = following.begun
    return kept
