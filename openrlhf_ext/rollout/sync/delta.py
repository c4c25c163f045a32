"""What changed in 16-bit weights since the update before: positions and values, lossless. At an RL learning rate bf16
weights keep most of their bits (docs/weight_sync.md has measured shares)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from openrlhf_ext.rollout.sync.base import WeightSyncError
from openrlhf_ext.rollout.sync.plan import HEADER_BYTES, Bucket

_SPAN = 1 << 16
"""Entries that share the upper bits of their positions, of which only the lower 16 travel."""
_DENSEST = 16
"""Changes travel where at most one entry in so many changed: an eighth of the bytes. For denser buckets
finding and packing them takes longer and longer (docs/weight_sync.md)."""
_SINCE = 5
"""Place in a frame's header: 1 + the version that its changes are to be applied to; 0: the bucket is whole."""


def changes(new: Tensor, old: Tensor) -> Tensor | None:
    """Of two uint8 vectors of 16-bit entries, as long as a bucket, what turns ``old`` into ``new``: int32 counts of
    every 65,536 entries, uint16 positions within these, the new entries. None if too many changed."""
    words, before, most = new.view(torch.int64), old.view(torch.int64), len(new) // (2 * _DENSEST)
    places = (words != before).nonzero().view(-1)  # of four entries, most of which are equal
    if len(places) > most:
        return None
    entries = words[places].view(torch.int16)
    found = (entries != before[places].view(torch.int16)).nonzero().view(-1)
    if len(found) > most:
        return None
    positions = 4 * places[found >> 2] + (found & 3)
    counts = torch.bincount(positions >> 16, minlength=_spans(new)).int()
    return torch.cat([part.view(torch.uint8) for part in (counts, positions.to(torch.int16), entries[found])])


def apply(changed: Tensor, content: Tensor) -> None:
    """Turn the old bits of a bucket into the new ones. Raises WeightSyncError: not all changes are there."""
    spans = _spans(content)
    counts = changed[: 4 * spans].view(torch.int32).long()
    number = (len(changed) - 4 * spans) // 4
    if int(counts.sum()) != number:
        raise WeightSyncError(f"{number} changed weights arrived where {int(counts.sum())} were expected")
    lower, values = changed[4 * spans :].view(torch.int16).tensor_split(2)
    upper = torch.arange(spans).repeat_interleave(counts) * _SPAN
    content.view(torch.int16)[upper + (lower.long() & (_SPAN - 1))] = values


def _spans(content: Tensor) -> int:
    return -(-len(content) // (2 * _SPAN))


class Sent:
    """A sender's copy of what engines hold of its stream, in host memory, and the frames that bring them the next
    update. In `send_stream` it takes the place of a transport.

    Attributes:
        version: the update that every engine has completed; None: not known, so that the next one is whole.
        frames: of the update that was taken last.
    """

    watch: Callable[[], None] | None = None

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.version: int | None = None
        self.frames: list[Tensor] = []
        self._copies = [torch.zeros(bucket.frame_bytes, dtype=torch.uint8) for bucket in buckets]

    def begin(self) -> None:
        """What `send` is given next is the first bucket of an update."""
        self._since, self.version, self.frames = self.version, None, []

    def send(self, frame: Tensor) -> Callable[[], object]:
        copy = self._copies[len(self.frames)]
        since = self._since
        changed = None if since is None else changes(frame[HEADER_BYTES:], copy[HEADER_BYTES:])
        if since is None or changed is None:
            copy.copy_(frame)
            self.frames.append(copy)
        else:
            header = frame[:HEADER_BYTES].clone()
            header.view(torch.int64)[_SINCE] = 1 + since
            apply(changed, copy[HEADER_BYTES:])
            self.frames.append(torch.cat([header, changed]))
        return lambda: None

    def close(self) -> None:
        self.version = None


class Received:
    """An engine worker's copy of the buckets, in host memory."""

    def __init__(self) -> None:
        self.version: int | None = None
        self._contents: dict[int, Tensor] = {}

    def begin(self) -> None:
        """What `update` is given next is the first bucket of an update. Until its caller sets `version` again it is not
        known what this worker holds."""
        self._since, self.version = self.version, None

    def update(self, index: int, frame: Tensor) -> Tensor:
        """The whole bucket, after a frame of it. Raises WeightSyncError: its changes are not of what this worker
        holds."""
        since, content = int(frame[:HEADER_BYTES].view(torch.int64)[_SINCE]) - 1, frame[HEADER_BYTES:]
        if since < 0:
            self._contents[index] = content
        elif self._since != since:
            raise WeightSyncError(
                f"changes since version {since} arrived at an engine worker that holds version {self._since}"
            )
        else:
            apply(content, self._contents[index])
        return self._contents[index]
