"""Who is shaped by entropy, and the pools that standardise their rewards, of `gtpo_entropy` and `grpo_s`.

Shape suffixes: B = completions.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openrlhf_ext.algorithms.base import Inputs
from openrlhf_ext.algorithms.groups import Moments, Partition, pool_moments
from openrlhf_ext.algorithms.option_blocks import EntropyOptions


@dataclass(frozen=True)
class Classes:
    """Who is shaped, (B,) bool each; nobody of a dropped group.

    Attributes:
        success_B: P, with shares of their entropy.
        failure_B: N.
        inverted_B: failures with shares of their own, of their inverse entropy: N in two-table versions, else nobody.
        live_B: completions that may get an advantage other than 0.
    """

    success_B: Tensor
    failure_B: Tensor
    inverted_B: Tensor
    live_B: Tensor

    @classmethod
    def of(cls, part: Partition, two_tables: bool) -> Classes:
        success_B, failure_B = part.success_B & part.kept_B, part.failure_B & part.kept_B
        inverted_B = failure_B if two_tables else torch.zeros_like(failure_B)
        return cls(success_B, failure_B, inverted_B, (success_B | failure_B) & ~part.zeroed_B)

    @property
    def member_B(self) -> Tensor:
        """Completions with shares."""
        return self.success_B | self.inverted_B

    def rows(self, rows_n: Tensor) -> Classes:
        """Those of some rows."""
        return Classes(*(getattr(self, f.name)[rows_n] for f in dataclasses.fields(self)))

    def select(self, on_success: Any, on_failure: Any) -> Tensor:
        """(B,) float64 with one value on successes, another on failures, 0 elsewhere."""
        zero_B = torch.zeros(len(self.success_B), dtype=torch.float64, device=self.success_B.device)
        return torch.where(self.success_B, on_success, torch.where(self.failure_B, on_failure, zero_B))


def base_rewards(inputs: Inputs, base_reward: str, success_B: Tensor) -> Tensor:
    """r_i of the shaped rewards: 1 on successes and 0 elsewhere, or the reward itself (specification 2.1)."""
    return inputs.batch.rewards if base_reward == "raw" else success_B.to(torch.float64)


def class_pools(
    rewards: Moments,
    group_B: Tensor,
    groups: int,
    classes: Classes,
    options: EntropyOptions,
    ddof: int,
) -> tuple[Tensor, Tensor]:
    """Mean and std that standardise each completion's shaped rewards (specification 3.5 step 4, 3.6 step 3).

    The pool of R+ serves successes, and failures too where the version has one table; that of R- serves failures.

    Args:
        rewards: moments of each completion's own shaped rewards.
        group_B: group number of each completion, below `groups`.
        classes: of the same completions.
    Returns:
        (B,) mean and std, float64.
    """
    success_B, failure_B = classes.success_B, classes.failure_B
    batch_wide = options.norm_scope == "batch"
    index_B = torch.zeros_like(group_B) if batch_wide else group_B
    pools = 1 if batch_wide else groups

    def pool(own_B: Tensor, other_B: Tensor, *, other_is_zero: bool) -> tuple[Tensor, Tensor]:
        member_B = own_B if options.adv_pool == "own" else own_B | other_B
        valued_B = own_B if other_is_zero else own_B | other_B
        count_B = torch.where(member_B, rewards.count, 0.0)
        mean_B, m2_B = torch.where(valued_B, rewards.mean, 0.0), torch.where(valued_B, rewards.m2, 0.0)
        merged = pool_moments(Moments(count_B, mean_B, torch.where(member_B, m2_B, 0.0)), index_B, pools)
        return merged.mean[index_B], merged.std(ddof)[index_B]

    mean_B, std_B = pool(success_B, failure_B, other_is_zero=options.two_tables)
    if options.two_tables:
        negative_mean_B, negative_std_B = pool(failure_B, success_B, other_is_zero=True)
        mean_B = torch.where(failure_B, negative_mean_B, mean_B)
        std_B = torch.where(failure_B, negative_std_B, std_B)
    return mean_B, std_B
