"""Covariance control: `clip_cov` and `kl_cov`.

G. Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", arXiv 2505.22617.

Shape suffixes: B = completions, N = tokens of all completions, n = tokens that a selection asks about.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import AfterValidator
from torch import Tensor

from openrlhf_ext.algorithms import losses
from openrlhf_ext.algorithms.base import LossBatch, Total
from openrlhf_ext.algorithms.baselines import GroupRelative
from openrlhf_ext.algorithms.batch import check_values
from openrlhf_ext.algorithms.losses import masked_log_ratio, promote
from openrlhf_ext.algorithms.option_blocks import (
    ClipOptions,
    Degenerate,
    KLOptions,
    PartitionOptions,
    PenaltyOptions,
    ScopeOptions,
    SequenceAdvantageOptions,
    clip_high,
    clip_low,
    degenerate,
)
from openrlhf_ext.algorithms.quantiles import order_statistic
from openrlhf_ext.algorithms.registry import register_algorithm
from openrlhf_ext.algorithms.segments import float64_sum
from openrlhf_ext.options import Float, Int, Violation, Words, no_effect, option


class CovarianceOptions(PartitionOptions, SequenceAdvantageOptions, PenaltyOptions, ClipOptions, ScopeOptions):
    """What both covariance methods read."""

    mask_truncated: bool = option(False, "not defined for covariance methods: true is rejected")
    degenerate: Degenerate = degenerate("drop")

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        if self.mask_truncated:
            message = "mask_truncated = true is not defined for covariance methods; leave it false"
            yield Violation(("mask_truncated",), message)


class CovarianceControl(GroupRelative):
    """Chooses tokens by the covariance of advantage and log-prob.

        cov_it = (A_i - mean A)(new_it - mean new)                      means over all tokens of the mini-batch

    The choice belongs to the whole mini-batch under the current policy: `prepare` makes it, of the whole or of all its
    shares together; the loss of a complete mini-batch calls `prepare` itself, that of a share refuses to guess.
    """

    needs_prepare: ClassVar[bool] = True
    loss_inputs: ClassVar[tuple[str, ...]] = ("place",)

    def loss_level(self, shaped: LossBatch) -> LossBatch:
        shaped = super().loss_level(shaped)
        completions = torch.tensor(float(len(shaped)), dtype=torch.float64, device=shaped.rows.device)
        return dataclasses.replace(
            shaped,
            exposed={**shaped.exposed, "place": natural_places(shaped.group_ids)},
            denominators={**shaped.denominators, "completions": completions},
        )

    def prepare(
        self, new_logprobs: Tensor, shaped: LossBatch, *, seed: int | None = None, total: Total | None = None
    ) -> LossBatch:
        if not shaped.complete and total is None:
            raise ValueError(f"{self.name}: prepare takes the whole mini-batch, got a share made by `select`")
        with torch.no_grad():
            log_ratio_N = masked_log_ratio(new_logprobs, shaped)
            check_values("new_logprobs", new_logprobs, shaped.segments, among_N=shaped.loss_mask)
            total = total or (lambda tensor: tensor)
            cov_N = self.covariances(promote(new_logprobs), shaped, total)
            selection_N, pools = self.choose(cov_N, log_ratio_N, shaped, seed, total)
        exposed, pools = {**shaped.exposed, "cov": cov_N}, {**shaped.pools, **pools}
        return dataclasses.replace(shaped, selection=selection_N, exposed=exposed, pools=pools)

    def covariances(self, new_logprobs: Tensor, shaped: LossBatch, total: Total) -> Tensor:
        """(N,) covariance per token, 0 outside kept groups; means in float64."""
        new_N = torch.where(shaped.loss_mask, new_logprobs, 0.0)
        tokens_B = torch.where(shaped.active, shaped.lengths, 0)
        sums = total(torch.stack([(shaped["seq_advantages"] * tokens_B).sum(), float64_sum(new_N)]))
        mean_advantage, mean_new = sums / shaped.denominators["tokens"].clamp(min=1.0)
        centered_N = shaped.segments.spread((shaped["seq_advantages"] - mean_advantage).to(new_N.dtype))
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


def natural_places(group_ids_B: Tensor) -> Tensor:
    """(B, 3) int64 of each completion: its rank in natural order, its group's, and its own within the group.

    Natural order is by group id, inside a group that of the mini-batch.
    """
    _, index_B, counts_Q = group_ids_B.unique(return_inverse=True, return_counts=True)
    order_B = index_B.argsort(stable=True)
    rank_B = torch.empty_like(order_B)
    rank_B[order_B] = torch.arange(len(order_B), device=order_B.device)
    return torch.stack([rank_B, index_B, rank_B - (counts_Q.cumsum(0) - counts_Q)[index_B]], dim=1)


@dataclass(frozen=True)
class FlaggedTokens:
    """Tokens of a mini-batch that a selection asks about, those of one share.

    Attributes:
        index_n: which of the share's tokens, in natural order.
        number_n: their numbers in natural order among those of all shares.
        place_n3: group, completion and position of each.
        count: of all shares together.
    """

    index_n: Tensor
    number_n: Tensor
    place_n3: Tensor
    count: int

    @classmethod
    def of(cls, flags_N: Tensor, shaped: LossBatch, total: Total) -> FlaggedTokens:
        """The shares tell each other how many tokens each completion has, and nothing else."""
        rank_B, place_B2 = shaped.exposed["place"][:, 0], shaped.exposed["place"][:, 1:]
        count_B = shaped.segments.sums(flags_N).long()
        counts = rank_B.new_zeros(int(shaped.denominators["completions"]))
        counts[rank_B] = count_B
        counts = total(counts)
        index_n = flags_N.nonzero().flatten()
        row_n = torch.repeat_interleave(torch.arange(len(shaped), device=index_n.device), count_B)
        first_B, own_B = (counts.cumsum(0) - counts)[rank_B], count_B.cumsum(0) - count_B
        number_n = torch.arange(len(index_n), device=index_n.device) + (first_B - own_B)[row_n]
        start_B = shaped.lengths.cumsum(0) - shaped.lengths
        place_n3 = torch.cat([place_B2[row_n], (index_n - start_B[row_n])[:, None]], dim=1)
        order_n = number_n.argsort()
        return cls(index_n[order_n], number_n[order_n], place_n3[order_n], int(counts.sum()))


def _distinct(indices: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(indices)) < len(indices) or min(indices, default=0) < 0:
        raise ValueError("distinct indices, 0 or more")
    return indices


Indices = Annotated[tuple[Int, ...], AfterValidator(_distinct), Words("list of distinct integers >= 0")]


class ClipCovOptions(CovarianceOptions):
    cov_ratio: Float = option(2e-4, "share of tokens removed", ge=0, le=1)
    cov_lb: Float = option(1.0, "lower end of the candidate band, exclusive")
    cov_ub: Float = option(5.0, "upper end of the candidate band, exclusive")
    perm: Indices | None = option(None, "selection order of the candidates; null: natural order")
    kl_coef: Float = option(0.0, "not defined here: a non-zero value is rejected")
    clip_low: Float | None = clip_low(1.0)
    clip_high: Float | None = clip_high(1.0)

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        if self.kl_coef != 0:
            yield Violation(("kl_coef",), f"kl_coef = {self.kl_coef} is not defined for clip_cov; leave it 0")
        if not self.cov_lb < self.cov_ub:
            message = f"the band of candidates is empty: cov_lb = {self.cov_lb} must be below cov_ub = {self.cov_ub}"
            yield Violation(("cov_lb", "cov_ub"), message)


@register_algorithm("clip_cov", ClipCovOptions)
class ClipCov(CovarianceControl):
    """Clip-Cov: a few tokens with a high covariance lose their loss term.

        J = 1/N sum over all but the chosen tokens of f(w_it, A_i)

    Of the N tokens, k = max(1, int(cov_ratio N)) unclipped ones with cov_lb < cov_it < cov_ub are chosen at random.
    """

    kl_places: ClassVar[tuple[str, ...]] = ("reward",)
    tokenwise: ClassVar[bool] = True

    def choose(
        self, cov_N: Tensor, log_ratio_N: Tensor, shaped: LossBatch, seed: int | None, total: Total
    ) -> tuple[Tensor, dict[str, Tensor]]:
        _, clipped_N = self.surrogate(log_ratio_N, shaped)
        in_band_N = (cov_N > self.options.cov_lb) & (cov_N < self.options.cov_ub)
        candidates = FlaggedTokens.of(in_band_N & ~clipped_N & shaped.loss_mask, shaped, total)
        order = self._selection_order(candidates.count, seed)[: self.number_chosen(shaped)]
        chosen_n = torch.isin(candidates.number_n, order.to(cov_N.device))
        selection_N = torch.zeros_like(shaped.loss_mask)
        selection_N[candidates.index_n[chosen_n]] = True
        return selection_N, {"candidates": candidates.place_n3, "chosen": candidates.place_n3[chosen_n]}

    def _selection_order(self, candidates: int, seed: int | None) -> Tensor:
        """Indices into the candidate list: `perm`, a seeded permutation, or natural order."""
        if self.options.perm is not None:
            order = torch.tensor(self.options.perm, dtype=torch.long)
            if len(order.unique()) != len(order) or not bool(((order >= 0) & (order < candidates)).all()):
                raise ValueError(f"perm must hold distinct indices into {candidates} candidates, got {order.tolist()}")
            return order
        if seed is not None:
            # Drawn on the CPU, so that all ranks and devices draw alike.
            return torch.randperm(candidates, generator=torch.Generator().manual_seed(seed))
        return torch.arange(candidates)

    def factor(self, shaped: LossBatch) -> Tensor | None:
        factor_N = super().factor(shaped)
        if shaped.selection is None:
            return factor_N
        kept_N = (~shaped.selection).to(shaped.advantages.dtype)
        return kept_N if factor_N is None else factor_N * kept_N


class KLCovOptions(CovarianceOptions, KLOptions):
    cov_ratio: Float = option(2e-3, "share of tokens penalized (2e-3 for 7B, 2e-4 for 32B)", ge=0, le=1)
    ppo_kl_coef: Float = option(1.0, "coefficient of |new - old| on the chosen tokens", ge=0)
    clip_low: Float | None = option(None, "accepted, without effect", ge=0)
    clip_high: Float | None = option(None, "accepted, without effect", ge=0)
    dual_clip: Float | None = option(None, "accepted, without effect", gt=1)

    def interval_violations(self) -> Iterator[Violation]:
        """None: nothing is clipped, so the clip keys need not agree."""
        return iter(())

    def cautions(self) -> Iterator[str]:
        yield from super().cautions()
        for name in ("clip_low", "clip_high", "dual_clip"):
            if getattr(self, name) is not None:
                yield no_effect(name, getattr(self, name), "kl_cov clips nothing")


@register_algorithm("kl_cov", KLCovOptions)
class KLCov(CovarianceControl):
    """KL-Cov: the tokens with the highest covariance are held back; nothing is clipped.

        J = 1/N (sum over all tokens of w_it A_i - ppo_kl_coef sum over the chosen ones of |new_it - old_it|)

    Of the N tokens, k = max(1, int(cov_ratio N)) are chosen.
    """

    tokenwise: ClassVar[bool] = True

    def choose(
        self, cov_N: Tensor, log_ratio_N: Tensor, shaped: LossBatch, seed: int | None, total: Total
    ) -> tuple[Tensor, dict[str, Tensor]]:
        selection_N = torch.zeros_like(shaped.loss_mask)
        if count := self.number_chosen(shaped):
            tokens = int(shaped.denominators["tokens"])
            least, up_to_least = order_statistic(cov_N, shaped.loss_mask, tokens - count, total)
            selection_N = (cov_N > least) & shaped.loss_mask
            # of equal ones the first in natural order
            ties = FlaggedTokens.of((cov_N == least) & shaped.loss_mask, shaped, total)
            selection_N[ties.index_n[ties.number_n < count - (tokens - up_to_least)]] = True
        return selection_N, {"chosen": FlaggedTokens.of(selection_N, shaped, total).place_n3}

    def surrogate(self, log_ratio_N: Tensor, shaped: LossBatch) -> tuple[Tensor, Tensor]:
        objective_N, clipped_N = losses.clipped_surrogate(
            log_ratio_N, shaped.advantages, None, factor=self.factor(shaped)
        )
        return torch.where(shaped.loss_mask, objective_N, 0.0), clipped_N

    def extra_objective(self, objective_N: Tensor, log_ratio_N: Tensor, shaped: LossBatch) -> Tensor:
        penalty_N = torch.where(shaped["selection"], log_ratio_N.abs(), 0.0)
        return objective_N - self.options.ppo_kl_coef * penalty_N
