"""`RolloutBatch`, the input of an algorithm, and the checks of its values.

Shape suffixes: B = completions, N = tokens of all completions, Q = groups (prompts).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, get_type_hints

import torch
from torch import Tensor

from openrlhf_ext.algorithms.segments import Segments
from openrlhf_ext.options import nearest

TOKEN_FLOATS = (
    "old_logprobs",
    "entropies",
    "ref_logprobs",
    "guide_logprobs",
    "rollout_logprobs",
    "values",
)
_ROW_FIELDS = ("lengths", "rewards", "group_ids", "truncated", "from_guide")


class Named:
    """Lists the attributes, and suggests a similar name, when an attribute does not exist."""

    if not TYPE_CHECKING:  # otherwise a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            known = {path.rpartition(".")[2]: path for path in _attributes(type(self))}
            near = known.get(name) or known.get(nearest(name, known) or "")
            hint = f" (did you mean {near}?)" if near else ""
            own = ", ".join(path for path in known.values() if "." not in path)
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}{hint}; it has {own}"
            )


def _attributes(holder: type) -> list[str]:
    """Names of fields and properties; those of nested holders have dots."""
    kinds = get_type_hints(holder)
    own = [name for name in (*kinds, *vars(holder)) if not name.startswith("_")]
    inner = {
        name: kind
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, Named)
    }
    below = [f"{name}.{path}" for name, kind in inner.items() for path in _attributes(kind)]
    return [*below, *dict.fromkeys(own)]


@dataclass(frozen=True, kw_only=True)
class RolloutBatch(Named):
    """B completions of one or more prompts, with their N tokens concatenated, without padding.

    Attributes:
        tokens: (N,) integer token ids of the completions, including a sampled EOS.
        lengths: (B,) int64 tokens of each completion, at least 1.
        rewards: (B,) float64 in `inputs`, terminal rewards, any real numbers.
        group_ids: (B,) integer id of the prompt each completion answers, in any order.
        old_logprobs: (N,) floating point, log-probability of each token under the policy at rollout
            time, natural log; None: the log-probs that the loss gets, for batches of one update
            (`Algorithm.why_old_logprobs`).
        entropies: (N,) floating point, entropy of that policy in nats, same (tempered)
            distribution; a constant.
        ref_logprobs: (N,) floating point, under the reference policy; required with `kl_coef`.
        guide_logprobs: (N,) floating point, under the guiding policy, for methods that have one.
        rollout_logprobs: (N,) floating point, as reported by the sampler; required with an
            importance correction.
        values: (N,) floating point, from the critic; `gae` only.
        truncated: (B,) bool, cut at the length limit without EOS (the sampler's finish reason).
        from_guide: (B,) bool, sampled by the guiding policy.
        group_size: declared completions per prompt: one number, or {group id: number}. `shape`
            raises ValueError for a group of another size. None: no check.
    """

    tokens: Tensor
    lengths: Tensor
    rewards: Tensor
    group_ids: Tensor
    old_logprobs: Tensor | None = None
    entropies: Tensor | None = None
    ref_logprobs: Tensor | None = None
    guide_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    values: Tensor | None = None
    truncated: Tensor | None = None
    from_guide: Tensor | None = None
    group_size: int | Mapping[int, int] | None = None

    def __post_init__(self) -> None:
        """Check ranks, shapes and dtypes; `shape` checks the values."""
        if self.tokens.ndim != 1 or self.lengths.ndim != 1:
            shapes = f"{tuple(self.tokens.shape)} and {tuple(self.lengths.shape)}"
            raise ValueError(f"tokens and lengths must have shapes (N,) and (B,), got {shapes}")
        for f in dataclasses.fields(self):
            tensor = getattr(self, f.name)
            if f.name == "group_size" or tensor is None:
                continue
            wanted = self.lengths.shape if f.name in _ROW_FIELDS else self.tokens.shape
            if tensor.shape != wanted:
                raise ValueError(
                    f"{f.name} must have shape {tuple(wanted)}, got {tuple(tensor.shape)}"
                )
            if tensor.device != self.tokens.device:
                raise ValueError(
                    f"{f.name} is on {tensor.device}, tokens on {self.tokens.device}; use one "
                    "device"
                )
            _check_dtype(f.name, tensor)

    def __getitem__(self, name: str) -> Tensor:
        """The tensor `name`. Raises ValueError if it is None."""
        tensor = getattr(self, name)
        if tensor is None:
            raise ValueError(f"RolloutBatch.{name} is needed and was not given")
        return tensor

    def rows(self, rows: slice) -> RolloutBatch:
        """These rows, of whole groups."""
        taken: dict[str, Any] = {}
        for f in dataclasses.fields(self):
            tensor = getattr(self, f.name)
            if isinstance(tensor, Tensor):
                of_rows = f.name in _ROW_FIELDS
                taken[f.name] = tensor[rows] if of_rows else self.segments.take(tensor, rows)
        return dataclasses.replace(self, **taken)

    @cached_property
    def segments(self) -> Segments:
        """Which tokens belong to which completion."""
        return Segments(self.lengths.long())

    @property
    def float_dtype(self) -> torch.dtype:
        """Dtype of the results: that of the float inputs, at least float32."""
        dtype = torch.float32
        for name in TOKEN_FLOATS:
            tensor = getattr(self, name)
            dtype = dtype if tensor is None else torch.promote_types(dtype, tensor.dtype)
        return dtype

    def promoted(self) -> RolloutBatch:
        """The batch with its (N,) floats in `float_dtype` and detached; rewards in float64."""
        floats = {name: getattr(self, name) for name in TOKEN_FLOATS}
        cast = {
            name: t.detach().to(self.float_dtype) for name, t in floats.items() if t is not None
        }
        return dataclasses.replace(self, rewards=self.rewards.detach().to(torch.float64), **cast)


def _check_dtype(name: str, tensor: Tensor) -> None:
    if name in ("truncated", "from_guide"):
        legal, wanted = tensor.dtype == torch.bool, "bool"
    elif name in ("tokens", "lengths", "group_ids"):
        legal, wanted = (
            not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool),
            "integer",
        )
    elif name == "rewards":
        legal, wanted = not tensor.is_complex(), "real"
    else:
        legal, wanted = tensor.is_floating_point(), "floating point"
    if not legal:
        raise ValueError(f"{name} must be {wanted}, got {tensor.dtype}")


def check_values(
    name: str,
    values_N: Tensor,
    segments: Segments,
    *,
    low: float = -torch.inf,
    high: float = torch.inf,
    among_N: Tensor | None = None,
) -> None:
    """Raise ValueError with tensor, row and position of the first token whose value is not legal.

    Finite values in [low, high] are legal. With `among_N`, any value is legal where `among_N` is
    False.
    """
    values_N = values_N.detach()
    if values_N.numel() == 0:
        return
    # The minimum and the maximum settle the usual case: a NaN or an infinity shows up in them.
    least, most = (end.item() for end in torch.aminmax(values_N))
    if low <= least and most <= high and math.isfinite(least) and math.isfinite(most):
        return
    illegal_N = ~torch.isfinite(values_N) | (values_N < low) | (values_N > high)
    where = (illegal_N if among_N is None else illegal_N & among_N).nonzero()
    if len(where):
        row, position = segments.place(int(where[0]))
        value = float(values_N[where[0]])
        rule = f"at least {low}" if value < low else f"at most {high}" if value > high else ""
        rule = rule if math.isfinite(value) else "finite"
        raise ValueError(
            f"{name} must be {rule} on completion tokens: row {row}, position {position} is {value}"
        )


def check_rewards(rewards_B: Tensor) -> None:
    """Raise ValueError with the row of the first inf or NaN reward."""
    bad = (~torch.isfinite(rewards_B)).nonzero().flatten()
    if len(bad):
        row = int(bad[0])
        raise ValueError(f"rewards must be finite: row {row} is {float(rewards_B[row])}")


def check_lengths(lengths_B: Tensor, tokens: int) -> None:
    """Raise ValueError if a completion is empty, or if the lengths do not add up to `tokens`."""
    if len(lengths_B) and int(lengths_B.min()) < 1:
        row = int(lengths_B.argmin())
        raise ValueError(
            f"row {row} has {int(lengths_B[row])} completion tokens; every completion needs one "
            "at least"
        )
    if int(lengths_B.sum()) != tokens:
        raise ValueError(
            f"lengths add up to {int(lengths_B.sum())} tokens, the tensors hold {tokens}"
        )


def check_group_sizes(
    ids_Q: Tensor, sizes_Q: Tensor, declared: int | Mapping[int, int] | None
) -> None:
    """Raise ValueError with the first group whose size differs from the declared size."""
    if declared is None:
        return
    for group_id, size in zip(ids_Q.tolist(), sizes_Q.tolist(), strict=True):
        wanted = declared if isinstance(declared, int) else declared.get(group_id)
        if wanted is None:
            raise ValueError(f"group {group_id} is in the batch but not in group_size")
        if size != wanted:
            raise ValueError(
                f"group {group_id} has {size} completions, declared group size is {wanted}: "
                "shaping needs whole groups; shape in the driver before the batch is split"
            )
