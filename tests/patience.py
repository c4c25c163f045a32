"""How long tests wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 600.0
"""For everything that is to come: far more than it takes on a slow machine with other work, so it
ends a hang only.

A deadline that is to pass is short instead, and leaves what must not pass it many times the time
that takes. A test that something comes *before* its deadline gives that deadline ``PATIENCE_S`` and
asks for less than ``SOONER_S``.
"""
SOONER_S = PATIENCE_S / 2


def until(happens: Callable[[], Any], what: str) -> None:
    """Returns when ``happens`` is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not happens():
        assert time.monotonic() < deadline, f"not after {PATIENCE_S:g} s: {what}"
        time.sleep(0.005)
