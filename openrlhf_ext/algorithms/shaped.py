"""What comes out of an algorithm: `ShapedBatch`, which the loss reads, and `Loss`.

Shape suffixes: B = completions, N = tokens of all completions, Q = groups (prompts).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from openrlhf_ext.algorithms.segments import RowSelection, Segments, packed, unpacked

if TYPE_CHECKING:
    from openrlhf_ext.algorithms.base import Algorithm


def _per_row(**kwargs: Any) -> Any:
    return field(metadata={"of": "row"}, **kwargs)


def _per_token(**kwargs: Any) -> Any:
    return field(metadata={"of": "token"}, **kwargs)


@dataclass(kw_only=True)
class ShapedBatch:
    """What the loss needs, plus what a user wants to look at.

    A copy made by pickle is on the CPU; its tensors travel out of band.

    Reward-level quantities (advantages, shaped rewards, masks) are those of the rollout batch. Loss-level quantities
    (`loss_mask`, `weights`, `denominators`) are those of the mini-batch, which is the rollout batch after `shape` and
    the given rows after `mini_batch`. `select` keeps them, so that the losses of disjoint selections add up.

    Names of method-specific quantities (`Rpos`, `rho_neg`, `delta`, `tau`, ...) are read as attributes or, for
    `lambda`, as `shaped["lambda"]`; `names()` lists them.

    Attributes:
        algorithm: the algorithm that made it (its options travel along).
        segments: which of the N tokens are whose; `lengths` are the (B,) completion tokens.
        rows: (B,) row of the rollout batch each row came from.
        group_ids: (B,) prompt id.
        group_sizes: (B,) completions of the row's group in the rollout batch.
        kept: (B,) bool, the row's group was not dropped.
        active: (B,) bool, the row carries loss (kept and not masked as truncated).
        rewards: (B,) float64, rewards after length penalties (and KL in the reward).
        seq_advantages: (B,) float64, or None where advantages are per token only.
        loss_mask: (N,) bool, tokens that carry loss.
        advantages: (N,).
        old_logprobs: (N,) denominator of the ratio (the guide's on its completions for `mixed_policy_dapo`).
        token_weights: (N,) factor on each token's surrogate (lambda), or None for 1.
        correction: (N,) importance-correction factor, or None for 1.
        weights: (B,) float64 aggregation weight of each token (or completion) of a row.
        denominators: float64 scalars of the mini-batch, e.g. `tokens`.
        selection: (N,) bool, tokens chosen by `prepare` (covariance methods), or None.
        exposed: method-specific tensors whose first dimension is B or N.
        pools: method-specific tensors that belong to no row.
        metrics: 0-d float64 tensors describing the rollout batch.
        complete: False for a share made by `select`.
        slim: True after `lean`.
    """

    algorithm: Algorithm
    segments: Segments
    rows: Tensor = _per_row()
    group_ids: Tensor = _per_row()
    group_sizes: Tensor = _per_row()
    kept: Tensor = _per_row()
    active: Tensor = _per_row()
    rewards: Tensor = _per_row()
    advantages: Tensor = _per_token()
    old_logprobs: Tensor = _per_token()
    seq_advantages: Tensor | None = _per_row(default=None)
    ref_logprobs: Tensor | None = _per_token(default=None)
    guide_logprobs: Tensor | None = _per_token(default=None)
    token_weights: Tensor | None = _per_token(default=None)
    correction: Tensor | None = _per_token(default=None)
    loss_mask: Tensor | None = _per_token(default=None)
    weights: Tensor | None = _per_row(default=None)
    selection: Tensor | None = _per_token(default=None)
    exposed: dict[str, Tensor] = field(default_factory=dict)
    denominators: dict[str, Tensor] = field(default_factory=dict)
    pools: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, Tensor] = field(default_factory=dict)
    complete: bool = True
    slim: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def __getattr__(self, name: str) -> Tensor:
        # Reached only for names that are no dataclass field. Guard: pickle asks before `exposed` exists.
        if name.startswith("__") or "exposed" not in self.__dict__:
            raise AttributeError(name)
        for source in (self.exposed, self.pools):
            if name in source:
                return source[name]
        derived = self.algorithm.derived()
        if name in derived:
            return derived[name](self)
        raise AttributeError(f"{self.algorithm.name} exposes no {name!r}; it has: {', '.join(self.names())}")

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: packed(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({name: unpacked(value) for name, value in state.items()})

    @property
    def lengths(self) -> Tensor:
        """(B,) int64 tokens of each completion."""
        return self.segments.lengths_B

    def __getitem__(self, name: str) -> Tensor:
        """The quantity of that name: a field, or a method-specific one."""
        return getattr(self, name)

    def names(self) -> list[str]:
        """Names of the method-specific quantities of this batch."""
        return sorted({*self.exposed, *self.pools, *self.algorithm.derived()})

    @property
    def kept_groups(self) -> Tensor:
        """Ids of the groups that were not dropped, ascending."""
        return self.group_ids[self.kept].unique()

    def select(self, rows: RowSelection) -> ShapedBatch:
        """A share of this mini-batch: these rows with the denominators of the whole.

        The losses and gradients of disjoint selections that cover all rows add up exactly to those of the whole.

        Args:
            rows: indices, a slice or a (B,) bool mask, in any order; for a slice the tensors are views.
        Raises:
            ValueError: a row is selected twice.
        """
        part = self._take(rows)
        part.complete = False
        return part

    def mini_batch(self, rows: RowSelection) -> ShapedBatch:
        """A mini-batch of its own: rows of whole groups, loss-level quantities recomputed for them.

        Raises:
            ValueError: naming the first group of which some completions are missing, or a repeated row; after `lean`.
        """
        if self.slim:
            raise ValueError("a lean batch has lost what its mini-batches need: call mini_batch before lean")
        part = self._take(rows)
        _require_whole_groups(part)
        part.selection = None
        return part.algorithm.loss_level(part)

    def tokens_at(self, index_n: Tensor) -> ShapedBatch:
        """n rows of one token each: the tokens at `index_n` of the N, with what their rows carry."""
        row_n = self._row_of_token[index_n]
        segments = Segments(torch.ones_like(index_n), np.arange(len(index_n) + 1))
        return self._each(lambda of_B: of_B[row_n], lambda of_N: of_N[index_n], segments=segments, complete=False)

    @cached_property
    def _row_of_token(self) -> Tensor:
        return self.segments.spread(torch.arange(len(self), device=self.rows.device))

    def lean(self) -> ShapedBatch:
        """A copy with what the loss and `prepare` read; what to ship to the workers.

        The last step before `select`: without what people look at and what only `mini_batch` reads, it cannot be cut
        into mini-batches any more.
        """
        needed = self.algorithm.loss_inputs
        exposed = {name: tensor for name, tensor in self.exposed.items() if name in needed}
        return dataclasses.replace(self, exposed=exposed, pools={}, metrics={}, slim=True)

    def to(self, device: torch.device | str) -> ShapedBatch:
        """A copy with all tensors on `device`."""

        def move(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: move(item) for key, item in value.items()}
            return value.to(device) if isinstance(value, Tensor | Segments) else value

        return dataclasses.replace(self, **{f.name: move(getattr(self, f.name)) for f in dataclasses.fields(self)})

    def _take(self, rows: RowSelection) -> ShapedBatch:
        if not isinstance(rows, slice):
            rows = row_index(rows, len(self))
        index, segments = (rows if isinstance(rows, slice) else rows.to(self.rows.device)), self.segments
        return self._each(
            lambda of_B: of_B[index], lambda of_N: segments.take(of_N, rows), segments=segments.select(rows)
        )

    def _each(
        self, of_rows: Callable[[Tensor], Tensor], of_tokens: Callable[[Tensor], Tensor], **changes: Any
    ) -> ShapedBatch:
        """A copy with every per-row and per-token tensor mapped, and with these `changes`."""
        maps = {"row": of_rows, "token": of_tokens}
        fields = ((f.name, f.metadata.get("of"), getattr(self, f.name)) for f in dataclasses.fields(self))
        mapped = {name: maps[of](tensor) for name, of, tensor in fields if of and tensor is not None}
        # where N = B every row is one token, and both maps give the same
        exposed = {
            name: (of_tokens if len(tensor) == self.segments.tokens else of_rows)(tensor)
            for name, tensor in self.exposed.items()
        }
        return dataclasses.replace(self, exposed=exposed, **mapped, **changes)


@dataclass(frozen=True)
class Loss:
    """A loss to minimise.

    Attributes:
        value: scalar, differentiable in the new log-probs.
        metrics: 0-d detached tensors, additive shares: the metrics of all micro-batches sum to those of the whole.
        details: detached tensors for inspection: `clipped` (N,) or (B,), and `ratios` for sequence objectives.
    """

    value: Tensor
    metrics: dict[str, Tensor]
    details: dict[str, Tensor] = field(default_factory=dict)


def row_index(rows: Tensor | Sequence[int], count: int) -> Tensor:
    """Selected rows, or a (B,) bool mask of them, as a (n,) int64 index tensor on the host.

    Raises:
        ValueError: naming a row that is selected twice.
    """
    index = torch.as_tensor(rows).to("cpu")
    index = torch.arange(count)[index if index.dtype == torch.bool else index.long()]
    unique, times = index.unique(return_counts=True)
    if len(unique) < len(index):
        raise ValueError(f"row {int(unique[times > 1][0])} is selected more than once: rows must be distinct")
    return index


def _require_whole_groups(part: ShapedBatch) -> None:
    ids_Q, index_B, counts_Q = part.group_ids.unique(return_inverse=True, return_counts=True)
    wrong = (counts_Q[index_B] != part.group_sizes).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"group {int(part.group_ids[row])} has {int(counts_Q[index_B][row])} of its "
            f"{int(part.group_sizes[row])} completions in this mini-batch: mini-batches consist of whole groups "
            "(use `select` for micro-batches)"
        )
