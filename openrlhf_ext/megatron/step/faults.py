"""What a train step may end with instead of an update. The driver knows these errors without Megatron."""

from __future__ import annotations


class NonFiniteUpdateError(FloatingPointError):
    """The loss or the gradient norm of a train step is NaN or infinite, on every rank; the step was not applied."""
