"""Final answers of mathematical completions and labels: extraction, parsing, and comparison.

An answer is parsed as a number with or without a unit, as a list of answers in brackets, or
otherwise as a text. Numbers are compared exactly, as fractions. There is no symbolic comparison.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple

_TAG = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)
_LINE = re.compile(r"answer\s*:[ \t]*(\S[^\n]*)", re.IGNORECASE)
_LINE_CHARACTERS = 300
Stated = Literal["any", "tagged", "line"]
"""The place where a completion states its answer."""
_HASHES = re.compile(r"####[ \t]*(.+)")
# Characters; longer texts are not answers, and Python refuses to convert much longer numbers.
_LONGEST_READ = 1000
_BOXED = "\\boxed{"

# ---- patterns of numbers, in the order in which they are tried ----
# groups of three digits, no blank after a comma
_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3})+(?!,?\d)|\d+)(?:\.\d*)?|\.\d+)"
_PART = rf"[+-]? ?{_DECIMAL}"
_TEN = r"(?:[eE]| ?(?:\\times|\\cdot|x|\*) ?10 ?\^) ?{?([+-]?\d{1,3})}?"
_MIXED = re.compile(r"(\d+)(?: ?\\frac{(\d+)}{(\d+)}| (\d+) ?/ ?(\d+))")
_FRACTION = re.compile(rf"\\frac{{({_PART})}}{{({_PART})}}|({_DECIMAL}) ?/ ?({_DECIMAL})")
_SCIENTIFIC = re.compile(rf"({_DECIMAL}){_TEN}")
_PLAIN = re.compile(f"({_DECIMAL})")
_WRITTEN = (_MIXED, _FRACTION, _SCIENTIFIC, _PLAIN)
_SIGN = re.compile(r"([+-]?) ?([$€£¥]?) ?([+-]?) ?")
_IN_TEXT = re.compile(rf"(?:(?<![\w)}}])-)?[$€£¥]?(?:{'|'.join(p.pattern for p in _WRITTEN)})")

# ---- markup around answers ----
_ROOT = re.compile(r"√ ?(?:{([^{}]*)}|\(([^()]*)\)|(\d+|\w))")
_REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\(?:overline|bar|dot)(?![a-zA-Z]) ?{?(\d+)}?")
_DRESSING = (
    (_REPEATING, lambda m: _repeating(*m.groups())),
    (re.compile(r"\\varnothing(?![a-zA-Z])|∅"), r"\\emptyset"),
    (re.compile(r", ?\\!(?=\d{3})"), ","),
    (re.compile(r"\\(?:left|right|displaystyle|limits)(?![a-zA-Z])|\\!|(?<!\\)\\[()\[\]]"), ""),
    (re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it)|mbox)\s*{([^{}]*)}"), r" \1"),
    (re.compile(r"(?<![\d.])\d{1,3}(?:(?:\\,|[\u00a0\u2009\u202f])\d{3})+(?!\d)"),
     lambda m: re.sub(r"\\,|\s", "", m[0])),
    (re.compile(r"(?<!\\)\\[,;: ]|\\q?quad(?![a-zA-Z])|~|\s"), " "),
    (re.compile(r"\{,}"), ","),
    (re.compile(r"\\([$%{}])"), r"\1"),
    (re.compile(r"([\^_]) ?{(\w)}"), r"\1\2"),
    (re.compile(r"\\[dt]?frac(?![a-zA-Z]) ?(?:{([^{}]*)}|(\w)) ?(?:{([^{}]*)}|(\w))"),
     lambda m: f"\\frac{{{(m[1] or m[2] or '').strip()}}}{{{(m[3] or m[4] or '').strip()}}}"),
    (re.compile(r" *\^ *(?:{ *\\circ *}|\\circ) *|°"), " degrees "),
    (re.compile(r"per cent"), "percent"),
    (re.compile(r" +"), " "),
)  # fmt: skip
_SIGNS = dict.fromkeys(map(ord, "−–‐‑‒﹣－"), "-") | {
    ord("×"): "\\times ",
    ord("·"): "\\cdot ",
    ord("π"): "\\pi ",
    ord("∞"): "\\infty ",
    ord("⁄"): "/",
}
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_BLANKS = re.compile(r"(?<!\d) | (?!\.?\d)")  # all blanks except those that separate two numbers
_GROUPS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?!,?\d)")
_DEEPEST = 8  # levels of nested brackets

# ---- units: dimension, and each unit's words with its size ----
_MEASURES = {
    "money": "dollar,dollars,usd,$=1 cent,cents,¢=1/100", "euro": "euro,euros,eur,€=1",
    "pound": "£=1", "yen": "yen,¥=1",
    "length": "m,meter,meters,metre,metres=1 cm,centimeter,centimeters,centimetre,centimetres=1/100 "
    "mm,millimeter,millimeters,millimetre,millimetres=1/1000 "
    "km,kilometer,kilometers,kilometre,kilometres=1000 inch,inches=254/10000 "
    "foot,feet,ft=3048/10000 yard,yards,yd=9144/10000 mile,miles=1609344/1000",
    "time": "second,seconds,sec,s=1 minute,minutes,min=60 hour,hours,hr,h=3600 day,days=86400 "
        "week,weeks=604800",
    "months": "month,months=1 year,years=12",
    "mass": "gram,grams,g=1 kg,kilogram,kilograms=1000", "weight": "ounce,ounces,oz=1 pound,pounds,lb,lbs=16",
    "ton": "ton,tons=1", "volume": "liter,liters,litre,litres,l=1 ml,milliliter,milliliters=1/1000",
    "gallon": "gallon,gallons=1", "length/time": "mph=1609344/3600000", "angle": "degree,degrees=1", "%": "%,percent=1",
    "": "unit,units,point,points,people,student,students,way,ways=1",
}  # fmt: skip
_UNITS: dict[str, tuple[str, Fraction]] = {}
for _dimension, _units in _MEASURES.items():
    for _entry in _units.split():
        _names, _, _size = _entry.partition("=")
        _UNITS |= dict.fromkeys(_names.split(","), (_dimension, Fraction(_size)))
_UNIT = re.compile(
    r"(?:(?P<before>square|sq\.?|cubic) )?(?P<unit>[a-z%$€£¥¢]+)(?: ?\^ ?{?(?P<power>[23])}?)?"
    r"(?: ?(?:per|/) ?(?P<per>[a-z]+))?[ .]*",
    re.IGNORECASE,
)
_TENS = {
    "dozen": 12,
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_SCALE = re.compile(rf"(?i) ?\b({'|'.join(_TENS)})s?\b")
_MARK = re.compile(
    r"\d ?_ ?{?\w+|\d +\.?\d|^-?[\d.]+[a-zA-Z]$|degrees ?[a-zA-Z]\b|\d ?['\"′″’”]+|"
    r"\d+/\d+/\d+|\d{4}-\d\d-\d\d|\b\d{3}-\d{4}\b"
)
"""Forms that math-verify drops or computes: it takes 12_7 for 12, "2 3" for 5, 5m for 5, 6'2" for
62, a date for a number."""
_WORD = re.compile(
    r"\\text\w*\s*{[^{}]*}|"
    r"\b(?:[ap]\.?m\.?|north|south|east|west|and|or|no|on|left|right|up|down|odd|even)(?![a-z])",
    re.IGNORECASE,
)


_SHORTEST_WORD = 3  # letters; a shorter text may be a product


class Quantity(NamedTuple):
    """A number, the dimension of its unit ("" without a unit, "%" for percent), and the size of the
    unit."""

    value: Fraction
    dimension: str = ""
    size: Fraction = Fraction(1)


class Several(NamedTuple):
    """A sequence of answers; the brackets are "" if there are none."""

    opening: str
    entries: tuple[Quantity | Several | str, ...]
    closing: str


Read = Quantity | Several | str


def label_text(label: Any) -> str:
    """A label of any JSON or CSV type as a text: 4, 4.0, "4" and ["4"] are the same label.

    Raises ValueError for a map, a list whose length is not one, null, or a number that is not
    finite.
    """
    match label.item() if hasattr(label, "item") else label:
        case str(text):
            return text
        case bool(truth):
            return str(truth).lower()
        case int(number):
            return str(number)
        case float(number) if math.isfinite(number):
            return str(int(number)) if number.is_integer() else repr(number)
        case [only]:
            return label_text(only)
    raise ValueError(
        "a label must be a text, a number, true or false, or a list of one of them, got "
        f"{label!r:.80} (--data.label_key): change the data, or read it in a reward function of "
        "your own"
    )


def extract_answer(text: str) -> str | None:
    """The final answer stated in a text, or ``None``.

    Looks, in this order, for the last ``<answer>...</answer>``, the last ``\\boxed{...}`` and the
    last ``#### ...``.
    """
    if tagged := _TAG.findall(text):
        return _nonempty(tagged[-1])
    if (boxed := last_boxed(text)) is not None:
        return _nonempty(boxed)
    if hashed := _HASHES.findall(text):
        return _nonempty(hashed[-1])
    return None


def answer_alone(text: str, where: Stated) -> str:
    """A completion's answer as ``<answer>...</answer>``, or "" if it states none in the place
    ``where``.

    ``any``: returns the completion unchanged. ``tagged``: in the last ``<answer>``. ``line``: after
    the last ``Answer:``, see :func:`answer_line`.
    """
    if where == "any":
        return text
    if where == "line":
        stated = answer_line(text)
    else:
        tagged = _TAG.findall(text)
        stated = _nonempty(tagged[-1]) if tagged else None
    return "" if stated is None else f"<answer>{stated}</answer>"


def answer_line(text: str) -> str | None:
    """The text after the last ``Answer:`` in the last 300 characters, up to the end of its line, as
    in verl's ``math_dapo``.

    For a boxed answer, only the content of the box.
    """
    found = _LINE.findall(text[-_LINE_CHARACTERS:])
    if not found:
        return None
    stated = found[-1].strip()
    return extract_answer(stated) or stated


def last_number(text: str) -> str | None:
    """The last number in a text, without its currency sign; a fraction or a mixed number counts as
    one number."""
    found = [match[0] for match in _IN_TEXT.finditer(_undressed(text))]
    return re.sub("[$€£¥]", "", found[-1]).rstrip(".") if found else None


def stated_answers(texts: Sequence[str], correct: Sequence[bool]) -> list[tuple[bool, str] | None]:
    """The vote of each completion of a problem, by text alone; None if it states no answer.

    All correct completions vote for one answer, since each equals the label; wrong ones vote for
    their :func:`normalized` text.
    """
    votes: list[tuple[bool, str] | None] = []
    for text, is_correct in zip(texts, correct, strict=True):
        answer = extract_answer(text)
        if answer is None:
            votes.append(None)
        elif is_correct:
            votes.append((is_correct, ""))
        else:
            votes.append((is_correct, normalized(answer)))
    return votes


def answers_equal(first: str, second: str) -> bool:
    """Whether two answers are the same number, the same list, or the same text.

    A number without a unit equals the same number with one, because labels often omit it. Units of
    one dimension are converted. 50 % equals both 50, for questions that want a percentage, and 1/2.
    Sets have no order; other lists do.
    """
    return _same(_read(first), _read(second))


def is_number(answer: str) -> bool:
    """Whether an answer is parsed as a number, with or without a unit."""
    return isinstance(_read(answer), Quantity)


def surely_different(first: str, second: str) -> bool:
    """Whether two unequal answers are surely different, so that no symbolic comparison, which might
    wrongly equate them, is needed.

    True for different numbers, different words, lists of different numbers, a number and a list,
    different brackets, and texts with different words for a power of ten or different notations
    such as a base.
    """
    if max(len(first), len(second)) > _LONGEST_READ:
        return True
    left = _read(first)
    right = _read(second)
    if isinstance(left, str) or isinstance(right, str):
        if _is_word(left) and _is_word(right):
            return True
        for pattern in (_SCALE, _MARK):
            found = sorted(pattern.findall(_undressed(first)))
            if found != sorted(pattern.findall(_undressed(second))):
                return True
        words, others = _words(first), _words(second)
        return bool(words and others and words != others)
    if isinstance(left, Quantity) and isinstance(right, Quantity):
        return not _same(left, right)
    if isinstance(left, Several) and isinstance(right, Several):
        if left.opening or right.opening:
            return bool(left.opening and right.opening) and left[::2] != right[::2]
        mine = sorted(map(_written, left.entries))
        theirs = sorted(map(_written, right.entries))
        numbers = all(isinstance(entry, Quantity) for entry in (*left.entries, *right.entries))
        return len(mine) != len(theirs) or (numbers and mine != theirs)
    return not any(isinstance(read, Several) and len(read.entries) == 1 for read in (left, right))


def _is_word(read: Read) -> bool:
    """Whether an answer is a word, and surely not a product of its letters."""
    return isinstance(read, str) and len(read) >= _SHORTEST_WORD and read.isalpha()


def _words(answer: str) -> set[str]:
    """Words of an answer that say more than a number: ``\\text{ p.m.}`` as ``pm``, and a plural as
    its singular."""
    words = set()
    for found in _WORD.findall(answer):
        letters = re.sub(r"[^a-z]", "", re.sub(r"\\text\w*", "", found).lower())
        words.add(letters.removesuffix("s"))
    return words - {""}


def normalized(answer: str) -> str:
    """An answer as a text that is the same for equal numbers, without units, currency and percent
    signs, and LaTeX markup."""
    return _written(_read(answer))


def last_boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{...}`` of a text; ``None`` without one, or if it is not
    closed."""
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


