"""Local paths, hub names and URLs inside option values."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from openrlhf_ext.config.entities.base import PathKind

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
