"""The picture of what a method does to a group of completions: a row of coloured tokens for each of them.

One panel for each quantity (entropy, advantage, ...), one row for each completion, one column for each position, so
that tokens at equal positions stand under each other. The same layout and the same colours go into a PNG and into a
terminal. Takes plain numbers and knows no method.
"""

from __future__ import annotations

import math
import os
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Colour = tuple[float, float, float]
"""Red, green, blue, each 0 to 1."""

LONGEST_TOKEN = 12  # characters shown of a token
LONGEST_PROMPT = 600  # characters shown of the prompt
MOST_CELLS = 1200  # tokens of one PNG over all panels; beyond, stripes without text replace the cells

_WHITE: Colour = (1.0, 1.0, 1.0)
_AMBER: Colour = (0.80, 0.36, 0.02)
_BLUE: Colour = (0.07, 0.34, 0.66)
_RED: Colour = (0.75, 0.10, 0.17)
_GREEN: Colour = (0.04, 0.45, 0.26)
_GREY: Colour = (0.30, 0.30, 0.33)
_GOLD: Colour = (0.98, 0.78, 0.24)
_PALEST, _DEEPEST = 0.18, 0.9  # strength of a sign's smallest and largest value; 0 is white, 1 its full colour
_FULL_CONTRAST = 0.1  # values that differ by less than this fraction get colours that differ less, too


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
        values: one number for each token of each completion.
    """

    name: str
    meaning: str
    scale: Literal["amount", "signed", "deviation", "factor", "choice"]
    values: tuple[tuple[float, ...], ...]

    @property
    def numbers(self) -> list[float]:
        """All values in one list."""
        return [value for row in self.values for value in row]


@dataclass(frozen=True)
class Explanation:
    """Everything the picture shows.

    Raises:
        ValueError: a quantity has not exactly one finite number for each token.
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
        """Tokens of the longest completion."""
        return max(len(completion.tokens) for completion in self.completions)


# --- colours ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Swatch:
    """An entry of a legend: a ramp of colours and what it stands for."""

    label: str
    ramp: tuple[Colour, ...]


class Palette:
    """The colours of one quantity, fitted to the range of its values.

    On the scales ``signed`` and ``factor``, numbers on either side have a ramp each, from the smallest to the largest
    magnitude there: shaping that moves rewards from 1.05 to 1.15 would be invisible on a ramp from 0.
    """

    def __init__(self, quantity: Quantity) -> None:
        self.scale = quantity.scale
        self.centre = 1.0 if quantity.scale == "factor" else 0.0
        self.above, self.below = {
            "amount": (_AMBER, _AMBER),
            "signed": (_BLUE, _RED),
            "deviation": (_BLUE, _RED),
            "factor": (_GREEN, _GREY),
            "choice": (_GOLD, _GOLD),
        }[quantity.scale]
        offsets = [value - self.centre for value in quantity.numbers]
        self.up = _range(offset for offset in offsets if offset > 0)
        self.down = _range(-offset for offset in offsets if offset < 0)
        self.neutral = 0 in offsets
        self.largest = max(map(abs, offsets), default=0.0)
        self.decimals = _decimals(max((abs(value) for value in quantity.numbers), default=0.0))

    def colour(self, value: float) -> Colour:
        """Background of a token."""
        offset = value - self.centre
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

    def text(self, value: float) -> str:
        """The number as shown in a cell."""
        if self.scale == "choice":
            return "yes" if value else "no"
        if self.scale == "factor":
            return f"{value:.3g}"
        if value == 0:
            return "0"
        return f"{value:{'' if self.scale == 'amount' else '+'}.{self.decimals}f}"

    def legend(self) -> Iterator[Swatch]:
        """What the colours stand for, smallest value first."""
        if self.scale == "amount":
            yield self._swatch(0.0, self.up[1] if self.up else 0.0)
            return
        if self.down:
            yield self._swatch(self.centre - self.down[1], self.centre - self.down[0])
        if self.neutral:
            yield self._swatch(self.centre, self.centre)
        if self.up:
            yield self._swatch(self.centre + self.up[0], self.centre + self.up[1])

    def _swatch(self, low: float, high: float, steps: int = 12) -> Swatch:
        first, last = self.text(low), self.text(high)
        if first == last:
            return Swatch(first, (self.colour(low),))
        ramp = [self.colour(low + (high - low) * step / (steps - 1)) for step in range(steps)]
        return Swatch(f"{first} to {last}", tuple(ramp))


def _range(sizes: Iterator[float]) -> tuple[float, float] | None:
    found = list(sizes)
    return (min(found), max(found)) if found else None


def _decimals(largest: float) -> int:
    """Two, or as many as show two digits of the largest value, at most six."""
    return 2 if largest == 0 else min(6, max(2, 1 - math.floor(math.log10(largest))))


