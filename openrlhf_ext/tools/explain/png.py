"""The picture as a PNG, the same layout and colors as in the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf_ext.outputs import in_one_piece
from openrlhf_ext.tools.explain.explanation import Explanation, Quantity
from openrlhf_ext.tools.explain.layout import columns_of, gutter_of, head, lay_out, row_name, visible
from openrlhf_ext.tools.explain.palette import Color, Palette, Swatch, ink_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_CELLS = 1200  # tokens of one PNG over all panels; beyond, stripes without text replace the cells

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
_SWATCH = 44.0
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
        self.layout = lay_out(explanation, self.palettes, width - gutter_of(explanation), numbers=True)
        tokens = sum(len(completion.tokens) for completion in explanation.completions)
        self.stripes = tokens * len(explanation.quantities) > MOST_CELLS
        self.left = _MARGIN + (gutter_of(explanation) + 1) * _CHARACTER
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
        self._text(_MARGIN, self.y + _CELL / 2, row_name(row, completion), color=_FAINT)
        x = self.left
        for position in band:
            width = self._cell_width(position)
            if position < len(completion.tokens):
                value = quantity.values[row][position]
                self._cell(x, width, visible(completion.tokens[position]), value, palette)
            x += width

    def _cell(self, x: float, width: float, token: str, value: float | None, palette: Palette) -> None:
        shade, number = palette.color(value), palette.text(value)
        self._box(x, self.y, width, _CELL, shade, edge="white" if sum(shade) < 2.85 else "#e4e4e4")
        ink = ink_of(value, shade)
        self._text(x + width / 2, self.y + 0.36 * _CELL, token, color=ink, ha="center")
        self._text(x + width / 2, self.y + 0.77 * _CELL, number, color=ink, ha="center", size=6, alpha=0.8)

    def _stripes(self, quantity: Quantity, palette: Palette) -> None:
        right = self.width - _MARGIN
        for row, completion in enumerate(self.explanation.completions):
            self._text(_MARGIN, self.y + _STRIPE / 2, row_name(row, completion), color=_FAINT)
            shades = [[palette.color(value) for value in quantity.values[row]]]
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
        self, x: float, y: float, width: float, height: float, fill: Color | None, edge: str | Color = "#bbbbbb"
    ) -> None:
        from matplotlib.patches import Rectangle

        face = "none" if fill is None else fill
        self.axes.add_patch(Rectangle((x, y), width, height, facecolor=face, edgecolor=edge, linewidth=0.6))

    def _text(self, x: float, y: float, text: str, *, size: float = _SIZE, **style: Any) -> None:
        # A dollar sign is a dollar sign, and a letter the font lacks is shown as a box without a warning.
        shown = "".join(letter if ord(letter) in self.glyphs else "▯" for letter in text)
        place: dict[str, Any] = {"va": "center_baseline", "fontsize": size, "family": _FONT, "parse_math": False}
        self.axes.text(x, y, shown, **{**place, **style})

    def save(self, path: Path) -> None:
        """Write the PNG beside its place, then move it there."""
        self.axes.set(xlim=(0, self.width), ylim=(self.height, 0))
        with in_one_piece(path) as partial:
            self.figure.savefig(partial, format="png", dpi=_DPI)


def _legend_width(quantity: Quantity, palette: Palette) -> float:
    characters = len(quantity.name) + len(quantity.meaning) + 5
    swatches = sum(_SWATCH + (len(swatch.label) + 3) * _CHARACTER for swatch in palette.legend())
    return characters * _CHARACTER + swatches


def _wrapped_head(explanation: Explanation, width: int) -> list[tuple[str, dict[str, Any]]]:
    """Lines above the panels, with their style."""
    title, *rest = head(explanation)
    lines: list[tuple[str, dict[str, Any]]] = [(title, {"weight": "bold", "size": 11})]
    notes = len(explanation.notes)
    for index, line in enumerate(rest):
        style: dict[str, Any] = {"color": _FAINT} if index < notes else {}
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
