"""Mini-batches of algorithms that choose tokens by what the current policy says of the whole mini-batch.

The controller prepares every mini-batch with the old log-probs, which are those of the current policy in the first
update after a rollout only. Before each later one the ranks compute the log-probs of their shares again and choose anew
together: they add up a few sums and counts, no rank sees another's tokens.

Shape suffixes: N = response tokens of a share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from openrlhf_ext.algorithms import ShapedBatch
from openrlhf_ext.megatron.step.batch import SequenceBatch

if TYPE_CHECKING:
    from openrlhf_ext.megatron.policy import MegatronPolicy

_SEEDS_PER_ROLLOUT = 1 << 20


def share_for_update(
    policy: MegatronPolicy, batch: SequenceBatch, share: ShapedBatch, seed: int, update: int
) -> ShapedBatch:
    """The rank's share of a mini-batch as it is right for this update. A collective.

    Args:
        batch: the rank's sequences.
        share: what the controller prepared for them.
        seed: of random choices in the first update; later ones have their own, the same on all ranks.
        update: number of the optimizer update since the rollout; 0 is made by the policy of the old log-probs.
    """
    if update == 0 or not share.algorithm.needs_prepare:
        return share
    new_N = policy.agreed(policy.logprobs(batch).logprobs_N)
    seed = seed * _SEEDS_PER_ROLLOUT + update
    return share.algorithm.prepare(new_N, share, seed=seed, total=policy.sum_over_replicas).lean()
