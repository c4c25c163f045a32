"""GRPO, DAPO, Dr. GRPO, GSPO and the entropy baselines over them (specification 3.1 - 3.4, 3.8 - 3.11).

Shape suffixes: B = completions, T = positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from openrlhf_ext.algorithms import losses
from openrlhf_ext.algorithms.base import (
    Inputs,
    SequenceAlgorithm,
    TokenAlgorithm,
    broadcast,
    group_advantages,
    masked_log_ratio,
    penalised_rewards,
    promote,
    tokens_of,
)
from openrlhf_ext.algorithms.batch import ShapedBatch
from openrlhf_ext.algorithms.blocks import row_blocks, row_counts
from openrlhf_ext.algorithms.options import (
    ClipCovOptions,
    DapoOptions,
    DrGrpoOptions,
    EntropyAdvantageOptions,
    GrpoOptions,
    GspoOptions,
    HighEntropyTokensOptions,
    KLCovOptions,
)
from openrlhf_ext.algorithms.quantiles import order_statistic, upper_threshold
from openrlhf_ext.algorithms.registry import register_algorithm


class GroupRelative(TokenAlgorithm):
    """Group-relative sequence advantage on every token of a completion."""

    kl_places: ClassVar[tuple[str, ...]] = ("loss", "reward")

    def advantages(self, inputs: Inputs) -> dict[str, Any]:
        rewards_B = penalised_rewards(self, inputs)
        seq_B = group_advantages(inputs, rewards_B, self.options)
        token_BT = broadcast(seq_B, inputs.batch.mask, inputs.batch.float_dtype)
        return {"advantages": token_BT, "seq_advantages": seq_B, "rewards": rewards_B}


@register_algorithm("grpo", GrpoOptions)
class Grpo(GroupRelative):
    """GRPO (arXiv 2402.03300): `A_i = (r_i - mean r)/(std r + eps)`, mean over tokens, then over completions."""


@register_algorithm("dapo", DapoOptions)
class Dapo(GroupRelative):
    """DAPO (arXiv 2503.14476): GRPO's advantage, mean over tokens, higher upper clip, degenerate groups dropped."""


@register_algorithm("dr_grpo", DrGrpoOptions)
class DrGrpo(GroupRelative):
    """Dr. GRPO (arXiv 2503.20783): no std, and token sums over a constant length."""


@register_algorithm("gspo", GspoOptions)
class Gspo(SequenceAlgorithm):
    """GSPO (arXiv 2507.18071): geometric-mean sequence ratio, clipped per completion."""

    kl_places: ClassVar[tuple[str, ...]] = ("reward",)

    def advantages(self, inputs: Inputs) -> dict[str, Any]:
        rewards_B = penalised_rewards(self, inputs)
        return {"seq_advantages": group_advantages(inputs, rewards_B, self.options), "rewards": rewards_B}


@register_algorithm("entropy_advantage", EntropyAdvantageOptions)
class EntropyAdvantage(GroupRelative):
    """Entropy-shaped advantage (arXiv 2506.14758): `A_i + min(alpha H_it, |A_i|/kappa)`."""

    needs: ClassVar[tuple[str, ...]] = ("entropies",)

    def advantages(self, inputs: Inputs) -> dict[str, Any]:
        fields = super().advantages(inputs)
        live_B = inputs.part.kept_B & ~inputs.part.zeroed_B
        limit_B1 = (fields["seq_advantages"].abs() / self.options.ent_kappa).to(inputs.batch.float_dtype)[:, None]
        advantages_BT = fields["advantages"]
        for rows in row_blocks(*advantages_BT.shape):
            bonus_bT = torch.minimum(self.options.ent_alpha * inputs.batch.entropies[rows], limit_B1[rows])
            advantages_BT[rows] += torch.where(inputs.batch.mask[rows] & live_B[rows, None], bonus_bT, 0.0)
        return fields


