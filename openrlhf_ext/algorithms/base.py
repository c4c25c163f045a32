"""The common frame of all algorithms: validate, shape whole groups, weigh tokens, compute a loss that splits exactly.

An algorithm is a small class. `TokenAlgorithm` (one ratio per token) and `SequenceAlgorithm` (one per completion) do
everything but the advantages:

    @register_algorithm("my_method", MyOptions)
    class MyMethod(TokenAlgorithm):
        def advantages(self, inputs: Inputs) -> dict[str, Any]:
            return {"advantages": ...}          # fields of ShapedBatch, (B, T)

Shape suffixes: B = completions, T = positions, Q = groups.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from openrlhf_ext.algorithms import losses
from openrlhf_ext.algorithms.batch import Loss, RolloutBatch, ShapedBatch, check_rewards, check_values
from openrlhf_ext.algorithms.groups import Groups, Partition, partition, sequence_moments
from openrlhf_ext.algorithms.importance import Correction, correction_weights
from openrlhf_ext.algorithms.kl import KLPenalty, reward_kl
from openrlhf_ext.algorithms.length_penalty import length_penalty
from openrlhf_ext.algorithms.metrics import rollout_metrics
from openrlhf_ext.algorithms.option_parsing import Options

LEAST_ENTROPY = -1e-4
MOST_LOGPROB = 1e-3
"""What rounding may make of the bounds 0 of entropies (nats) and log-probs; values beyond are refused."""

TokenLoss = Callable[[Tensor, Tensor], Tensor]
"""`(new_logprobs_N, index_N) -> loss_N`: loss terms of single tokens, see `Algorithm.token_loss`."""


@dataclass(frozen=True)
class Inputs:
    """A validated rollout batch with its grouping and partition; floats promoted, rewards in float64."""

    batch: RolloutBatch
    groups: Groups
    part: Partition


class Algorithm:
    """Base of all algorithms.

    Class attributes:
        name: registry name.
        Options: options dataclass.
        needs: optional RolloutBatch tensors that `shape` requires.
        loss_inputs: names in `ShapedBatch.exposed` that `prepare` and the loss read (kept by `ShapedBatch.lean`); what
            only `loss_level` reads is not among them.
        needs_prepare: the caller must call `prepare` with the log-probs of the whole mini-batch before it computes
            the losses of shares (`select`).
        kl_places: where a KL penalty is defined for the algorithm: "loss", "reward".
    """

    name: ClassVar[str] = ""
    Options: ClassVar[type] = Options
    needs: ClassVar[tuple[str, ...]] = ()
    loss_inputs: ClassVar[tuple[str, ...]] = ()
    needs_prepare: ClassVar[bool] = False
    kl_places: ClassVar[tuple[str, ...]] = ()

    def __init__(self, options: Any, *, correction: Correction | None = None, kl: KLPenalty | None = None) -> None:
        self.options = options
        self.correction = correction
        self.kl = kl
        if kl is not None and kl.place not in self.kl_places:
            legal = f"only in the {self.kl_places[0]}" if self.kl_places else "not at all"
            raise ValueError(f"{self.name} takes a KL penalty {legal}, got kl place {kl.place!r}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.options!r}, correction={self.correction!r}, kl={self.kl!r})"

    # ---- what a caller uses ----

    def with_kl_coef(self, coef: float) -> Algorithm:
        """This algorithm with another coefficient of its KL penalty, which it must have."""
        changed = copy.copy(self)
        changed.kl = dataclasses.replace(self.kl, coef=coef)
        return changed

    @torch.no_grad()
    def shape(self, batch: RolloutBatch) -> ShapedBatch:
        """Turn whole groups of a rollout batch into what the loss needs.

        Args:
            batch: complete groups; never a shard of one.
        Returns:
            A ShapedBatch whose mini-batch is the whole rollout batch.
        Raises:
            ValueError: missing inputs, an empty completion, an incomplete group; on a completion token inf or NaN, an
                entropy below `LEAST_ENTROPY` (above it up to 0: taken as 0), a log-prob above `MOST_LOGPROB`.
        """
        inputs = self.inputs(batch)
        shaped = self.rollout_level(inputs)
        shaped.metrics.update(rollout_metrics(inputs, shaped))
        return self.loss_level(shaped)

    def prepare(self, new_logprobs: Tensor, shaped: ShapedBatch, *, seed: int | None = None) -> ShapedBatch:
        """Fix what the loss needs to know about the whole mini-batch under the *current* policy.

        Algorithms with `needs_prepare` choose tokens by statistics of the new log-probs over the whole mini-batch;
        call this once per optimiser step, then `select` shares of the result. A no-op for all others.

        Args:
            new_logprobs: (B, T) of the whole mini-batch; no gradient is used.
            shaped: the mini-batch (result of `shape` or `mini_batch`).
            seed: seeds random choices; use the same number on all ranks. None: natural order.
        """
        return shaped

    def loss(self, new_logprobs: Tensor, shaped: ShapedBatch) -> Loss:
        """The loss of these rows.

        Args:
            new_logprobs: (B, T) log-probs of the current policy, differentiable; padding may hold anything.
            shaped: a mini-batch, or a share of one made by `select`.
        Raises:
            ValueError: on the CPU only, naming row and position: a log-prob is inf or NaN, or a ratio overflows that
                neither clipping nor a zero advantage silences. On a device the test would wait for it: there the
                caller tests `value` and the metric `policy_kl`, which shows log-probs, when it reads them.
        """
        raise NotImplementedError

    def token_loss(self, shaped: ShapedBatch) -> TokenLoss | None:
        """The loss as a sum of terms of single tokens, for a caller that meets the log-probs block by block.

        A fused output layer computes log-probs, loss and gradient of a block of tokens and then forgets the block's
        logits; it needs each token's loss without the others'. Summed over the completion tokens (`mask`) of `shaped`
        the terms are `loss(new_logprobs, shaped).value`; metrics come from `loss` on the detached log-probs, which
        also reports what is not finite (the terms do not check, to cost no synchronisation per block).

        Args:
            shaped: a mini-batch, or a share of one made by `select`; prepared, where `needs_prepare`.
        Returns:
            `terms(new_logprobs_N, index_N) -> loss_N` for tokens at the flat positions `index_N` (int64) of (B, T),
            differentiable in `new_logprobs_N`, 0 for tokens without loss; all denominators are those of the mini-batch.
            None where a token's loss depends on other tokens (sequence ratios), or the algorithm does not say
            otherwise (`tokenwise`).
        Raises:
            ValueError: `shaped` has not been prepared.
        """
        return None

    # ---- what an algorithm defines ----

    def rollout_level(self, inputs: Inputs) -> ShapedBatch:
        """Reward- and advantage-level quantities, computed once per rollout batch."""
        raise NotImplementedError

    def loss_level(self, shaped: ShapedBatch) -> ShapedBatch:
        """Denominators, masks and statistics of a mini-batch (`loss_mask`, `weights`, `denominators`)."""
        raise NotImplementedError

    def derived(self) -> dict[str, Callable[[ShapedBatch], Tensor]]:
        """Quantities that a ShapedBatch computes on demand from what it stores."""
        return {}

    # ---- shared steps ----

    def inputs(self, batch: RolloutBatch) -> Inputs:
        """Validate and group a batch."""
        self._require(batch)
        batch = batch.promoted()
        groups = Groups.of(batch)
        check_rewards(batch.rewards)
        for name in ("old_logprobs", *self._optional_inputs()):
            high = MOST_LOGPROB if name.endswith("logprobs") else torch.inf
            check_values(name, getattr(batch, name), batch.mask, high=high)
        if batch.entropies is not None:
            check_values("entropies", batch.entropies, batch.mask, low=LEAST_ENTROPY)
            if len(batch.rewards) and not batch.entropies.amin() >= 0:  # negative, or NaN in the padding
                batch = dataclasses.replace(batch, entropies=batch.entropies.clamp(min=0.0))
        return Inputs(batch, groups, self.partition(batch, groups))

    def partition(self, batch: RolloutBatch, groups: Groups) -> Partition:
        """Success classes and degenerate groups."""
        return partition(
            batch,
            groups,
            success_threshold=self.options.success_threshold,
            mask_truncated=self.options.mask_truncated,
            degenerate=self.options.degenerate,
            degenerate_by=self.options.degenerate_by,
        )

    def _optional_inputs(self) -> tuple[str, ...]:
        names = {name for name in self.needs if name != "entropies"}
        if self.kl is not None:
            names.add("ref_logprobs")
        if self.correction is not None:
            names.add("rollout_logprobs")
        return tuple(sorted(names))

    def _require(self, batch: RolloutBatch) -> None:
        reasons = {"ref_logprobs": "a KL penalty", "rollout_logprobs": "an importance correction"}
        wanted = dict.fromkeys((*self.needs, *self._optional_inputs()))
        for name in wanted:
            if getattr(batch, name) is None:
                raise ValueError(f"{self.name} with {reasons.get(name, 'these options')} needs RolloutBatch.{name}")

    def corrected_rows(self, inputs: Inputs) -> Tensor:
        """(B,) completions that the importance correction applies to."""
        return torch.ones_like(inputs.part.kept_B)

    def shaped(self, inputs: Inputs, **fields: Any) -> ShapedBatch:
        """A ShapedBatch with the fields every algorithm shares filled in."""
        batch, groups, part = inputs.batch, inputs.groups, inputs.part
        common: dict[str, Any] = {
            "algorithm": self,
            "rows": torch.arange(len(batch.rewards), device=batch.rewards.device),
            "group_ids": batch.group_ids,
            "group_sizes": groups.sizes_B,
            "lengths": groups.lengths_B,
            "kept": part.kept_B,
            "active": part.active_B,
            "rewards": batch.rewards,
            "mask": batch.mask,
            "old_logprobs": batch.old_logprobs,
            "ref_logprobs": batch.ref_logprobs if self.kl is not None and self.kl.place == "loss" else None,
        }
        if self.correction is not None:
            weights_BT, filtered_BT = correction_weights(
                self.correction, batch.old_logprobs, batch.rollout_logprobs, batch.mask
            )
            weights_BT = torch.where(self.corrected_rows(inputs)[:, None], weights_BT, 1.0)
            check_values("importance correction exp(old - rollout)", weights_BT, batch.mask)
            common["correction"] = weights_BT
            tokens = groups.lengths_B.sum().clamp(min=1)
            gap_BT = torch.where(batch.mask, batch.rollout_logprobs - batch.old_logprobs, 0.0)
            fields["metrics"] = {
                "correction_filtered": filtered_BT.sum(dtype=torch.float64) / tokens,
                "rollout_kl": gap_BT.sum(dtype=torch.float64) / tokens,
                **fields.get("metrics", {}),
            }
        return ShapedBatch(**{**common, **fields})


def group_advantages(inputs: Inputs, rewards_B: Tensor, options: Any) -> Tensor:
    """Group-relative sequence advantage (specification 2.5), float64, 0 in dropped and zeroed groups.

    Args:
        rewards_B: (B,) float64 penalised rewards.
        options: reads `baseline`, `normalize_std`, `ddof_seq`, `adv_eps`.
    """
    groups, part = inputs.groups, inputs.part
    everyone_B = torch.ones_like(part.kept_B)
    moments = sequence_moments(rewards_B, everyone_B, groups.index_B, len(groups))
    centre_Q = moments.mean
    if getattr(options, "baseline", "seq") == "token":
        lengths_B = groups.lengths_B.to(torch.float64)
        # Relative to the mean, so that equal rewards give exactly the mean.
        shift_Q = groups.sum(lengths_B * (rewards_B - centre_Q[groups.index_B])) / groups.sum(lengths_B)
        centre_Q = centre_Q + shift_Q
    live_B = part.kept_B & ~part.zeroed_B
    centred_B = rewards_B - centre_Q[groups.index_B]
    if options.normalize_std:
        std_B = moments.std(options.ddof_seq)[groups.index_B]
        centred_B = divide_by_std(centred_B, std_B, options.adv_eps, live_B, inputs.batch.group_ids)
    return torch.where(live_B, centred_B, 0.0)


def divide_by_std(centred_B: Tensor, std_B: Tensor, adv_eps: float, live_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """`centred / (std + adv_eps)`; ValueError naming the group where that would be 0/0."""
    if adv_eps == 0.0:
        require_positive_std(std_B, live_B, group_ids_B)
    return centred_B / torch.where(live_B, std_B + adv_eps, 1.0)


def require_positive_std(std_B: Tensor, live_B: Tensor, group_ids_B: Tensor) -> None:
    """`adv_eps: 0` is legal only when no standard deviation that divides is 0 (specification 2.4)."""
    flat = (live_B & (std_B == 0)).nonzero().flatten()
    if len(flat):
        group = int(group_ids_B[flat[0]])
        raise ValueError(f"adv_eps = 0 needs positive standard deviations, that of group {group} is 0; set adv_eps > 0")


def broadcast(values_B: Tensor, mask_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, T) with one value per completion on its tokens and 0 in padding."""
    return torch.where(mask_BT, values_B.to(dtype)[:, None], 0.0)


