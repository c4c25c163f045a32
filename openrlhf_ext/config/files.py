"""A look at what a run reads: paths, hub names and URLs; config.json and tokenizer of a model,
source code."""

from __future__ import annotations

import ast
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel
from safetensors import safe_open
from tokenizers import Tokenizer

from openrlhf_ext.inputs import (
    INTEGER,
    MAP,
    TEXT,
    InputError,
    Kind,
    check,
    is_integer,
    list_of,
    map_with,
    named_part,
    or_null,
    path_exists,
    read_json,
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
    """Whether the text has the form ``org/name`` of a Hugging Face hub name and no local folder is
    meant by it."""
    path = Path(text)
    if path.suffix.lower() in (*DATA_SUFFIXES, ".py"):
        return False
    return _HUB_NAME.fullmatch(text) is not None and not path.exists() and not path.parent.exists()


def resolve_path(value: str, kind: PathKind) -> str:
    """``value`` with its local paths made absolute (``~`` expanded): one path, or several inputs
    separated by commas,
    ``path@folder`` as OpenRLHF's datasets allow, each perhaps with a name (``name=path``). Inputs
    that are URLs or hub names stay as they are."""
    if not value.strip():
        return value  # refused; it would become the current directory
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
    """``path@folder`` as its two parts. A path that exists may have ``@`` of its own."""
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
        """Whether it is a local data file, which has one split and no folders."""
        path = Path(self.path)
        return path.suffix.lower() in DATA_SUFFIXES and path.is_file()


def inputs_of(config: BaseModel, option: str) -> str:
    """Paths, hub names and URLs of an option, separated by commas, without names of sets
    (``eval.dataset``,
    ``eval.remote_url``); "" if none are given."""
    value = value_of(config, option) or ""
    return ",".join(rest for _, rest in named_parts(value)) if option.startswith("eval.") else value


def dataset_refs(value: str) -> Iterator[DatasetRef]:
    for text in split_inputs(value):
        path, folder = _without_folder(text)
        yield DatasetRef(path, folder or None)


_FLOATING = ("F64", "F32", "F16", "BF16")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# what is read of tokenizer.json
_ADDED_TOKEN = map_with({"id": INTEGER, "content": TEXT})
_PAIR = Kind(
    "a token and its score", lambda v: isinstance(v, list) and len(v) == 2 and isinstance(v[0], str)
)
_VOCABULARY = Kind(
    "a map of tokens to integers, or a list of tokens with scores",
    lambda v: list_of(_PAIR).holds(v) or (isinstance(v, dict) and all(map(is_integer, v.values()))),
)
_MERGE = Kind("a text or a list of texts", lambda v: isinstance(v, str) or list_of(TEXT).holds(v))
# as transformers 5.19 reads them
_TEMPLATE_FILES = ("chat_template.jinja", "additional_chat_templates/default.jinja")


_KNOWN = shipped("configs/models")
_PUBLISHERS = ("Qwen", "meta-llama")


def model_folder(name: str) -> str | None:
    """The folder whose ``config.json`` says what a model is: its own, or that of ``configs/models``
    for a hub name.

    ``Qwen/Qwen2.5-7B`` and ``Qwen/Qwen2.5-7B-Instruct`` are ``configs/models/qwen2.5-7b``. None if
    the name is a hub's and there is no such folder.
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
        f"{known}); give a folder that holds the model's config.json, no weights are needed"
    )


def has_weights(folder: str) -> bool:
    """A folder of ``config.json`` alone is for a dry run."""
    return any(Path(folder).glob("*.safetensors"))


AS_TOKENIZER_JSON = (
    "if you trust it, save it as tokenizer.json: "
    "transformers.AutoTokenizer.from_pretrained(FOLDER, "
    "trust_remote_code=True).save_pretrained(FOLDER), and remove auto_map from "
    "tokenizer_config.json"
)


def names_code(
    folder: str, names: Sequence[str] = ("config.json", "tokenizer_config.json")
) -> bool:
    """Whether these files of a model folder name Python code of its own, which nothing here
    executes."""
    files = [Path(folder) / name for name in names]
    return any(file.is_file() and b'"auto_map"' in file.read_bytes() for file in files)


def tokenizer_fault(folder: str, *, chat: bool) -> str | None:
    """Why a model folder cannot give the run its tokenizer, or with ``chat`` its chat template;
    None if it can."""
    path = Path(folder)
    if (path / "controller.json").is_file():  # a user would try it: it is what ckpt.path holds
        return (
            "is a checkpoint to resume from (ckpt.load_enable), not a model: give "
            "ckpt.output_dir, or a global_step*_hf of ckpt.save_hf"
        )
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        return (
            f"holds no tokenizer ({', '.join(_TOKENIZER_FILES)}): copy the tokenizer's files there"
        )
    if (file := path / "tokenizer.json").is_file():
        try:
            with reading(file, "as a tokenizer"):
                Tokenizer.from_file(str(file))
        except InputError as error:
            return f"has a file that cannot be used: {error}"
    elif names_code(folder, ["tokenizer_config.json"]):
        return (
            "has a tokenizer that is Python code of its own, which is not executed; "
            f"{AS_TOKENIZER_JSON}"
        )
    if not chat or any((path / name).exists() for name in _TEMPLATE_FILES):
        return None
    settings = path / "tokenizer_config.json"
    try:
        template = read_json(settings).get("chat_template") if settings.is_file() else None
    except InputError as error:
        return f"has a file that cannot be used: {error}"
    names = (
        [one.get("name") for one in template if isinstance(one, dict)]
        if isinstance(template, list)
        else []
    )
    if (isinstance(template, str) and template) or "default" in names:
        return None
    if names:
        return (
            f"has chat templates that are called {', '.join(map(str, names))}, and none is "
            "called default: give one"
        )
    unread = (
        "; chat_template.json is read of processors alone"
        if (path / "chat_template.json").is_file()
        else ""
    )
    return (
        f"has a tokenizer without a chat template (a base model?){unread}: leave "
        "data.apply_chat_template out and use data.input_template, or take the instruct model's "
        "tokenizer"
    )


def tokenizer_difference(one: str, other: str) -> str | None:
    """What differs between the tokenizers of two model folders, None if they make the same ids of a
    text.

    ``tokenizer.json`` is compared by its vocabulary and merges, since tokenizers writes the same
    ones in several forms; other files have to be the same. Folders without a tokenizer are
    :func:`tokenizer_fault`'s business.
    """
    names = [
        {name for name in _TOKENIZER_FILES if (Path(folder) / name).is_file()}
        for folder in (one, other)
    ]
    if not all(names):
        return None
    if not (common := [name for name in _TOKENIZER_FILES if name in names[0] & names[1]]):
        return (
            f"{one} has {', '.join(sorted(names[0]))} and {other} has {', '.join(sorted(names[1]))}"
        )
    paths = [Path(folder) / common[0] for folder in (one, other)]
    files = [path.read_bytes() for path in paths]
    if files[0] == files[1]:
        return None
    if common[0] != "tokenizer.json":
        return f"{paths[0]} and {paths[1]} differ"
    try:
        return _vocabulary_difference(*map(_tokenizer_json, paths))
    except InputError as error:
        return f"they differ, and one cannot be read: {error}"


def unknown_tokens(folder: str, policy_folder: str) -> str | None:
    """Which tokens of the policy a model reads as something else, None if none or where it is not
    known; tokens that only the model has do not matter."""
    paths = [Path(one) / "tokenizer.json" for one in (policy_folder, folder)]
    if not all(path.is_file() for path in paths):
        return tokenizer_difference(folder, policy_folder)
    try:
        policy, model = (_token_of_id(_tokenizer_json(path)) for path in paths)
    except InputError as error:
        return f"one cannot be read: {error}"
    return _id_difference(policy, policy, model)


def _tokenizer_json(path: Path) -> dict[str, Any]:
    tokenizer = read_json(path, {"model": MAP}, {"added_tokens": or_null(list_of(_ADDED_TOKEN))})
    check(
        tokenizer["model"],
        f"{path}, model",
        {"vocab": _VOCABULARY},
        {"merges": or_null(list_of(_MERGE))},
    )
    return tokenizer


def _vocabulary_difference(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    mine, theirs = _token_of_id(one), _token_of_id(other)
    if (difference := _id_difference(mine.keys() | theirs.keys(), mine, theirs)) is not None:
        return difference
    return None if _merges(one) == _merges(other) else "they have the same tokens and other merges"


def _id_difference(ids: Iterable[int], mine: dict[int, str], theirs: dict[int, str]) -> str | None:
    if not (differing := sorted(id_ for id_ in ids if mine.get(id_) != theirs.get(id_))):
        return None
    return (
        f"{len(differing)} token ids mean different tokens, id {differing[0]} is "
        f"{mine.get(differing[0])!r} and {theirs.get(differing[0])!r}"
    )


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


def require_definition(path: str, *names: str) -> None:
    """Raises InputError unless the Python file, which is not run, defines one of the names at top
    level."""
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
    """Parameters in a folder's safetensors files, from their headers; None if there is none or it
    is no such file."""
    files = sorted(Path(folder).glob("*.safetensors")) if folder is not None else []
    try:
        return sum(map(_elements, files)) or None
    except InputError:
        return None  # whether the model can be loaded is checked, and reported, elsewhere


def _elements(path: Path) -> int:
    with reading(path, "as safetensors"), safe_open(path, framework="numpy") as file:
        tensors = [file.get_slice(name) for name in file.keys()]
        return sum(
            math.prod(tensor.get_shape()) for tensor in tensors if tensor.get_dtype() in _FLOATING
        )


# ---- models of the hub
# ----------------------------------------------------------------------------------------------


def downloaded(option: str, name: str) -> str:
    """The folder of a hub model's files. Raises ConfigError: it cannot be downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, HTTPError

    logger.info("downloading %s", name)
    try:
        patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.tiktoken", "*.jinja"]
        return snapshot_download(name, allow_patterns=patterns)
    except (OSError, ValueError, HTTPError, EntryNotFoundError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        message = (
            f"{option}: {name} is no folder on this machine, and it cannot be downloaded from "
            f"the hub ({reason}); give the folder of a checkpoint that holds the weights"
        )
        raise ConfigError([Violation((option,), message)]) from error