@register_algorithm("high_entropy_tokens", HighEntropyTokensOptions)
class HighEntropyTokens(GroupRelative):
    """DAPO on the share `top_rho` of tokens with the highest entropy (arXiv 2506.01939)."""

    needs: ClassVar[tuple[str, ...]] = ("entropies",)
    loss_inputs: ClassVar[tuple[str, ...]] = ("entropies",)

    def advantages(self, inputs: Inputs) -> dict[str, Any]:
        return {**super().advantages(inputs), "exposed": {"entropies": inputs.batch.entropies}}

    def loss_level(self, shaped: ShapedBatch) -> ShapedBatch:
        pool_BT = tokens_of(shaped.mask, shaped.kept)
        tau, cut = upper_threshold(shaped.exposed["entropies"], pool_BT, self.options.top_rho)
        return super().loss_level(dataclasses.replace(shaped, pools={"tau": tau, "cut": cut}))

    def loss_mask(self, shaped: ShapedBatch) -> Tensor:
        return self._selected(shaped) & shaped.active[:, None]

    def loss_tokens(self, shaped: ShapedBatch, loss_mask_BT: Tensor) -> Tensor:
        return row_counts(loss_mask_BT)

    def counted_tokens(self, shaped: ShapedBatch, loss_mask_BT: Tensor) -> Tensor:
        if self.options.mask_denominator == "all":
            return torch.where(shaped.active, shaped.lengths, 0)
        return self.loss_tokens(shaped, loss_mask_BT)

    def derived(self) -> dict[str, Callable[[ShapedBatch], Tensor]]:
        return {"token_mask": self._selected}

    def _selected(self, shaped: ShapedBatch) -> Tensor:
        """(B, T) tokens of the mini-batch with an entropy of at least tau, dropped groups included."""
        return (shaped.exposed["entropies"] >= shaped.pools["cut"]) & shaped.mask


# --------------------------------------------------------------------------------------------------------------------
# Covariance methods (arXiv 2505.22617)
# --------------------------------------------------------------------------------------------------------------------


class CovarianceControl(GroupRelative):
    """Chooses tokens by `(A_i - mean A)(new_it - mean new)`, means over all tokens of the mini-batch's kept groups.

    The choice belongs to the whole mini-batch under the current policy: `prepare` makes it; the loss of a complete
    mini-batch calls `prepare` itself, that of a share refuses to guess.
    """

    needs_prepare: ClassVar[bool] = True

    def prepare(self, new_logprobs: Tensor, shaped: ShapedBatch, *, seed: int | None = None) -> ShapedBatch:
        if not shaped.complete:
            raise ValueError(f"{self.name}: prepare takes the whole mini-batch, got a share made by `select`")
        with torch.no_grad():
            log_ratio_BT = masked_log_ratio(new_logprobs, shaped)
            cov_BT = self.covariances(promote(new_logprobs), shaped)
            return self.choose(cov_BT, log_ratio_BT, shaped, seed)

    def prepared(self, new_logprobs: Tensor, shaped: ShapedBatch) -> ShapedBatch:
        if shaped.selection is not None:
            return shaped
        if not shaped.complete:
            raise ValueError(
                f"{self.name} chooses tokens over the whole mini-batch: call "
                "`shaped = algorithm.prepare(new_logprobs, shaped)` before `shaped.select(rows)`"
            )
        return self.prepare(new_logprobs, shaped)

    def covariances(self, new_logprobs: Tensor, shaped: ShapedBatch) -> Tensor:
        """(B, T) covariance per token, 0 outside kept groups; means in float64."""
        new_BT = torch.where(shaped.loss_mask, new_logprobs, 0.0)
        tokens = shaped.loss_mask.sum().clamp(min=1).to(torch.float64)
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
        tokens = int(shaped.loss_mask.sum())
        return max(1, int(self.options.cov_ratio * tokens)) if tokens else 0