def tokens_of(mask_BT: Tensor, rows_B: Tensor) -> Tensor:
    """(B, T) tokens of the flagged completions; the mask itself, not a copy, when all are flagged."""
    return mask_BT if bool(rows_B.all()) else mask_BT & rows_B[:, None]


class TokenAlgorithm(Algorithm):
    """One ratio and one advantage per token; clipped surrogate, optional KL, token-level aggregation.

    Class attributes:
        fixed_agg: aggregation of algorithms without the option `agg`.
        tokenwise: `loss` is a sum of terms of single tokens, so that `token_loss` can compute it. A class that defines
            `loss`, `objective`, `surrogate`, `factor`, `extra_objective` or `extra_terms` must say so again by
            `tokenwise = True`: its hooks then must treat every token alone. The loss is right either way; without it
            the fused output layer is not used.
    """

    fixed_agg: ClassVar[str] = "token-mean"
    kl_places: ClassVar[tuple[str, ...]] = ("loss",)
    tokenwise: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        hooks = ("loss", "objective", "surrogate", "factor", "extra_objective", "extra_terms")
        if "tokenwise" not in vars(cls) and any(name in vars(cls) for name in hooks):
            cls.tokenwise = False

    def advantages(self, inputs: Inputs) -> dict[str, Any]:
        """Fields of ShapedBatch that this algorithm fills; at least `advantages` (B, T)."""
        raise NotImplementedError

    def rollout_level(self, inputs: Inputs) -> ShapedBatch:
        return self.shaped(inputs, **self.advantages(inputs))

    def loss_level(self, shaped: ShapedBatch) -> ShapedBatch:
        loss_mask_BT = self.loss_mask(shaped)
        counted_B = self.counted_tokens(shaped, loss_mask_BT)
        _, index_B = shaped.group_ids.unique(return_inverse=True)
        weights_B = losses.token_weights(
            getattr(self.options, "agg", self.fixed_agg),
            getattr(self.options, "agg_scope", "batch"),
            getattr(self.options, "l_norm", None),
            counted_B=counted_B,
            kept_B=shaped.kept,
            active_B=shaped.active,
            index_B=index_B,
            sizes_B=shaped.group_sizes,
        )
        tokens = self.loss_tokens(shaped, loss_mask_BT).sum().to(torch.float64)
        return dataclasses.replace(
            shaped, loss_mask=loss_mask_BT, weights=weights_B, denominators={"tokens": tokens}, complete=True
        )

    def loss_mask(self, shaped: ShapedBatch) -> Tensor:
        """(B, T) tokens that carry loss."""
        return tokens_of(shaped.mask, shaped.active)

    def loss_tokens(self, shaped: ShapedBatch, loss_mask_BT: Tensor) -> Tensor:
        """(B,) tokens of each completion that carry loss."""
        return torch.where(shaped.active, shaped.lengths, 0)

    def counted_tokens(self, shaped: ShapedBatch, loss_mask_BT: Tensor) -> Tensor:
        """(B,) counted tokens c_i of specification 2.9."""
        return self.loss_tokens(shaped, loss_mask_BT)

    def loss(self, new_logprobs: Tensor, shaped: ShapedBatch) -> Loss:
        shaped = self.prepared(new_logprobs, shaped)
        log_ratio_BT = masked_log_ratio(new_logprobs, shaped)
        objective_BT, clipped_BT, kl_BT = self.objective(promote(new_logprobs), log_ratio_BT, shaped)
        value = -weighted_sum(objective_BT, shaped)
        metrics = {"policy_loss": value.detach(), **ratio_metrics(log_ratio_BT, clipped_BT, shaped)}
        if kl_BT is not None:
            metrics["ref_kl"] = share(kl_BT, shaped)
        extra = self.extra_terms(promote(new_logprobs), shaped)
        for name, terms_BT in extra.items():
            total = terms_BT.sum()
            value = value + total
            metrics[name] = total.detach()
        loss = Loss(value, metrics, {"clipped": clipped_BT})
        return checked(loss, (objective_BT, *extra.values()), new_logprobs, log_ratio_BT, shaped)

    def token_loss(self, shaped: ShapedBatch) -> TokenLoss | None:
        if not self.tokenwise:
            return None
        if self.needs_prepare and shaped.selection is None:
            raise ValueError(
                f"{self.name} chooses tokens over the whole mini-batch: call "
                "`shaped = algorithm.prepare(new_logprobs, shaped)` before `token_loss`"
            )
        return functools.partial(self._terms_of_tokens, shaped.lean())

    def _terms_of_tokens(self, shaped: ShapedBatch, new_logprobs_N: Tensor, index_N: Tensor) -> Tensor:
        """(N,) loss terms: the loss of N rows of one position each."""
        part = shaped.tokens_at(index_N)
        new_N1 = promote(new_logprobs_N)[:, None]
        log_ratio_N1 = torch.where(part.loss_mask, new_N1 - part.old_logprobs, 0.0)
        objective_N1, _, _ = self.objective(new_N1, log_ratio_N1, part)
        loss_N1 = -objective_N1 * part.weights.to(objective_N1.dtype)[:, None]
        for terms_N1 in self.extra_terms(new_N1, part).values():
            loss_N1 = loss_N1 + terms_N1
        return loss_N1[:, 0]

    def prepared(self, new_logprobs: Tensor, shaped: ShapedBatch) -> ShapedBatch:
        """The batch with everything that `loss` reads; where `needs_prepare`, refuses a share nobody prepared."""
        return shaped

    def objective(
        self, new_BT: Tensor, log_ratio_BT: Tensor, shaped: ShapedBatch
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Objective to maximise per token, before aggregation weights; which tokens were clipped; reference KL."""
        objective_BT, clipped_BT = self.surrogate(log_ratio_BT, shaped)
        kl_BT = None
        if shaped.ref_logprobs is not None:
            kl_BT = self.kl.in_loss(new_BT, shaped.ref_logprobs, shaped.old_logprobs, shaped.loss_mask)
            objective_BT = objective_BT - self.kl.coef * kl_BT
        return self.extra_objective(objective_BT, log_ratio_BT, shaped), clipped_BT, kl_BT

    def surrogate(self, log_ratio_BT: Tensor, shaped: ShapedBatch) -> tuple[Tensor, Tensor]:
        """Objective per token times `factor`, 0 outside the loss mask, and which tokens were clipped."""
        options = self.options
        value_BT, clipped_BT = losses.clipped_surrogate(
            log_ratio_BT,
            shaped.advantages,
            options.clip_low,
            options.clip_high,
            getattr(options, "dual_clip", None),
            factor=self.factor(shaped),
        )
        return torch.where(shaped.loss_mask, value_BT, 0.0), clipped_BT & shaped.loss_mask

    def factor(self, shaped: ShapedBatch) -> Tensor | None:
        """(B, T) constant factor on each token's surrogate, None for 1."""
        factors = [f for f in (shaped.token_weights, shaped.correction) if f is not None]
        return functools.reduce(torch.mul, factors) if factors else None

    def extra_objective(self, objective_BT: Tensor, log_ratio_BT: Tensor, shaped: ShapedBatch) -> Tensor:
        """Hook for terms beyond the surrogate and the reference KL."""
        return objective_BT

    def extra_terms(self, new_BT: Tensor, shaped: ShapedBatch) -> dict[str, Tensor]:
        """Hook for loss terms (B, T) with a normalisation of their own; each is a metric by its name."""
        return {}


class SequenceAlgorithm(Algorithm):
    """One ratio and one advantage per completion (specification 2.10)."""

    ratio_kind: ClassVar[str] = "geometric"

    def advantages(self, inputs: Inputs) -> dict[str, Any]:
        """Fields of ShapedBatch that this algorithm fills; at least `seq_advantages` (B,) float64."""
        raise NotImplementedError

    def rollout_level(self, inputs: Inputs) -> ShapedBatch:
        fields = self.advantages(inputs)
        token_BT = broadcast(fields["seq_advantages"], inputs.batch.mask, inputs.batch.float_dtype)
        return self.shaped(inputs, advantages=token_BT, **fields)

    def loss_level(self, shaped: ShapedBatch) -> ShapedBatch:
        _, index_B = shaped.group_ids.unique(return_inverse=True)
        weights_B = losses.sequence_weights(
            kept_B=shaped.kept, active_B=shaped.active, index_B=index_B, sizes_B=shaped.group_sizes
        )
        # Truncated-masked completions have a ratio to look at, but weight 0.
        loss_mask_BT = tokens_of(shaped.mask, shaped.kept)
        denominators = {
            "tokens": torch.where(shaped.active, shaped.lengths, 0).sum().to(torch.float64),
            "sequences": shaped.active.sum().to(torch.float64),
        }
        return dataclasses.replace(
            shaped, loss_mask=loss_mask_BT, weights=weights_B, denominators=denominators, complete=True
        )

    def sequence_log_ratio(self, log_ratio_BT: Tensor, shaped: ShapedBatch) -> Tensor:
        """(B,) log of the ratio: of the mean of the token ratios, or of their geometric mean; 0 in dropped groups."""
        lengths_B = shaped.lengths.to(log_ratio_BT.dtype)
        if self.ratio_kind == "geometric" or len(shaped) == 0:
            return log_ratio_BT.sum(dim=1) / lengths_B
        # Relative to the largest token ratio, so that nothing overflows.
        largest_B = torch.where(shaped.loss_mask, log_ratio_BT.detach(), -torch.inf).amax(dim=1)
        largest_B = torch.where(shaped.kept, largest_B, 0.0)
        below_BT = torch.where(shaped.loss_mask, log_ratio_BT - largest_B[:, None], -torch.inf)
        mean_B = below_BT.exp().sum(dim=1) / lengths_B
        return largest_B + torch.where(shaped.kept, mean_B, 1.0).log()

    def loss(self, new_logprobs: Tensor, shaped: ShapedBatch) -> Loss:
        options = self.options
        log_ratio_BT = masked_log_ratio(new_logprobs, shaped)
        log_ratio_B = self.sequence_log_ratio(log_ratio_BT, shaped)
        factor_B = shaped.weights if shaped.correction is None else shaped.weights * sequence_correction(shaped)
        objective_B, clipped_B = losses.clipped_surrogate(
            log_ratio_B,
            shaped.seq_advantages.to(log_ratio_B.dtype),
            options.clip_low,
            options.clip_high,
            options.dual_clip,
            factor=factor_B.to(log_ratio_B.dtype),
        )
        value = -objective_B.sum()
        clipped_B = clipped_B & shaped.active
        metrics = ratio_metrics(torch.where(shaped.active[:, None], log_ratio_BT.detach(), 0.0), None, shaped)
        metrics["clip_fraction"] = clipped_B.sum(dtype=torch.float64) / at_least_one(shaped.denominators["sequences"])
        details = {"clipped": clipped_B, "ratios": log_ratio_B.detach().exp()}
        loss = Loss(value, {"policy_loss": value.detach(), **metrics}, details)
        return checked(loss, (objective_B,), new_logprobs, log_ratio_BT, shaped)


def sequence_correction(shaped: ShapedBatch) -> Tensor:
    """(B,) factor of a sequence objective: mean of the completion's token factors."""
    total_B = torch.where(shaped.mask, shaped.correction, 0.0).sum(dim=1)
    return total_B / shaped.lengths.to(total_B.dtype)


def promote(logprobs: Tensor) -> Tensor:
    """Log-probs in at least float32, differentiably."""
    return logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))


