"""Mini-batches of algorithms that choose tokens by what the current policy says of the whole mini-batch.

The controller prepares every mini-batch with the old log-probs, which are those of the current policy in the first
update after a rollout only. Before each later one the ranks compute the log-probs again and choose anew.

Shape suffixes: B = completions of the mini-batch, T = response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf_ext.algorithms import ShapedBatch
from openrlhf_ext.megatron.batch import SequenceBatch

if TYPE_CHECKING:
    from openrlhf_ext.megatron.policy import MegatronPolicy

_SEEDS_PER_ROLLOUT = 1 << 20


@dataclass(frozen=True)
class Preparation:
    """What a rank needs to prepare a mini-batch again.

    Attributes:
        whole: the mini-batch, of which the rank trains a share.
        rows: the rank's rows of it.
        seed: of random choices in the first update; later ones have their own, the same on all ranks.
    """

    whole: ShapedBatch
    rows: list[int]
    seed: int


def share_for_update(
    policy: MegatronPolicy, batch: SequenceBatch, share: ShapedBatch, preparation: Preparation | None, update: int
) -> ShapedBatch:
    """The rank's share of a mini-batch as it is right for this update. A collective.

    Args:
        batch: the rank's sequences.
        share: what the controller prepared for them.
        preparation: None where the share is right for every update.
        update: number of the optimizer update since the rollout; 0 is made by the policy of the old log-probs.
    """
    if update == 0 or preparation is None:
        return share
    whole = preparation.whole
    new_BT = gather_rows(policy.logprobs(batch).logprobs_BT, preparation.rows, len(whole), policy)
    seed = preparation.seed * _SEEDS_PER_ROLLOUT + update
    return whole.algorithm.prepare(new_BT, whole, seed=seed).lean().select(preparation.rows)


def gather_rows(own_bT: Tensor, rows: list[int], count: int, policy: MegatronPolicy) -> Tensor:
    """(B, T) rows of all data-parallel ranks, bit for bit the same on every rank of the policy. A collective.

    Args:
        own_bT: this rank's rows, which all ranks of its replica hold.
        rows: which of the ``count`` rows they are.
    """
    whole_BT = torch.zeros(count, own_bT.shape[1], dtype=own_bT.dtype, device=policy.device)
    # one rank of each replica, a block of consecutive ranks, contributes: copies may differ in the last bit
    if rows and dist.get_rank() % policy.settings.layout.model_parallel_size == 0:
        whole_BT[rows] = own_bT.to(policy.device)
    dist.all_reduce(whole_BT)
    return whole_BT.cpu()
