"""How rollout fails. Importable without vLLM; every error survives the way through Ray with its message."""

from __future__ import annotations


class RolloutError(RuntimeError):
    """A rollout engine cannot do what it was asked."""


class EngineStartError(RolloutError):
    """An engine did not start; the message holds that process's own error."""


class EngineDied(RolloutError):
    """The engine inside a rollout actor stopped working; the message holds its last words."""


class InvalidWeights(RolloutError):
    """A weight update did not complete, so that the engine refuses to sample until a later one does."""


class GenerationTimeout(RolloutError):
    """A request did not finish before its deadline; the message says what the engine was doing."""
