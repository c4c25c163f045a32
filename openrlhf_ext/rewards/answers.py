"""Final answers of mathematical completions and labels: find them, compare them. Numbers are compared exactly as
fractions; other answers as normalized text. Symbolic equality is not attempted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

_TAG = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)
_LINE = re.compile(r"answer\s*:[ \t]*(\S[^\n]*)", re.IGNORECASE)
_LINE_CHARACTERS = 300
Stated = Literal["any", "tagged", "line"]
"""Where a completion states its answer."""
_HASHES = re.compile(r"####[ \t]*(.+)")
_LONGEST_NUMBER = 1000  # characters; Python refuses to convert much longer ones
_BOXED = "\\boxed{"
_PLAIN_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:/\d+)?")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}")
_LATEX_TEXT = re.compile(r"\\(?:text|mathrm)\{([^{}]*)\}")
_UNIT = re.compile(
    r"(?<=[\d})])[\s~]*\b(?:(?:square|sq|cubic)[\s.]+)?(?:dollars?|cents?|euros?|pounds?|ounces?|grams?|kilograms?|kg|"
    r"tons?|meters?|metres?|centimeters?|centimetres?|millimeters?|kilometers?|kilometres?|cm|mm|km|feet|foot|ft|"
    r"inch(?:es)?|yards?|miles?|mph|seconds?|minutes?|hours?|days?|weeks?|months?|years?|liters?|litres?|gallons?|"
    r"degrees?|units?|percent|points?|people|students?|ways?)(?:\^\{?[23]\}?)?(?:[\s]*(?:per|/)[\s]*[a-z]{1,9})?[\s.]*\Z"
)
_SCALE = re.compile(r"(?i)\b(?:dozen|hundred|thousand|(?:m|b|tr)illion)s?\b")
_IGNORED = re.compile(r"\\(?:left|right|[,;!%])|[\s$%]")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?:\D|\Z))")


def extract_answer(text: str) -> str | None:
    """The final answer stated in a text, or ``None``.

    Looks, in this order, for the last ``<answer>...</answer>``, the last ``\\boxed{...}`` and the last ``#### ...``.
    """
    if tagged := _TAG.findall(text):
        return _nonempty(tagged[-1])
    if (boxed := last_boxed(text)) is not None:
        return _nonempty(boxed)
    if hashed := _HASHES.findall(text):
        return _nonempty(hashed[-1])
    return None


def answer_alone(text: str, where: Stated) -> str:
    """A completion's answer as ``<answer>...</answer>``, "" if it states none there; the completion itself if it may
    stand anywhere. ``tagged``: in the last ``<answer>``. ``line``: behind the last ``Answer:``, see
    :func:`answer_line`."""
    if where == "any":
        return text
    tagged = _TAG.findall(text)
    stated = answer_line(text) if where == "line" else _nonempty(tagged[-1]) if tagged else None
    return "" if stated is None else f"<answer>{stated}</answer>"


def answer_line(text: str) -> str | None:
    """What follows the last ``Answer:`` in the last 300 characters, up to the end of its line, as verl's ``math_dapo``
    looks for it; of a boxed answer, what is in the box."""
    found = _LINE.findall(text[-_LINE_CHARACTERS:])
    if not found:
        return None
    stated = found[-1].strip()
    return extract_answer(stated) or stated


def stated_answers(texts: Sequence[str], correct: Sequence[bool]) -> list[tuple[bool, str] | None]:
    """What each completion of a problem votes for, by text alone: None = it states no answer. All correct ones vote for
    one answer, since each equals the label; wrong ones for their :func:`normalized` text."""
    votes: list[tuple[bool, str] | None] = []
    for text, is_correct in zip(texts, correct, strict=True):
        answer = extract_answer(text)
        votes.append(None if answer is None else (is_correct, "" if is_correct else normalized(answer)))
    return votes


def answers_equal(first: str, second: str) -> bool:
    """Whether two answers are the same number, or the same text after :func:`normalized`."""
    left, right = normalized(first), normalized(second)
    if left == right:
        return True
    left_number, right_number = _number(left), _number(right)
    return left_number is not None and left_number == right_number


def surely_different(first: str, second: str) -> bool:
    """Whether both are whole numbers and not the same one, or one has a word for a power of ten and the other has not.
    math-verify drops the text behind a number: to it 5 million is 5."""
    if sorted(_SCALE.findall(first)) != sorted(_SCALE.findall(second)):
        return True
    left, right = (_number(normalized(answer)) for answer in (first, second))
    return left is not None and right is not None and left != right and left.denominator == right.denominator == 1


def normalized(answer: str) -> str:
    """An answer without spaces, units, dollar and per cent signs, thousands separators, full stop, LaTeX dressing. A
    unit is one of the words for measures, money, time and counted things that stand behind the numbers of textbooks."""
    text = _LATEX_TEXT.sub(r" \1", answer)
    if len(text) <= _LONGEST_NUMBER:
        text = _UNIT.sub("", text)
    text = _IGNORED.sub("", text)
    text = _LATEX_FRACTION.sub(r"\1/\2", text)
    return _THOUSANDS.sub("", text).rstrip(".")


def _number(text: str) -> Fraction | None:
    if len(text) > _LONGEST_NUMBER or not _PLAIN_NUMBER.fullmatch(text):
        return None
    numerator, _, denominator = text.partition("/")
    if denominator and int(denominator) == 0:
        return None
    return Fraction(numerator) / int(denominator or 1)


def last_boxed(text: str) -> str | None:
    """What stands in the last ``\\boxed{...}`` of a text; ``None`` without one, or if it is not closed."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth = 1
    for position in range(start + len(_BOXED), len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + len(_BOXED) : position]
    return None


def _nonempty(text: str) -> str | None:
    return text.strip() or None
