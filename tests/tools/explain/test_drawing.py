"""Colors and the terminal, on plain numbers."""

from __future__ import annotations

import re

import pytest

from openrlhf_ext.tools.explain.picture import Completion, Explanation, Palette, Quantity, render, visible

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def picture(*rows: tuple[str, ...], scale: str = "signed") -> Explanation:
    values = tuple(tuple(index - 0.5 for index, _ in enumerate(row)) for row in rows)
    quantity = Quantity("advantage", "of a token", scale, values)
    return Explanation("title", "prompt", ("note",), tuple(Completion("+", "label", row) for row in rows), (quantity,))


def test_colors_follow_sign_and_size() -> None:
    palette = Palette(Quantity("a", "", "signed", ((-2.0, -1.0, 0.0, 1.05, 1.15),)))
    deep, pale, zero, low, high = (palette.color(value) for value in (-2.0, -1.0, 0.0, 1.05, 1.15))
    assert zero == (1, 1, 1)
    assert deep[0] > deep[2] and high[2] > high[0]
    assert sum(deep) < sum(pale) < 3 and sum(high) + 0.5 < sum(low) < 3
    assert [label for label, _ in palette.legend()] == ["-2.00 to -1.00", "0", "+1.05 to +1.15"]
    nearly_equal = Palette(Quantity("a", "", "signed", ((1.0, 1.0001),)))
    assert nearly_equal.color(1.0) == pytest.approx(nearly_equal.color(1.0001), abs=0.01)


def test_terminal_colors_and_bands() -> None:
    explanation = picture(("abc",) * 20, ("d",) * 3)
    text = render(explanation, width=40)
    assert "\x1b[48;2;" in text and "from token 1" in text
    plain = ANSI.sub("", text).splitlines()
    assert all(len(line) <= 40 for line in plain[8:])  # below the heading
    assert sum(line.count("abc") for line in plain) == 20
    assert sum(line.startswith("2 + ") for line in plain[6:]) == 1  # it ends in the first band
    assert "\x1b" not in render(explanation, width=40, color=False)


def test_hostile_tokens_are_shown_not_obeyed() -> None:
    assert [visible(token) for token in (" the", "\n", "\x1b[2J", "", "$x_1$", "é")] == [
        "·the", "↵", "\\x1b[2J", "∅", "$x_1$", "é",
    ]  # fmt: skip
    assert len(visible("x" * 99)) == 12
    tokens = ("\x1b[2J", "$x_1$", "漢字", "\ud800", "", "\\frac{", "👍")
    explanation = picture(tokens)
    assert "\x1b" not in render(explanation, color=False)


def test_a_picture_needs_finite_values() -> None:
    with pytest.raises(ValueError, match="a must be finite"):
        Quantity("a", "", "signed", ((float("inf"),),))
