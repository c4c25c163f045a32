"""Sums of the bits of tensors: the proof that the engines hold what the policy sent.

The sum of a tensor does not depend on the order of its entries, so that a tensor can be summed where it lies: in the
buckets on its way, fused with others and cut into shards in an engine's workers. Rank 0 sums what it sends; every
worker sums what it holds afterwards; over an engine's workers these add up to as many times the sent sum as there are
copies. What an order-free sum cannot see, entries that changed places within a tensor, is left to the probe.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from openrlhf_ext.rollout.sync.plan import Bucket, BucketPlan

_AT_A_TIME = {"cpu": 1 << 15, "cuda": 1 << 22}
"""Numbers mixed at a time: what stays in a core's cache; on a GPU 32 MiB, of which two copies are made."""
_FACTOR = -7046029254386353131
"""Odd, with its bits well mixed: 2^64 / golden ratio, as a signed number."""
_BLOCK = 16
"""Words of 8 bytes that are added up before they are mixed: one pass over the memory instead of five."""
_NAMED = 10
_MODULUS = 1 << 64


class WeightSyncMismatch(RuntimeError):
    """An engine does not sample from the weights the policy has."""


class Receipt(NamedTuple):
    """What an engine holds after an update; lists have an entry for every tensor of the plan, in its order.

    Attributes:
        load_s: seconds that the slowest worker spent loading and summing.
        sums: of what the workers hold, modulo 2^64.
        entries: how many these are, over all workers.
        as_received: how many tensors were summed as they arrived, because a worker holds them in another form
            (quantized, or packed for a CPU's matrix products).
    """

    load_s: float
    sums: list[int]
    entries: list[int]
    as_received: int


def words(tensor: Tensor, shape: Sequence[int], workers: int) -> Tensor | None:
    """The bits of a tensor, or of a shard of one, as integers.

    Args:
        tensor: of a plan's dtype, on any device.
        shape: of the whole tensor.
        workers: of an engine, which may hold a part of each row.

    Returns:
        Without a copy: (N, 16) words of 8 bytes, where rows can be cut so; else (N,) the entries. None if the shard is
        not contiguous, or cut otherwise than among the workers.
    """
    if not tensor.is_contiguous():
        return None
    flat, block = tensor.detach().view(-1), 8 * _BLOCK
    if len(shape) < 2 or shape[-1] * tensor.element_size() % (block * workers):
        return flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    if tensor.shape[-1] * tensor.element_size() % block or tensor.data_ptr() % 8:
        return None
    return flat.view(torch.int64).view(-1, _BLOCK)


def bit_sum(words: Tensor) -> Tensor:
    """(): the sum of the words modulo 2^64, mixed so that changes of several do not cancel.

    In blocks it is their sums that are mixed: +1 and -1 in two words of one block do cancel. Zeros count nothing.
    Nothing is read back from the device.
    """
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for piece in words.split(_AT_A_TIME[words.device.type]):
        mixed_N = (piece.long() if piece.dim() == 1 else piece.sum(1)) * _FACTOR
        mixed_N ^= mixed_N >> 32
        total += mixed_N.sum()
    return total


class SentSums:
    """Sums of the tensors of one update, made while their buckets are under way."""

    def __init__(self, plan: BucketPlan, workers: int) -> None:
        self._sums: dict[str, Tensor] = {}
        self._workers = workers
        self._names = [name for name, _, _ in plan.tensors]

    def add(self, bucket: Bucket, content: Tensor) -> None:
        """Add what a bucket holds of its tensors; ``content``: uint8 vector holding at least the whole bucket."""
        for slot in bucket.slots:
            rows = words(slot.view(content), slot.shape, self._workers)
            assert rows is not None, "rows of a tensor are contiguous and begin at a word"
            part = bit_sum(rows)
            self._sums[slot.name] = self._sums[slot.name] + part if slot.name in self._sums else part

    def take(self) -> list[int]:
        """The sum of every tensor, in the plan's order."""
        return torch.stack([self._sums[name] for name in self._names]).tolist()


def together(load_s: Iterable[float], workers: Sequence[Sequence[tuple[int, int, bool]]]) -> Receipt:
    """An engine's receipt from its workers' (sum, entries, whether as received) of every tensor."""
    tensors = list(zip(*workers, strict=True))
    return Receipt(
        max(load_s),
        [sum(each[0] for each in tensor) % _MODULUS for tensor in tensors],
        [sum(each[1] for each in tensor) for tensor in tensors],
        sum(any(each[2] for each in tensor) for tensor in tensors),
    )


def check_receipts(plan: BucketPlan, sent: Sequence[int], receipts: Sequence[Receipt], version: int) -> None:
    """Compare what the engines hold with what was sent to them.

    Args:
        sent: `SentSums.take`.
        receipts: of every engine.

    Raises:
        WeightSyncMismatch: naming engines and tensors.
    """
    found = []
    for engine, receipt in enumerate(receipts):
        wrong = list(_wrong(plan, sent, receipt))
        if wrong:
            more = f", and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
            found.append(f"- engine {engine}: {len(wrong)} of {len(sent)}: {', '.join(wrong[:_NAMED])}{more}")
    if found:
        raise WeightSyncMismatch(
            f"after weight sync {version} engines do not hold the weights that were sent; checksums differ of these "
            "tensors:\n" + "\n".join(found)
        )


def _wrong(plan: BucketPlan, sent: Sequence[int], receipt: Receipt) -> Iterable[str]:
    for (name, shape, _), ours, theirs, entries in zip(plan.tensors, sent, receipt.sums, receipt.entries, strict=True):
        size = torch.Size(shape).numel()
        copies, rest = divmod(entries, size) if size else (1, entries)
        if rest or (copies * ours - theirs) % _MODULUS:
            yield f"{name} ({entries} of {size} entries held)" if rest or not copies else name
