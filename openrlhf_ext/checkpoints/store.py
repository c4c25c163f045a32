"""The folder of a run's checkpoints: begin, commit, keep N and the best, find the newest.

A checkpoint is a folder ``global_step<N>`` that holds a ``manifest.json`` with size and SHA-256 of
every other file. It is written as ``global_step<N>.incomplete`` and renamed when everything in it
is on disk: whatever happens in between leaves the earlier ones as they were.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from openrlhf_ext.checkpoints.files import (
    VISIBLE_S,
    CheckpointError,
    FileEntry,
    absent_files,
    check_files,
    deal_files,
    fsync_folder,
    write_file,
)
from openrlhf_ext.inputs import (
    INNER_PATH,
    INTEGER,
    MAP,
    NUMBER,
    TEXT,
    InputError,
    check,
    decode,
    free_name,
    list_of,
    map_with,
    read_json,
)

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
BEST = "best.json"
_FORMAT = "openrlhf_ext checkpoint"
_VERSION = 1
_INCOMPLETE = ".incomplete"
_BEST_KEYS = {"step": INTEGER, "metric": TEXT, "value": NUMBER}
# best first; earlier releases had none
_BEST_MAYBE = {"next": list_of(map_with({"step": INTEGER, "value": NUMBER}))}
_NAME = re.compile(r"global_step(\d+)")
_PENDING = "pending.json"
_ENTRY_KEYS = {"path": INNER_PATH, "size": INTEGER, "sha256": TEXT}
_PARTS = "written"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself; ``about``: layout, versions and the like, for people."""

    step: int
    files: tuple[FileEntry, ...]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.files)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises CheckpointError: there is none, or not one of this
    format."""
    path = folder / MANIFEST
    if not path.exists():
        raise CheckpointError(
            f"{folder} holds no {MANIFEST}: it is no resumable checkpoint of this program, or "
            "not a complete one"
        )
    try:
        data = read_json(path, {"format": TEXT, "version": INTEGER})
        if (data["format"], data["version"]) != (_FORMAT, _VERSION):
            raise CheckpointError(
                f"{path} is of format {data['format']!r} version {data['version']!r}, this "
                f"program reads {_FORMAT!r} version {_VERSION}"
            )
        check(
            data,
            str(path),
            {"step": INTEGER, "files": list_of(map_with(_ENTRY_KEYS)), "about": MAP},
        )
    except InputError as error:
        raise CheckpointError(str(error)) from error
    files = tuple(
        FileEntry(entry["path"], entry["size"], entry["sha256"]) for entry in data["files"]
    )
    return Manifest(data["step"], files, data["about"])


def check_share(folder: Path, rank: int, ranks: int) -> list[str]:
    """What is wrong with a rank's share of a checkpoint's files: together they read all. Raises
    CheckpointError."""
    return check_files(folder, deal_files(read_manifest(folder).files, ranks)[rank])


class Witness:
    """A rank of a run, which says what it sees of files that others have written."""

    def sees(self, path: str) -> bool:
        return not absent_files(Path(path).parent, {Path(path).name: 0}, VISIBLE_S)

    def check_checkpoint(self, folder: str) -> list[str]:
        return check_share(Path(folder), dist.get_rank(), dist.get_world_size())


def write_receipt(folder: Path, part: str, entries: Iterable[FileEntry]) -> None:
    """Says which files a rank has written in the background; ``part``: its name, as
    ``CheckpointStore.expect`` was told."""
    write_file(
        folder, f"{_PARTS}/{part}.json", [json.dumps([asdict(entry) for entry in entries]).encode()]
    )


class CheckpointStore:
    """The checkpoints in one folder on a file system that every node shares; one process at a time
    writes. ``keep``:
    checkpoints kept besides the best one. ``max_bytes``: space that resumable ones may take
    together; the newest one is never deleted. ``visible_s``: how long files that other nodes have
    written may take to appear here; ``check_own`` is called before anything is changed, and raises
    if the folder is somebody else's by now."""

    def __init__(
        self,
        folder: str | Path,
        keep: int,
        max_bytes: float = float("inf"),
        visible_s: float = VISIBLE_S,
        check_own: Callable[[], None] = lambda: None,
    ) -> None:
        self._check_own = check_own
        self.folder, self.keep, self.max_bytes, self.visible_s = (
            Path(folder),
            keep,
            max_bytes,
            visible_s,
        )

    def checkpoints(self) -> list[Path]:
        found = [
            p for p in self.folder.glob("global_step*") if _NAME.fullmatch(p.name) and p.is_dir()
        ]
        return sorted(found, key=step_of)

    def path_of(self, step: int) -> Path:
        return self.folder / f"global_step{step}"

    def begin(self, step: int) -> Path:
        self._check_own()
        target = self._incomplete(step)
        try:
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"cannot make {target}: {error}") from error
        return target

    def commit(self, manifest: Manifest) -> Path:
        """Completes the checkpoint begun for ``manifest.step``. Raises CheckpointError: a file is
        not there (a rank wrote to other storage), or the system refused; the checkpoints made
        before are untouched."""
        self._check_own()
        folder, target = self._incomplete(manifest.step), self.path_of(manifest.step)
        sizes = {entry.path: entry.size for entry in manifest.files}
        if absent := absent_files(folder, sizes, self.visible_s):
            raise CheckpointError(
                f"{folder / absent[0]} was written by a rank and is not here with its "
                f"{sizes[absent[0]]} bytes after {self.visible_s:g} s: ckpt.path must be on "
                "storage that all nodes and the driver share"
            )
        content = {"format": _FORMAT, "version": _VERSION, **asdict(manifest)}
        write_file(folder, MANIFEST, [json.dumps(content, indent=1).encode()])
        try:
            if target.exists():  # left behind by a run that went back to an earlier checkpoint
                aside = free_name(target.with_name(f"{target.name}.superseded"))
                logger.warning(
                    "%s of an earlier run is in the way and is moved to %s", target, aside
                )
                target.rename(aside)
            os.replace(folder, target)
            fsync_folder(self.folder)
        except OSError as error:
            raise CheckpointError(f"cannot rename {folder} to {target}: {error}") from error
        return target

    def expect(self, manifest: Manifest, parts: Sequence[str]) -> None:
        """Notes what ``complete`` waits for: the receipts of ranks that write in the background,
        beside the files of ``manifest`` that are there already."""
        content = json.dumps({**asdict(manifest), "parts": parts})
        write_file(self._incomplete(manifest.step), _PENDING, [content.encode()])

    def await_receipts(self, step: int) -> None:
        folder = self._incomplete(step)
        noted = json.loads((folder / _PENDING).read_text(encoding="utf-8"))
        deadline = time.monotonic() + self.visible_s
        while absent := [
            part for part in noted["parts"] if not (folder / _PARTS / f"{part}.json").exists()
        ]:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{', '.join(absent)} have written step {step}, which is not seen in "
                    f"{folder} after {self.visible_s:g} s: ckpt.path must be on storage that all "
                    "nodes and the driver share"
                )
            time.sleep(0.2)

    def complete(self, step: int) -> Manifest | None:
        """Commits the checkpoint that ``expect`` noted, if every rank has written its part; None if
        not. It needs only
        files: whoever comes after a run that failed completes what had been written."""
        folder = self._incomplete(step)
        if not (folder / _PENDING).exists():
            return None
        noted = decode((folder / _PENDING).read_bytes(), str(folder / _PENDING))
        receipts = [folder / _PARTS / f"{part}.json" for part in noted["parts"]]
        if not all(receipt.exists() for receipt in receipts):
            return None
        written = [
            entry for receipt in receipts for entry in decode(receipt.read_bytes(), str(receipt))
        ]
        files = tuple(FileEntry(**entry) for entry in (*noted["files"], *written))
        manifest = Manifest(step, files, noted["about"])
        path = self.commit(manifest)
        shutil.rmtree(path / _PARTS, ignore_errors=True)
        (path / _PENDING).unlink(missing_ok=True)
        return manifest

    def abandon(self, step: int) -> None:
        self._check_own()
        shutil.rmtree(self._incomplete(step), ignore_errors=True)

    def clean(self) -> None:
        """Completes what the ranks of a run that was stopped had fully written, and removes what is
        half-written."""
        self._check_own()
        for left in [*self.folder.glob(f"global_step*{_INCOMPLETE}")]:
            if self._completed(left):
                continue
            logger.info("removing %s, which a run that was stopped left half-written", left)
            shutil.rmtree(left)

    def _completed(self, left: Path) -> bool:
        try:
            manifest = self.complete(step_of(left))
        except (CheckpointError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s cannot be completed: %s", left, error)
            return False
        if manifest is not None:
            logger.info(
                "completed the checkpoint of step %d, whose files had all been written",
                manifest.step,
            )
        return manifest is not None

    def rotate(self) -> None:
        """Deletes the oldest checkpoints beyond ``keep`` and ``max_bytes``, never the best;
        likewise the HF ones."""
        self._check_own()
        protected = {step for step, _ in best_of(self.best())}
        complete = [p for p in self.checkpoints() if step_of(p) not in protected]
        hf = [
            p
            for p in self.folder.glob("global_step*_hf")
            if _NAME.match(p.name) and step_of(p) not in protected
        ]
        for old in (*complete[: -self.keep], *sorted(hf, key=step_of)[: -self.keep]):
            _delete(old)
        kept = complete[-self.keep :]
        while len(kept) > 1 and sum(map(_size_of, self.checkpoints())) > self.max_bytes:
            _delete(kept.pop(0))

    def mark_best(self, content: Mapping[str, Any]) -> None:
        """``content``: what :func:`best_content` makes, or :meth:`best` has returned."""
        self._check_own()
        write_file(
            self.folder, f"{BEST}{_INCOMPLETE}", [json.dumps(dict(content), indent=1).encode()]
        )
        os.replace(self.folder / f"{BEST}{_INCOMPLETE}", self.folder / BEST)
        fsync_folder(self.folder)

    def best(self) -> dict[str, Any] | None:
        """Step, metric and value of the best checkpoint, and of those that are kept after it
        (``next``)."""
        path = self.folder / BEST
        if not path.exists():
            return None
        try:
            return read_json(path, _BEST_KEYS, _BEST_MAYBE)
        except InputError as error:  # a run goes on saving; the next best one is marked anew
            aside = free_name(path.with_name(f"{BEST}.superseded"))
            logger.warning(
                "%s; it is moved to %s, and no checkpoint counts as the best any more", error, aside
            )
            path.rename(aside)
            return None

    def recover_best(self, folder: Path) -> None:
        """Makes :meth:`best` what it was when the checkpoint ``folder``, from which a run goes on,
        was completed. A kill right after that leaves one that does not know of it; a later one that
        turned out to be damaged may have been the best."""
        best = read_manifest(folder).about.get("best")
        if best is not None and best != self.best():
            check(
                best,
                f"{folder / MANIFEST}, best",
                _BEST_KEYS,
                _BEST_MAYBE,
                remedy="give another checkpoint",
            )
            self.mark_best(best)

    def set_aside_all(self) -> Path | None:
        """Moves an earlier run's checkpoints out of the way of a run that starts anew; returns
        where to."""
        found = [*self.folder.glob("global_step*"), *self.folder.glob(BEST)]
        if not found:
            return None
        target = free_name(self.folder / "superseded")
        target.mkdir()
        for path in found:
            path.rename(target / path.name)
        return target

    def _incomplete(self, step: int) -> Path:
        return self.folder / f"global_step{step}{_INCOMPLETE}"


def best_content(metric: str, kept: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """What ``best.json`` holds of the kept steps and their values, best first."""
    (step, value), *others = kept
    more = {"next": [{"step": step, "value": value} for step, value in others]} if others else {}
    return {"step": step, "metric": metric, "value": value, **more}


def best_of(
    content: Mapping[str, Any] | None, metric: str | None = None
) -> list[tuple[int, float]]:
    """The reverse of :func:`best_content`; empty if they were chosen by another ``metric``."""
    if content is None or metric not in (None, content["metric"]):
        return []
    return [(each["step"], each["value"]) for each in (content, *content.get("next", ()))]


def _delete(checkpoint: Path) -> None:
    """At no moment is there half a checkpoint under its name; what cannot be removed now is when
    the next run starts. A network file system keeps files that a process has open (``.nfs*``): no
    reason to end a run that has just saved."""
    doomed = checkpoint.with_name(f"{checkpoint.name}{_INCOMPLETE}")
    try:
        checkpoint.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        logger.warning(
            "the old checkpoint %s could not be deleted and still takes room: %s", checkpoint, error
        )


def step_of(path: Path) -> int:
    found = _NAME.match(path.name)
    if found is None:
        raise ValueError(f"{path} is not named like a checkpoint (global_step<N>)")
    return int(found[1])


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