def _mix(start: Colour, end: Colour, share: float) -> Colour:
    red, green, blue = ((1 - share) * a + share * b for a, b in zip(start, end, strict=True))
    return red, green, blue


def _ink(background: Colour) -> Colour:
    """Black or white, whichever is easier to read."""
    red, green, blue = background
    return (0.0, 0.0, 0.0) if 0.299 * red + 0.587 * green + 0.114 * blue > 0.52 else _WHITE


# --- layout -----------------------------------------------------------------------------------------------------------


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
    """Terminal columns of a printable text."""
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
                texts += _cell_numbers(explanation, palettes, row, position)
            widths[position] = max(widths[position], *map(columns_of, texts))
    return Layout(tuple(widths), tuple(_bands(widths, width)))


def _cell_numbers(explanation: Explanation, palettes: Sequence[Palette], row: int, position: int) -> list[str]:
    pairs = zip(explanation.quantities, palettes, strict=True)
    return [palette.text(quantity.values[row][position]) for quantity, palette in pairs]


def _bands(widths: Sequence[int], width: int) -> Iterator[range]:
    start, used = 0, 0
    for position, column in enumerate(widths):
        if position > start and used + column + 1 > width:
            yield range(start, position)
            start, used = position, 0
        used += column + 1
    yield range(start, len(widths))


# --- terminal ---------------------------------------------------------------------------------------------------------


def render(explanation: Explanation, *, width: int = 100, colour: bool = True) -> str:
    """The picture as text.

    Args:
        width: characters of a line.
        colour: ANSI background colours (24 bit) behind the tokens; otherwise the numbers below the tokens.
    """
    palettes = [Palette(quantity) for quantity in explanation.quantities]
    gutter = _gutter(explanation)
    layout = lay_out(explanation, palettes, width - gutter, numbers=not colour)
    lines = _head(explanation)
    for quantity, palette in zip(explanation.quantities, palettes, strict=True):
        lines += ["", _heading(quantity, palette, colour)]
        for band in layout.bands:
            lines += _band_mark(layout, band, gutter)
            for row in range(len(explanation.completions)):
                lines += _terminal_row(explanation, quantity, palette, layout, row, band, gutter, colour)
    return "\n".join(line.rstrip() for line in lines)


def _head(explanation: Explanation) -> list[str]:
    rows = [
        f"{_name(row, completion):>{_gutter(explanation) - 1}} {completion.label}"
        for row, completion in enumerate(explanation.completions)
    ]
    prompt = explanation.prompt
    if len(prompt) > LONGEST_PROMPT:
        prompt = prompt[:LONGEST_PROMPT] + "…"
    lines = [explanation.title, *explanation.notes, "", f"prompt  {prompt}", *rows]
    return [printable(line) for line in lines]


def _name(row: int, completion: Completion) -> str:
    return f"{row + 1} {completion.mark}"


def _gutter(explanation: Explanation) -> int:
    """Characters before a row: its name and a space."""
    return 1 + max(columns_of(_name(row, completion)) for row, completion in enumerate(explanation.completions))


def _heading(quantity: Quantity, palette: Palette, colour: bool) -> str:
    legend = "   ".join(_terminal_swatch(swatch) if colour else swatch.label for swatch in palette.legend())
    return f"{quantity.name}: {quantity.meaning}   [{legend}]"


def _terminal_swatch(swatch: Swatch) -> str:
    ramp = swatch.ramp if len(swatch.ramp) == 1 else swatch.ramp[::2]
    return "".join(_painted(" ", shade) for shade in ramp) + f" {swatch.label}"


def _band_mark(layout: Layout, band: range, gutter: int) -> list[str]:
    """Where the positions of a band start, if there are several bands."""
    return [] if len(layout.bands) == 1 else [f"{'':{gutter}}from token {band.start + 1}"]


def _terminal_row(
    explanation: Explanation,
    quantity: Quantity,
    palette: Palette,
    layout: Layout,
    row: int,
    band: range,
    gutter: int,
    colour: bool,
) -> list[str]:
    completion, values = explanation.completions[row], quantity.values[row]
    positions = [position for position in band if position < len(completion.tokens)]
    if not positions:
        return []
    texts = [_pad(visible(completion.tokens[position]), layout.widths[position]) for position in positions]
    name = f"{_name(row, completion):>{gutter - 1}} "
    if colour:
        shades = [palette.colour(values[position]) for position in positions]
        return [name + " ".join(_painted(text, shade) for text, shade in zip(texts, shades, strict=True))]
    numbers = [palette.text(values[position]).rjust(layout.widths[position]) for position in positions]
    return [name + " ".join(texts), " " * gutter + " ".join(numbers)]


