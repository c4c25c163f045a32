"""The one door for files that a user brings: bounded reading into plain values, and one error that
says what is wrong.

Whoever reads JSON, lines of JSON or a file by means of another library does it here, so that a file
that is cut off, of another encoding, nested without end or of other types ends as an
:class:`InputError` with file, place, key, rule and remedy. Imports the standard library alone.
"""

from __future__ import annotations

import codecs
import difflib
import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

FILE_BYTES = 1 << 28
"""Of a file that is read at once; the largest tokenizers have some 30 MB."""
LINE_BYTES = 1 << 26
"""Of a line of JSON, and of an element of a JSON array."""
_LEVELS = 64
_DIGITS = 100  # tokenizer_config.json has a model_max_length of 10^30
_CHUNK = 1 << 20
_SPACE = re.compile(r"[ \t\n\r]*")
_SURROGATE = re.compile("[\ud800-\udfff]")
_SHOWN_CHARACTERS = 100
_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]*)=(.*)", re.DOTALL)
_NAMES = {
    dict: "map",
    list: "list",
    str: "text",
    bool: "true or false",
    int: "number",
    float: "number",
}


class InputError(ValueError):
    """A file that is absent or does not hold what it should; the message has file, place, key, rule
    and remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


def type_name(value: Any) -> str:
    return "null" if value is None else _NAMES.get(type(value), type(value).__name__)


def shown(value: Any) -> str:
    return shortened("null" if value is None else repr(value), _SHOWN_CHARACTERS)


def shortened(text: str, most: int = 3000) -> str:
    """A message without its middle, if it is longer: whatever it echoes may be of any length."""
    half = most // 2
    if (left_out := len(text) - most) <= 0:
        return text
    return f"{text[:half]} ... ({left_out} characters left out) ... {text[-half:]}"


def require_one_beginning(tokenizer: Any, texts: Sequence[Sequence[int]], where: str) -> None:
    """Raises InputError if the tokens of a text begin with the beginning-of-sequence token twice;
    warns if none does and the tokenizer would put it there: texts are tokenized as they stand."""
    bos = tokenizer.bos_token_id
    if bos is None or not len(texts):
        return
    if twice := [number for number, ids in enumerate(texts, start=1) if [*ids[:2]] == [bos, bos]]:
        raise InputError(
            f"{where}: {len(twice)} of {len(texts)} begin with {tokenizer.bos_token!r} twice, "
            f"the first is record {twice[0]}: the chat template writes it and so does the "
            "record; remove one of them"
        )
    if tokenizer("a")["input_ids"][:1] == [bos] and not any([*ids[:1]] == [bos] for ids in texts):
        logger.warning(
            "%s: none begins with %r, which the tokenizer would put there: texts are tokenized "
            "as they stand; write it into the template if the model was trained with it",
            where,
            tokenizer.bos_token,
        )


# ---- kinds of values


@dataclass(frozen=True)
class Kind:
    words: str
    holds: Callable[[Any], bool]


NOTHING: Mapping[str, Kind] = {}


def is_number(value: Any) -> bool:
    """A finite number that a float can hold."""
    is_plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_plain and abs(value) < 1e308 and not math.isnan(value)


def is_integer(value: Any) -> bool:
    """An integer of 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


