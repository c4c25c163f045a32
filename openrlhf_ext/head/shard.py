"""Where a rank's vocabulary rows stand, and the collectives that make whole distributions out of shards.

Shape suffixes: N = tokens, V = rows of this rank's shard of the output embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's rows of the output embedding, ``[first, first + true_rows)`` of the true vocabulary.

    Attributes:
        group: the tensor-parallel group; None where one rank holds the whole vocabulary.
        first: token id of this rank's first row.
        true_rows: rows that belong to tokens; the rest of the shard is padding. 0 on a rank of padding alone.
        vocab_size: size of the true vocabulary over all ranks.
    """

    group: dist.ProcessGroup | None
    first: int
    true_rows: int
    vocab_size: int

    @classmethod
    def of(cls, weight_VH: Tensor, vocab_size: int | None, group: dist.ProcessGroup | None) -> VocabularyShard:
        """The shard of this rank: rank r of the group holds rows ``[r V, (r + 1) V)`` of the padded vocabulary.

        Raises:
            ValueError: ``vocab_size`` does not fit the shards.
        """
        size = group.size() if group is not None else 1
        rank = group.rank() if group is not None else 0
        rows = weight_VH.shape[0]
        total = rows * size if vocab_size is None else vocab_size
        if not 0 < total <= rows * size:
            raise ValueError(f"vocab_size must be in [1, shard rows * group size]: got {total}, {rows} * {size}")
        true_rows = min(max(total - rank * rows, 0), rows)
        return cls(group if size > 1 else None, rank * rows, true_rows, total)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduces in place over the ranks; the deadline is the group's."""
        if self.group is not None and tensor.numel():
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def start_sum(self, tensor: Tensor) -> dist.Work | None:
        """Begins to sum ``tensor`` in place over the ranks; None where there is nothing to wait for."""
        if self.group is None:
            return None
        return dist.all_reduce(tensor, group=self.group, async_op=True)

    def local(self, target_N: Tensor) -> Tensor:
        """Row of each target in this shard; outside of ``[0, true_rows)`` where another rank holds it."""
        return target_N - self.first
