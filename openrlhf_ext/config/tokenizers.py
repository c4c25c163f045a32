"""Checks tokenizer files without loading the tokenizer: faults, and differences between two."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from openrlhf_ext.config.files import names_code
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
    or_null,
    read_json,
    reading,
)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# Schema of the parts of tokenizer.json that are read.
_ADDED_TOKEN = map_with({"id": INTEGER, "content": TEXT})
_PAIR = Kind(
    "a token and its score", lambda v: isinstance(v, list) and len(v) == 2 and isinstance(v[0], str)
)
_VOCABULARY = Kind(
    "a map of tokens to integers, or a list of tokens with scores",
    lambda v: list_of(_PAIR).holds(v) or (isinstance(v, dict) and all(map(is_integer, v.values()))),
)
_MERGE = Kind("a text or a list of texts", lambda v: isinstance(v, str) or list_of(TEXT).holds(v))
# Same files as in transformers 5.19.
_TEMPLATE_FILES = ("chat_template.jinja", "additional_chat_templates/default.jinja")
AS_TOKENIZER_JSON = (
    "if you trust it, save it as tokenizer.json: "
    "transformers.AutoTokenizer.from_pretrained(FOLDER, "
    "trust_remote_code=True).save_pretrained(FOLDER), and remove auto_map from "
    "tokenizer_config.json"
)


def tokenizer_fault(folder: str, *, chat: bool) -> str | None:
    """Returns why a model folder has no usable tokenizer, or with ``chat`` no chat template; None
    if it has."""
    path = Path(folder)
    if (path / "controller.json").is_file():  # ckpt.path holds such folders, so a user may try one
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
            f"has a tokenizer with its own Python code, which is not executed; {AS_TOKENIZER_JSON}"
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
            f"has chat templates named {', '.join(map(str, names))}, but none named default: add "
            "one"
        )
    unread = (
        "; chat_template.json is read only for processors"
        if (path / "chat_template.json").is_file()
        else ""
    )
    return (
        f"has a tokenizer without a chat template (a base model?){unread}: leave "
        "data.apply_chat_template out and use data.input_template, or use the instruct model's "
        "tokenizer"
    )


def tokenizer_difference(one: str, other: str) -> str | None:
    """Returns the difference between the tokenizers of two model folders; None if they map every
    text to the same ids.

    ``tokenizer.json`` is compared by vocabulary and merges, because tokenizers writes the same ones
    in several forms; other files must be identical. :func:`tokenizer_fault` reports folders without
    a tokenizer.
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
    """Returns which of the policy's tokens a model reads differently; None if there are none, or if
    that is unknown.

    Tokens that only the model has do not matter.
    """
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
    return (
        None if _merges(one) == _merges(other) else "they have the same tokens but different merges"
    )


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