def _pad(text: str, columns: int) -> str:
    return " " * (columns - columns_of(text)) + text


def _painted(text: str, background: Colour) -> str:
    def code(colour: Colour) -> str:
        return ";".join(str(round(255 * part)) for part in colour)

    return f"\x1b[48;2;{code(background)}m\x1b[38;2;{code(_ink(background))}m{text}\x1b[0m"


# --- PNG --------------------------------------------------------------------------------------------------------------

# Lengths are in points; the only axes of the figure count points from the upper left corner.
_FONT = "DejaVu Sans Mono"
_SIZE = 8.5
_CHARACTER = 0.602 * _SIZE
_PAD = 5.0
_MARGIN = 20.0
_LINE = 14.0
_CELL = 24.0
_STRIPE = 13.0
_GAP = 24.0
_HEADING = 22.0
_DPI = 160
_FAINT = "#666666"


def write_png(explanation: Explanation, path: str | Path, *, width: int = 200) -> None:
    """Draw the picture into a file, which is replaced atomically. Uses no global state of matplotlib.

    Cells carry the token and its number. Where the group has more than ``MOST_CELLS`` of them over all panels, each
    completion becomes a stripe without text, all positions on one line.

    Args:
        path: the image; folders are made.
        width: characters of a line.
    """
    picture = _Picture(explanation, width)
    picture.draw()
    picture.save(Path(path))


