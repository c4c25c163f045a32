"""What `explain` shows, as plain numbers and texts, and its lines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from openrlhf_ext.inputs import shortened
from openrlhf_ext.outputs import aligned
from openrlhf_ext.redaction import printable


@dataclass(frozen=True)
class Completion:
    """One table: a short mark before it, a sentence about it, and the texts of its tokens."""

    mark: str
    label: str
    tokens: tuple[str, ...]


@dataclass(frozen=True)
class Quantity:
    """What one column shows.

    Attributes:
        scale: ``amount`` for numbers from 0 up, ``signed`` for numbers whose sign says most and
            whose sizes are to be compared within a sign, ``deviation`` for numbers around 0,
            ``factor`` for numbers around 1, ``choice`` for 0 and 1.
        values: one finite number for each token of each completion; None for one that an
        environment wrote.
    """

    name: str
    meaning: str
    scale: Literal["amount", "signed", "deviation", "factor", "choice"]
    values: tuple[tuple[float | None, ...], ...]

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, self.numbers)):
            raise ValueError(f"{self.name} must be finite")

    @property
    def numbers(self) -> list[float]:
        return [value for row in self.values for value in row if value is not None]


@dataclass(frozen=True)
class Explanation:
    """Everything that is shown."""

    title: str
    prompt: str
    notes: tuple[str, ...]
    completions: tuple[Completion, ...]
    quantities: tuple[Quantity, ...]


# ---- lines

_LONGEST_TOKEN, _LONGEST_PROMPT = 12, 600  # characters shown


def visible(token: str) -> str:
    """A token as shown: spaces and line ends have a sign, control characters are escaped, a long
    token is cut."""
    text = _on_one_line(token).replace(" ", "·") or "∅"
    return text if len(text) <= _LONGEST_TOKEN else text[: _LONGEST_TOKEN - 1] + "…"


def _on_one_line(text: str) -> str:
    """Without anything a terminal would obey."""
    return printable(text.replace("\n", "↵").replace("\t", "⇥"))


def render(explanation: Explanation) -> str:
    """As text: a table for each completion, with a row for each token and a column of numbers for
    each quantity."""
    quantities = explanation.quantities
    lines = [
        explanation.title,
        *explanation.notes,
        "",
        f"prompt  {shortened(explanation.prompt, _LONGEST_PROMPT)}",
        "",
    ]
    lines += [f"{quantity.name}: {quantity.meaning}" for quantity in quantities]
    decimals = list(map(_decimals, quantities))
    for row, completion in enumerate(explanation.completions):
        table = [("#", *(quantity.name for quantity in quantities), "token")]
        for place, token in enumerate(completion.tokens):
            numbers = (
                _text(quantity.scale, count, quantity.values[row][place])
                for quantity, count in zip(quantities, decimals, strict=True)
            )
            table.append((str(place + 1), *numbers, visible(token)))
        lines += ["", f"{row + 1} {completion.mark} {completion.label}", *aligned(table)]
    return "\n".join(map(_on_one_line, lines))


def _decimals(quantity: Quantity) -> int:
    """Two, or as many as show two digits of the largest value, at most six."""
    largest = max(map(abs, quantity.numbers), default=0.0)
    return 2 if largest == 0 else min(6, max(2, 1 - math.floor(math.log10(largest))))


def _text(scale: str, decimals: int, value: float | None) -> str:
    if value is None:
        return ""
    if scale == "choice":
        return "yes" if value else "no"
    if scale == "factor":
        return f"{value:.3g}"
    return "0" if value == 0 else f"{value:{'' if scale == 'amount' else '+'}.{decimals}f}"
