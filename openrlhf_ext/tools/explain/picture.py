"""What `explain` shows, as plain numbers and texts; its lines, and the colors that the report's
page draws them in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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


# ---- colors

Color = tuple[float, float, float]
"""Red, green, blue, each 0 to 1."""

_WHITE = (1.0, 1.0, 1.0)
_BLUE_RED = (0.07, 0.34, 0.66), (0.75, 0.10, 0.17)
_ORANGE, _YELLOW = (0.80, 0.36, 0.02), (0.98, 0.78, 0.24)
_COLORS: dict[str, tuple[Color, Color]] = {
    "amount": (_ORANGE, _ORANGE),
    "signed": _BLUE_RED,
    "deviation": _BLUE_RED,
    "choice": (_YELLOW, _YELLOW),
    "factor": ((0.04, 0.45, 0.26), (0.30, 0.30, 0.33)),
}
"""Of the largest number above the center of a scale, and of the one furthest below it."""
# strength of a sign's smallest and largest value; 0 is white, 1 its full color
_PALEST, _DEEPEST = 0.18, 0.9
# values that differ by less than this fraction get colors that differ less, too
_FULL_CONTRAST = 0.1
_STEPS = 12  # of a ramp in the legend


class Palette:
    """The colors of one quantity, fitted to the range of its values.

    On the scales ``signed`` and ``factor``, numbers on either side have a ramp each, from the
    smallest to the largest magnitude there: shaping that moves rewards from 1.05 to 1.15 would be
    invisible on a ramp from 0.
    """

    def __init__(self, quantity: Quantity) -> None:
        self.scale = quantity.scale
        self.center = 1.0 if quantity.scale == "factor" else 0.0
        offsets = [value - self.center for value in quantity.numbers]
        self.up, self.down = (
            _span([sign * offset for offset in offsets if sign * offset > 0]) for sign in (1, -1)
        )
        self.neutral, self.furthest = 0 in offsets, max(map(abs, offsets), default=0.0)
        # two, or as many as show two digits of the largest value, at most six
        largest = max(map(abs, quantity.numbers), default=0.0)
        self.decimals = 2 if largest == 0 else min(6, max(2, 1 - math.floor(math.log10(largest))))

    def color(self, value: float | None) -> Color:
        if value is None or value == self.center:
            return _WHITE
        size, above = abs(value - self.center), value > self.center
        strength = self._strength(size, *((self.up if above else self.down) or (0.0, size)))
        red, green, blue = (1 + (part - 1) * strength for part in _COLORS[self.scale][not above])
        return red, green, blue

    def _strength(self, size: float, low: float, high: float) -> float:
        if self.scale == "choice":
            return 1.0
        if self.scale == "amount":
            # The square root keeps the many small entropies apart where one token has a large one.
            return _DEEPEST * math.sqrt(size / high)
        if self.scale == "deviation":
            return _DEEPEST * size / self.furthest
        contrast = min(1.0, (high - low) / (_FULL_CONTRAST * high)) * (_DEEPEST - _PALEST)
        place = (size - low) / (high - low) if high > low else 0.5
        return (_PALEST + _DEEPEST) / 2 + contrast * (place - 0.5)

    def text(self, value: float | None) -> str:
        if value is None:
            return ""
        if self.scale == "choice":
            return "yes" if value else "no"
        if self.scale == "factor":
            return f"{value:.3g}"
        return (
            "0"
            if value == 0
            else f"{value:{'' if self.scale == 'amount' else '+'}.{self.decimals}f}"
        )

    def legend(self) -> Iterator[tuple[str, list[Color]]]:
        """What a ramp of colors stands for, and its colors."""
        ends = [(-self.down[1], -self.down[0])] if self.down else []
        ends += [(0.0, 0.0)] if self.neutral else []
        ends += [self.up] if self.up else []
        if self.scale == "amount":
            ends = [(0.0, self.up[1] if self.up else 0.0)]
        for low, high in ((self.center + low, self.center + high) for low, high in ends):
            first, last = self.text(low), self.text(high)
            steps = [low + (high - low) * step / (_STEPS - 1) for step in range(_STEPS)]
            yield (
                (first, [self.color(low)])
                if first == last
                else (f"{first} to {last}", list(map(self.color, steps)))
            )


def _span(sizes: Sequence[float]) -> tuple[float, float] | None:
    return (min(sizes), max(sizes)) if sizes else None


def ink_on(background: Color) -> Color:
    """Black or white, whichever is easier to read."""
    red, green, blue = background
    return (0.0, 0.0, 0.0) if 0.299 * red + 0.587 * green + 0.114 * blue > 0.52 else _WHITE


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
    palettes = [Palette(quantity) for quantity in quantities]
    for row, completion in enumerate(explanation.completions):
        table = [("#", *(quantity.name for quantity in quantities), "token")]
        for place, token in enumerate(completion.tokens):
            values = (quantity.values[row][place] for quantity in quantities)
            numbers = (palette.text(value) for palette, value in zip(palettes, values, strict=True))
            table.append((str(place + 1), *numbers, visible(token)))
        lines += ["", f"{row + 1} {completion.mark} {completion.label}", *aligned(table)]
    return "\n".join(map(_on_one_line, lines))
