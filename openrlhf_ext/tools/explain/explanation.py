"""What the picture shows, as plain numbers and texts: knows no method and no way of drawing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Completion:
    """One row: a short mark before it, a sentence about it, and the texts of its tokens."""

    mark: str
    label: str
    tokens: tuple[str, ...]


@dataclass(frozen=True)
class Quantity:
    """What one panel shows.

    Attributes:
        name, meaning: heading, and its explanation with the unit.
        scale: ``amount`` for numbers from 0 up, ``signed`` for numbers whose sign says most and whose sizes are to
            be compared within a sign, ``deviation`` for numbers around 0, ``factor`` for numbers around 1, ``choice``
            for 0 and 1.
        values: one number for each token of each completion; None for one that an agent's environment wrote.
    """

    name: str
    meaning: str
    scale: Literal["amount", "signed", "deviation", "factor", "choice"]
    values: tuple[tuple[float | None, ...], ...]

    @property
    def numbers(self) -> list[float]:
        return [value for row in self.values for value in row if value is not None]


@dataclass(frozen=True)
class Explanation:
    """Everything the picture shows.

    Raises:
        ValueError: a quantity has not exactly one finite number, or None, for each token.
    """

    title: str
    prompt: str
    notes: tuple[str, ...]
    completions: tuple[Completion, ...]
    quantities: tuple[Quantity, ...]

    def __post_init__(self) -> None:
        lengths = [len(completion.tokens) for completion in self.completions]
        for quantity in self.quantities:
            found = [len(row) for row in quantity.values]
            if found != lengths:
                raise ValueError(f"{quantity.name} needs one value per token: {lengths} tokens, {found} values")
            if not all(map(math.isfinite, quantity.numbers)):
                raise ValueError(f"{quantity.name} must be finite")

    @property
    def longest(self) -> int:
        return max(len(completion.tokens) for completion in self.completions)
