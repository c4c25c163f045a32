"""What is refused, and what is reported, with the tokens it concerns."""

from __future__ import annotations

import torch
from torch import Tensor

from openrlhf_ext.head.rows import Block
from openrlhf_ext.head.statistics import TokenStatistics, VocabularyShard

_MOST_NAMED = 8


class NonFiniteLogitsError(FloatingPointError):
    """Hidden states or logits are NaN or infinite; ``tokens``: their places in the call, ascending."""

    def __init__(self, what: str, tokens: list[int]) -> None:
        self.tokens = sorted(tokens)
        named = ", ".join(map(str, self.tokens[:_MOST_NAMED]))
        more = f" and {len(tokens) - _MOST_NAMED} more" if len(tokens) > _MOST_NAMED else ""
        super().__init__(f"{what} of {len(tokens)} tokens are NaN or infinite: rows {named}{more}")


def check_call(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    temperature: float | Tensor,
    sequence_rows: Tensor | None,
    workspace_bytes: int,
    shard: VocabularyShard,
    checks: bool,
) -> None:
    """The arguments of ``linear_logprob_entropy``, as far as they can be checked without waiting for a device.

    Args:
        checks: look at the values of tensors too.

    Raises:
        ValueError: the message names the rule and the values.
    """
    if hidden_TH.dim() != 2 or weight_VH.dim() != 2 or hidden_TH.shape[1] != weight_VH.shape[1]:
        raise ValueError(
            f"expected hidden (T, H) and weight (V, H), got {tuple(hidden_TH.shape)} and {tuple(weight_VH.shape)}"
        )
    if hidden_TH.dtype != weight_VH.dtype:
        raise ValueError(f"hidden and weight must have one format, got {hidden_TH.dtype} and {weight_VH.dtype}")
    rows = hidden_TH.shape[:1] if sequence_rows is None else sequence_rows.shape
    if target_T.shape != rows or len(rows) != 1:
        raise ValueError(f"expected one target per token: tokens {tuple(rows)}, targets {tuple(target_T.shape)}")
    if workspace_bytes <= 0:
        raise ValueError(f"workspace_bytes must be > 0, got {workspace_bytes}")
    _check_temperature(temperature, target_T, checks)
    if checks and target_T.numel():
        low, high = int(target_T.min()), int(target_T.max())
        if low < 0 or high >= shard.vocab_size:
            raise ValueError(f"target ids must be in [0, {shard.vocab_size}), got {low}..{high}")


def _check_temperature(temperature: float | Tensor, target_T: Tensor, checks: bool) -> None:
    if isinstance(temperature, Tensor):
        if temperature.numel() != 1 and temperature.shape != target_T.shape:
            raise ValueError(
                "temperature must be a number or one per token: "
                f"got {tuple(temperature.shape)} for {tuple(target_T.shape)} tokens"
            )
        if not checks or not temperature.numel():
            return
        temperature = float(temperature.min())
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")


def check_finite_hidden(block: Block, order_N: Tensor | None) -> None:
    """Raises NonFiniteLogitsError if a hidden state of the block is not finite."""
    low_B, high_B = block.hidden_BH.aminmax(dim=1)  # passes NaN on, and takes no memory of the block's size
    finite_B = low_B.isfinite() & high_B.isfinite()
    if not finite_B.all():
        rows = torch.arange(block.rows.start, block.rows.stop, device=finite_B.device)[~finite_B]
        raise NonFiniteLogitsError("the hidden states", (rows if order_N is None else order_N[rows]).tolist())


def check_finite_statistics(stats: TokenStatistics) -> None:
    """Raises NonFiniteLogitsError if a distribution is not finite although its hidden state is."""
    finite_N = stats.logprob_N.isfinite() & stats.entropy_N.isfinite()
    if not finite_N.all():
        raise NonFiniteLogitsError(
            "the hidden states are finite, but the logits", torch.nonzero(~finite_N)[:, 0].tolist()
        )
