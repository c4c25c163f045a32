"""Colors and lines, on plain numbers."""

from __future__ import annotations

import pytest

from openrlhf_ext.tools.explain.picture import (
    Completion,
    Explanation,
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