def masked_log_ratio(new_logprobs: Tensor, shaped: ShapedBatch) -> Tensor:
    """(B, T) `new - old` on loss tokens, 0 elsewhere."""
    if new_logprobs.shape != shaped.old_logprobs.shape:
        raise ValueError(
            f"new_logprobs has shape {tuple(new_logprobs.shape)}, the shaped batch {tuple(shaped.old_logprobs.shape)}"
        )
    return torch.where(shaped.loss_mask, promote(new_logprobs) - shaped.old_logprobs, 0.0)


def checked(
    loss: Loss, terms: Sequence[Tensor], new_logprobs: Tensor, log_ratio_BT: Tensor, shaped: ShapedBatch
) -> Loss:
    """The loss; on the CPU a ValueError that names what makes it, or a log-ratio, infinite or NaN.

    Args:
        terms: (B, T) or (B,) what the loss is the sum of.
    """
    if loss.value.device.type != "cpu" or bool(torch.isfinite(loss.value.detach() + log_ratio_BT.detach().sum())):
        return loss
    check_values("new_logprobs", new_logprobs, shaped.mask)
    worst = max((term.detach().abs().nan_to_num(nan=torch.inf) for term in terms), key=lambda term: float(term.max()))
    row, *position = (int(i) for i in torch.unravel_index(worst.argmax(), worst.shape))
    column = position[0] if position else int(log_ratio_BT.detach()[row].abs().argmax())
    raise ValueError(
        f"the loss is {float(loss.value.detach())}: at row {row}, position {column} (new log-prob "
        f"{float(new_logprobs.detach()[row, column])}, old {float(shaped.old_logprobs[row, column])}) a ratio or KL "
        f"term overflows {log_ratio_BT.dtype} that neither clipping nor a zero advantage silences. Bound the ratios of "
        "negative advantages by dual_clip, or look for log-probs of other weights or of another tokenisation"
    )


