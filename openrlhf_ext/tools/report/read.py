"""What a run's folder holds, also while the run goes on, and of runs that kept less."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openrlhf_ext.inputs import (
    INTEGER,
    MAP,
    NUMBER,
    TEXT,
    TEXT_OR_INTEGER,
    InputError,
    Kind,
    check,
    list_of,
    or_null,
    similar_path,
)
from openrlhf_ext.redaction import redacted
from openrlhf_ext.reporting import read_metrics
from openrlhf_ext.reporting.lines import read_lines

Record = dict[str, Any]
_ENDS = {"end": "finished", "failure": "failed", "interrupted": "interrupted"}
_BEGINS = {"start", "restart", "resumed"}
# what the page needs of the lines of events.jsonl and samples.jsonl, and what they may have
_EVENT = {"event": TEXT, "step": INTEGER, "time": NUMBER}
_FACTS = {
    **dict.fromkeys(("options", "versions", "hardware", "layout", "processes"), MAP), "set": list_of(TEXT),
    **dict.fromkeys(("steps", "filtered", "late", "count"), INTEGER),
    **dict.fromkeys(("accuracy", "stderr", "over_mean"), NUMBER),
}  # fmt: skip
_SAMPLE = {"step": INTEGER, "group": TEXT_OR_INTEGER, "tokens": list_of(TEXT)}
_NUMBERS = {
    **dict.fromkeys(("entropies", "advantages"), list_of(or_null(NUMBER))), "prompt": TEXT, "reward": NUMBER,
    "score": or_null(NUMBER), "environment": list_of(INTEGER),
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: its folder's name, made unique among the runs of a page.
        events: of events.jsonl; empty if there is none.
        samples: completions of samples.jsonl; empty if there is none.
        missing: what the folder does not hold or what of it cannot be read, as sentences.
    """

    name: str
    folder: Path
    records: list[Record]
    events: list[Record] = field(default_factory=list)
    samples: list[Record] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def steps(self) -> list[Record]:
        """The records of training steps."""
        return [record for record in self.records if "time/step" in record]

    @property
    def start(self) -> Record:
        """The last event of a start: options, versions, hardware, layout; empty if there is none."""
        return next((event for event in reversed(self.events) if event["event"] == "start"), {})

    @property
    def state(self) -> str:
        """``finished``, ``failed``, ``interrupted``, ``no end`` (it goes on, or was killed), or ``unknown``."""
        if not self.events:
            return "unknown"
        last = next((e["event"] for e in reversed(self.events) if e["event"] in _BEGINS | _ENDS.keys()), "start")
        return _ENDS.get(last, "no end")


def read_runs(folders: list[Path]) -> list[Run]:
    """The runs of these folders, in order.

    Raises:
        InputError: a folder holds no metrics.jsonl, or one that cannot be read; all of them are named.
    """
    runs, faults = [], []
    for folder, name in zip(folders, _names(folders), strict=True):
        try:
            runs.append(_read_run(folder, name))
        except InputError as error:
            faults.append(str(error))
    if faults:
        raise InputError("\n".join(faults))
    return runs


def _names(folders: list[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    paths = [folder.resolve() for folder in folders]
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({number})" for number, path in enumerate(paths, start=1)]


def _read_run(folder: Path, name: str) -> Run:
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        there = "it holds no metrics.jsonl" if folder.is_dir() else f"there is no such folder{similar_path(folder)}"
        there = "it is a file" if folder.is_file() else there
        raise InputError(f"{folder} is not the folder of a run: {there}; give the folder of logger.metrics_path")
    missing: list[str] = []
    records = read_metrics(metrics)
    if not records:
        missing.append("metrics.jsonl is still empty: there are no curves yet.")
    without = "no events, configuration, versions and hardware, and whether it ended is not known"
    events = _optional(folder / "events.jsonl", _EVENT, _FACTS, missing, without)
    samples = _optional(folder / "samples.jsonl", _SAMPLE, _NUMBERS, missing, "no completions")
    return Run(name, folder, records, redacted(events), samples, missing)  # earlier releases wrote passwords down


def _optional(
    path: Path, required: Mapping[str, Kind], optional: Mapping[str, Kind], missing: list[str], without: str
) -> list[Record]:
    """Objects of a file that older runs do not have; what is wrong with it goes into ``missing``."""
    if not path.is_file():
        missing.append(f"The folder holds no {path.name}: {without}.")
        return []
    found, faults = [], []
    try:
        for number, record in read_lines(path):
            try:
                found.append(check(record, f"line {number}", required, optional))
            except InputError as error:
                faults.append(str(error))
    except InputError as error:
        missing.append(f"{error}: {without}.")
        return []
    if faults:
        missing.append(f"{path.name} has lines that cannot be used and are left out: {len(faults)}, first {faults[0]}.")
    elif not found:
        missing.append(f"{path.name} is empty: {without}.")
    return found