def natural_rows(shaped: ShapedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Rows in natural order (group, completion), and the group and completion number of each row of the batch."""
    _, index_B, counts_Q = shaped.group_ids.unique(return_inverse=True, return_counts=True)
    order_B = index_B.argsort(stable=True)
    number_B = torch.empty_like(order_B)
    first_Q = counts_Q.cumsum(0) - counts_Q
    number_B[order_B] = torch.arange(len(order_B), device=order_B.device) - first_Q[index_B[order_B]]
    return order_B, index_B, number_B


def natural_tokens(flags_BT: Tensor, shaped: ShapedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """True entries in natural order: row, position, and their (n, 3) places (group, completion, position)."""
    order_B, index_B, number_B = natural_rows(shaped)
    ordered, position = flags_BT[order_B].nonzero(as_tuple=True)
    row = order_B[ordered]
    return row, position, torch.stack([index_B[row], number_B[row], position], dim=1)


def with_selection(
    shaped: ShapedBatch, row: Tensor, position: Tensor, cov_BT: Tensor, pools: dict[str, Tensor]
) -> ShapedBatch:
    """The mini-batch with these tokens selected."""
    selection_BT = torch.zeros_like(shaped.loss_mask)
    selection_BT[row, position] = True
    exposed = {**shaped.exposed, "cov": cov_BT}
    return dataclasses.replace(shaped, selection=selection_BT, exposed=exposed, pools={**shaped.pools, **pools})


@register_algorithm("clip_cov", ClipCovOptions)
class ClipCov(CovarianceControl):
    """Clip-Cov: a few tokens with a high covariance lose their loss term."""

    kl_places: ClassVar[tuple[str, ...]] = ("reward",)
    tokenwise: ClassVar[bool] = True

    def choose(self, cov_BT: Tensor, log_ratio_BT: Tensor, shaped: ShapedBatch, seed: int | None) -> ShapedBatch:
        _, clipped_BT = self.surrogate(log_ratio_BT, dataclasses.replace(shaped, selection=None))
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

    def surrogate(self, log_ratio_BT: Tensor, shaped: ShapedBatch) -> tuple[Tensor, Tensor]:
        objective_BT, clipped_BT = super().surrogate(log_ratio_BT, shaped)
        if shaped.selection is not None:
            objective_BT = torch.where(shaped.selection, 0.0, objective_BT)
        return objective_BT, clipped_BT


@register_algorithm("kl_cov", KLCovOptions)
class KLCov(CovarianceControl):
    """KL-Cov: tokens with the highest covariances are held back by `ppo_kl_coef |new - old|`; no clipping."""

    tokenwise: ClassVar[bool] = True

    def choose(self, cov_BT: Tensor, log_ratio_BT: Tensor, shaped: ShapedBatch, seed: int | None) -> ShapedBatch:
        count = self.number_chosen(shaped)
        if count == 0:
            empty = torch.zeros(0, dtype=torch.long, device=cov_BT.device)
            return with_selection(shaped, empty, empty, cov_BT, {"chosen": empty.new_zeros(0, 3)})
        tokens = int(shaped.loss_mask.sum())
        least, _ = order_statistic(cov_BT, shaped.loss_mask, tokens - count)
        row, position, places = natural_tokens((cov_BT >= least) & shaped.loss_mask, shaped)
        best = cov_BT[row, position].argsort(descending=True, stable=True)[:count]
        return with_selection(shaped, row[best], position[best], cov_BT, {"chosen": places[best]})

    def surrogate(self, log_ratio_BT: Tensor, shaped: ShapedBatch) -> tuple[Tensor, Tensor]:
        objective_BT, clipped_BT = losses.clipped_surrogate(log_ratio_BT.exp(), shaped.advantages, None)
        return torch.where(shaped.loss_mask, objective_BT, 0.0), clipped_BT

    def extra_objective(self, objective_BT: Tensor, log_ratio_BT: Tensor, shaped: ShapedBatch) -> Tensor:
        penalty_BT = torch.where(shaped.selection, log_ratio_BT.abs(), 0.0)
        return objective_BT - self.options.ppo_kl_coef * penalty_BT
