"""Starting Ray on a machine that is slow or busy."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_TRIES = 5


def patiently(start: Callable[[], _T]) -> _T:
    """What ``start`` returns, which starts a Ray node; tried again when Ray has not waited long enough for itself.

    Ray's raylet gives up when its agents, each a Python process, take longer than 15 s to start, and no option changes
    that (ray 2.55, https://github.com/ray-project/ray/issues/65983). The next try finds their files in memory.

    Raises:
        Exception: as ``start``, after the last try.
    """
    for left in reversed(range(_TRIES)):
        try:
            return start()
        except Exception as error:
            if left == 0 or "timed out during startup" not in str(error):
                raise
            logger.warning("Ray did not start in time: trying again, %d tries are left", left)
    raise AssertionError("unreachable")
