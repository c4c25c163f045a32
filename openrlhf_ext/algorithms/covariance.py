"""Covariance control, what `clip_cov` and `kl_cov` share.

G. Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models",
arXiv 2505.22617.

Shape suffixes: B = completions, N = tokens of all completions, n = tokens that a selection asks
about.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf_ext.algorithms.base import LossBatch, Total
from openrlhf_ext.algorithms.batch import check_values
from openrlhf_ext.algorithms.groups import group_index
from openrlhf_ext.algorithms.losses import GroupRelative, TokenAlgorithm, masked_log_ratio, promote
from openrlhf_ext.algorithms.option_blocks import (
    ClipOptions,
    Degenerate,
    PartitionOptions,
    PenaltyOptions,
    ScopeOptions,
    SequenceAdvantageOptions,
    degenerate,
)
from openrlhf_ext.algorithms.segments import float64_sum
from openrlhf_ext.options import Violation, option


class CovarianceOptions(
    PartitionOptions, SequenceAdvantageOptions, PenaltyOptions, ClipOptions, ScopeOptions
):
    """What both covariance methods read."""

    mask_truncated: bool = option(False, "not defined for covariance methods: true is rejected")
    degenerate: Degenerate = degenerate("drop")

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        if self.mask_truncated:
            message = "mask_truncated = true is not defined for covariance methods; leave it false"
            yield Violation(("mask_truncated",), message)


class CovarianceControl(GroupRelative, TokenAlgorithm):
    """Chooses tokens by the covariance of advantage and log-prob.

        cov_it = (A_i - mean A)(new_it - mean new)           means over all tokens of the mini-batch

    The choice belongs to the whole mini-batch under the current policy: `prepare` makes it, of the
    whole or of all its shares together; the loss of a complete mini-batch calls `prepare` itself,
    that of a share refuses to guess.
    """

    needs_prepare = True
    loss_inputs = ("order",)

    def loss_level(self, shaped: LossBatch) -> LossBatch:
        shaped = super().loss_level(shaped)
        completions = torch.tensor(
            float(len(shaped)), dtype=torch.float64, device=shaped.kept.device
        )
        return dataclasses.replace(
            shaped,
            of_rows=shaped.of_rows | {"order": natural_order(shaped.group_ids)},
            denominators={**shaped.denominators, "completions": completions},
        )

    def prepare(
        self,
        new_logprobs: Tensor,
        shaped: LossBatch,
        *,
        seed: int | None = None,
        total: Total | None = None,
    ) -> LossBatch:
        if not shaped.complete and total is None:
            raise ValueError(
                f"{self.name}: prepare takes the whole mini-batch, got a share made by `select`"
            )
        with torch.no_grad():
            log_ratio_N = masked_log_ratio(new_logprobs, shaped)
            check_values("new_logprobs", new_logprobs, shaped.segments, among_N=shaped.loss_mask)
            total = total or (lambda tensor: tensor)
            cov_N = self.covariances(promote(new_logprobs), shaped, total)
            selection_N, pools = self.choose(cov_N, log_ratio_N, shaped, seed, total)
        of_tokens = shaped.of_tokens | {"cov": cov_N}
        return dataclasses.replace(
            shaped, selection=selection_N, of_tokens=of_tokens, pools=shaped.pools | pools
        )

    def covariances(self, new_logprobs: Tensor, shaped: LossBatch, total: Total) -> Tensor:
        """(N,) covariance per token, 0 outside kept groups; means in float64."""
        new_N = torch.where(shaped.loss_mask, new_logprobs, 0.0)
        tokens_B = torch.where(shaped.active, shaped.lengths, 0)
        sums = total(torch.stack([(shaped["seq_advantages"] * tokens_B).sum(), float64_sum(new_N)]))
        mean_advantage, mean_new = sums / shaped.denominators["tokens"].clamp(min=1.0)
        centered_N = shaped.segments.spread(
            (shaped["seq_advantages"] - mean_advantage).to(new_N.dtype)
        )
        return torch.where(shaped.loss_mask, centered_N * (new_N - mean_new.to(new_N.dtype)), 0.0)

    def choose(
        self, cov_N: Tensor, log_ratio_N: Tensor, shaped: LossBatch, seed: int | None, total: Total
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(N,) bool which tokens are chosen, and `pools` that say so."""
        raise NotImplementedError

    def number_chosen(self, shaped: LossBatch) -> int:
        """k = max(1, int(cov_ratio * N_tok)); 0 without tokens."""
        tokens = int(shaped.denominators["tokens"])
        return max(1, int(self.options.cov_ratio * tokens)) if tokens else 0


def natural_order(group_ids_B: Tensor) -> Tensor:
    """(B, 3) int64 of each completion: its rank in natural order, its group's, and its own within
    the group.

    Natural order is by group id, inside a group that of the mini-batch.
    """
    index_B = group_index(group_ids_B)
    order_B = index_B.argsort(stable=True)
    rank_B = torch.empty_like(order_B)
    rank_B[order_B] = torch.arange(len(order_B), device=order_B.device)
    counts_Q = torch.zeros_like(index_B).index_add_(0, index_B, torch.ones_like(index_B))
    return torch.stack([rank_B, index_B, rank_B - (counts_Q.cumsum(0) - counts_Q)[index_B]], dim=1)


@dataclass(frozen=True)
class FlaggedTokens:
    """Tokens of a mini-batch that a selection asks about, those of one share.

    Attributes:
        index_n: which of the share's tokens, in natural order.
        number_n: their numbers in natural order among those of all shares.
        token_n3: group, completion and position of each.
        count: of all shares together.
    """

    index_n: Tensor
    number_n: Tensor
    token_n3: Tensor
    count: int

    @classmethod
    def of(cls, flags_N: Tensor, shaped: LossBatch, total: Total) -> FlaggedTokens:
        """The shares tell each other how many tokens each completion has, and nothing else."""
        rank_B, own_B2 = shaped["order"][:, 0], shaped["order"][:, 1:]
        count_B = shaped.segments.sums(flags_N).long()
        counts = rank_B.new_zeros(int(shaped.denominators["completions"]))
        counts[rank_B] = count_B
        counts = total(counts)
        index_n = flags_N.nonzero().flatten()
        row_n = torch.repeat_interleave(torch.arange(len(shaped), device=index_n.device), count_B)
        first_B, own_B = (counts.cumsum(0) - counts)[rank_B], count_B.cumsum(0) - count_B
        number_n = torch.arange(len(index_n), device=index_n.device) + (first_B - own_B)[row_n]
        start_B = shaped.lengths.cumsum(0) - shaped.lengths
        token_n3 = torch.cat([own_B2[row_n], (index_n - start_B[row_n])[:, None]], dim=1)
        order_n = number_n.argsort()
        return cls(index_n[order_n], number_n[order_n], token_n3[order_n], int(counts.sum()))
