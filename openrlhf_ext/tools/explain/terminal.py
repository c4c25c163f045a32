"""The picture in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf_ext.tools.explain.explanation import Completion, Explanation, Quantity
from openrlhf_ext.tools.explain.layout import Layout, columns_of, gutter_of, head, lay_out, row_name, visible
from openrlhf_ext.tools.explain.palette import Color, Palette, Swatch, ink_of


def render(explanation: Explanation, *, width: int = 100, color: bool = True) -> str:
    """The picture as text.

    Args:
        color: ANSI background colors (24 bit) behind the tokens; otherwise the numbers below the tokens.
    """
    palettes = [Palette(quantity) for quantity in explanation.quantities]
    gutter = gutter_of(explanation)
    layout = lay_out(explanation, palettes, width - gutter, numbers=not color)
    lines = head(explanation)
    for quantity, palette in zip(explanation.quantities, palettes, strict=True):
        lines += ["", _heading(quantity, palette, color)]
        for band in layout.bands:
            lines += _band_mark(layout, band, gutter)
            for row, completion in enumerate(explanation.completions):
                name = f"{row_name(row, completion):>{gutter - 1}} "
                lines += _row(name, completion, quantity.values[row], palette, layout.widths, band, color)
    return "\n".join(line.rstrip() for line in lines)


def _heading(quantity: Quantity, palette: Palette, color: bool) -> str:
    legend = "   ".join(_swatch(swatch) if color else swatch.label for swatch in palette.legend())
    return f"{quantity.name}: {quantity.meaning}   [{legend}]"


def _swatch(swatch: Swatch) -> str:
    ramp = swatch.ramp if len(swatch.ramp) == 1 else swatch.ramp[::2]
    return "".join(_painted(" ", shade) for shade in ramp) + f" {swatch.label}"


def _band_mark(layout: Layout, band: range, gutter: int) -> list[str]:
    """Where the positions of a band start, if there are several bands."""
    return [] if len(layout.bands) == 1 else [f"{'':{gutter}}from token {band.start + 1}"]


def _row(
    name: str,
    completion: Completion,
    values: Sequence[float | None],
    palette: Palette,
    widths: Sequence[int],
    band: range,
    color: bool,
) -> list[str]:
    """The part of a completion that lies in a band, with colors or with a line of numbers below it."""
    positions = [position for position in band if position < len(completion.tokens)]
    if not positions:
        return []
    texts = [_pad(visible(completion.tokens[position]), widths[position]) for position in positions]
    if color:
        pairs = zip(texts, (values[position] for position in positions), strict=True)
        return [name + " ".join(_painted(text, palette.color(value), value) for text, value in pairs)]
    numbers = [palette.text(values[position]).rjust(widths[position]) for position in positions]
    return [name + " ".join(texts), " " * len(name) + " ".join(numbers)]


def _pad(text: str, columns: int) -> str:
    return " " * (columns - columns_of(text)) + text


def _painted(text: str, background: Color, value: float | None = 0.0) -> str:
    def code(color: Color) -> str:
        return ";".join(str(round(255 * part)) for part in color)

    return f"\x1b[48;2;{code(background)}m\x1b[38;2;{code(ink_of(value, background))}m{text}\x1b[0m"
