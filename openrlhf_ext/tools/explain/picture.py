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

    @property
    def longest(self) -> int:
        return max(len(completion.tokens) for completion in self.completions)


# ---- colors ---------------------------------------------------------------------------------------------------------

Color = tuple[float, float, float]
"""Red, green, blue, each 0 to 1."""

_WHITE: Color = (1.0, 1.0, 1.0)
_AMBER: Color = (0.80, 0.36, 0.02)
_BLUE: Color = (0.07, 0.34, 0.66)
_RED: Color = (0.75, 0.10, 0.17)
_GREEN: Color = (0.04, 0.45, 0.26)
_GRAY: Color = (0.30, 0.30, 0.33)
_GOLD: Color = (0.98, 0.78, 0.24)
_DIM: Color = (0.62, 0.62, 0.64)
_COLORS = {
    "amount": (_AMBER, _AMBER), "signed": (_BLUE, _RED), "deviation": (_BLUE, _RED), "factor": (_GREEN, _GRAY),
    "choice": (_GOLD, _GOLD),
}  # fmt: skip
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
        self.up = _range(offset for offset in offsets if offset > 0)
        self.down = _range(-offset for offset in offsets if offset < 0)
        self.neutral = 0 in offsets
        self.largest = max(map(abs, offsets), default=0.0)
        self.decimals = _decimals(max((abs(value) for value in quantity.numbers), default=0.0))

    def color(self, value: float | None) -> Color:
        if value is None:
            return _WHITE
        offset = value - self.center
        if offset == 0:
            return _WHITE
        full, span = (self.above, self.up) if offset > 0 else (self.below, self.down)
        return _mix(_WHITE, full, self._strength(abs(offset), span))

    def _strength(self, size: float, span: tuple[float, float] | None) -> float:
        if self.scale == "choice":
            return 1.0
        low, high = span or (0.0, size)
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


def _range(sizes: Iterator[float]) -> tuple[float, float] | None:
    found = list(sizes)
    return (min(found), max(found)) if found else None


def _decimals(largest: float) -> int:
    """Two, or as many as show two digits of the largest value, at most six."""
    return 2 if largest == 0 else min(6, max(2, 1 - math.floor(math.log10(largest))))


def _mix(start: Color, end: Color, share: float) -> Color:
    red, green, blue = ((1 - share) * a + share * b for a, b in zip(start, end, strict=True))
    return red, green, blue


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


@dataclass(frozen=True)
class Layout:
    """Columns of a picture: a width in characters for each position, and bands of positions that fit a line."""

    widths: tuple[int, ...]
    bands: tuple[range, ...]


def lay_out(explanation: Explanation, palettes: Sequence[Palette], width: int, numbers: bool) -> Layout:
    """Fit the positions into lines of ``width`` characters, one of them between columns; a band has one at least."""
    widths = [1] * explanation.longest
    for row, completion in enumerate(explanation.completions):
        for position, token in enumerate(completion.tokens):
            texts = [visible(token)]
            if numbers:
                pairs = zip(explanation.quantities, palettes, strict=True)
                texts += [palette.text(quantity.values[row][position]) for quantity, palette in pairs]
            widths[position] = max(widths[position], *map(columns_of, texts))
    return Layout(tuple(widths), tuple(_bands(widths, width)))


def _bands(widths: Sequence[int], width: int) -> Iterator[range]:
    start, used = 0, 0
    for position, column in enumerate(widths):
        if position > start and used + column + 1 > width:
            yield range(start, position)
            start, used = position, 0
        used += column + 1
    yield range(start, len(widths))


def head(explanation: Explanation) -> list[str]:
    """The lines above the panels: title, notes, prompt, and one for each completion."""
    rows = [
        f"{row_name(row, completion):>{gutter_of(explanation) - 1}} {completion.label}"
        for row, completion in enumerate(explanation.completions)
    ]
    prompt = explanation.prompt
    if len(prompt) > LONGEST_PROMPT:
        prompt = prompt[:LONGEST_PROMPT] + "…"
    lines = [explanation.title, *explanation.notes, "", f"prompt  {prompt}", *rows]
    return [printable(line) for line in lines]


def row_name(row: int, completion: Completion) -> str:
    return f"{row + 1} {completion.mark}"


def gutter_of(explanation: Explanation) -> int:
    return 1 + max(columns_of(row_name(row, completion)) for row, completion in enumerate(explanation.completions))


# ---- lines ----------------------------------------------------------------------------------------------------------


def render(explanation: Explanation, *, width: int = 100, color: bool = True) -> str:
    """The picture as text: ANSI background colors (24 bit) behind the tokens, or the numbers below them."""
    palettes = [Palette(quantity) for quantity in explanation.quantities]
    gutter = gutter_of(explanation)
    layout = lay_out(explanation, palettes, width - gutter, numbers=not color)
    lines = head(explanation)
    for quantity, palette in zip(explanation.quantities, palettes, strict=True):
        legend = "   ".join(_swatch(swatch) if color else swatch.label for swatch in palette.legend())
        lines += ["", f"{quantity.name}: {quantity.meaning}   [{legend}]"]
        for band in layout.bands:
            lines += [f"{'':{gutter}}from token {band.start + 1}"] if len(layout.bands) > 1 else []
            for row, completion in enumerate(explanation.completions):
                name = f"{row_name(row, completion):>{gutter - 1}} "
                lines += _row(name, completion, quantity.values[row], palette, layout.widths, band, color)
    return "\n".join(line.rstrip() for line in lines)


def _swatch(swatch: Swatch) -> str:
    ramp = swatch.ramp if len(swatch.ramp) == 1 else swatch.ramp[::2]
    return "".join(_painted(" ", shade) for shade in ramp) + f" {swatch.label}"


def _row(
    name: str, completion: Completion, values: Sequence[float | None], palette: Palette, widths: Sequence[int],
    band: range, color: bool,
) -> list[str]:  # fmt: skip
    positions = [position for position in band if position < len(completion.tokens)]
    if not positions:
        return []
    tokens = [(visible(completion.tokens[position]), widths[position]) for position in positions]
    texts = [" " * (width - columns_of(token)) + token for token, width in tokens]
    if color:
        pairs = zip(texts, (values[position] for position in positions), strict=True)
        return [name + " ".join(_painted(text, palette.color(value), value) for text, value in pairs)]
    numbers = [palette.text(values[position]).rjust(widths[position]) for position in positions]
    return [name + " ".join(texts), " " * len(name) + " ".join(numbers)]


def _painted(text: str, background: Color, value: float | None = 0.0) -> str:
    def code(color: Color) -> str:
        return ";".join(str(round(255 * part)) for part in color)

    ink = _DIM if value is None else ink_on(background)  # dim: an environment wrote it
    return f"\x1b[48;2;{code(background)}m\x1b[38;2;{code(ink)}m{text}\x1b[0m"