class _Picture:
    """A figure that is filled from the top."""

    def __init__(self, explanation: Explanation, width: int) -> None:
        self.explanation = explanation
        self.palettes = [Palette(quantity) for quantity in explanation.quantities]
        self.layout = lay_out(explanation, self.palettes, width - _gutter(explanation), numbers=True)
        tokens = sum(len(completion.tokens) for completion in explanation.completions)
        self.stripes = tokens * len(explanation.quantities) > MOST_CELLS
        self.left = _MARGIN + (_gutter(explanation) + 1) * _CHARACTER
        self.characters = width
        self.head = _wrapped_head(explanation, self.characters)
        self.width = self._width()
        self.height = self._height()
        self.figure, self.axes = _canvas(self.width, self.height)
        self.glyphs = _glyphs()
        self.y = _MARGIN

    # A cell is as wide as its text and the padding on both sides.
    def _cell_width(self, position: int) -> float:
        return self.layout.widths[position] * _CHARACTER + 2 * _PAD

    def _width(self) -> float:
        readable = self.characters * _CHARACTER
        widest = readable
        if not self.stripes:
            widest = max(sum(self._cell_width(position) for position in band) for band in self.layout.bands)
        legend = max(_legend_width(quantity, p) for quantity, p in self._panels())
        head = max(columns_of(line) for line, _ in self.head) * _CHARACTER
        return max(self.left + widest, _MARGIN + legend, _MARGIN + head) + _MARGIN

    def _height(self) -> float:
        if self.stripes:
            panel = _STRIPE * len(self.explanation.completions) + _LINE
        else:
            mark = _LINE if len(self.layout.bands) > 1 else 0.0
            panel = sum(_CELL * len(self._rows(band)) + _LINE / 2 + mark for band in self.layout.bands)
        head = _LINE * (len(self.head) + 1)
        return 2 * _MARGIN + head + (panel + _HEADING + _GAP) * len(self.explanation.quantities) - _GAP

    def _panels(self) -> Iterator[tuple[Quantity, Palette]]:
        return zip(self.explanation.quantities, self.palettes, strict=True)

    def _rows(self, band: range) -> list[int]:
        """Completions that reach a band."""
        return [row for row, found in enumerate(self.explanation.completions) if len(found.tokens) > band.start]

    def draw(self) -> None:
        """Heading and panels."""
        for line, style in self.head:
            self._text(_MARGIN, self.y + _LINE / 2, line, **style)
            self.y += _LINE
        self.y += _LINE
        for quantity, palette in self._panels():
            self._heading(quantity, palette)
            (self._stripes if self.stripes else self._cells)(quantity, palette)
            self.y += _GAP

    def _heading(self, quantity: Quantity, palette: Palette) -> None:
        middle = self.y + _LINE / 2
        self._text(_MARGIN, middle, quantity.name, weight="bold")
        x = _MARGIN + (len(quantity.name) + 2) * _CHARACTER
        self._text(x, middle, quantity.meaning, color=_FAINT)
        x += (len(quantity.meaning) + 3) * _CHARACTER
        for swatch in palette.legend():
            x = self._swatch(x, middle, swatch)
        self.y += _HEADING

    def _swatch(self, x: float, middle: float, swatch: Swatch) -> float:
        step = _SWATCH / len(swatch.ramp)
        for index, shade in enumerate(swatch.ramp):
            self._box(x + index * step, middle - 5, step, 10, shade, edge=shade)
        self._box(x, middle - 5, _SWATCH, 10, None)
        self._text(x + _SWATCH + _CHARACTER, middle, swatch.label, color=_FAINT)
        return x + _SWATCH + (len(swatch.label) + 3) * _CHARACTER

    def _cells(self, quantity: Quantity, palette: Palette) -> None:
        for band in self.layout.bands:
            if len(self.layout.bands) > 1:
                self._text(self.left, self.y + _LINE / 2, f"from token {band.start + 1}", color=_FAINT, size=7)
                self.y += _LINE
            for row in self._rows(band):
                self._row(quantity, palette, row, band)
                self.y += _CELL
            self.y += _LINE / 2

    def _row(self, quantity: Quantity, palette: Palette, row: int, band: range) -> None:
        completion = self.explanation.completions[row]
        self._text(_MARGIN, self.y + _CELL / 2, _name(row, completion), color=_FAINT)
        x = self.left
        for position in band:
            width = self._cell_width(position)
            if position < len(completion.tokens):
                value = quantity.values[row][position]
                self._cell(x, width, visible(completion.tokens[position]), palette.text(value), palette.colour(value))
            x += width

    def _cell(self, x: float, width: float, token: str, number: str, shade: Colour) -> None:
        self._box(x, self.y, width, _CELL, shade, edge="white" if sum(shade) < 2.85 else "#e4e4e4")
        ink = _ink(shade)
        self._text(x + width / 2, self.y + 0.36 * _CELL, token, color=ink, ha="center")
        self._text(x + width / 2, self.y + 0.77 * _CELL, number, color=ink, ha="center", size=6, alpha=0.8)

    def _stripes(self, quantity: Quantity, palette: Palette) -> None:
        right = self.width - _MARGIN
        for row, completion in enumerate(self.explanation.completions):
            self._text(_MARGIN, self.y + _STRIPE / 2, _name(row, completion), color=_FAINT)
            shades = [[palette.colour(value) for value in quantity.values[row]]]
            end = self.left + (right - self.left) * len(completion.tokens) / self.explanation.longest
            box = (self.left, end, self.y + _STRIPE - 1, self.y)
            self.axes.imshow(shades, extent=box, aspect="auto", interpolation="antialiased")
            self._box(self.left, self.y, end - self.left, _STRIPE - 1, None)
            self.y += _STRIPE
        for share, side in ((0.0, "left"), (0.5, "center"), (1.0, "right")):
            position = max(1, round(share * self.explanation.longest))
            at = self.left + share * (right - self.left)
            self._text(at, self.y + _LINE / 2, f"token {position}", color=_FAINT, ha=side, size=7)
        self.y += _LINE

    def _box(
        self, x: float, y: float, width: float, height: float, fill: Colour | None, edge: str | Colour = "#bbbbbb"
    ) -> None:
        from matplotlib.patches import Rectangle

        face = "none" if fill is None else fill
        self.axes.add_patch(Rectangle((x, y), width, height, facecolor=face, edgecolor=edge, linewidth=0.6))

    def _text(self, x: float, y: float, text: str, *, size: float = _SIZE, **style: object) -> None:
        # A dollar sign is a dollar sign, and a letter the font lacks is shown as a box without a warning.
        shown = "".join(letter if ord(letter) in self.glyphs else "▯" for letter in text)
        place = {"va": "center_baseline", "fontsize": size, "family": _FONT, "parse_math": False}
        self.axes.text(x, y, shown, **{**place, **style})

    def save(self, path: Path) -> None:
        """Write the PNG beside its place, then move it there."""
        self.axes.set(xlim=(0, self.width), ylim=(self.height, 0))
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            self.figure.savefig(partial, format="png", dpi=_DPI)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


_SWATCH = 44.0


def _legend_width(quantity: Quantity, palette: Palette) -> float:
    characters = len(quantity.name) + len(quantity.meaning) + 5
    swatches = sum(_SWATCH + (len(swatch.label) + 3) * _CHARACTER for swatch in palette.legend())
    return characters * _CHARACTER + swatches


def _wrapped_head(explanation: Explanation, width: int) -> list[tuple[str, dict[str, object]]]:
    """Lines above the panels, with their style."""
    import textwrap

    title, *rest = _head(explanation)
    lines: list[tuple[str, dict[str, object]]] = [(title, {"weight": "bold", "size": 11})]
    notes = len(explanation.notes)
    for index, line in enumerate(rest):
        style: dict[str, object] = {"color": _FAINT} if index < notes else {}
        lines += [(part, style) for part in textwrap.wrap(line, width, drop_whitespace=False) or [""]]
    return lines


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    return figure, axes


def _glyphs() -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont(_FONT)).get_charmap())