def _same(left: Read, right: Read) -> bool:
    if isinstance(left, Quantity) and isinstance(right, Quantity):
        if left.dimension and right.dimension:
            return (left.dimension, left.value * left.size) == (
                right.dimension,
                right.value * right.size,
            )
        percent, other = (left, right) if left.dimension == "%" else (right, left)
        return percent.value == other.value or (
            percent.dimension == "%" and percent.value == 100 * other.value
        )
    if isinstance(left, Several) and isinstance(right, Several):
        mine, theirs = _entries(left), _entries(right)
        if (left.opening, left.closing, len(mine)) != (right.opening, right.closing, len(theirs)):
            return False
        return all(_same(*pair) for pair in zip(mine, theirs, strict=True))
    return left == right


def _entries(several: Several) -> Sequence[Read]:
    """The entries; of a set, sorted and without duplicates."""
    if several.opening != "{":
        return several.entries
    by_text = {_written(entry): entry for entry in several.entries}
    return [by_text[text] for text in sorted(by_text)]


def _written(read: Read) -> str:
    if isinstance(read, Several):
        return f"{read.opening}{','.join(map(_written, read.entries))}{read.closing}"
    return read if isinstance(read, str) else str(read.value)


def _read(answer: str) -> Read:
    if len(answer) > _LONGEST_READ:
        return "".join(answer.split())
    return _read_plain(_undressed(answer).strip(" *").removesuffix(".").strip(), 0)