TEXT = Kind("a text", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
NUMBER = Kind("a finite number", is_number)
INTEGER = Kind("an integer", is_integer)
TEXT_OR_INTEGER = Kind(
    "a text or an integer", lambda value: isinstance(value, str) or is_integer(value)
)
MAP = Kind("a map", lambda value: isinstance(value, dict))
FILE_NAME = Kind(
    "the name of a file in the same folder",
    lambda v: (
        isinstance(v, str)
        and 0 < len(v.encode()) < 256
        and v not in (".", "..")
        and not set(v) & set("/\\\0")
    ),
)

INNER_PATH = Kind(
    "the path of a file inside of the folder, with forward slashes",
    lambda v: isinstance(v, str) and len(v) < 4096 and all(map(FILE_NAME.holds, v.split("/"))),
)


def list_of(kind: Kind) -> Kind:
    return Kind(
        f"a list, each entry {kind.words}",
        lambda v: isinstance(v, list) and all(map(kind.holds, v)),
    )


def map_of(kind: Kind) -> Kind:
    return Kind(
        f"a map, each value {kind.words}",
        lambda v: isinstance(v, dict) and all(map(kind.holds, v.values())),
    )


def map_with(required: Mapping[str, Kind], optional: Mapping[str, Kind] = NOTHING) -> Kind:
    """A map with these keys; it may have others."""
    wanted = {**required, **optional}

    def holds(value: Any) -> bool:
        is_whole = isinstance(value, dict) and all(key in value for key in required)
        return is_whole and all(
            kind.holds(value[key]) for key, kind in wanted.items() if key in value
        )

    words = ", ".join(
        f"{key} ({kind.words}{'' if key in required else ', if any'})"
        for key, kind in wanted.items()
    )
    return Kind(f"a map with {words}", holds)


def or_null(kind: Kind) -> Kind:
    return Kind(f"{kind.words}, or null", lambda value: value is None or kind.holds(value))


def check(
    value: Any,
    where: str,
    required: Mapping[str, Kind],
    optional: Mapping[str, Kind] = NOTHING,
    remedy: str = "",
) -> dict[str, Any]:
    """``value``, which has to be a map with these keys; it may have others. InputError lists
    everything that is wrong.

    ``where``: file and place, at the start of the message.
    """
    end = f"; {remedy}" if remedy else ""
    if not isinstance(value, dict):
        raise InputError(f"{where}: must be a JSON object, got a {type_name(value)}{end}")
    faults = []
    if missing := [key for key in required if key not in value]:
        faults.append(
            f"needs {', '.join(missing)}, has {', '.join(map(shown, value)) or 'no keys'}"
        )
    for key, kind in {**required, **optional}.items():
        if key in value and not kind.holds(value[key]):
            faults.append(f"{key} must be {kind.words}, got {shown(value[key])}")
    if faults:
        raise InputError(f"{where}: {'; '.join(faults)}{end}")
    return value


# ---- files


@contextmanager
def reading(path: str | Path, how: str = "") -> Iterator[None]:
    """Whatever goes wrong inside is said of the file, as InputError: other people's parsers raise
    what they like, and a Rust library's panic is no ``Exception``. ``how``: in what form it is
    read, such as ``"as safetensors"``."""
    try:
        yield
    except InputError:
        raise
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}; save it as UTF-8"
        ) from error
    except OSError as error:
        hint = similar_path(path) if isinstance(error, FileNotFoundError) else ""
        hint = "; give one of its files" if isinstance(error, IsADirectoryError) else hint
        raise InputError(f"{path} cannot be read: {error.strerror or error}{hint}") from error
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error.__cause__ or error).split())  # of datasets' "An error occurred"
        raise InputError(
            f"{path} cannot be read{how and ' '}{how}: {type(error).__name__}: {reason:.500}"
        ) from error


def named_part(text: str) -> tuple[str, str]:
    """(name, rest) of ``name=rest``; the name is empty where there is none, as in paths and
    addresses."""
    found = _NAMED.fullmatch(text.strip())
    return (found[1], found[2].strip()) if found else ("", text.strip())


def path_exists(text: str) -> bool:
    """Whether a local file or folder is there; ``~`` is expanded."""
    return os.path.exists(os.path.expanduser(text.strip()))


def split_inputs(value: str) -> Iterator[str]:
    """The inputs of a value that commas separate. A path that exists may have commas of its own."""
    parts = value.split(",")
    while parts:
        taken = 1
        for end in range(len(parts), 1, -1):
            text = ",".join(parts[:end])
            if path_exists(text) or path_exists(named_part(text)[1]):
                taken = end
                break
        yield ",".join(parts[:taken]).strip()
        parts = parts[taken:]


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The known name that looks most like this one; of equally close ones that with the same
    letters."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=cutoff)
    return next(
        (other for other in close if sorted(other) == sorted(name)), next(iter(close), None)
    )


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "", cutoff: float = 0.5) -> str:
    """The question, or what is said where no known name is near."""
    near = nearest(name, known, cutoff)
    return f"did you mean {near}?" if near else otherwise


def similar_path(path: str | Path) -> str:
    """What may have been meant by a path that does not exist, to follow a message; empty if nothing
    is near."""
    path = Path(path)
    try:
        near = nearest(path.name, [other.name for other in path.parent.iterdir()], cutoff=0.7)
    except OSError:  # the folder does not exist either, or is not ours to read
        return ""
    return f"; did you mean {path.parent / near}?" if near and near != path.name else ""


