"""A transport that is not part of the package: through files that sender and engines both see
(docs/weight_sync.md)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf_ext.rollout.sync.base import (
    Link,
    Staging,
    Transport,
    WeightTransferFailed,
    wait_until,
)
from openrlhf_ext.rollout.sync.plan import BucketPlan


class FileTransport(Transport):
    """One file per frame, in a folder that rank 0 makes."""

    def staging(
        self, plan: BucketPlan, streams: Sequence[Sequence[int]], timeout_s: float
    ) -> Staging:
        staging = super().staging(plan, streams, timeout_s)
        staging.handles = {"folder": tempfile.mkdtemp(prefix="weights-")}
        return staging

    def open_sender(self, store: dist.Store, link: Link, staging: Staging) -> FileSender:
        return FileSender(store, link)

    def open_receiver(self, store: dist.Store, link: Link, rank: int) -> FileReceiver:
        return FileReceiver(store, link)


class FileSender:
    """Writes a frame, says so in the store, and waits until every worker has read it."""

    def __init__(self, store: dist.Store, link: Link) -> None:
        self.watch: Callable[[], None] | None = None
        self.store, self.link, self.sent = store, link, 0

    def send(self, frame: Tensor) -> Callable[[], None]:
        number, self.sent = self.sent, self.sent + 1
        path = Path(self.link.handles["folder"], str(number))
        path.write_bytes(frame.numpy().tobytes())
        self.store.set(f"frame/{number}", "there")
        return lambda: self.wait(number, path)

    def wait(self, number: int, path: Path) -> None:
        def is_read() -> bool:
            return self.store.add(f"taken/{number}", 0) == self.link.world_size - 1

        wait_until(
            is_read, self.watch, self.link.timeout_s, lambda: f"frame {number} was not read in time"
        )
        path.unlink()

    def close(self) -> None:
        self.store.set(f"frame/{self.sent}", "left")


class FileReceiver:
    """Reads a frame when the store says that it is there."""

    def __init__(self, store: dist.Store, link: Link) -> None:
        self.store, self.link, self.received = store, link, 0

    def receive(self, nbytes: int) -> Callable[[], Tensor]:
        number, self.received = self.received, self.received + 1
        return lambda: self.wait(number, nbytes)

    def wait(self, number: int, nbytes: int) -> Tensor:
        try:
            self.store.wait([f"frame/{number}"], timedelta(seconds=self.link.timeout_s))
        except RuntimeError as error:
            raise WeightTransferFailed(f"frame {number} did not come: {error}") from error
        if self.store.get(f"frame/{number}") == b"left":
            raise WeightTransferFailed("the sender has left")
        frame = torch.from_numpy(
            np.fromfile(Path(self.link.handles["folder"], str(number)), np.uint8, nbytes)
        )
        self.store.add(f"taken/{number}", 1)
        return frame

    def close(self) -> None:
        pass


TRANSPORT = FileTransport()