def _undressed(text: str) -> str:
    text = _in_ascii(text).strip()
    if len(text) > 2 and text[0] == text[-1] == "$":
        text = text[1:-1]
    for pattern, replacement in _DRESSING:
        text = pattern.sub(replacement, text)
    return text


def with_roots(text: str) -> str:
    """Converts ``√2``, ``√(x+1)`` to LaTeX."""
    return _ROOT.sub(lambda m: f"\\sqrt{{{m[1] or m[2] or m[3]}}}", text)


def _repeating(whole: str, once: str, again: str) -> str:
    """A repeating decimal as a fraction."""
    nines = 10 ** len(once) * (10 ** len(again) - 1)
    return f"\\frac{{{int(whole + once + again) - int(whole + once or '0')}}}{{{nines}}}"


def _in_ascii(text: str) -> str:
    if text.isascii():
        return text
    text = with_roots(text)
    text = _RAISED.sub(lambda m: f"^{{{unicodedata.normalize('NFKC', m[0])}}}", text)
    return "".join(map(_character, text.translate(_SIGNS))).translate(_SIGNS)


def _character(character: str) -> str:
    """Full-width digits and signs as plain ones, a fraction character as two numbers, "" for an
    invisible character."""
    kind = unicodedata.decomposition(character).partition(" ")[0]
    if kind == "<fraction>":
        return " " + unicodedata.normalize("NFKC", character)
    if kind in ("<wide>", "<font>"):
        return unicodedata.normalize("NFKC", character)
    if unicodedata.category(character) == "Cf":
        return ""
    digit = unicodedata.decimal(character, None)
    return character if digit is None else str(digit)


