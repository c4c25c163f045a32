"""The layout of the picture: texts of tokens, widths of columns, lines of positions, the lines on top."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from openrlhf_ext.tools.explain.explanation import Completion, Explanation
from openrlhf_ext.tools.explain.palette import Palette

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
    """Characters before a row: its name and a space."""
    return 1 + max(columns_of(row_name(row, completion)) for row, completion in enumerate(explanation.completions))
