"""A look at what a run reads: paths, hub names and URLs; config.json and tokenizer of a model, records, source code."""

from __future__ import annotations

import ast
import csv
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from openrlhf_ext.options import PathKind

DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def is_url(text: str) -> bool:
    """Whether the text has a scheme, so that no local path is meant by it."""
    return "://" in text


def is_http_url(text: str) -> bool:
    """Whether the text is an http or https URL with a host."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:  # a malformed host
        return False


def is_hub_name(text: str) -> bool:
    """Whether the text has the form ``org/name`` of a Hugging Face hub name and no local folder is meant by it."""
    path = Path(text)
    if path.suffix.lower() in (*DATA_SUFFIXES, ".py"):
        return False
    return _HUB_NAME.fullmatch(text) is not None and not path.exists() and not path.parent.exists()


def resolve_path(value: str, kind: PathKind) -> str:
    """``value`` with its local paths made absolute (``~`` expanded).

    Args:
        value: one path, or several inputs separated by commas; ``path@folder`` as OpenRLHF's datasets allow.
        kind: inputs that are URLs, hub names or plain words (``agent``) stay as they are.
    """
    if not value.strip():
        return value  # refused; it would become the current directory
    if kind == "output":
        return _absolute(value)
    return ",".join(_resolve_input(part.strip()) for part in value.split(","))


def _absolute(text: str) -> str:
    return os.path.abspath(os.path.expanduser(text))


def _resolve_input(text: str) -> str:
    base, at, folder = text.partition("@")
    if not base or is_url(text) or is_hub_name(base):
        return text
    return _absolute(base) + at + folder


@dataclass(frozen=True)
class DatasetRef:
    """One dataset of a comma-separated list: a local path or a hub name, with an optional folder inside it."""

    path: str
    folder: str | None

    @property
    def suffix(self) -> str:
        return Path(self.path).suffix.lower()


def dataset_refs(value: str) -> Iterator[DatasetRef]:
    """The datasets of an option such as ``data.prompt_dataset``."""
    for part in value.split(","):
        path, _, folder = part.strip().partition("@")
        yield DatasetRef(path.strip(), folder.strip() or None)


_FLOATING = ("F64", "F32", "F16", "BF16")
_JSON_HEAD_BYTES = 1 << 20
_SCAN_BYTES = 16 << 20
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


class InputError(ValueError):
    """A file that is absent or does not hold what it should. The message names the file."""


def has_weights(folder: str) -> bool:
    """Whether a model folder holds weights; one of ``config.json`` alone is for a dry run."""
    return any(Path(folder).glob("*.safetensors"))


def first_record(path: str) -> dict[str, Any] | None:
    """The first record of a .jsonl, .json or .csv file; None for the binary forms, which are not opened here.

    Raises:
        InputError: the file is empty, malformed, or its first record is no mapping.
    """
    suffix = Path(path).suffix.lower()
    try:
        if suffix == ".csv":
            record = _first_csv_record(path)
        elif suffix in (".json", ".jsonl"):
            record = _first_json_record(path)
        else:
            return None
    except (OSError, ValueError, StopIteration) as error:
        reason = "it is empty" if isinstance(error, StopIteration) else error
        raise InputError(f"{path} has no readable first record: {reason}") from error
    if not isinstance(record, dict):
        raise InputError(f"the first record of {path} must be a mapping, got {type(record).__name__}")
    return record


def faulty_records(path: str, input_key: str) -> Iterator[str]:
    """What is wrong with records of a .jsonl file, one text for each, as far as ``_SCAN_BYTES`` reach.

    A record is faulty if its line is no JSON object, or if its prompt is missing, null or empty. Other forms are read
    by ``datasets`` alone, and what lies behind is seen when the prompts are loaded.
    """
    if Path(path).suffix.lower() != ".jsonl" or not Path(path).is_file():
        return
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip() and (fault := _record_fault(line, input_key)) is not None:
                yield f"line {number} {fault}"
            if file.tell() > _SCAN_BYTES:
                return


def _record_fault(line: bytes, input_key: str) -> str | None:
    try:
        record = json.loads(line)
    except ValueError as error:
        return f"is no JSON ({error})"
    if not isinstance(record, dict):
        return f"holds a {type(record).__name__}, not a mapping"
    if not record.get(input_key):
        return f"has {'no' if input_key not in record else 'an empty'} {input_key!r}"
    return None


def tokenizer_fault(folder: str, *, chat: bool) -> str | None:
    """Why a model folder cannot give the run its tokenizer, or with ``chat`` its chat template; None if it can."""
    path = Path(folder)
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        return f"holds no tokenizer ({', '.join(_TOKENIZER_FILES)}): copy the tokenizer's files there"
    if not chat or any((path / name).exists() for name in _TEMPLATE_FILES):
        return None
    try:
        settings = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        settings = {}
    if isinstance(settings, dict) and settings.get("chat_template"):
        return None
    return (
        "has a tokenizer without a chat template (a base model?): leave data.apply_chat_template out and use "
        "data.input_template, or take the instruct model's tokenizer"
    )


def tokenizer_difference(one: str, other: str) -> str | None:
    """What differs between the tokenizers of two model folders, None if they make the same ids of a text.

    ``tokenizer.json`` is compared by its vocabulary and merges, since tokenizers writes the same ones in several forms;
    other files have to be the same. Folders without a tokenizer are :func:`tokenizer_fault`'s business.
    """
    names = [{name for name in _TOKENIZER_FILES if (Path(folder) / name).is_file()} for folder in (one, other)]
    if not all(names):
        return None
    if not (common := [name for name in _TOKENIZER_FILES if name in names[0] & names[1]]):
        return f"{one} has {', '.join(sorted(names[0]))} and {other} has {', '.join(sorted(names[1]))}"
    paths = [Path(folder) / common[0] for folder in (one, other)]
    files = [path.read_bytes() for path in paths]
    if files[0] == files[1]:
        return None
    if common[0] != "tokenizer.json":
        return f"{paths[0]} and {paths[1]} differ"
    try:
        return _vocabulary_difference(*(json.loads(file) for file in files))
    except (ValueError, LookupError, TypeError, AttributeError):
        return f"{paths[0]} and {paths[1]} differ, and one of them cannot be read"


def _vocabulary_difference(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    mine, theirs = _token_of_id(one), _token_of_id(other)
    if differing := sorted(id_ for id_ in mine.keys() | theirs.keys() if mine.get(id_) != theirs.get(id_)):
        first = differing[0]
        return (
            f"{len(differing)} token ids mean different tokens, id {first} is {mine.get(first)!r} and "
            f"{theirs.get(first)!r}"
        )
    return None if _merges(one) == _merges(other) else "they have the same tokens and other merges"


def _token_of_id(tokenizer: dict[str, Any]) -> dict[int, str]:
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, list):  # pairs of token and score
        tokens = {id_: token for id_, (token, _) in enumerate(vocabulary)}
    else:
        tokens = {id_: token for token, id_ in vocabulary.items()}
    return tokens | {added["id"]: added["content"] for added in tokenizer.get("added_tokens") or ()}


def _merges(tokenizer: dict[str, Any]) -> list[str]:
    merges = tokenizer["model"].get("merges") or ()
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def count_records(path: str, limit: int) -> int | None:
    """Records of a .jsonl file, at most ``limit``; None for other forms and for what is no file."""
    if Path(path).suffix.lower() != ".jsonl" or not Path(path).is_file():
        return None
    with Path(path).open("rb") as file:
        return sum(1 for _ in islice((line for line in file if line.strip()), limit))


def _first_csv_record(path: str) -> dict[str, Any]:
    with Path(path).open(encoding="utf-8", newline="") as file:
        return next(csv.DictReader(file))


def _first_json_record(path: str) -> Any:
    """One record per line, or one array: the first record is decoded from the head of the file when it fits there."""
    with Path(path).open(encoding="utf-8") as file:
        head = file.read(_JSON_HEAD_BYTES).lstrip()
        if not head:
            raise StopIteration
        start = head.removeprefix("[").lstrip()
        try:
            return json.JSONDecoder().raw_decode(start)[0]
        except json.JSONDecodeError:
            if len(head) < _JSON_HEAD_BYTES // 2:
                raise
            return json.JSONDecoder().raw_decode(start + file.read())[0]


def require_definition(path: str, name: str) -> None:
    """Sees, without running it, that the Python file ``path`` defines ``name`` at top level.

    Raises:
        InputError: the file is absent, is no valid Python, or does not define the name.
    """
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"), filename=path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except (SyntaxError, ValueError) as error:
        raise InputError(f"{path} is not valid Python: {error}") from error
    defined = set(_top_level_names(tree.body))
    if name not in defined and "*" not in defined:
        found = ", ".join(sorted(defined)) or "nothing"
        raise InputError(f"{path} must define {name} at top level; it defines {found}")


def _top_level_names(statements: list[ast.stmt]) -> Iterator[str]:
    for statement in statements:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield statement.name
            case ast.Assign():
                yield from (target.id for target in statement.targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Import() | ast.ImportFrom():
                yield from (alias.asname or alias.name for alias in statement.names)
            case ast.If() | ast.Try():
                yield from _top_level_names(statement.body + statement.orelse)


def parameter_count(folder: str | None) -> int | None:
    """Parameters in a folder's safetensors files, from their headers; None if there is none or it is no such file."""
    files = sorted(Path(folder).glob("*.safetensors")) if folder is not None else []
    try:
        return sum(map(_elements, files)) or None
    except (OSError, ValueError, KeyError, AttributeError):
        return None  # whether the model can be loaded is checked, and reported, elsewhere


def _elements(path: Path) -> int:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length)) if length < path.stat().st_size else {}
    tensors = [t for name, t in header.items() if name != "__metadata__" and t["dtype"] in _FLOATING]
    return sum(math.prod(tensor["shape"]) for tensor in tensors)
