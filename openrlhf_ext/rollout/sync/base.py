"""What every weight-sync transport offers, and how it fails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from openrlhf_ext.rollout.sync.plan import Bucket


class WeightSyncError(RuntimeError):
    """Weights did not arrive; what the engines hold is not to be sampled from until a whole update succeeds."""

    explained = True
    """The message says what failed, even if it quotes a collective library: it was not one of the policy's ranks."""


class WeightTransferFailed(WeightSyncError):
    """The group broke; the message is the transport's."""

    MARK = "weight transfer failed"
    """In every message: what is left of the type after a way that carries only text."""

    def __init__(self, message: str) -> None:
        super().__init__(message if self.MARK in message else f"{self.MARK}: {message}")


class EnginesAtFault(WeightSyncError):
    """An error of particular engines, which a restart of these may cure.

    Attributes:
        engines: their positions among the sender's engines.
    """

    def __init__(self, message: str, engines: Iterable[int]) -> None:
        super().__init__(message)
        self.engines = tuple(engines)

    def __reduce__(self) -> tuple:
        return type(self), (str(self), self.engines)


class WeightSyncTimeout(EnginesAtFault):
    """A deadline passed; the message says which engines had not answered, and in which phase."""


class EngineFailed(EnginesAtFault):
    """An engine failed to do its part; the message holds its own error."""


class WeightStreamMismatch(WeightSyncError):
    """The tensors handed to the sender are not those of the plan; the message lists the names."""


class WeightStreamAborted(WeightSyncError):
    """The sender gave up in the middle of a stream; the reason is in the sender's own error."""

    MARK = "the sender gave up"


@dataclass(frozen=True)
class Link:
    """How an engine's workers reach the sender.

    Attributes:
        transport: name of the transport.
        address, port: of the sender's TCPStore.
        first_rank: rank of the engine's first worker in the group; the others follow.
        world_size: ranks of the group: the sender and every worker of every engine.
        timeout_s: limit of joining, and of every transfer.
        buffers: shared-memory transports: how to open the sender's buffers, by the device they are on.
    """

    transport: str
    address: str
    port: int
    first_rank: int
    world_size: int
    timeout_s: float
    buffers: dict[str, Any] = field(default_factory=dict)

    def to_wire(self) -> dict[str, Any]:
        """Strings and numbers, for ways that carry nothing else (vLLM's worker calls)."""
        return dict(vars(self))

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> Link:
        """The link that `to_wire` described."""
        return cls(**wire)


@dataclass(frozen=True)
class SendReport:
    """One finished update.

    Attributes:
        seconds: until the last engine had loaded everything and dropped its prefix cache.
        nbytes: bytes of all tensors (each engine worker receives so many).
        load_s: seconds that the slowest engine worker spent loading, not waiting for weights.
    """

    seconds: float
    nbytes: int
    load_s: float


class BucketSource(Protocol):
    """Where the sender's buckets come from. Several policy ranks may work on one bucket."""

    def fill(self, bucket: Bucket, content: Tensor) -> None:
        """Put the bucket's tensors, or this process's part of them, into `content` (uint8, at least its size).

        Runs while the bucket before is under way.
        """

    def complete(self, bucket: Bucket) -> None:
        """Return when the whole frame is ready to be sent. The bucket before has left its buffer by now.

        Called after a failed `fill` too: the frame then only says so.
        """

    def drain(self) -> None:
        """Called once at the end, also after a failure: let the other ranks that work on the rest come to an end."""


class WeightSender(Protocol):
    """The policy's end, in one process (policy rank 0) however many ranks the policy has."""

    connected: bool

    def connect(self) -> None:
        """Build the group with every worker of every engine. Call again after any failure."""

    def send(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> SendReport:
        """Replace the weights of all engines by these tensors. Afterwards they sample as `version`."""

    def send_buckets(self, source: BucketSource, version: int) -> SendReport:
        """The same, from whoever fills buckets."""

    def close(self) -> None:
        """Leave the group."""


class WeightReceiver(Protocol):
    """An engine worker's end.

    Attributes:
        waited_s: seconds that the last `receive` waited for weights.
    """

    waited_s: float

    def receive(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the plan. A tensor stays valid as long as it is referenced."""

    def close(self) -> None:
        """Leave the group, so that the sender is not left waiting."""
