"""Files, folders and addresses that a run's options name: paths, hub names and URLs, model folders,
source code."""

from __future__ import annotations

import ast
import logging
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel
from safetensors import safe_open

from openrlhf_ext.inputs import (
    InputError,
    named_part,
    path_exists,
    read_text,
    reading,
    shipped,
    split_inputs,
)
from openrlhf_ext.options import ConfigError, PathKind, Violation, value_of
from openrlhf_ext.options.sections.evaluation import named_parts

logger = logging.getLogger(__name__)

DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def is_url(text: str) -> bool:
    return "://" in text


def is_http_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:  # a malformed host
        return False


def is_hub_name(text: str) -> bool:
    """Whether the text has the form ``org/name`` of a Hugging Face hub name and is not a local
    folder."""
    path = Path(text)
    if path.suffix.lower() in (*DATA_SUFFIXES, ".py"):
        return False
    return _HUB_NAME.fullmatch(text) is not None and not path.exists() and not path.parent.exists()


def resolve_path(value: str, kind: PathKind) -> str:
    """Returns ``value`` with its local paths made absolute (``~`` expanded); URLs and hub names
    stay unchanged.

    ``value`` is one path, or several inputs separated by commas. An input may have the form
    ``path@folder``, as in OpenRLHF's datasets, and may have a name (``name=path``).
    """
    if not value.strip():
        return value  # rejected elsewhere; it would become the current directory
    if kind == "output":
        return _absolute(value)
    return ",".join(map(_resolve_input, split_inputs(value)))


def _absolute(text: str) -> str:
    return os.path.abspath(os.path.expanduser(text))


def _resolve_input(text: str) -> str:
    name, path = named_part(text)
    if name and not os.path.exists(text):
        return f"{name}={_resolve_input(path)}"
    base, folder = _without_folder(text)
    if not base or is_url(text) or is_hub_name(base):
        return text
    return _absolute(base) + ("" if folder is None else f"@{folder}")


def _without_folder(text: str) -> tuple[str, str | None]:
    """Splits ``path@folder`` into its two parts. A path that exists may contain ``@``."""
    if "@" not in text or path_exists(text):
        return text, None
    at = text.index("@")
    for place, letter in enumerate(text):
        if letter == "@" and path_exists(text[:place]):
            at = place
    return text[:at].strip(), text[at + 1 :].strip()


@dataclass(frozen=True)
class DatasetRef:
    path: str
    folder: str | None

    @property
    def is_file(self) -> bool:
        """Whether it is a local data file; such a file has one split and no folders."""
        path = Path(self.path)
        return path.suffix.lower() in DATA_SUFFIXES and path.is_file()


def inputs_of(config: BaseModel, option: str) -> str:
    """Returns the paths, hub names and URLs of an option, separated by commas, without names of
    sets (``eval.dataset``, ``eval.remote_url``); "" if none are given."""
    value = value_of(config, option) or ""
    return ",".join(rest for _, rest in named_parts(value)) if option.startswith("eval.") else value


def dataset_refs(value: str) -> Iterator[DatasetRef]:
    for text in split_inputs(value):
        path, folder = _without_folder(text)
        yield DatasetRef(path, folder or None)


_FLOATING = ("F64", "F32", "F16", "BF16")


_KNOWN = shipped("configs/models")
_PUBLISHERS = ("Qwen", "meta-llama")


def model_folder(name: str) -> str | None:
    """Returns the folder with the model's ``config.json``: its own, or one of ``configs/models``
    for a hub name.

    ``Qwen/Qwen2.5-7B`` and ``Qwen/Qwen2.5-7B-Instruct`` are ``configs/models/qwen2.5-7b``. Returns
    None for a hub name without such a folder.
    """
    if not is_hub_name(name):
        return name
    publisher, _, model = name.partition("/")
    folder = _KNOWN / model.lower().removesuffix("-instruct").removesuffix("-base")
    return str(folder) if publisher in _PUBLISHERS and folder.is_dir() else None


def unknown_model(name: str) -> str:
    known = ", ".join(sorted(folder.name for folder in _KNOWN.iterdir()))
    return (
        f"{name} is a hub name whose config.json is not on this machine (configs/models has "
        f"{known}); give a folder with the model's config.json; weights are not needed"
    )


def has_weights(folder: str) -> bool:
    """Whether the folder holds weights; a folder with only ``config.json`` suffices for a dry
    run."""
    return any(Path(folder).glob("*.safetensors"))


def names_code(
    folder: str, names: Sequence[str] = ("config.json", "tokenizer_config.json")
) -> bool:
    """Whether these files of a model folder name custom Python code, which nothing here
    executes."""
    files = [Path(folder) / name for name in names]
    return any(file.is_file() and b'"auto_map"' in file.read_bytes() for file in files)


def require_definition(path: str, *names: str) -> None:
    """Raises InputError unless the Python file defines one of the names at top level. The file is
    not executed."""
    text = read_text(path)
    with reading(path, "as Python"):
        tree = ast.parse(text, filename=path)
    defined = set(_top_level_names(tree.body))
    if defined.isdisjoint({*names, "*"}):
        found = ", ".join(sorted(defined)) or "nothing"
        raise InputError(
            f"{path} must define {' or '.join(names)} at top level; it defines {found}"
        )


def _top_level_names(statements: list[ast.stmt]) -> Iterator[str]:
    for statement in statements:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield statement.name
                takes = getattr(statement, "args", None)
                if takes and {one.arg for one in (*takes.args, *takes.kwonlyargs)} & {
                    "completions",
                    "solution_str",
                }:
                    yield "reward_func"  # verl's or TRL's: rewards/foreign.py
            case ast.Assign():
                yield from (
                    target.id for target in statement.targets if isinstance(target, ast.Name)
                )
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Import() | ast.ImportFrom():
                yield from (alias.asname or alias.name for alias in statement.names)
            case ast.If() | ast.Try():
                yield from _top_level_names(statement.body + statement.orelse)


def parameter_count(folder: str | None) -> int | None:
    """Returns the number of parameters in a folder's safetensors files, from their headers; None
    without valid files."""
    files = sorted(Path(folder).glob("*.safetensors")) if folder is not None else []
    try:
        return sum(map(_elements, files)) or None
    except InputError:
        return None  # other checks report whether the model can be loaded


def _elements(path: Path) -> int:
    with reading(path, "as safetensors"), safe_open(path, framework="numpy") as file:
        tensors = [file.get_slice(name) for name in file.keys()]
        return sum(
            math.prod(tensor.get_shape()) for tensor in tensors if tensor.get_dtype() in _FLOATING
        )


# ---- models of the hub


def downloaded(option: str, name: str) -> str:
    """Downloads a hub model and returns the folder of its files. Raises ConfigError if that
    fails."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, HTTPError

    logger.info("downloading %s", name)
    try:
        patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.tiktoken", "*.jinja"]
        return snapshot_download(name, allow_patterns=patterns)
    except (OSError, ValueError, HTTPError, EntryNotFoundError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        message = (
            f"{option}: {name} is not a folder on this machine and cannot be downloaded from the "
            f"hub ({reason}); give the folder of a checkpoint with weights"
        )
        raise ConfigError([Violation((option,), message)]) from error
