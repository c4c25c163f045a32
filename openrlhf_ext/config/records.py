"""Every record of a data file, looked at before anything starts: each has a prompt and a label of one type.

The file is read as ``datasets`` reads it later, a part at a time, and nothing of it is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from openrlhf_ext.inputs import InputError, decode, is_integer, is_number, json_array, json_lines, reading, type_name

_FAULTS_KEPT = 6
_CSV_ROWS = 10_000  # datasets/packaged_modules/csv/csv.py:64; the types of a column are found for so many rows
_COLUMNS_BYTES = 10 << 20  # datasets/packaged_modules/json/json.py:55: later lines bring no new columns
Records = Iterator[tuple[str, Any, bool]]  # a place, such as "line 3"; what stands there; whether keys may be new


@dataclass(frozen=True)
class Wanted:
    """What is read of a record.

    Attributes:
        prompt: key of the prompt.
        label: key of the label; None if there is none.
        chat: a prompt may be a list of messages.
    """

    prompt: str
    label: str | None = None
    chat: bool = False


@dataclass
class Scan:
    """What a data file holds.

    Attributes:
        records: how many there are.
        keys: of the first record.
        faults: the first six faults of records, each with its place.
        first_prompt: of the first record.
    """

    records: int = 0
    keys: tuple[str, ...] = ()
    faults: list[str] = field(default_factory=list)
    first_prompt: Any = None


def scan_records(path: str, wanted: Wanted) -> Scan | None:
    """Reads all records of a data file; None for what is no file.

    Raises:
        InputError: the file cannot be read on: it is none of its form, or holds no record.
    """
    if (records := _records(path, wanted)) is None:
        return None
    scan, types = Scan(), _Types()
    for place, record, may_be_new in records:
        scan.records += 1
        if scan.records == 1:
            if isinstance(record, InputError):
                raise InputError(f"{path}, {place} {record}")
            if not isinstance(record, dict):
                raise InputError(f"the first record of {path} must be a mapping, got a {type_name(record)}")
            scan.keys, scan.first_prompt = tuple(record), record.get(wanted.prompt)
        if (fault := record_fault(record, wanted) or types.fault(record, may_be_new)) is not None:
            scan.faults.append(f"{place} {fault}")
            if len(scan.faults) == _FAULTS_KEPT:
                break
    if not scan.records:
        raise InputError(f"{path} has no readable first record: it is empty")
    return scan


def first_record(path: str, wanted: Wanted) -> dict[str, Any] | None:
    """The first record of a data file that ``scan_records`` has found good; None for what is no file."""
    records = _records(path, wanted)
    return None if records is None else next(record for _, record, _ in records)


def _records(path: str, wanted: Wanted) -> Records | None:
    forms: dict[str, Callable[[str, Wanted], Records]] = {
        ".jsonl": _json_records, ".json": _json_records, ".csv": _csv_records, ".parquet": _parquet_records,
        ".arrow": _arrow_records,
    }  # fmt: skip
    form = forms.get(Path(path).suffix.lower())
    return form(path, wanted) if form is not None and Path(path).is_file() else None


def record_fault(record: Any, wanted: Wanted) -> str | None:
    """Why a record cannot be used, None if it can: its prompt is a text or a list of messages, its label is there."""
    if isinstance(record, InputError):
        return str(record)
    if not isinstance(record, dict):
        return f"holds a {type_name(record)}, not a mapping"
    prompt = record.get(wanted.prompt)
    if not prompt and prompt != 0:
        return f"has {'no' if wanted.prompt not in record else 'an empty'} {wanted.prompt!r}"
    if not isinstance(prompt, str) and (fault := _messages_fault(prompt, wanted.chat)) is not None:
        return f"has a {type_name(prompt)} under {wanted.prompt!r}, which must be {fault}"
    if wanted.label is not None and record.get(wanted.label) is None:
        return f"has {'no' if wanted.label not in record else 'an empty'} {wanted.label!r}"
    return None


def _messages_fault(prompt: Any, chat: bool) -> str | None:
    if not chat:
        return "a text"
    if not isinstance(prompt, list):
        return "a text or a list of messages"
    roles = (isinstance(message, dict) and isinstance(message.get("role"), str) for message in prompt)
    contents = (isinstance(m, dict) and isinstance(m.get("content"), (str, list)) for m in prompt)
    return None if all(roles) and all(contents) else "a list of messages, each with the texts 'role' and 'content'"


class _Types:
    """The type of each key in all records so far: Arrow, in which ``datasets`` keeps them, has one for a column."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, _Types]] = {}

    def fault(self, record: dict[str, Any], may_be_new: bool) -> str | None:
        """Why a record does not fit the earlier ones, None if it does."""
        for key, value in record.items():
            if value is None:
                continue
            name = type_name(value)
            if (known := self._known.get(key)) is None:
                if not may_be_new:
                    return f"has the key {key!r}, which no record of the first 10 MiB has: give it to the first one too"
                known = self._known[key] = (name, _Types())
            if known[0] != name:
                return f"has a {name} under {key!r}, where earlier records have a {known[0]}"
            if name == "number":
                if not (is_integer(value) if isinstance(value, int) else is_number(value)):
                    return f"has a number under {key!r} that 64 bits do not hold"
            elif name in ("list", "map"):
                entries = [value] if name == "map" else [{"": entry} for entry in value]
                if (fault := next(filter(None, (known[1].fault(e, may_be_new) for e in entries)), None)) is not None:
                    return f"{fault} (under {key!r})" if key else fault
        return None


