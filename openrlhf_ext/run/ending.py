"""How a run ends early: the signals that end it, and what it says and writes down then."""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping
from typing import Any

from openrlhf_ext.config.trained import TrainedConfig
from openrlhf_ext.reporting import EventLog
from openrlhf_ext.run.checkpoints import checkpoint_store, resumption

logger = logging.getLogger(__name__)

INTERRUPTED = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
"""The signals that end a run, and its exit code then. All but SIGINT (Ctrl-C) let it save; SIGHUP
is the end of its terminal."""


def listened() -> list[signal.Signals]:
    """Those of ``INTERRUPTED`` that this process is to hear: not SIGHUP under ``nohup``."""
    return [
        number
        for number in INTERRUPTED
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]


def hear_again(handlers: Mapping[signal.Signals, Any]) -> None:
    """The signals go to these handlers, which they went to before."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


def report_interruption(config: TrainedConfig, events: EventLog, number: int) -> int:
    """Says what the run can go on from, after a signal; returns the exit code."""
    name = signal.Signals(number).name
    logger.warning("%s: %s", name, resumption(config))
    newest = [str(folder) for folder in checkpoint_store(config).checkpoints()[-1:]]
    note_end(events, "interrupted", signal=name, checkpoint=newest[0] if newest else None)
    return 128 + number


def note_end(events: EventLog, event: str, **facts: Any) -> None:
    """Writes how the run ended; the disk that is full may be why it did."""
    try:
        events.note(event, **facts)
    except OSError as error:
        logger.error("events.jsonl does not say that the run ended: %s", error)