def free_name(path: Path) -> Path:
    """The path with the first number behind it that is not taken."""
    number = 1
    while (candidate := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return candidate


def shipped(path: str) -> Path:
    """A file or folder of the checkout, such as ``configs/models``, or its copy in the installed
    package."""
    package = Path(__file__).resolve().parent
    return package / path if (package / path).exists() else package.parent / path


def read_text(path: str | Path, most: int = FILE_BYTES) -> str:
    """The text of a file of at most ``most`` bytes, in UTF-8."""
    with reading(path), open(path, "rb") as file:
        content = file.read(most + 1)
        if len(content) > most:
            raise InputError(
                f"{path} is too large: it must have at most {most} bytes; is it the right file?"
            )
        return content.decode("utf-8-sig")


def sha256_of(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(
    path: str | Path, required: Mapping[str, Kind] = NOTHING, optional: Mapping[str, Kind] = NOTHING
) -> dict[str, Any]:
    """The JSON object that a file holds; ``required`` and ``optional`` as for :func:`check`."""
    return check(decode(read_text(path), str(path)), str(path), required, optional)


def decode_record(text: str | bytes, where: str) -> Any:
    """As :func:`decode`; InputError also for a map that has a key twice."""
    return decode(text, where, _RECORD_DECODER)


def decode(text: str | bytes, where: str, decoder: json.JSONDecoder | None = None) -> Any:
    """The value of a JSON text; InputError also for more than 64 levels, an integer of more than
    100 digits, a number that no float holds, or half of a UTF-16 pair."""
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        # of a line that is cut off, the error is on no second line
        value = (decoder or _DECODER).decode(text.rstrip(" \t\r\n"))
    except json.JSONDecodeError as error:
        place = (
            f"line {error.lineno}, column {error.colno}"
            if error.lineno > 1
            else f"column {error.colno}"
        )
        raise InputError(f"{where}: not JSON ({error.msg} at {place})") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where}: not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from error
    except RecursionError as error:
        raise InputError(f"{where}: nested deeper than {_LEVELS} levels") from error
    except ValueError as error:
        raise InputError(f"{where}: not JSON that can be read: {error}") from error
    return _checked(value, text, where)


def _checked(value: Any, text: str, where: str) -> Any:
    """The value of ``text``, unless it is nested too deep or holds what cannot be written as
    UTF-8."""
    if _is_deep(value):
        raise InputError(f"{where}: nested deeper than {_LEVELS} levels")
    if "\\u" in text and _SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        raise InputError(
            f"{where}: a text holds half of a UTF-16 pair (\\ud800 to \\udfff), which is no "
            "character"
        )
    return value


def _is_deep(value: Any) -> bool:
    level, levels = [value] if isinstance(value, (dict, list)) else [], 0
    while level and levels <= _LEVELS:
        entries = (
            entry
            for outer in level
            for entry in (outer.values() if isinstance(outer, dict) else outer)
        )
        level, levels = [entry for entry in entries if isinstance(entry, (dict, list))], levels + 1
    return levels > _LEVELS


def json_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Number, from 1, and content of the lines that are not blank, without a byte order mark at the
    beginning; InputError if one is longer than 64 MiB."""
    with reading(path), open(path, "rb") as file:
        number = 0
        if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
            file.seek(0)
        while line := file.readline(LINE_BYTES + 1):
            number += 1
            if len(line) > LINE_BYTES:
                said = f"longer than {LINE_BYTES} bytes; write one object on each line"
                raise InputError(f"{path}, line {number}: {said}")
            if not line.isspace():
                yield number, line


def json_array(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Number, from 1, and value of the elements of a file that is one JSON array; one chunk of it
    is held at a time.

    InputError if an element is longer than 64 MiB.
    """
    with reading(path), open(path, encoding="utf-8-sig") as file:
        text = file.read(_CHUNK)
        at, number = _behind_space(text, 0) + 1, 0
        while True:
            number += 1
            while (found := _element(text, at, may_end=number == 1)) is None:
                more = file.read(max(_CHUNK, len(text) - at))
                if not more or len(text) - at > LINE_BYTES:
                    # says what is wrong with it, in most cases
                    decode_record(text[at:], f"{path}, record {number}")
                    raise InputError(f"{path}, record {number}: the array does not end behind it")
                text, at = text[at:] + more, 0
            value, start, end, at = found
            if start < end:
                yield number, _checked(value, text[start:end], f"{path}, record {number}")
            if text[at - 1] == "]":
                break
        if (text[at:] + file.read(_CHUNK)).strip():
            raise InputError(f"{path}: something follows the end of the array")


def _element(text: str, at: int, may_end: bool) -> tuple[Any, int, int, int] | None:
    """Value, start and end of the element at ``at``, and the place behind the comma or bracket that
    follows.

    None where ``text`` holds no whole element. ``may_end``: the bracket may follow at once, as in
    an empty array.
    """
    start = _behind_space(text, at)
    try:
        ends = may_end and text[start : start + 1] == "]"
        value, end = (None, start) if ends else _RECORD_DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    behind = _behind_space(text, end)
    return (value, start, end, behind + 1) if text[behind : behind + 1] in ("]", ",") else None


def _behind_space(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]  # matches nothing, too


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"an integer of {len(text)} digits, {_DIGITS} are the most")
    return int(text)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _number(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"no float holds {text:.40}")
    return number


def _with_unlike_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(
            f"the key {next(key for key in keys if keys.count(key) > 1)!r} is there twice"
        )
    return value


_DECODER = json.JSONDecoder(parse_int=_integer, parse_float=_number, parse_constant=_no_constant)
_RECORD_DECODER = json.JSONDecoder(
    parse_int=_integer,
    parse_float=_number,
    parse_constant=_no_constant,
    object_pairs_hook=_with_unlike_keys,
)