def _read_plain(text: str, depth: int) -> Read:
    if (quantity := _quantity(text)) is not None:
        return quantity
    if depth == 0 and not re.search(r"[(\[{]", text):
        text = _GROUPS.sub(lambda m: m[0].replace(",", ""), text)
    opening, inside, closing = _without_brackets(text)
    parts = _split(inside)
    if depth < _DEEPEST and opening + closing == "()" and len(parts) == 1:
        return _read_plain(inside.strip(), depth + 1)
    if depth < _DEEPEST and (opening or len(parts) > 1):
        entries = [_read_plain(part.strip(), depth + 1) for part in parts]
        return Several(opening, tuple(entries), closing)
    text = _BLANKS.sub("", text).rstrip(".")
    return text.casefold() if len(text) > 1 and text.isalpha() else text


def _without_brackets(text: str) -> tuple[str, str, str]:
    """The brackets around the whole text and the text inside; "" for missing brackets."""
    depths = [*_depths(text)]
    around = (
        bool(depths)
        and text[0] in "([{"
        and text[-1] in ")]}"
        and depths[-1] == 0
        and 0 not in depths[:-1]
    )
    return (text[0], text[1:-1], text[-1]) if around else ("", text, "")


def _depths(text: str) -> Iterator[int]:
    """The number of open brackets after each character."""
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        yield depth


