"""Rules about the files that a run writes: they can be written, and nothing that is read is among them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from openrlhf_ext.config.errors import Violation


@dataclass(frozen=True)
class Output:
    """What a run writes: the files of a folder, or one file."""

    option: str
    path: str
    is_folder: bool

    @property
    def folder(self) -> Path:
        """The folder that is written into, links resolved."""
        return Path(self.path).resolve() if self.is_folder else Path(self.path).resolve().parent


@dataclass(frozen=True)
class Inputs:
    """What a run reads, each as (option, path): the folders of models, and data and code as files or folders."""

    models: tuple[tuple[str, str], ...]
    sources: tuple[tuple[str, str], ...]


def writable_violations(output: Output) -> Iterator[Violation]:
    """The path can be written: the nearest folder that exists is one, and is writable."""
    place = Path(output.path) if output.is_folder else Path(output.path).parent
    existing = next((folder for folder in (place, *place.parents) if folder.exists()), Path("/"))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        reason = "is not writable" if existing.is_dir() else "is a file"
        yield Violation(
            (output.option,), f"{output.option} must be writable: got {output.path}, but {existing} {reason}"
        )


def overlap_violations(*, outputs: Sequence[Output], inputs: Inputs, checkpoints: str) -> Iterator[Violation]:
    """Nothing that is read is overwritten, moved away, or added to.

    A final checkpoint replaces the weights in its folder; every file of a folder of data is read as data; the
    ``global_step*`` in ``checkpoints`` (``ckpt.path``) are moved and deleted.
    """
    kept = Path(checkpoints).resolve()
    for option, path in inputs.models:
        model = Path(path).resolve()
        yield from _overlap([o for o in outputs if o.folder == model], option, path, "the folder of the model that is")
        if kept in model.parents and model.relative_to(kept).parts[0].startswith("global_step"):
            yield Violation(
                ("ckpt.path", option),
                f"{option} must not be a checkpoint in ckpt.path, where checkpoints are moved and deleted: got {path} "
                f"and {checkpoints}; choose another ckpt.path or copy the model",
            )
    for option, path in inputs.sources:
        source = Path(path).resolve()
        if source.is_dir():
            hits = [output for output in outputs if source in (output.folder, *output.folder.parents)]
            yield from _overlap(hits, option, path, "the folder of data that is")
        else:
            hits = [output for output in outputs if Path(output.path).resolve() == source]
            yield from _overlap(hits, option, path, "the file that is")
    files = [output for output in outputs if not output.is_folder]
    for output in files:
        if Path(output.path).is_dir():
            yield Violation((output.option,), f"{output.option} must be a file, {output.path} is a folder")
    if len({Path(output.path).resolve() for output in files}) < len(files):
        yield Violation(
            tuple(output.option for output in files),
            f"{' and '.join(output.option for output in files)} must be different files: got {files[0].path}",
        )


def _overlap(outputs: Sequence[Output], option: str, path: str, what: str) -> Iterator[Violation]:
    """One violation for everything that would be written into the same input."""
    if outputs:
        names = [output.option for output in outputs]
        yield Violation(
            (*names, option),
            f"{', '.join(names)} would write into {what} read by {option}: {path}; choose another place",
        )
