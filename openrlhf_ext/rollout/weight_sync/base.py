"""What every weight-sync transport offers, and how it fails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from torch import Tensor


class WeightSyncError(RuntimeError):
    """Weights did not arrive; what the engines hold is not to be sampled from until a whole update succeeds."""


class WeightSyncTimeout(WeightSyncError):
    """A deadline passed; the message says which engines had not answered, and in which phase."""


class WeightTransferFailed(WeightSyncError):
    """The group broke; the message is the transport's."""

    MARK = "weight transfer failed"
    """In every message: what is left of the type after a way that carries only text."""

    def __init__(self, message: str) -> None:
        super().__init__(message if self.MARK in message else f"{self.MARK}: {message}")


class EngineFailed(WeightSyncError):
    """An engine failed to do its part; the message holds its own error."""


class WeightStreamMismatch(WeightSyncError):
    """The tensors handed to the sender are not those of the plan; the message lists the names."""


class WeightStreamAborted(WeightSyncError):
    """The sender gave up in the middle of a stream; the reason is in the sender's own error."""

    MARK = "the sender gave up"


class WeightSender(Protocol):
    """The policy's end, in one process (policy rank 0) however many ranks the policy has."""

    def connect(self) -> None:
        """Build the group with every worker of every engine. Call again after any failure."""

    def send(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> float:
        """Replace the weights of all engines; seconds taken. Afterwards they sample as `version`."""

    def close(self) -> None:
        """Leave the group."""


class WeightReceiver(Protocol):
    """An engine worker's end."""

    def receive(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the plan. A tensor stays valid as long as it is referenced."""

    def close(self) -> None:
        """Leave the group, so that the sender is not left waiting."""
