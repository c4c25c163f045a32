"""Covariance control: `clip_cov` and `kl_cov` (specification 3.10, 3.11).

G. Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", arXiv 2505.22617.

Shape suffixes: B = completions, T = positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from openrlhf_ext.algorithms import losses
from openrlhf_ext.algorithms.baselines import GroupRelative
from openrlhf_ext.algorithms.batch import check_values
from openrlhf_ext.algorithms.losses import masked_log_ratio, promote
from openrlhf_ext.algorithms.option_blocks import (
    ClipOptions,
    KLOptions,
    PartitionOptions,
    PenaltyOptions,
    ScopeOptions,
    SequenceAdvantageOptions,
    clip_high,
    clip_low,
    degenerate,
)
from openrlhf_ext.algorithms.option_parsing import in_closed_unit_interval, not_negative, option
from openrlhf_ext.algorithms.quantiles import order_statistic
from openrlhf_ext.algorithms.registry import register_algorithm
from openrlhf_ext.algorithms.shaped import ShapedBatch


@dataclass(frozen=True, kw_only=True)
class CovarianceOptions(PartitionOptions, SequenceAdvantageOptions, PenaltyOptions, ClipOptions, ScopeOptions):
    """What both covariance methods read."""

    mask_truncated: bool = option("bool", False, "not defined for covariance methods: true is rejected")
    degenerate: str = degenerate("drop")

    def violations(self) -> Iterator[str]:
        yield from super().violations()
        if self.mask_truncated:
            yield "mask_truncated = true is not defined for covariance methods; leave it false"


class CovarianceControl(GroupRelative):
    """Chooses tokens by the covariance of advantage and log-prob.

        cov_it = (A_i - mean A)(new_it - mean new)                      means over all tokens of the mini-batch

    The choice belongs to the whole mini-batch under the current policy: `prepare` makes it; the loss of a complete
    mini-batch calls `prepare` itself, that of a share refuses to guess.
    """

    needs_prepare: ClassVar[bool] = True

    def prepare(self, new_logprobs: Tensor, shaped: ShapedBatch, *, seed: int | None = None) -> ShapedBatch:
        if not shaped.complete:
            raise ValueError(f"{self.name}: prepare takes the whole mini-batch, got a share made by `select`")
        with torch.no_grad():
            log_ratio_BT = masked_log_ratio(new_logprobs, shaped)
            check_values("new_logprobs", new_logprobs, shaped.loss_mask)
            cov_BT = self.covariances(promote(new_logprobs), shaped)
            return self.choose(cov_BT, log_ratio_BT, shaped, seed)

    def covariances(self, new_logprobs: Tensor, shaped: ShapedBatch) -> Tensor:
        """(B, T) covariance per token, 0 outside kept groups; means in float64."""
        new_BT = torch.where(shaped.loss_mask, new_logprobs, 0.0)
        tokens = shaped.denominators["tokens"].clamp(min=1.0)
        weight_B = torch.where(shaped.active, shaped.lengths, 0).to(torch.float64)
        centred_B1 = (shaped.seq_advantages - (shaped.seq_advantages * weight_B).sum() / tokens)[:, None]
        mean_new = new_BT.sum(dim=1, dtype=torch.float64).sum() / tokens
        cov_BT = centred_B1.to(new_BT.dtype) * (new_BT - mean_new.to(new_BT.dtype))
        return torch.where(shaped.loss_mask, cov_BT, 0.0)

    def choose(self, cov_BT: Tensor, log_ratio_BT: Tensor, shaped: ShapedBatch, seed: int | None) -> ShapedBatch:
        """The mini-batch with `selection` and the covariances set."""
        raise NotImplementedError

    def number_chosen(self, shaped: ShapedBatch) -> int:
        """k = max(1, int(cov_ratio * N_tok)); 0 without tokens."""
        tokens = int(shaped.denominators["tokens"])
        return max(1, int(self.options.cov_ratio * tokens)) if tokens else 0


def natural_tokens(flags_BT: Tensor, shaped: ShapedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """True entries in natural order: row, position, and their (n, 3) places (group, completion, position)."""
    _, index_B, counts_Q = shaped.group_ids.unique(return_inverse=True, return_counts=True)
    order_B = index_B.argsort(stable=True)
    first_Q = counts_Q.cumsum(0) - counts_Q
    ordered, position = flags_BT[order_B].nonzero(as_tuple=True)
    row = order_B[ordered]
    return row, position, torch.stack([index_B[row], ordered - first_Q[index_B[row]], position], dim=1)


def with_selection(
    shaped: ShapedBatch, row: Tensor, position: Tensor, cov_BT: Tensor, pools: dict[str, Tensor]
) -> ShapedBatch:
    """The mini-batch with these tokens selected."""
    selection_BT = torch.zeros_like(shaped.loss_mask)
    selection_BT[row, position] = True
    exposed = {**shaped.exposed, "cov": cov_BT}
    return dataclasses.replace(shaped, selection=selection_BT, exposed=exposed, pools={**shaped.pools, **pools})


@dataclass(frozen=True, kw_only=True)
class ClipCovOptions(CovarianceOptions):
    cov_ratio: float = option("float", 2e-4, "share of tokens removed", check=in_closed_unit_interval, rule="in [0, 1]")
    cov_lb: float = option("float", 1.0, "lower end of the candidate band, exclusive")
    cov_ub: float = option("float", 5.0, "upper end of the candidate band, exclusive")
    perm: tuple[int, ...] | None = option(
        "ints",
        None,
        "selection order of the candidates; null: natural order",
        check=lambda perm: len(set(perm)) == len(perm) and all(index >= 0 for index in perm),
        rule="distinct indices, 0 or more",
    )
    kl_coef: float = option("float", 0.0, "not defined here: a non-zero value is rejected")
    clip_low: float | None = clip_low(1.0)
    clip_high: float | None = clip_high(1.0)

    def violations(self) -> Iterator[str]:
        yield from super().violations()
        if self.kl_coef != 0:
            yield f"kl_coef = {self.kl_coef} is not defined for clip_cov; leave it 0"
        if not self.cov_lb < self.cov_ub:
            yield f"the band of candidates is empty: cov_lb = {self.cov_lb} must be below cov_ub = {self.cov_ub}"


@register_algorithm("clip_cov", ClipCovOptions)
class ClipCov(CovarianceControl):
    """Clip-Cov: a few tokens with a high covariance lose their loss term.

        J = 1/N sum over all but the chosen tokens of f(w_it, A_i)

    Of the N tokens, k = max(1, int(cov_ratio N)) unclipped ones with cov_lb < cov_it < cov_ub are chosen at random.
    """

    kl_places: ClassVar[tuple[str, ...]] = ("reward",)
    tokenwise: ClassVar[bool] = True

    def choose(self, cov_BT: Tensor, log_ratio_BT: Tensor, shaped: ShapedBatch, seed: int | None) -> ShapedBatch:
        _, clipped_BT = self.surrogate(log_ratio_BT, shaped)
        in_band_BT = (cov_BT > self.options.cov_lb) & (cov_BT < self.options.cov_ub)
        row, position, places = natural_tokens(in_band_BT & ~clipped_BT & shaped.loss_mask, shaped)
        chosen = self._selection_order(len(row), seed).to(row.device)[: self.number_chosen(shaped)]
        pools = {"candidates": places, "chosen": places[chosen]}
        return with_selection(shaped, row[chosen], position[chosen], cov_BT, pools)

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

    def factor(self, shaped: ShapedBatch) -> Tensor | None:
        factor_BT = super().factor(shaped)
        if shaped.selection is None:
            return factor_BT
        kept_BT = (~shaped.selection).to(shaped.advantages.dtype)
        return kept_BT if factor_BT is None else factor_BT * kept_BT


@dataclass(frozen=True, kw_only=True)
class KLCovOptions(CovarianceOptions, KLOptions):
    cov_ratio: float = option(
        "float",
        2e-3,
        "share of tokens penalised (2e-3 for 7B, 2e-4 for 32B)",
        check=in_closed_unit_interval,
        rule="in [0, 1]",
    )
    ppo_kl_coef: float = option(
        "float", 1.0, "coefficient of |new - old| on the chosen tokens", check=not_negative, rule="at least 0"
    )
    clip_low: float | None = option("float", None, "accepted, without effect", nullable=True)
    clip_high: float | None = option("float", None, "accepted, without effect")
    dual_clip: float | None = option("float", None, "accepted, without effect")

    def interval_violations(self) -> Iterator[str]:
        """None: nothing is clipped, so the clip keys need not agree."""
        return iter(())


@register_algorithm("kl_cov", KLCovOptions)
class KLCov(CovarianceControl):
    """KL-Cov: the tokens with the highest covariance are held back; nothing is clipped.

        J = 1/N (sum over all tokens of w_it A_i - ppo_kl_coef sum over the chosen ones of |new_it - old_it|)

    Of the N tokens, k = max(1, int(cov_ratio N)) are chosen.
    """

    tokenwise: ClassVar[bool] = True

    def choose(self, cov_BT: Tensor, log_ratio_BT: Tensor, shaped: ShapedBatch, seed: int | None) -> ShapedBatch:
        count = self.number_chosen(shaped)
        if count == 0:
            empty = torch.zeros(0, dtype=torch.long, device=cov_BT.device)
            return with_selection(shaped, empty, empty, cov_BT, {"chosen": empty.new_zeros(0, 3)})
        tokens = int(shaped.denominators["tokens"])
        least, _ = order_statistic(cov_BT, shaped.loss_mask, tokens - count)
        row, position, places = natural_tokens((cov_BT >= least) & shaped.loss_mask, shaped)
        best = cov_BT[row, position].argsort(descending=True, stable=True)[:count]
        return with_selection(shaped, row[best], position[best], cov_BT, {"chosen": places[best]})

    def surrogate(self, log_ratio_BT: Tensor, shaped: ShapedBatch) -> tuple[Tensor, Tensor]:
        objective_BT, clipped_BT = losses.clipped_surrogate(
            log_ratio_BT, shaped.advantages, None, factor=self.factor(shaped)
        )
        return torch.where(shaped.loss_mask, objective_BT, 0.0), clipped_BT

    def extra_objective(self, objective_BT: Tensor, log_ratio_BT: Tensor, shaped: ShapedBatch) -> Tensor:
        penalty_BT = torch.where(shaped.selection, log_ratio_BT.abs(), 0.0)
        return objective_BT - self.options.ppo_kl_coef * penalty_BT
