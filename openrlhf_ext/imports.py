"""Importing large libraries in less time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """For imports: their objects stay, and to search them for garbage again and again takes a
    quarter of the time. Afterwards the collector is as it was, except that it leaves out everything
    that exists by then."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
