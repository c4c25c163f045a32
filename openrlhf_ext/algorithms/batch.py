"""What goes into an algorithm and what comes out: `RolloutBatch`, `ShapedBatch`, `Loss`.

Shape suffixes: B = completions, T = token positions (right-padded), Q = groups (prompts).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from openrlhf_ext.algorithms.blocks import row_blocks

if TYPE_CHECKING:
    from openrlhf_ext.algorithms.base import Algorithm

TOKEN_FLOATS = ("old_logprobs", "entropies", "ref_logprobs", "guide_logprobs", "rollout_logprobs", "values")
Rows = Tensor | Sequence[int] | slice


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """B completions of one or more prompts, right-padded to T positions.

    Attributes:
        tokens: (B, T) integer token ids; anything in the padding.
        mask: (B, T) bool, True on completion tokens (a sampled EOS included): a non-empty prefix of each row.
        rewards: (B,) terminal rewards, any real numbers.
        group_ids: (B,) integer id of the prompt each completion answers, in any order.
        old_logprobs: (B, T) log-probability of each token under the policy at rollout time, natural log.
        entropies: (B, T) entropy of that policy in nats, same (tempered) distribution; a constant.
        ref_logprobs: (B, T) under the reference policy; needed with `kl_coef`.
        guide_logprobs: (B, T) under the guiding policy; `mixed_policy_dapo` only.
        rollout_logprobs: (B, T) as reported by the sampler; needed with an importance correction.
        values: (B, T) of a critic; `gae` only.
        truncated: (B,) bool, cut at the length limit without EOS (the sampler's finish reason).
        from_guide: (B,) bool, sampled by the guiding policy.
        group_size: declared completions per prompt: one number, or {group id: number}. `shape` refuses a group of
            another size. None: no check.
    """

    tokens: Tensor
    mask: Tensor
    rewards: Tensor
    group_ids: Tensor
    old_logprobs: Tensor
    entropies: Tensor | None = None
    ref_logprobs: Tensor | None = None
    guide_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    values: Tensor | None = None
    truncated: Tensor | None = None
    from_guide: Tensor | None = None
    group_size: int | Mapping[int, int] | None = None

    def __post_init__(self) -> None:
        """Check ranks, shapes and dtypes; the values are checked by `shape`."""
        if self.tokens.ndim != 2:
            raise ValueError(f"tokens must have shape (B, T), got {tuple(self.tokens.shape)}")
        for f in dataclasses.fields(self):
            tensor = getattr(self, f.name)
            if f.name == "group_size" or tensor is None:
                continue
            wanted = self.tokens.shape[:1] if f.name in _ROW_FIELDS else self.tokens.shape
            if tensor.shape != wanted:
                raise ValueError(f"{f.name} must have shape {tuple(wanted)}, got {tuple(tensor.shape)}")
            if tensor.device != self.tokens.device:
                raise ValueError(f"{f.name} is on {tensor.device}, tokens on {self.tokens.device}; use one device")
            _check_dtype(f.name, tensor)

    @property
    def float_dtype(self) -> torch.dtype:
        """Dtype of the results: that of the float inputs, at least float32."""
        dtype = torch.float32
        for name in TOKEN_FLOATS:
            tensor = getattr(self, name)
            dtype = dtype if tensor is None else torch.promote_types(dtype, tensor.dtype)
        return dtype

    def promoted(self) -> RolloutBatch:
        """The batch with its (B, T) floats in `float_dtype` and detached; rewards in float64."""
        floats = {name: getattr(self, name) for name in TOKEN_FLOATS}
        cast = {name: t.detach().to(self.float_dtype) for name, t in floats.items() if t is not None}
        return dataclasses.replace(self, rewards=self.rewards.detach().to(torch.float64), **cast)


_ROW_FIELDS = ("rewards", "group_ids", "truncated", "from_guide")


def _check_dtype(name: str, tensor: Tensor) -> None:
    if name in ("mask", "truncated", "from_guide"):
        legal, wanted = tensor.dtype == torch.bool, "bool"
    elif name in ("tokens", "group_ids"):
        legal, wanted = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool), "integer"
    elif name == "rewards":
        legal, wanted = not tensor.is_complex(), "real"
    else:
        legal, wanted = tensor.is_floating_point(), "floating point"
    if not legal:
        raise ValueError(f"{name} must be {wanted}, got {tensor.dtype}")


# --------------------------------------------------------------------------------------------------------------------
# Validation of values
# --------------------------------------------------------------------------------------------------------------------


def check_values(
    name: str, values_BT: Tensor, mask_BT: Tensor, *, low: float = -torch.inf, high: float = torch.inf
) -> None:
    """Raise ValueError naming tensor, row and position of the first completion token whose value is not legal.

    Legal are finite values in [low, high]. Padding may hold anything.
    """
    values_BT = values_BT.detach()
    if values_BT.numel() == 0:
        return
    # Both ends settle the usual case: a NaN or an infinity shows in them.
    least, most = (end.item() for end in torch.aminmax(values_BT))
    if low <= least and most <= high and math.isfinite(least) and math.isfinite(most):
        return
    illegal_BT = (~torch.isfinite(values_BT) | (values_BT < low) | (values_BT > high)) & mask_BT
    where = illegal_BT.nonzero()
    if len(where):
        row, position = where[0].tolist()
        value = float(values_BT[row, position])
        rule = f"at least {low}" if value < low else f"at most {high}" if value > high else ""
        rule = rule if math.isfinite(value) else "finite"
        raise ValueError(f"{name} must be {rule} on completion tokens: row {row}, position {position} is {value}")


def check_rewards(rewards_B: Tensor) -> None:
    """Raise ValueError naming the row of the first inf or NaN reward."""
    bad = (~torch.isfinite(rewards_B)).nonzero().flatten()
    if len(bad):
        row = int(bad[0])
        raise ValueError(f"rewards must be finite: row {row} is {float(rewards_B[row])}")


def completion_lengths(mask_BT: Tensor) -> Tensor:
    """(B,) int64 tokens per completion; ValueError if a row is empty or its True entries are not a prefix."""
    lengths_B = torch.zeros(len(mask_BT), dtype=torch.int64, device=mask_BT.device)
    for rows in row_blocks(*mask_BT.shape):
        block_bT = mask_BT[rows]
        lengths_B[rows] = block_bT.sum(dim=1)
        restarts_bT = block_bT[:, 1:] > block_bT[:, :-1]
        if bool(restarts_bT.any()):
            row, position = restarts_bT.nonzero()[0].tolist()
            raise ValueError(
                f"mask must be right-padded (True tokens first): row {rows.start + row} has a True token at position "
                f"{position + 1} after a False one"
            )
    if len(lengths_B) and int(lengths_B.min()) == 0:
        raise ValueError(f"row {int(lengths_B.argmin())} of mask has no completion token; every completion needs one")
    return lengths_B


def check_group_sizes(ids_Q: Tensor, sizes_Q: Tensor, declared: int | Mapping[int, int] | None) -> None:
    """Raise ValueError naming the first group whose size is not the declared one."""
    if declared is None:
        return
    for group_id, size in zip(ids_Q.tolist(), sizes_Q.tolist(), strict=True):
        wanted = declared if isinstance(declared, int) else declared.get(group_id)
        if wanted is None:
            raise ValueError(f"group {group_id} is in the batch but not in group_size")
        if size != wanted:
            raise ValueError(
                f"group {group_id} has {size} completions, declared group size is {wanted}: shaping needs whole "
                "groups; shape on the controller before the batch is split"
            )


# --------------------------------------------------------------------------------------------------------------------
# Results
# --------------------------------------------------------------------------------------------------------------------


def _per_row(**kwargs: Any) -> Any:
    return field(metadata={"rows": True}, **kwargs)


@dataclass(kw_only=True)
class ShapedBatch:
    """What the loss needs, plus what a user wants to look at. Plain tensors: it pickles.

    Reward-level quantities (advantages, shaped rewards, masks) are those of the rollout batch. Loss-level quantities
    (`loss_mask`, `weights`, `denominators`) are those of the mini-batch, which is the rollout batch after `shape` and
    the given rows after `mini_batch`. `select` keeps them, so that the losses of disjoint selections add up.

    Names of method-specific quantities (`Rpos`, `rho_neg`, `delta`, `tau`, ...) are read as attributes or, for
    `lambda`, as `shaped["lambda"]`; `names()` lists them.

    Attributes:
        algorithm: the algorithm that made it (its options travel along).
        rows: (B,) row of the rollout batch each row came from.
        group_ids, lengths: (B,) prompt id and completion tokens.
        group_sizes: (B,) completions of the row's group in the rollout batch.
        kept: (B,) bool, the row's group was not dropped.
        active: (B,) bool, the row carries loss (kept and not masked as truncated).
        rewards: (B,) float64, rewards after length penalties (and KL in the reward).
        seq_advantages: (B,) float64, or None where advantages are per token only.
        mask: (B, T) completion tokens.
        loss_mask: (B, T) tokens that carry loss.
        advantages: (B, T), 0 in padding.
        old_logprobs: (B, T) denominator of the ratio (the guide's on its completions for `mixed_policy_dapo`).
        token_weights: (B, T) factor on each token's surrogate (lambda), or None for 1.
        correction: (B, T) importance-correction factor, or None for 1.
        weights: (B,) float64 aggregation weight of each token (or completion) of a row.
        denominators: float64 scalars of the mini-batch, e.g. `tokens`.
        selection: (B, T) bool, tokens chosen by `prepare` (covariance methods), or None.
        exposed: method-specific tensors whose first dimension is B.
        pools: method-specific tensors that belong to no row.
        metrics: 0-d float64 tensors describing the rollout batch.
        complete: False for a share made by `select`.
        slim: True after `lean`.
    """

    algorithm: Algorithm
    rows: Tensor = _per_row()
    group_ids: Tensor = _per_row()
    group_sizes: Tensor = _per_row()
    lengths: Tensor = _per_row()
    kept: Tensor = _per_row()
    active: Tensor = _per_row()
    rewards: Tensor = _per_row()
    mask: Tensor = _per_row()
    advantages: Tensor = _per_row()
    old_logprobs: Tensor = _per_row()
    seq_advantages: Tensor | None = _per_row(default=None)
    ref_logprobs: Tensor | None = _per_row(default=None)
    guide_logprobs: Tensor | None = _per_row(default=None)
    token_weights: Tensor | None = _per_row(default=None)
    correction: Tensor | None = _per_row(default=None)
    loss_mask: Tensor | None = _per_row(default=None)
    weights: Tensor | None = _per_row(default=None)
    selection: Tensor | None = _per_row(default=None)
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

    def select(self, rows: Rows) -> ShapedBatch:
        """A share of this mini-batch: these rows with the denominators of the whole.

        The losses and gradients of disjoint selections that cover all rows add up exactly to those of the whole.

        Args:
            rows: indices, a slice or a (B,) bool mask, in any order.
        Raises:
            ValueError: a row is selected twice.
        """
        part = self._take(rows)
        part.complete = False
        return part

    def mini_batch(self, rows: Rows) -> ShapedBatch:
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

    def tokens_at(self, index_N: Tensor) -> ShapedBatch:
        """N rows of one position each: the tokens at flat positions `index_N` of (B, T), with what their rows carry."""
        width = self.mask.shape[1]

        def pick(tensor: Tensor) -> Tensor:
            if tensor.shape == self.mask.shape:
                return tensor.reshape(-1)[index_N][:, None]
            return tensor[index_N // width]

        exposed = {name: pick(tensor) for name, tensor in self.exposed.items()}
        return dataclasses.replace(self, exposed=exposed, complete=False, **self._per_row_fields(pick))

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
            return value.to(device) if isinstance(value, Tensor) else value

        return dataclasses.replace(self, **{f.name: move(getattr(self, f.name)) for f in dataclasses.fields(self)})

    def _take(self, rows: Rows) -> ShapedBatch:
        index = row_index(rows, len(self), self.rows.device)
        exposed = {name: tensor[index] for name, tensor in self.exposed.items()}
        return dataclasses.replace(self, exposed=exposed, **self._per_row_fields(lambda tensor: tensor[index]))

    def _per_row_fields(self, take: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """`take` of every per-row field that is set."""
        fields = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if f.metadata.get("rows"))
        return {name: take(tensor) for name, tensor in fields if tensor is not None}


@dataclass(frozen=True)
class Loss:
    """A loss to minimise.

    Attributes:
        value: scalar, differentiable in the new log-probs.
        metrics: 0-d detached tensors, additive shares: the metrics of all micro-batches sum to those of the whole.
        details: detached tensors for inspection: `clipped` (B, T) or (B,), and `ratios` for sequence objectives.
    """

    value: Tensor
    metrics: dict[str, Tensor]
    details: dict[str, Tensor] = field(default_factory=dict)


def row_index(rows: Rows, count: int, device: torch.device) -> Tensor:
    """Row selection of any form as a (n,) int64 index tensor.

    Raises:
        ValueError: naming a row that is selected twice; not for indices on a device, which the test would wait for.
    """
    if isinstance(rows, slice):
        return torch.arange(count, device=device)[rows]
    index = torch.as_tensor(rows)
    everything = torch.arange(count, device=index.device)
    index = everything[index if index.dtype == torch.bool else index.long()]
    if index.device.type == "cpu":
        unique, times = index.unique(return_counts=True)
        if len(unique) < len(index):
            raise ValueError(f"row {int(unique[times > 1][0])} is selected more than once: rows must be distinct")
    return index.to(device)


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
