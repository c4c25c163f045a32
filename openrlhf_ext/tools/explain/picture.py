"""The picture in a terminal: what it shows, as plain numbers and texts; its colors, its layout, its lines."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Sequence
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
    """Everything the picture shows; each quantity has exactly one finite number, or None, for each token."""

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


# ---- colors ---------------------------------------------------------------------------------------------------------

Color = tuple[float, float, float]
"""Red, green, blue, each 0 to 1."""

_WHITE: Color = (1.0, 1.0, 1.0)
_BLUE: Color = (0.07, 0.34, 0.66)
_RED: Color = (0.75, 0.10, 0.17)
_DIM: Color = (0.62, 0.62, 0.64)
_COLORS: dict[str, tuple[Color, Color]] = {
    "amount": ((0.80, 0.36, 0.02), (0.80, 0.36, 0.02)), "signed": (_BLUE, _RED), "deviation": (_BLUE, _RED),
    "factor": ((0.04, 0.45, 0.26), (0.30, 0.30, 0.33)), "choice": ((0.98, 0.78, 0.24), (0.98, 0.78, 0.24)),
}  # fmt: skip
"""Of the largest number above the center of a scale, and of the one furthest below it."""
_PALEST, _DEEPEST = 0.18, 0.9  # strength of a sign's smallest and largest value; 0 is white, 1 its full color
_FULL_CONTRAST = 0.1  # values that differ by less than this fraction get colors that differ less, too


@dataclass(frozen=True)
class Swatch:
    label: str
    ramp: tuple[Color, ...]


class Palette:
    """The colors of one quantity, fitted to the range of its values.

    On the scales ``signed`` and ``factor``, numbers on either side have a ramp each, from the smallest to the largest
    magnitude there: shaping that moves rewards from 1.05 to 1.15 would be invisible on a ramp from 0.
    """

    def __init__(self, quantity: Quantity) -> None:
        self.scale = quantity.scale
        self.center = 1.0 if quantity.scale == "factor" else 0.0
        self.above, self.below = _COLORS[quantity.scale]
        offsets = [value - self.center for value in quantity.numbers]
        self.up, self.down = (_span([sign * offset for offset in offsets if sign * offset > 0]) for sign in (1, -1))
        self.neutral = 0 in offsets
        self.largest = max(map(abs, offsets), default=0.0)
        # two, or as many as show two digits of the largest value, at most six
        largest = max(map(abs, quantity.numbers), default=0.0)
        self.decimals = 2 if largest == 0 else min(6, max(2, 1 - math.floor(math.log10(largest))))

    def color(self, value: float | None) -> Color:
        if value is None or value == self.center:
            return _WHITE
        offset = value - self.center
        full, span = (self.above, self.up) if offset > 0 else (self.below, self.down)
        strength = self._strength(abs(offset), *(span or (0.0, abs(offset))))
        red, green, blue = (1 + (part - 1) * strength for part in full)
        return red, green, blue

    def _strength(self, size: float, low: float, high: float) -> float:
        if self.scale == "choice":
            return 1.0
        if self.scale == "amount":
            # The square root keeps the many small entropies apart where one token has a large one.
            return _DEEPEST * math.sqrt(size / high)
        if self.scale == "deviation":
            return _DEEPEST * size / self.largest
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
        if value == 0:
            return "0"
        return f"{value:{'' if self.scale == 'amount' else '+'}.{self.decimals}f}"

    def legend(self) -> Iterator[Swatch]:
        if self.scale == "amount":
            yield self._swatch(0.0, self.up[1] if self.up else 0.0)
            return
        if self.down:
            yield self._swatch(self.center - self.down[1], self.center - self.down[0])
        if self.neutral:
            yield self._swatch(self.center, self.center)
        if self.up:
            yield self._swatch(self.center + self.up[0], self.center + self.up[1])

    def _swatch(self, low: float, high: float, steps: int = 12) -> Swatch:
        first, last = self.text(low), self.text(high)
        if first == last:
            return Swatch(first, (self.color(low),))
        ramp = [self.color(low + (high - low) * step / (steps - 1)) for step in range(steps)]
        return Swatch(f"{first} to {last}", tuple(ramp))


def _span(sizes: Sequence[float]) -> tuple[float, float] | None:
    return (min(sizes), max(sizes)) if sizes else None


def ink_on(background: Color) -> Color:
    """Black or white, whichever is easier to read."""
    red, green, blue = background
    return (0.0, 0.0, 0.0) if 0.299 * red + 0.587 * green + 0.114 * blue > 0.52 else _WHITE


# ---- layout ---------------------------------------------------------------------------------------------------------

LONGEST_TOKEN = 12  # characters shown of a token
LONGEST_PROMPT = 600  # characters shown of the prompt


def visible(token: str) -> str:
    """A token as shown: spaces and line ends have a sign, control characters are escaped, a long token is cut."""
    text = printable(token).replace(" ", "·") or "∅"
    return text if len(text) <= LONGEST_TOKEN else text[: LONGEST_TOKEN - 1] + "…"


def printable(text: str) -> str:
    """A text on one line, without anything a terminal would obey."""
    signs = {"\n": "↵", "\t": "⇥"}
    return "".join(
        signs.get(letter) or (letter if letter.isprintable() else letter.encode("unicode_escape").decode())
        for letter in text
    )


def columns_of(text: str) -> int:
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    combining = sum(unicodedata.combining(letter) > 0 for letter in text)
    return len(text) + wide - combining


def _bands(widths: Sequence[int], width: int) -> Iterator[range]:
    start, used = 0, 0
    for position, column in enumerate(widths):
        if position > start and used + column + 1 > width:
            yield range(start, position)
            start, used = position, 0
        used += column + 1
    yield range(start, len(widths))


# ---- lines ----------------------------------------------------------------------------------------------------------


def render(explanation: Explanation, *, width: int = 100, color: bool = True) -> str:
    """The picture as text: ANSI background colors (24 bit) behind the tokens, or the numbers below them."""
    completions = explanation.completions
    names = [f"{row} {completion.mark}" for row, completion in enumerate(completions, start=1)]
    gutter = 1 + max(map(columns_of, names))
    names = [f"{name:>{gutter - 1}} " for name in names]
    panels = [(quantity, Palette(quantity)) for quantity in explanation.quantities]
    widths = [1] * max(len(completion.tokens) for completion in completions)
    for row, completion in enumerate(completions):
        for place, token in enumerate(completion.tokens):
            numbers = [] if color else [palette.text(quantity.values[row][place]) for quantity, palette in panels]
            widths[place] = max(widths[place], *map(columns_of, (visible(token), *numbers)))
    bands = list(_bands(widths, width - gutter))
    prompt = explanation.prompt
    prompt = prompt if len(prompt) <= LONGEST_PROMPT else prompt[:LONGEST_PROMPT] + "…"
    labels = [name + completion.label for name, completion in zip(names, completions, strict=True)]
    lines = list(map(printable, [explanation.title, *explanation.notes, "", f"prompt  {prompt}", *labels]))
    for quantity, palette in panels:
        legend = "   ".join(_legend(swatch) if color else swatch.label for swatch in palette.legend())
        lines += ["", f"{quantity.name}: {quantity.meaning}   [{legend}]"]
        for band in bands:
            lines += [f"{'':{gutter}}from token {band.start + 1}"] if len(bands) > 1 else []
            for name, completion, values in zip(names, completions, quantity.values, strict=True):
                places = band[: max(0, len(completion.tokens) - band.start)]
                shown = [(visible(completion.tokens[place]), values[place], widths[place]) for place in places]
                lines += _row(name, shown, palette, color)
    return "\n".join(line.rstrip() for line in lines)


def _legend(swatch: Swatch) -> str:
    ramp = swatch.ramp if len(swatch.ramp) == 1 else swatch.ramp[::2]
    return "".join(_painted(" ", shade) for shade in ramp) + f" {swatch.label}"


def _row(name: str, shown: Sequence[tuple[str, float | None, int]], palette: Palette, color: bool) -> list[str]:
    """``shown``: token, number, and columns."""
    texts = [" " * (width - columns_of(token)) + token for token, _, width in shown]
    if not shown:
        return []
    if color:
        pairs = zip(texts, shown, strict=True)
        return [name + " ".join(_painted(text, palette.color(value), value) for text, (_, value, _) in pairs)]
    numbers = [palette.text(value).rjust(width) for _, value, width in shown]
    return [name + " ".join(texts), " " * len(name) + " ".join(numbers)]


def _painted(text: str, background: Color, value: float | None = 0.0) -> str:
    ink = _DIM if value is None else ink_on(background)  # dim: an environment wrote it
    behind, letters = (";".join(str(round(255 * part)) for part in shade) for shade in (background, ink))
    return f"\x1b[48;2;{behind}m\x1b[38;2;{letters}m{text}\x1b[0m"