# ---- forms of files --------------------------------------------------------------------------------------------------


def _json_records(path: str, wanted: Wanted) -> Records:
    """One record on each line, or one array of them."""
    seen = 0
    for number, line in json_lines(path):
        if not seen and line.lstrip().startswith(b"["):
            yield from ((f"record {at}", record, True) for at, record in json_array(path))
            return
        yield f"line {number}", _record_or_fault(line), seen < _COLUMNS_BYTES
        seen += len(line)


def _record_or_fault(line: bytes) -> Any:
    """A line that is no JSON is a fault of this record: those behind it can be read."""
    try:
        return decode(line, "cannot be read")
    except InputError as error:
        return error


def _csv_records(path: str, wanted: Wanted) -> Records:
    """pandas reads it, as for ``datasets``: NA, null and None are no text to it but a value that is missing."""
    import pandas

    number = count(1)
    with reading(path, "as CSV"), pandas.read_csv(path, chunksize=_CSV_ROWS) as parts:
        for part in parts:
            if not isinstance(part.index, pandas.RangeIndex):
                raise InputError(
                    f"{path}: its rows have more fields than its first line; put texts with commas in quotes"
                )
            plain = part.astype(object).where(part.notna(), None)
            for row in plain.to_dict("records"):
                yield f"record {next(number)}", {str(key): value for key, value in row.items()}, True


def _parquet_records(path: str, wanted: Wanted) -> Records:
    import pyarrow.parquet

    with reading(path, "as parquet"), pyarrow.parquet.ParquetFile(path) as file:
        yield from _rows(file.schema_arrow, file.iter_batches(columns=_columns(file.schema_arrow, wanted)), wanted)


def _arrow_records(path: str, wanted: Wanted) -> Records:
    import pyarrow

    with reading(path, "as Arrow"), pyarrow.OSFile(path) as file:
        try:
            opened = pyarrow.ipc.open_stream(file)
            batches = iter(opened)
        except pyarrow.ArrowInvalid:  # the other of Arrow's two formats, as datasets/packaged_modules/arrow/arrow.py:42
            opened = pyarrow.ipc.open_file(file)
            batches = map(opened.get_batch, range(opened.num_record_batches))
        yield from _rows(opened.schema, batches, wanted)


def _columns(schema: Any, wanted: Wanted) -> list[str]:
    return [name for name in (wanted.prompt, wanted.label) if name is not None and name in schema.names]


def _rows(schema: Any, batches: Iterator[Any], wanted: Wanted) -> Records:
    """Rows of the columns that are read, under all names of the schema in the first of them."""
    number, columns = count(1), _columns(schema, wanted)
    for batch in batches:
        batch.validate(full=True)  # or offsets of a damaged file are followed out of the buffers, and the process dies
        for row in batch.select(columns).to_pylist() if columns else [{}] * batch.num_rows:
            place = next(number)
            yield f"record {place}", {**(dict.fromkeys(schema.names) if place == 1 else {}), **row}, True
