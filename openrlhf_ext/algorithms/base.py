"""`Algorithm`, the frame of all methods: validate, shape whole groups, compute a loss that splits exactly.

A method is a small class. `TokenAlgorithm` (`token_level`, one ratio per token) and `SequenceAlgorithm`
(`sequence_level`, one per completion) do everything but the advantages:

    @register_algorithm("my_method", MyOptions)
    class MyMethod(TokenAlgorithm):
        def advantages(self, inputs: Inputs) -> dict[str, Any]:
            return {"advantages": ...}          # fields of ShapedBatch, (N,)

Shape suffixes: B = completions, N = tokens of all completions, n = some of them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from openrlhf_ext.algorithms.batch import RolloutBatch, check_rewards, check_values
from openrlhf_ext.algorithms.groups import Groups, Partition, partition
from openrlhf_ext.algorithms.importance import Correction, correction_weights
from openrlhf_ext.algorithms.kl import KLPenalty
from openrlhf_ext.algorithms.metrics import rollout_metrics
from openrlhf_ext.algorithms.option_blocks import Options
from openrlhf_ext.algorithms.segments import Segments
from openrlhf_ext.algorithms.shaped import Loss, ShapedBatch

LEAST_ENTROPY = -1e-4
MOST_LOGPROB = 1e-3
"""What rounding may make of the bounds 0 of entropies (nats) and log-probs; values beyond are refused."""

Total = Callable[[Tensor], Tensor]
"""Sums a tensor over the shares of a mini-batch that several processes hold, see `Algorithm.prepare`."""

TokenLoss = Callable[[Tensor, Tensor], Tensor]
"""`(new_logprobs_n, index_n) -> loss_n`: loss terms of single tokens, see `Algorithm.token_loss`."""


@dataclass(frozen=True)
class Inputs:
    """A validated rollout batch with its grouping and partition; floats promoted, rewards in float64."""

    batch: RolloutBatch
    groups: Groups
    part: Partition

    @property
    def segments(self) -> Segments:
        """Which tokens are whose."""
        return self.batch.segments


class Algorithm:
    """Base of all algorithms.

    Class attributes:
        name: registry name.
        Options: options class.
        needs: optional RolloutBatch tensors that `shape` requires.
        loss_inputs: names in `ShapedBatch.exposed` that `prepare` and the loss read (kept by `ShapedBatch.lean`); what
            only `loss_level` reads is not among them.
        needs_prepare: the caller must call `prepare` with the log-probs of the whole mini-batch before it computes
            the losses of shares (`select`).
        kl_places: where a KL penalty is defined for the algorithm: "loss", "reward".
    """

    name: ClassVar[str] = ""
    Options: ClassVar[type[Options]] = Options
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
        changed.kl = self.kl.model_copy(update={"coef": coef})
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

    def prepare(
        self, new_logprobs: Tensor, shaped: ShapedBatch, *, seed: int | None = None, total: Total | None = None
    ) -> ShapedBatch:
        """Fix what the loss needs to know about the whole mini-batch under the *current* policy.

        Algorithms with `needs_prepare` choose tokens by statistics of the new log-probs over the whole mini-batch;
        call this once per optimiser step, then `select` shares of the result. A no-op for all others.

        Processes that hold a share each choose together: every one calls this with its share and a `total`.

        Args:
            new_logprobs: (N,) of the mini-batch, or of the share; no gradient is used.
            shaped: the mini-batch (result of `shape` or `mini_batch`); with `total` a share of one made by `select`.
            seed: seeds random choices; use the same number on all ranks. None: natural order.
            total: sums a tensor over the shares, which have no row in common and cover the mini-batch; the result must
                be the same bits for all. None: `shaped` is the whole.
        """
        return shaped

    def loss(self, new_logprobs: Tensor, shaped: ShapedBatch) -> Loss:
        """The loss of these rows.

        Args:
            new_logprobs: (N,) log-probs of the current policy, differentiable.
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
        logits; it needs each token's loss without the others'. Summed over the tokens of `shaped` the
        terms are `loss(new_logprobs, shaped).value`; metrics come from `loss` on the detached log-probs, which
        also reports what is not finite (the terms do not check, to cost no synchronisation per block).

        Args:
            shaped: a mini-batch, or a share of one made by `select`; prepared, where `needs_prepare`.
        Returns:
            `terms(new_logprobs_n, index_n) -> loss_n` for the tokens at `index_n` (int64) of the N of `shaped`,
            differentiable in `new_logprobs_n`, 0 for tokens without loss; all denominators are those of the mini-batch.
            None where a token's loss depends on other tokens (sequence ratios), or the algorithm does not say
            otherwise (`tokenwise`).
        Raises:
            ValueError: `shaped` has not been prepared.
        """
        return None

    # ---- what an algorithm defines ----

    def advantages(self, inputs: Inputs) -> dict[str, Any]:
        """Fields of ShapedBatch: at least `advantages` (N,), or `seq_advantages` (B,) float64 at sequence level."""
        raise NotImplementedError

    def rollout_level(self, inputs: Inputs) -> ShapedBatch:
        """Reward- and advantage-level quantities, computed once per rollout batch."""
        return self.shaped(inputs, **self.advantages(inputs))

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
            check_values(name, getattr(batch, name), batch.segments, high=high)
        if batch.entropies is not None:
            check_values("entropies", batch.entropies, batch.segments, low=LEAST_ENTROPY)
            if len(batch.rewards) and not batch.entropies.amin() >= 0:
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

    def shaped(self, inputs: Inputs, *, metrics: dict[str, Tensor] | None = None, **fields: Any) -> ShapedBatch:
        """A ShapedBatch with the fields every algorithm shares filled in."""
        batch, groups, part = inputs.batch, inputs.groups, inputs.part
        weights_N, correction_metrics = self._correction(inputs)
        common: dict[str, Any] = {
            "algorithm": self,
            "rows": torch.arange(len(batch.rewards), device=batch.rewards.device),
            "group_ids": batch.group_ids,
            "group_sizes": groups.sizes_B,
            "segments": inputs.segments,
            "kept": part.kept_B,
            "active": part.active_B,
            "rewards": batch.rewards,
            "old_logprobs": batch.old_logprobs,
            "ref_logprobs": batch.ref_logprobs if self.kl is not None and self.kl.place == "loss" else None,
            "correction": weights_N,
        }
        return ShapedBatch(**{**common, **fields}, metrics={**correction_metrics, **(metrics or {})})

    def _correction(self, inputs: Inputs) -> tuple[Tensor | None, dict[str, Tensor]]:
        """(N,) importance-correction factors, None for 1, and their metrics."""
        if self.correction is None:
            return None, {}
        batch = inputs.batch
        weights_N, filtered_B, gap_B = correction_weights(
            self.correction, batch.old_logprobs, batch.rollout_logprobs, batch.segments
        )
        corrected_B = self.corrected_rows(inputs)
        if not bool(corrected_B.all()):
            weights_N.masked_fill_(batch.segments.spread(~corrected_B), 1.0)
        check_values("importance correction exp(old - rollout)", weights_N, batch.segments)
        tokens = inputs.groups.lengths_B.sum().clamp(min=1)
        return weights_N, {
            "correction_filtered": filtered_B[corrected_B].sum(dtype=torch.float64) / tokens,
            "rollout_kl": gap_B.sum() / tokens,
        }
