"""Records of data: the only reader of prompts, labels, messages and answers, for runs, checks and
evaluations.

A value keeps its type from the file: a text in a JSON file stays a text, whatever it contains, an
integer keeps all of its digits, and every field of a CSV file is a text.
"""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

from openrlhf_ext.config.files import DATA_SUFFIXES, DatasetRef, dataset_refs
from openrlhf_ext.inputs import (
    LINE_BYTES,
    InputError,
    decode,
    decode_record,
    json_array,
    json_lines,
    reading,
    type_name,
)

logger = logging.getLogger(__name__)
CHAT = "data.apply_chat_template"

FAULTS_KEPT = 6
HELD_OUT_SPLITS = ("validation", "valid", "val", "dev", "test", "eval", "heldout", "held_out")
"""Names of splits that are not for training; an evaluation uses the first one that the data set
has."""
TOOLS_ARE_NOT_READ = "the key 'tools' is not read: put the tools into a system message"
_FORMS = {".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
# Without this check these files would be read as JSON.
_NOT_READ = (".tsv", ".gz", ".bz2", ".xz", ".zst", ".zip", ".xlsx")
Chat = list[dict[str, Any]]
Records = Iterator[tuple[str, Any]]  # a place, such as "line 3", and the record there


@dataclass(frozen=True)
class Wanted:
    """Keys of prompt and label; with ``chat`` a prompt may be a list of messages.

    With ``answers`` the label is an answer to train on; without a label, the prompt is a chat whose
    last message is the answer.
    """

    prompt: str
    label: str | None = None
    chat: bool = False
    answers: bool = False
    label_option: str = "data.label_key"


# ---- data sets


@dataclass(frozen=True)
class Source:
    """One split of a data set: ``files`` of one format that this module reads, or ``rows``, a
    Hugging Face data set in a format that only the library ``datasets`` reads."""

    path: str
    form: str = ""
    files: tuple[str, ...] = ()
    rows: Any = None

    def records(self, wanted: Wanted) -> Records:
        """Yields all records, each with its file and place."""
        for file in self.files:
            for place, record in records_of(file, wanted, self.form):
                yield f"{file}, {place}" if len(self.files) > 1 else place, record
        if self.rows is not None:
            for number, record in enumerate(self.rows, start=1):
                yield f"record {number}", _without_nulls_of_messages(record, wanted)


def open_source(ref: DatasetRef, split: str | None) -> Source:
    """Opens a split of a data set, after downloading it if it is on the hub.

    Args:
        split: None: a held-out split (``HELD_OUT_SPLITS``) if the data set has several splits, else
            the only one.

    Raises:
        InputError: there is no such split, or the data set cannot be read.
    """
    if ref.is_file:
        if ref.folder is not None:
            raise InputError(
                f"{ref.path}@{ref.folder}: only a folder or a hub name can have an @, which names "
                "a folder inside it; shares of several data sets have their own option "
                "(data.prompt_probs, data.dataset_probs)"
            )
        if split not in ("train", None):
            raise InputError(
                f"{ref.path} is a file, which has only the split train: got {split!r}; leave the "
                "split out (data.prompt_split, data.dataset_split, eval.split)"
            )
        return Source(ref.path, files=(ref.path,))
    import datasets

    with reading(ref.path, "as a data set"):
        if any((Path(ref.path) / name).is_file() for name in ("dataset_dict.json", "state.json")):
            saved = datasets.load_from_disk(ref.path)
            splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
            return Source(ref.path, rows=splits[_chosen(ref.path, [*splits], split)])
        builder = datasets.load_dataset_builder(ref.path, data_dir=ref.folder)
        files = builder.config.data_files
        if files and builder.name in ("json", "csv", "parquet", "arrow"):
            names = [*map(str, files[_chosen(ref.path, [*map(str, files)], split)])]
            _say_what_is_left_out(Path(ref.path, ref.folder or ""), builder.name)
            there = datasets.DownloadManager(record_checksums=False).download_and_extract(names)
            return Source(ref.path, builder.name, tuple(map(str, there)))
        loaded = datasets.load_dataset(ref.path, data_dir=ref.folder)
        return Source(ref.path, rows=loaded[_chosen(ref.path, [*map(str, loaded)], split)])


def _say_what_is_left_out(folder: Path, form: str) -> None:
    """Warns about files that are not read: ``datasets`` reads only one format of a folder."""
    data = (path for path in sorted(folder.rglob("*")) if path.suffix.lower() in DATA_SUFFIXES)
    others = [
        path.name
        for path in data
        if _form_of(path) != form and not path.name.startswith(("dataset_info", "."))
    ]
    if others:
        warn_once(
            f"{folder}: only its {form} files are read, not other formats: {', '.join(others[:3])}"
        )


def _form_of(path: Path) -> str:
    """Returns the format of a file; a file other than .csv, .parquet or .arrow is read as JSON."""
    return _FORMS.get(path.suffix.lower(), "json")


def _chosen(path: str, names: list[str], split: str | None) -> str:
    if split is None:
        held_out = next((name for name in HELD_OUT_SPLITS if name in names), None)
        if held_out is not None:
            logger.info("%s: its split %s is evaluated (eval.split)", path, held_out)
            return held_out
        split = "train"
    if split not in names:
        raise InputError(f"{path} has no split {split!r}; it has {', '.join(names)}")
    return split


def read_records(
    value: str,
    split: str | None,
    wanted: Wanted,
    most: int,
    probabilities: str | None = None,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Yields the records of all data sets in ``value``, at most ``most`` from each and in total.

    The data sets come in order, or interleaved by ``probabilities`` as
    ``datasets.interleave_datasets`` does (OpenRLHF's ``blending_datasets``).

    Raises:
        InputError: a record cannot be used (with its place), or a data set cannot be read.
    """
    sources = [open_source(ref, split) for ref in dataset_refs(value)]
    sets = [
        _usable(islice(source.records(wanted), most), source.path, wanted) for source in sources
    ]
    if probabilities is None:
        yield from islice(chain.from_iterable(sets), most)
        return
    import datasets

    lists = [list(records) for records in sets]
    places = [
        datasets.Dataset.from_dict({"set": [number] * len(records), "row": range(len(records))})
        for number, records in enumerate(lists)
    ]
    shares = [float(share) for share in probabilities.split(",")]
    mixed = datasets.interleave_datasets(places, shares, seed, stopping_strategy="all_exhausted")
    for place in islice(mixed, most):
        yield lists[place["set"]][place["row"]]


def _usable(records: Records, path: str, wanted: Wanted) -> Iterator[dict[str, Any]]:
    for place, record in records:
        if (fault := record_fault(record, wanted)) is not None:
            raise InputError(f"{path}, {place} {fault}; fix or remove it")
        if wanted.chat and "tools" in record:
            warn_once(f"{path}: {TOOLS_ARE_NOT_READ}")
        yield record


@cache
def warn_once(text: str) -> None:
    logger.warning("%s", text)


# ---- checks of records


@dataclass
class Scan:
    """Contents of a data set: number of records, keys of the first record, the first six faults
    with their places."""

    records: int = 0
    keys: tuple[str, ...] = ()
    faults: list[str] = field(default_factory=list)


def scan_records(source: Source, wanted: Wanted) -> Scan:
    """Reads all records. Raises InputError if reading cannot continue.

    Labels for a grader must be all text or all other types. Otherwise a grader that compares text
    gives a record with a number no reward, without an error.
    """
    scan = Scan()
    first_type = ""
    for place, record in source.records(wanted):
        scan.records += 1
        if scan.records == 1:
            if not isinstance(record, dict):
                raise InputError(f"{source.path}, {place} {record_fault(record, wanted)}")
            scan.keys = tuple(record)
        fault = record_fault(record, wanted)
        if fault is None and wanted.label is not None and not wanted.answers:
            label_type = type_name(record[wanted.label])
            first_type = first_type or label_type
            if label_type != first_type and "text" in (label_type, first_type):
                fault = (
                    f"has a {label_type} under {wanted.label!r}, but the first record has a "
                    f"{first_type}: use one type"
                )
        if fault is not None:
            scan.faults.append(f"{place} {fault}")
            if len(scan.faults) == FAULTS_KEPT:
                break
    if not scan.records:
        raise InputError(f"{source.path} has no readable first record: it is empty")
    return scan


def record_fault(record: Any, wanted: Wanted) -> str | None:
    """Returns why a record cannot be used, or None. The prompt must be a text or a list of
    messages, and the label must exist."""
    if isinstance(record, InputError):
        return str(record)
    if not isinstance(record, dict):
        return f"holds a {type_name(record)}, not a mapping"
    prompt = record.get(wanted.prompt)
    if not prompt and prompt != 0:
        return f"has {'no' if wanted.prompt not in record else 'an empty'} {wanted.prompt!r}"
    if wanted.chat and isinstance(prompt, str) and _is_chat_as_text(prompt):
        return (
            f"has a list of messages under {wanted.prompt!r} that is written as text: write it as "
            "a JSON list"
        )
    if not isinstance(prompt, str) and (fault := _messages_fault(prompt, wanted.chat)) is not None:
        return f"has a {type_name(prompt)} under {wanted.prompt!r}, which must be {fault}"
    if wanted.label is not None:
        label = record.get(wanted.label)
        if label is None:
            return f"has {'no' if wanted.label not in record else 'an empty'} {wanted.label!r}"
        try:
            json.dumps(label, allow_nan=False)
        # A label must be valid JSON, or it cannot be sent to a grader in another process or on
        # another machine.
        except (TypeError, ValueError) as error:
            kind = type_name(label)
            return (
                f"has a {kind} under {wanted.label!r} that JSON cannot represent ({error}): write "
                "it as text"
            )
    return _answer_fault(record, wanted) if wanted.answers else None


def _answer_fault(record: dict[str, Any], wanted: Wanted) -> str | None:
    prompt, answer = record[wanted.prompt], None if wanted.label is None else record[wanted.label]
    if wanted.label is None:
        if isinstance(prompt, list) and len(prompt) > 1 and prompt[-1]["role"] == "assistant":
            return None
        return (
            f"has no chat under {wanted.prompt!r}: it must be a list of messages, the last one "
            "from the assistant"
        )
    if isinstance(answer, str) and isinstance(prompt, str):
        return None
    if (
        isinstance(prompt, list)
        and isinstance(answer, list)
        and _messages_fault(answer, True) is None
    ):
        return None
    need = "both must be texts" + (", or both lists of messages" if wanted.chat else "")
    return (
        f"has a {type_name(prompt)} under {wanted.prompt!r} and a {type_name(answer)} under "
        f"{wanted.label!r}; {need}"
    )


def _messages_fault(prompt: Any, chat: bool) -> str | None:
    if not chat:
        return f"a text, or with {CHAT} a list of messages"
    if not isinstance(prompt, list):
        return "a text or a list of messages"
    roles = (
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in prompt
    )
    contents = (isinstance(m, dict) and isinstance(as_text(m.get("content")), str) for m in prompt)
    return (
        None
        if all(roles) and all(contents)
        else "a list of messages, each with the texts 'role' and 'content'"
    )


def _is_chat_as_text(prompt: str) -> bool:
    """Whether a prompt is a list of messages written as text, as in a CSV file."""
    try:
        return prompt.lstrip().startswith("[") and _messages_fault(decode(prompt, ""), True) is None
    except InputError:
        return False


def as_text(content: Any) -> Any:
    """Joins a message's content if it is a list of text parts; returns other content unchanged.

    The chat template of a text-only model would render such a list as Python's repr.
    """
    parts: list[Any] = content if isinstance(content, list) else [None]
    if all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    return content


def as_chat(prompt: str | Chat, role: str = "user") -> Chat:
    """Returns messages in the form that chat templates expect; a text becomes one message."""
    if isinstance(prompt, str):
        return [{"role": role, "content": prompt}]
    return [{**message, "content": as_text(message["content"])} for message in prompt]


# ---- file formats


def records_of(path: str, wanted: Wanted | None = None, form: str = "") -> Records:
    """Yields all records of a data file, for parquet and Arrow only the ``wanted`` columns (None:
    all).

    The format follows from the suffix: a file other than .csv, .parquet or .arrow is read as JSON.
    A record that cannot be read is replaced by its InputError. Raises InputError if reading cannot
    continue.
    """
    suffix = Path(path).suffix.lower()
    if suffix in _NOT_READ:
        raise InputError(
            f"{path}: {suffix} files are not supported: convert it to .jsonl, .json, .csv, "
            ".parquet or .arrow"
        )
    form = form or _form_of(Path(path))
    if form == "json":
        yield from _json_records(path)
        return
    with reading(path, f"as {form}"):
        rows = _csv_rows(path) if form == "csv" else _arrow_rows(path, wanted, form)
        yield from ((f"record {number}", row) for number, row in enumerate(rows, start=1))


def _json_records(path: str) -> Records:
    """Yields one record per line, or the entries of one array."""
    is_first = True
    for number, line in json_lines(path):
        if is_first and line.lstrip().startswith(b"["):
            yield from ((f"record {at}", record) for at, record in json_array(path))
            return
        is_first = False
        try:
            yield f"line {number}", decode_record(line, "cannot be read")
        except InputError as error:  # only this record is faulty; later ones can be read
            yield f"line {number}", error


def _csv_rows(path: str) -> Iterator[dict[str, Any]]:
    """Yields rows whose fields are texts; an empty field is None."""
    csv.field_size_limit(LINE_BYTES)
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        names = reader.fieldnames or []
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise InputError(
                f"{path}: its first line has the column {twice[0]!r} twice; rename one of them"
            )
        for row in reader:
            if None in row:
                raise InputError(
                    f"{path}, line {reader.line_num} has more fields than the first line; "
                    "separate fields by commas, and put texts with commas in quotes"
                )
            yield {name: text or None for name, text in row.items()}


def _arrow_rows(path: str, wanted: Wanted | None, form: str) -> Iterator[dict[str, Any]]:
    """Yields rows of a parquet file or of either Arrow format; only the first row has the unwanted
    columns, as null."""
    import pyarrow.parquet

    with pyarrow.OSFile(path) as file:
        if form == "parquet":
            parquet = pyarrow.parquet.ParquetFile(file)
            schema = parquet.schema_arrow
        else:
            try:
                stream = pyarrow.ipc.open_stream(file)
                schema, batches = stream.schema, iter(stream)
            # The file format; datasets/packaged_modules/arrow/arrow.py:42 does the same.
            except pyarrow.ArrowInvalid:
                whole = pyarrow.ipc.open_file(file)
                schema, batches = (
                    whole.schema,
                    map(whole.get_batch, range(whole.num_record_batches)),
                )
        names = schema.names
        columns = names
        if wanted is not None:
            columns = [
                name for name in (wanted.prompt, wanted.label, "datasource") if name in names
            ]
        if form == "parquet":
            batches = parquet.iter_batches(columns=columns)
        features = _json_features(schema)
        others = dict.fromkeys(names)
        for batch in batches:
            # Without this check, damaged offsets would be followed out of the buffers and crash the
            # process.
            batch.validate(full=True)
            for row in batch.select(columns).to_pylist() if columns else [{}] * batch.num_rows:
                decoded = (
                    row
                    if features is None
                    else features.decode_example({**dict.fromkeys(names), **row})
                )
                yield others | _without_nulls_of_messages(
                    {name: decoded[name] for name in row}, wanted
                )
                others = {}


def _json_features(schema: Any) -> Any:
    """Returns the ``datasets`` features if a column stores its values as JSON texts; None if there
    are none."""
    if b'"Json"' not in (schema.metadata or {}).get(b"huggingface", b""):
        return None
    from datasets import Features

    return Features.from_arrow_schema(schema)


def _without_nulls_of_messages(row: dict[str, Any], wanted: Wanted | None) -> dict[str, Any]:
    """Drops null entries of messages: a table gives every message and every call's arguments the
    union of all keys."""
    if wanted is None:
        return row
    chats = (wanted.prompt, wanted.label if wanted.answers else None)
    return {name: _without_nulls(value) if name in chats else value for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value
