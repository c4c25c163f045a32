"""`Algorithm`, the base class of all methods: it validates a batch, shapes whole groups, and
computes the loss.

The loss reads a `LossBatch` and returns a `Loss`. The losses of disjoint shares of a mini-batch add
up exactly. A method is a small class: `TokenAlgorithm` (one ratio per token) and
`SequenceAlgorithm` (one per completion, both in `losses`) do everything but the advantages.

Shape suffixes: B = completions, N = tokens of all completions, n = some of them, Q = groups
(prompts).
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from openrlhf_ext.algorithms.batch import Named, RolloutBatch, check_rewards, check_values
from openrlhf_ext.algorithms.groups import Groups, Inputs, Partition, group_index, partition
from openrlhf_ext.algorithms.importance import Correction, correction_weights, factors
from openrlhf_ext.algorithms.kl import KLPenalty
from openrlhf_ext.algorithms.metrics import rollout_metrics
from openrlhf_ext.algorithms.option_blocks import Options
from openrlhf_ext.algorithms.segments import Packed, RowSelection, Segments
from openrlhf_ext.options import nearest

LEAST_ENTROPY = -1e-4
MOST_LOGPROB = 1e-3
"""Rounding tolerance of the bound 0 for entropies (nats) and log-probs. `Algorithm.inputs` raises
ValueError for values beyond it."""

Total = Callable[[Tensor], Tensor]
"""Sums a tensor over the shares of a mini-batch that several processes hold, see
`Algorithm.prepare`."""

Derived = dict[str, Callable[["LossBatch"], Tensor]]
TokenLoss = Callable[[Tensor, Tensor], Tensor]
"""`(new_logprobs_n, index_n) -> loss_n`: loss terms of single tokens, see
`Algorithm.token_loss`."""


class Algorithm:
    """Base of all algorithms.

    Class attributes:
        name: registry name.
        Options: options class.
        needs: optional RolloutBatch tensors that `shape` requires.
        loss_inputs: names in `of_rows` and `of_tokens` of a LossBatch that `prepare` and the loss
            read (kept by `LossBatch.lean`), without names that only `loss_level` reads.
        reads_old: `advantages` reads `RolloutBatch.old_logprobs`.
        needs_prepare: the caller must call `prepare` with the log-probs of the whole mini-batch
            before it computes the losses of shares (`select`).
        kl_places: where a KL penalty is defined for the algorithm: "loss", "reward".
        main_field: the field that `advantages` must return.
    """

    name: ClassVar[str] = ""
    Options: ClassVar[type[Options]] = Options
    needs: ClassVar[tuple[str, ...]] = ()
    loss_inputs: ClassVar[tuple[str, ...]] = ()
    reads_old: ClassVar[bool] = False
    needs_prepare: ClassVar[bool] = False
    kl_places: ClassVar[tuple[str, ...]] = ()
    main_field: ClassVar[str] = "advantages"

    def __init__(
        self,
        options: Any,
        *,
        correction: Correction | None = None,
        kl: KLPenalty | None = None,
        entropy_coef: float = 0.0,
    ) -> None:
        self.options = options
        self.correction = correction
        self.entropy_coef = entropy_coef
        self.kl = kl
        if kl is not None and kl.place not in self.kl_places:
            legal = f"only in the {self.kl_places[0]}" if self.kl_places else "not at all"
            raise ValueError(f"{self.name} takes a KL penalty {legal}, got kl place {kl.place!r}")

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.options!r}, correction={self.correction!r}, "
            f"kl={self.kl!r})"
        )

    # ---- interface for callers ----

    def why_old_logprobs(self, entropies_are_there: bool = False) -> str | None:
        """The reason why the algorithm needs the policy's log-probs, or entropies, before the loss;
        None if it needs neither.

        If None, `shape` takes batches without `old_logprobs`. Their ratios are 1 (one update per
        batch).
        """
        in_reward = self.kl is not None and self.kl.place == "reward"
        level = "off" if self.correction is None else self.correction.level
        return self.why_with(entropies_are_there, in_reward, level)

    @classmethod
    def why_with(
        cls, entropies_are_there: bool, kl_in_reward: bool, correction_level: str
    ) -> str | None:
        """`why_old_logprobs` for a KL penalty and a correction of this kind, before the algorithm
        is built."""
        if "entropies" in cls.needs and not entropies_are_there:
            return f"{cls.name} shapes by entropies"
        if cls.reads_old or cls.needs_prepare:
            return f"{cls.name} reads old log-probs before the update"
        if kl_in_reward:
            return "the KL penalty is in the reward"
        if correction_level == "seq":
            return "the importance correction is of whole completions"
        return None

    @property
    def penalty(self) -> KLPenalty:
        """The KL penalty. Raises ValueError if the algorithm has none."""
        if self.kl is None:
            raise ValueError(f"{self.name} was built without a KL penalty")
        return self.kl

    def with_kl_coef(self, coef: float) -> Algorithm:
        """A copy of this algorithm with another KL coefficient. Raises ValueError if it has no KL
        penalty."""
        changed = copy.copy(self)
        changed.kl = self.penalty.model_copy(update={"coef": coef})
        return changed

    @torch.no_grad()
    def shape(self, batch: RolloutBatch) -> LossBatch:
        """Turn whole groups of a rollout batch into the inputs of the loss.

        Args:
            batch: complete groups; never a shard of one.
        Returns:
            A LossBatch whose mini-batch is the whole rollout batch.
        Raises:
            ValueError: an input is missing, a completion is empty, or a group is incomplete; or a
                completion token has inf or NaN, an entropy below `LEAST_ENTROPY` (entropies between
                it and 0 become 0), or a log-prob above `MOST_LOGPROB`.
        """
        inputs = self.inputs(batch)
        shaped = self.rollout_level(inputs)
        shaped.metrics.update(rollout_metrics(inputs, shaped.rewards, shaped.advantages))
        return self.loss_level(shaped)

    @torch.no_grad()
    def measured(self, batch: RolloutBatch, shaped: LossBatch) -> dict[str, Tensor]:
        """The metrics of `shape` that depend on old log-probs and entropies.

        For a batch that was shaped without one of them and has both now.
        """
        inputs = self.inputs(batch)
        return self._correction(inputs)[1] | rollout_metrics(
            inputs, shaped.rewards, shaped.advantages
        )

    def prepare(
        self,
        new_logprobs: Tensor,
        shaped: LossBatch,
        *,
        seed: int | None = None,
        total: Total | None = None,
    ) -> LossBatch:
        """Select tokens by statistics of the new log-probs over the whole mini-batch, if
        `needs_prepare`.

        Call this once per optimizer step, then `select` shares of the result. If several processes
        each hold a share, every process calls this with its share and a `total`.

        Args:
            new_logprobs: (N,) of the mini-batch, or of the share; no gradient is used.
            shaped: the mini-batch (result of `shape` or `mini_batch`); with `total`, a share of it
                made by `select`.
            seed: seeds random choices; use the same number on all ranks. None: natural order.
            total: sums a tensor over the shares, which are disjoint and cover the mini-batch; all
                processes must get bitwise the same result. None: `shaped` is the whole mini-batch.
        """
        return shaped

    def loss(self, new_logprobs: Tensor, shaped: LossBatch) -> Loss:
        """The loss of these rows.

        Args:
            new_logprobs: (N,) log-probs of the current policy, differentiable.
            shaped: a mini-batch, or a share of one made by `select`.
        Raises:
            ValueError: on the CPU only, with row and position: a log-prob is inf or NaN, or a ratio
                overflows where neither clipping nor a zero advantage removes it. On a device this
                check would force a synchronization, so the caller checks `value` and the metric
                `policy_kl` (which becomes inf or NaN with the log-probs) when it reads them.
        """
        raise NotImplementedError

    def token_loss(self, shaped: LossBatch) -> TokenLoss | None:
        """The loss as a sum of per-token terms, for a caller that gets the log-probs block by
        block.

        A fused output layer needs each token's loss without the other tokens. The terms summed over
        the tokens of `shaped` equal `loss(new_logprobs, shaped).value`. Metrics come from `loss` on
        the detached log-probs. `loss` also reports non-finite values; the terms do not check,
        because a check would synchronize at every block.

        Args:
            shaped: a mini-batch, or a share of one made by `select`; prepared, if `needs_prepare`.
        Returns:
            `terms(new_logprobs_n, index_n) -> loss_n` for the tokens at `index_n` (int64) of the N
            of `shaped`, differentiable in `new_logprobs_n`, 0 for tokens without loss. None if a
            token's loss depends on other tokens (sequence ratios), or if the algorithm does not set
            `tokenwise`.
        Raises:
            ValueError: `shaped` has not been prepared.
        """
        return None

    # ---- methods that an algorithm defines ----

    def advantages(self, inputs: Inputs) -> dict[str, Any]:
        """Fields of LossBatch: at least `advantages` (N,), or `seq_advantages` (B,) float64 at
        sequence level.

        Do not change the tensors of `inputs`: the loss and the metrics read them later.
        """
        raise NotImplementedError(
            f"{type(self).__name__} defines no method advantages(self, inputs)"
        )

    def state_dict(self) -> dict[str, Any]:
        """The state that `advantages` keeps in `self` across batches, for checkpoints: plain
        values, tensors, arrays."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict` in the driver, when a run resumes or rolls back to a
        checkpoint."""
        raise ValueError(
            f"{type(self).__name__} defines no load_state_dict, and the checkpoint has "
            f"{', '.join(state)}"
        )

    def rollout_level(self, inputs: Inputs) -> LossBatch:
        """Reward- and advantage-level quantities, computed once per rollout batch."""
        fields = dict(self.checked_advantages(inputs))
        if "advantages" not in fields:
            fields["advantages"] = inputs.segments.spread(
                fields["seq_advantages"].to(inputs.batch.float_dtype)
            )
        return self.shaped(inputs, **fields)

    def checked_advantages(self, inputs: Inputs) -> dict[str, Any]:
        """The result of `advantages`, checked.

        Raises:
            ValueError: with method, file and line, field, and shape: LossBatch has no such field,
                the field does not have one entry per completion or token, or `advantages`
                (`seq_advantages`) is missing or not finite.
        """
        fields = self.advantages(inputs)
        if faults := list(_field_faults(fields, self.main_field, inputs)):
            raise ValueError(
                f"{self.place} returned what the loss cannot take: {'; '.join(faults)}"
            )
        return fields

    @property
    def place(self) -> str:
        """The location of the `advantages` method, for messages."""
        code = inspect.unwrap(type(self).advantages).__code__
        return f"{self.name}.advantages ({code.co_filename}, line {code.co_firstlineno})"

    def loss_level(self, shaped: LossBatch) -> LossBatch:
        """Denominators, masks and statistics of a mini-batch (`loss_mask`, `weights`,
        `denominators`)."""
        raise NotImplementedError

    def derived(self) -> Derived:
        """Functions that compute quantities of a LossBatch on demand from its stored tensors."""
        return {}

    def entropy_slope(self, shaped: LossBatch) -> Tensor | None:
        """(N,) factor on the entropy of each token in the loss; None without an entropy bonus.

        It is `-entropy_coef` / (loss tokens of the mini-batch) on loss tokens, 0 elsewhere.
        """
        if not self.entropy_coef:
            return None
        mask_N = shaped.loss_mask & shaped.segments.spread(shaped.active)
        slope = -self.entropy_coef / shaped.denominators["tokens"].clamp(min=1.0)
        return torch.where(mask_N, slope, 0.0).to(torch.float32)

    # ---- shared steps ----

    def inputs(self, batch: RolloutBatch) -> Inputs:
        """Validate and group a batch."""
        self._require(batch)
        batch = batch.promoted()
        groups = Groups.of(batch)
        check_rewards(batch.rewards)
        for name in (
            *(() if batch.old_logprobs is None else ("old_logprobs",)),
            *self._optional_inputs(),
        ):
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
        if (
            batch.old_logprobs is None
            and (why := self.why_old_logprobs(batch.entropies is not None)) is not None
        ):
            raise ValueError(f"RolloutBatch.old_logprobs is needed: {why}")
        reasons = {"ref_logprobs": "a KL penalty", "rollout_logprobs": "an importance correction"}
        wanted = dict.fromkeys((*self.needs, *self._optional_inputs()))
        for name in wanted:
            if getattr(batch, name) is None:
                why = reasons.get(name, "these options")
                raise ValueError(
                    f"{self.name} with {why} needs RolloutBatch.{name} (explain: {name!r} on "
                    "every line)"
                )

    def corrected_rows(self, inputs: Inputs) -> Tensor:
        """(B,) completions that the importance correction applies to."""
        return torch.ones_like(inputs.part.kept_B)

    def shaped(self, inputs: Inputs, **fields: Any) -> LossBatch:
        """A LossBatch with the fields every algorithm shares filled in.

        Tensors of N entries in `exposed` become `of_tokens`, the others `of_rows`. If every
        completion is one token, both have N entries and mean the same.
        """
        batch, groups, part = inputs.batch, inputs.groups, inputs.part
        exposed, metrics = fields.pop("exposed", {}), fields.pop("metrics", {})
        weights_N, correction_metrics = self._correction(inputs)
        of_tokens = {
            name: tensor
            for name, tensor in exposed.items()
            if len(tensor) == inputs.segments.tokens
        }
        common: dict[str, Any] = {
            "algorithm": self,
            "group_ids": batch.group_ids,
            "group_sizes": groups.sizes_B,
            "segments": inputs.segments,
            "kept": part.kept_B,
            "active": part.active_B,
            "rewards": batch.rewards,
            "old_logprobs": batch.old_logprobs,
            # No token carries loss until `loss_level` sets the mask and the weights.
            "loss_mask": part.active_B.new_zeros(()).expand(len(batch.tokens)),
            "weights": torch.zeros_like(batch.rewards),
            "ref_logprobs": batch.ref_logprobs
            if self.kl is not None and self.kl.place == "loss"
            else None,
            "correction": weights_N,
            "rollout_logprobs": batch.rollout_logprobs
            if batch.old_logprobs is None and self.correction
            else None,
            "of_rows": {name: tensor for name, tensor in exposed.items() if name not in of_tokens},
            "of_tokens": of_tokens,
        }
        return LossBatch(**(common | fields), metrics=correction_metrics | metrics)

    def _correction(self, inputs: Inputs) -> tuple[Tensor | None, dict[str, Tensor]]:
        """(N,) importance-correction factors, None for 1, and their metrics."""
        batch = inputs.batch
        if self.correction is None or batch.old_logprobs is None:
            return None, {}
        weights_N, filtered_B, gap_B = correction_weights(
            self.correction, batch.old_logprobs, batch["rollout_logprobs"], batch.segments
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


def _per_row(**kwargs: Any) -> Any:
    return field(metadata={"of": "row"}, **kwargs)


def _per_token(**kwargs: Any) -> Any:
    return field(metadata={"of": "token"}, **kwargs)


@dataclass(kw_only=True)
class LossBatch(Packed, Named):
    """The inputs of the loss, plus quantities for inspection.

    A pickled copy is on the CPU; pickle sends its tensors out of band.

    Reward-level quantities (advantages, shaped rewards, masks) belong to the rollout batch.
    Loss-level quantities (`loss_mask`, `weights`, `denominators`) belong to the mini-batch: the
    rollout batch after `shape`, the given rows after `mini_batch`. `select` keeps them, so that the
    losses of disjoint selections add up.

    Method-specific quantities are read as `shaped["Rpos"]`, `shaped["lambda"]`, ...; `names()`
    lists them.

    Attributes:
        algorithm: the algorithm that made the batch, with its options.
        segments: which of the N tokens belong to which completion; `lengths` are the (B,)
            completion tokens.
        group_ids: (B,) integer prompt id.
        group_sizes: (B,) int64 completions of the row's group in the rollout batch.
        kept: (B,) bool, the row's group was not dropped.
        active: (B,) bool, the row carries loss (kept and not masked as truncated).
        rewards: (B,) float64, rewards after length penalties (and KL in the reward).
        seq_advantages: (B,) float64, or None where advantages are per token only.
        loss_mask: (N,) bool, tokens that carry loss.
        advantages: (N,) floating point; a value above 0 makes the token more likely.
        old_logprobs: (N,) floating point, denominator of the ratio (for `mixed_policy_dapo`, the
            guide's log-probs on its completions); None: `with_old` uses the log-probs passed to the
            loss.
        ref_logprobs: (N,) floating point, under the reference policy, with a KL penalty in the
            loss; else None.
        token_weights: (N,) floating point, factor on each token's surrogate (lambda), or None for
            1.
        correction: (N,) floating point, importance-correction factor, or None for 1.
        rollout_logprobs: (N,) floating point, from the sampler, if `with_old` must compute
            `correction`; else None.
        weights: (B,) float64 aggregation weight of each token (or completion) of a row.
        denominators: float64 scalars of the mini-batch, e.g. `tokens`.
        selection: (N,) bool, tokens chosen by `prepare` (covariance methods), or None.
        of_rows: method-specific tensors, (B, ...) each.
        of_tokens: method-specific tensors, (N, ...) each.
        pools: method-specific tensors that belong to no row.
        metrics: 0-d float64 tensors describing the rollout batch.
        complete: False for a share made by `select`.
        slim: True after `lean`.
    """

    algorithm: Algorithm
    segments: Segments
    group_ids: Tensor = _per_row()
    group_sizes: Tensor = _per_row()
    kept: Tensor = _per_row()
    active: Tensor = _per_row()
    rewards: Tensor = _per_row()
    advantages: Tensor = _per_token()
    loss_mask: Tensor = _per_token()
    old_logprobs: Tensor | None = _per_token(default=None)
    weights: Tensor = _per_row()
    seq_advantages: Tensor | None = _per_row(default=None)
    ref_logprobs: Tensor | None = _per_token(default=None)
    token_weights: Tensor | None = _per_token(default=None)
    correction: Tensor | None = _per_token(default=None)
    rollout_logprobs: Tensor | None = _per_token(default=None)
    selection: Tensor | None = _per_token(default=None)
    of_rows: dict[str, Tensor] = field(default_factory=dict)
    of_tokens: dict[str, Tensor] = field(default_factory=dict)
    denominators: dict[str, Tensor] = field(default_factory=dict)
    pools: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, Tensor] = field(default_factory=dict)
    complete: bool = True
    slim: bool = False

    def __len__(self) -> int:
        return len(self.segments)

    @property
    def lengths(self) -> Tensor:
        """(B,) int64 tokens of each completion."""
        return self.segments.lengths_B

    def __getitem__(self, name: str) -> Tensor:
        """The method-specific quantity or field tensor `name`. Raises LookupError if this batch has
        none."""
        stored, derived = self.of_rows | self.of_tokens | self.pools, self.algorithm.derived()
        if name in derived:
            return derived[name](self)
        value = stored[name] if name in stored else self.__dict__.get(name)
        if not isinstance(value, Tensor):
            raise LookupError(
                f"{self.algorithm.name} has no {name!r} here, only {', '.join(self.names())} and "
                "fields"
            )
        return value

    def with_old(self, new_logprobs: Tensor) -> LossBatch:
        """The batch with old log-probs: its own, or else the detached `new_logprobs`.

        In the second case, the per-token importance correction is computed from them.
        """
        if self.old_logprobs is not None:
            return self
        old_N, weights_N = new_logprobs.detach(), self.correction
        if (
            self.rollout_logprobs is not None
            and (correction := self.algorithm.correction) is not None
        ):
            weights_N, _ = factors(correction, old_N, self.rollout_logprobs)
        return dataclasses.replace(self, old_logprobs=old_N, correction=weights_N)

    def names(self) -> list[str]:
        """Names of the method-specific quantities of this batch."""
        return sorted({*self.of_rows, *self.of_tokens, *self.pools, *self.algorithm.derived()})

    def select(self, rows: RowSelection) -> LossBatch:
        """A share of this mini-batch: these rows, with the denominators of the whole mini-batch.

        The losses and gradients of disjoint selections that cover all rows add up exactly to the
        loss and the gradient of the whole.

        Args:
            rows: indices, a slice or a (B,) bool mask, in any order; with a slice, the tensors are
                views.
        Raises:
            ValueError: a row is selected twice.
        """
        part = self._take(rows)
        part.complete = False
        return part

    def mini_batch(self, rows: RowSelection) -> LossBatch:
        """A new mini-batch: rows of whole groups, with recomputed loss-level quantities.

        Raises:
            ValueError: a group is incomplete (with its id), a row is repeated, or the batch is
                lean.
        """
        if self.slim:
            raise ValueError(
                "a lean batch has lost what its mini-batches need: call mini_batch before lean"
            )
        part = self._take(rows)
        _require_whole_groups(part)
        part.selection = None
        return part.algorithm.loss_level(part)

    def tokens_at(self, index_n: Tensor) -> LossBatch:
        """n rows of one token each: the tokens at `index_n` of the N, with their rows'
        quantities."""
        row_n = self._row_of_token[index_n]
        segments = Segments(torch.ones_like(index_n), np.arange(len(index_n) + 1))
        return self._each(
            lambda of_B: of_B[row_n], lambda of_N: of_N[index_n], segments=segments, complete=False
        )

    @cached_property
    def _row_of_token(self) -> Tensor:
        return self.segments.spread(torch.arange(len(self), device=self.kept.device))

    def lean(self) -> LossBatch:
        """A copy that holds only what the loss and `prepare` read, to ship to the workers.

        Call it last before `select`: the copy has no quantities for inspection and none that only
        `mini_batch` reads, so it cannot be split into mini-batches any more.
        """
        needed = self.algorithm.loss_inputs
        of_rows = {name: tensor for name, tensor in self.of_rows.items() if name in needed}
        of_tokens = {name: tensor for name, tensor in self.of_tokens.items() if name in needed}
        return dataclasses.replace(
            self, of_rows=of_rows, of_tokens=of_tokens, pools={}, metrics={}, slim=True
        )

    def to(self, device: torch.device | str) -> LossBatch:
        """A copy with all tensors on `device`."""

        def move(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: move(item) for key, item in value.items()}
            return value.to(device) if isinstance(value, Tensor | Segments) else value

        return dataclasses.replace(
            self, **{f.name: move(getattr(self, f.name)) for f in dataclasses.fields(self)}
        )

    def _take(self, rows: RowSelection) -> LossBatch:
        if not isinstance(rows, slice):
            rows = row_index(rows, len(self))
        index, segments = (
            (rows if isinstance(rows, slice) else rows.to(self.kept.device)),
            self.segments,
        )
        return self._each(
            lambda of_B: of_B[index],
            lambda of_N: segments.take(of_N, rows),
            segments=segments.select(rows),
        )

    def _each(
        self,
        of_rows: Callable[[Tensor], Tensor],
        of_tokens: Callable[[Tensor], Tensor],
        **changes: Any,
    ) -> LossBatch:
        """A copy with every per-row and per-token tensor mapped, and with these `changes`."""
        maps = {"row": of_rows, "token": of_tokens}
        fields = (
            (f.name, f.metadata.get("of"), getattr(self, f.name)) for f in dataclasses.fields(self)
        )
        mapped: dict[str, Any] = {
            name: maps[of](tensor) for name, of, tensor in fields if of and tensor is not None
        }
        mapped["of_rows"] = {name: of_rows(tensor) for name, tensor in self.of_rows.items()}
        mapped["of_tokens"] = {name: of_tokens(tensor) for name, tensor in self.of_tokens.items()}
        return dataclasses.replace(self, **mapped, **changes)


def _field_faults(fields: Any, main: str, inputs: Inputs) -> Iterator[str]:
    """The faults in the result of `advantages`."""
    if not isinstance(fields, Mapping):
        yield f"it must be a dict with the key {main!r}, got a {type(fields).__name__}"
        return
    of: dict[str, str | None] = {
        f.name: f.metadata.get("of") for f in dataclasses.fields(LossBatch)
    }
    known = [name for name, holds in of.items() if holds] + ["exposed", "pools", "metrics"]
    sizes = {"row": ("B", len(inputs.groups.index_B)), "token": ("N", inputs.segments.tokens)}
    if fields.get(main) is None:
        yield f"the key {main!r} is missing, got {', '.join(map(repr, fields)) or 'no keys'}"
    for name, value in fields.items():
        if name not in known:
            near = nearest(str(name), known)
            yield (
                f"{name!r} is no field of LossBatch "
                f"({f'did you mean {near!r}?' if near else ', '.join(known)})"
            )
        elif (holds := of.get(name)) and value is not None:
            yield from _shape_faults(name, value, [sizes[holds]])
        elif name == "exposed":
            for key, tensor in value.items():
                yield from _shape_faults(f"exposed[{key!r}]", tensor, list(sizes.values()))
        if name == main and isinstance(value, Tensor) and value.shape == (sizes[str(of[name])][1],):
            yield from _not_finite(name, value, of[name] == "token", inputs)


def _not_finite(name: str, value: Tensor, of_tokens: bool, inputs: Inputs) -> Iterator[str]:
    """A fault with the rewards of the first non-finite group: usually they are all equal, which
    causes a division by 0."""
    # aminmax tests all values in one pass, without a copy.
    if not len(value) or torch.stack(torch.aminmax(value)).isfinite().all():
        return
    index_B = inputs.groups.index_B
    group = int(
        (inputs.segments.spread(index_B) if of_tokens else index_B)[~torch.isfinite(value)][0]
    )
    rewards = inputs.batch.rewards[index_B == group].tolist()
    shown = ", ".join(f"{reward:g}" for reward in rewards[:8]) + (
        ", ..." if len(rewards) > 8 else ""
    )
    yield f"{name} has inf or NaN, first in a group whose rewards are {shown}"


_EACH = {"B": "completion", "N": "token"}


def _shape_faults(name: str, value: Any, legal: list[tuple[str, int]]) -> Iterator[str]:
    wanted = " or ".join(
        f"({letter},) = ({size},), one for each {_EACH[letter]}" for letter, size in legal
    )
    if not isinstance(value, Tensor):
        yield f"{name} must be a tensor of shape {wanted}, got a {type(value).__name__}"
    elif (
        value.ndim < 1
        or value.shape[0] not in [size for _, size in legal]
        or (len(legal) == 1 and value.ndim > 1)
    ):
        yield f"{name} must have shape {wanted}, got {tuple(value.shape)}"


@dataclass(frozen=True)
class Loss:
    """A loss to minimize.

    Attributes:
        value: scalar, differentiable in the new log-probs.
        metrics: 0-d detached tensors; the metrics of all micro-batches sum to the metrics of the
            mini-batch.
        details: detached tensors for inspection: `clipped` (N,) or (B,), and `ratios` for sequence
            objectives.
    """

    value: Tensor
    metrics: dict[str, Tensor]
    details: dict[str, Tensor] = field(default_factory=dict)


def row_index(rows: Tensor | Sequence[int], count: int) -> Tensor:
    """Selected rows, or a (B,) bool mask of them, as a (n,) int64 index tensor on the host.

    Raises:
        ValueError: a row is selected twice (with its index).
    """
    index = torch.as_tensor(rows).to("cpu")
    index = torch.arange(count)[index if index.dtype == torch.bool else index.long()]
    unique, times = index.unique(return_counts=True)
    if len(unique) < len(index):
        raise ValueError(
            f"row {int(unique[times > 1][0])} is selected more than once: rows must be distinct"
        )
    return index


def _require_whole_groups(part: LossBatch) -> None:
    index_B = group_index(part.group_ids)
    there_B = torch.zeros_like(index_B).index_add_(0, index_B, torch.ones_like(index_B))[index_B]
    # The only synchronization with the device.
    wrong = (there_B != part.group_sizes).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"group {int(part.group_ids[row])} has {int(there_B[row])} of its "
            f"{int(part.group_sizes[row])} completions in this mini-batch: mini-batches consist "
            "of whole groups (use `select` for micro-batches)"
        )
