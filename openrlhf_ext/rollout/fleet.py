"""The list of engine handles that a run works with. Importable without Ray and vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class EngineFleet(list):
    """Handles of the engines, in order. A new engine takes the place of an old one in the list itself.

    Whoever keeps the list sees it; a copy that went to another process is an ordinary list.
    """

    def __init__(self, start: Callable[[int], Any], num_engines: int) -> None:
        """
        Args:
            start: begins to start engine number i, as it was the first time, and returns its handle.
            num_engines: how many.
        """
        super().__init__(start(index) for index in range(num_engines))
        self._start = start

    def start_anew(self, index: int) -> Any:
        """Start another engine in the place of one whose actor has been killed; returns its handle."""
        self[index] = self._start(index)
        return self[index]

    def __reduce__(self) -> tuple:
        return list, (list(self),)
