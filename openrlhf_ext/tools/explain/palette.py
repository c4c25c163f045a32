"""The colors of a quantity and what they stand for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from openrlhf_ext.tools.explain.explanation import Quantity

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
_PALEST, _DEEPEST = 0.18, 0.9  # strength of a sign's smallest and largest value; 0 is white, 1 its full color
_FULL_CONTRAST = 0.1  # values that differ by less than this fraction get colors that differ less, too


@dataclass(frozen=True)
class Swatch:
    """An entry of a legend: a ramp of colors and what it stands for."""

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
        self.above, self.below = {
            "amount": (_AMBER, _AMBER),
            "signed": (_BLUE, _RED),
            "deviation": (_BLUE, _RED),
            "factor": (_GREEN, _GRAY),
            "choice": (_GOLD, _GOLD),
        }[quantity.scale]
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


def ink_of(value: float | None, background: Color) -> Color:
    """Of a token with this value: gray where an environment wrote it."""
    return _DIM if value is None else ink_on(background)


def ink_on(background: Color) -> Color:
    """Black or white, whichever is easier to read."""
    red, green, blue = background
    return (0.0, 0.0, 0.0) if 0.299 * red + 0.587 * green + 0.114 * blue > 0.52 else _WHITE