def weighted_sum(objective_BT: Tensor, shaped: ShapedBatch) -> Tensor:
    """Scalar sum over tokens with the aggregation weight of their completion."""
    return (objective_BT.sum(dim=1) * shaped.weights.to(objective_BT.dtype)).sum()


def share(values_BT: Tensor, shaped: ShapedBatch) -> Tensor:
    """This share's part of the mean over the loss tokens of the whole mini-batch."""
    return values_BT.detach().sum(dtype=torch.float64) / at_least_one(shaped.denominators["tokens"])


def at_least_one(count: Tensor) -> Tensor:
    """A count made safe to divide by."""
    return count.clamp(min=1.0)


def ratio_metrics(log_ratio_BT: Tensor, clipped_BT: Tensor | None, shaped: ShapedBatch) -> dict[str, Tensor]:
    """Mean of `old - new`, and clip fractions by sign of the advantage."""
    metrics = {"policy_kl": -share(log_ratio_BT, shaped)}
    if clipped_BT is not None:
        up_BT = clipped_BT & (shaped.advantages > 0)
        metrics["clip_fraction"] = share(clipped_BT, shaped)
        metrics["clip_fraction_high"] = share(up_BT, shaped)
        metrics["clip_fraction_low"] = metrics["clip_fraction"] - metrics["clip_fraction_high"]
    return metrics


def penalised_rewards(algorithm: Algorithm, inputs: Inputs) -> Tensor:
    """(B,) float64 raw rewards plus length penalty (specification 2.5), minus a KL placed in the reward."""
    rewards_B = inputs.batch.rewards + length_penalty(inputs.groups, inputs.part, algorithm.options)
    kl, batch = algorithm.kl, inputs.batch
    if kl is not None and kl.place == "reward":
        kl_BT = reward_kl(kl, batch.old_logprobs, batch.ref_logprobs, batch.mask)
        rewards_B = rewards_B - kl_BT.sum(dim=1, dtype=torch.float64)
    return rewards_B
