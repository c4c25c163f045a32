"""How rollout fails. Importable without vLLM; every error survives the way through Ray with its message."""

from __future__ import annotations

from collections.abc import Iterable


class RolloutError(RuntimeError):
    """A rollout engine cannot do what it was asked."""


class EngineStartError(RolloutError):
    """An engine did not start; the message holds that process's own error.

    Attributes:
        engines: positions of those that did not, among those that were waited for.
    """

    def __init__(self, message: str, engines: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.engines = tuple(engines)


class EngineDied(RolloutError):
    """The engine inside a rollout actor stopped working; the message holds its last words."""


class NotFP8(RolloutError):
    """Linear layers of an engine do not compute in FP8 as they were asked to, or some do that should not."""


class InvalidWeights(RolloutError):
    """A weight update did not complete, so that the engine refuses to sample until a later one does."""


class GenerationTimeout(RolloutError):
    """A request did not finish before its deadline; the message says what the engine was doing."""
