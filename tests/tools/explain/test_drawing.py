"""Colors and lines, on plain numbers."""

from __future__ import annotations

import pytest

from openrlhf_ext.tools.explain.picture import (
    Completion,
    Explanation,
    Palette,
    Quantity,
    render,
    visible,
)


def picture(*rows: tuple[str, ...], scale: str = "signed") -> Explanation:
    values = tuple(tuple(index - 0.5 for index, _ in enumerate(row)) for row in rows)
    quantity = Quantity("advantage", "of a token", scale, values)
    return Explanation(
        "title",
        "prompt",
        ("note",),
        tuple(Completion("+", "label", row) for row in rows),
        (quantity,),
    )


def test_colors_follow_sign_and_size() -> None:
    palette = Palette(Quantity("a", "", "signed", ((-2.0, -1.0, 0.0, 1.05, 1.15),)))
    deep, pale, zero, low, high = (palette.color(value) for value in (-2.0, -1.0, 0.0, 1.05, 1.15))
    assert zero == (1, 1, 1)
    assert deep[0] > deep[2] and high[2] > high[0]
    assert sum(deep) < sum(pale) < 3 and sum(high) + 0.5 < sum(low) < 3
    assert [label for label, _ in palette.legend()] == ["-2.00 to -1.00", "0", "+1.05 to +1.15"]
    nearly_equal = Palette(Quantity("a", "", "signed", ((1.0, 1.0001),)))
    assert nearly_equal.color(1.0) == pytest.approx(nearly_equal.color(1.0001), abs=0.01)


def test_hostile_tokens_are_shown_not_obeyed() -> None:
    assert [visible(token) for token in (" the", "\n", "\x1b[2J", "", "$x_1$", "é")] == [
        "·the",
        "↵",
        "\\x1b[2J",
        "∅",
        "$x_1$",
        "é",
    ]
    assert len(visible("x" * 99)) == 12
    tokens = ("\x1b[2J", "$x_1$", "漢字", "\ud800", "", "\\frac{", "👍")
    explanation = picture(tokens)
    assert "\x1b" not in render(explanation)


def test_a_picture_needs_finite_values() -> None:
    with pytest.raises(ValueError, match="a must be finite"):
        Quantity("a", "", "signed", ((float("inf"),),))