def _split(text: str) -> list[str]:
    """The parts between the commas outside brackets."""
    parts = []
    start = 0
    for place, depth in enumerate(_depths(text)):
        if depth == 0 and text[place] == ",":
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]


def _quantity(text: str) -> Quantity | None:
    signs = _SIGN.match(text)
    assert signs is not None  # every part of it is optional
    sign, money, inner = signs.groups()
    if sign and inner:
        return None
    for written in _WRITTEN:
        if (found := written.match(text, signs.end())) is None:
            continue
        if (unit := _unit(text[found.end() :], money)) is None:
            continue
        value = _value(written, [part for part in found.groups() if part is not None])
        if value is None:
            return None
        factor, dimension, size = unit
        value *= factor
        if "-" in sign + inner:
            value = -value
        return Quantity(value, dimension, size)
    return None


def _value(written: re.Pattern[str], parts: list[str]) -> Fraction | None:
    """The number; None if a denominator is zero, or a whole number precedes an improper
    fraction."""
    first, *others = (Fraction(part.replace(",", "").replace(" ", "")) for part in parts)
    if written is _MIXED:
        return first + others[0] / others[1] if others[0] < others[1] else None
    if written is _FRACTION:
        return first / others[0] if others[0] else None
    return first * Fraction(10) ** int(others[0]) if others else first


def _unit(text: str, money: str) -> tuple[Fraction, str, Fraction] | None:
    """The factor of a number, and the dimension and size of its unit; None if the text is not a
    unit."""
    scale = Fraction(1)
    blank = text.startswith(" ")
    while found := _SCALE.match(text):
        scale *= _TENS[found[1].lower()]
        text = text[found.end() :]
    text = f"{money}{text}".strip(" .")
    if not text:
        return scale, "", Fraction(1)
    if (found := _UNIT.fullmatch(text)) is None or (word := found["unit"].lower()) not in _UNITS:
        return None
    if len(word) == 1 and word.isalpha() and not blank:  # 5m is a product
        return None

    dimension, size = _UNITS[word]
    power = int(found["power"] or {"s": 2, "c": 3}.get((found["before"] or " ")[0].lower(), 1))
    size **= power
    if dimension and power > 1:
        dimension += f"^{power}"
    if (per := found["per"]) is not None:
        other_dimension, other_size = _UNITS.get(per.lower(), (per, Fraction(1)))
        dimension += f"/{other_dimension}"
        size /= other_size
    return scale, dimension, size
