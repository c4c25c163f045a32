"""How far optimizer steps move what they update, by a sample of the entries, and with what they do
it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from openrlhf_ext.megatron.policy import MegatronPolicy
    from openrlhf_ext.options.sections.models import Optimizer

logger = logging.getLogger(__name__)

_ENTRIES = 1024  # of each parameter
ADAM = ("update/beta1", "update/beta2", "update/eps", "update/weight_decay")


@dataclass(frozen=True)
class Moved:
    """What optimizer steps did to a sample of the entries that a rank updates: the sum of their
    squared movements, of Adam's second moments afterwards, how many they are; parameters, those of
    them that stood still; Adam's own count of its steps; the square of the rank's share of the
    gradient that the last of them used; ``ADAM``, as its own groups have them."""

    squares: float
    second_moments: float
    entries: int
    parameters: int
    still: int
    adam_steps: int
    gradient_square: float
    adam: tuple[float, ...]


def movement_gauges(moved: Sequence[Moved]) -> dict[str, float]:
    """Of all ranks; none: there was no step."""
    if not moved:
        return {}
    entries = sum(each.entries for each in moved)
    return {
        "update/rms": math.sqrt(sum(each.squares for each in moved) / entries),
        "update/second_moment": math.sqrt(sum(each.second_moments for each in moved) / entries),
        "update/still": sum(each.still for each in moved) / sum(each.parameters for each in moved),
        "update/adam_steps": float(max(each.adam_steps for each in moved)),
        "update/grad_norm": math.sqrt(sum(each.gradient_square for each in moved)),
        **dict(zip(ADAM, moved[0].adam, strict=True)),
    }


def check_gauges(step: int, metrics: Mapping[str, float], options: Optimizer) -> None:
    """Logs an error for the gauges of a step that these options rule out."""
    adam = options.adam
    wanted = dict(zip(ADAM, (*adam.betas, adam.eps, adam.weight_decay), strict=True)) | {
        "mismatch/rewards": 0.0
    }
    wrong = [
        f"{name} is {metrics[name]:g}"
        for name, value in wanted.items()
        if metrics.get(name, value) != value
    ]
    if wrong:
        logger.error(
            "step %d: %s: not possible with these options (docs/faults.md)", step, ", ".join(wrong)
        )


class Movement:
    """Of one rank. Not a collective: every entry is updated by one rank, or by all of its replicas
    alike."""

    def __init__(self, policy: MegatronPolicy) -> None:
        self._policy = policy
        self._before: list[Tensor] = []
        self._moved: Moved | None = None

    def begin(self) -> None:
        """Call it before the optimizer steps of a batch."""
        self._before = [entries for entries, _ in self._sampled()]

    def end(self) -> None:
        """Call it after them."""
        from openrlhf_ext.megatron.checkpoint import optimizer_step

        optimizer = self._policy.optimizer
        if not self._before or optimizer is None:
            return
        sampled = list(self._sampled())
        pairs = zip((now for now, _ in sampled), self._before, strict=True)
        squares = torch.stack([(now - then).double().square().sum() for now, then in pairs])
        seconds = torch.stack([second.double().sum() for _, second in sampled])
        totals = squares.sum().item(), seconds.sum().item()
        entries, still = sum(len(now) for now, _ in sampled), int((squares == 0).sum())
        first, decay = (
            optimizer.param_groups[0],
            max(group["weight_decay"] for group in optimizer.param_groups),
        )
        steps, square = optimizer_step(optimizer), self._policy.gradient_square()
        adam = (*first["betas"], first["eps"], decay)
        self._moved = Moved(*totals, entries, len(sampled), still, steps, square, adam)
        self._before = []

    def take(self) -> Moved | None:
        """What the steps since the last call did; None: there were none."""
        moved, self._moved = self._moved, None
        return moved

    def _sampled(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Entries of every parameter, fp32, and their second moments."""
        from openrlhf_ext.megatron.checkpoint import optimizer_ranges

        ranges = optimizer_ranges(self._policy.optimizer)
        for chunk in self._policy.chunks:
            for parameter in chunk.parameters():
                if (held := ranges.get(id(parameter))) is None or held.end == held.start:
                    continue
                values = held.tensors.get("master")
                values = (
                    parameter.detach().view(-1)[held.start : held.end] if values is None else values
                )
                entries = slice(None, None, max(1, len(values) // _ENTRIES))
                now, second = (
                    t[entries][:_ENTRIES].float().clone()
                    for t in (values, held.tensors["exp_avg_sq"])
                )
                yield now, second
