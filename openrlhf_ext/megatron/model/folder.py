"""What a folder must hold to be one model: readers disagree about a folder that holds two."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from safetensors import safe_open

from openrlhf_ext.inputs import FILE_NAME, InputError, map_of, read_json, reading
from openrlhf_ext.megatron.model.adapter import CONFIG

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SHOWN = 4
# weights of other programs
_OTHER = re.compile(r"pytorch_model.*\.bin|.*\.(pth|ckpt|gguf|h5|msgpack)")
_ROWS = 1 << 14  # compared at a time
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def require_one_model(folder: str | Path) -> None:
    """Raises InputError: the folder holds an adapter, weights of two models, or weights that are no
    safetensors, by the names of its files."""
    folder = Path(folder)
    if (folder / CONFIG).is_file():
        what = (
            "a model and an adapter"
            if (folder / "config.json").is_file()
            else "an adapter, and no model"
        )
        raise InputError(
            f"{folder} holds {what} ({CONFIG}): merge it into its base (openrlhf-ext convert "
            "--merge ADAPTER --to FOLDER), start from it by ds.lora.path, or move the adapter's "
            "files elsewhere"
        )
    others = {path.name for path in folder.iterdir() if _OTHER.fullmatch(path.name)}
    if others and not any(folder.glob("*.safetensors")):
        raise InputError(
            f"{folder} has its weights in {_listed(others)} alone: safetensors are needed, which "
            "run no code as they are read; if you trust the files, save them so (transformers: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER))"
        )
    files, indexed = (
        {path.name for path in folder.glob("model*.safetensors")},
        (folder / INDEX).is_file(),
    )
    if indexed:
        listed = set(
            read_json(folder / INDEX, {"weight_map": map_of(FILE_NAME)})["weight_map"].values()
        )
        others = files & {SINGLE} - listed
    else:
        listed, others = {SINGLE} & files, files - {SINGLE} if SINGLE in files else set()
    if others:
        raise InputError(
            f"{folder} holds two models: {_listed(others)} beside {_listed(listed)}"
            f"{f', which {INDEX} lists' if indexed else ''}; policy, engines and transformers do "
            "not read the same one: remove the files of the other"
        )


def require_tied_head(folder: str | Path) -> None:
    """Raises InputError: ``config.json`` says ``tie_word_embeddings``, and the weights hold a head
    of their own that is not the embedding: some readers take it, others do not."""
    folder = Path(folder)
    if read_json(folder / "config.json").get("tie_word_embeddings") is not True:
        return
    found: dict[str, Path] = {}
    for path in folder.glob("model*.safetensors"):
        with reading(path, "as safetensors"), safe_open(path, framework="pt") as file:
            found |= dict.fromkeys({_EMBEDDING, _HEAD} & set(file.keys()), path)
    if len(found) < 2 or _equal(found):
        return
    raise InputError(
        f"{folder}: config.json says tie_word_embeddings, and {found[_HEAD].name} holds a "
        f"{_HEAD} that is not {_EMBEDDING}: readers take one or the other; set "
        "tie_word_embeddings to false if the head was trained, or remove it"
    )


def _equal(found: dict[str, Path]) -> bool:
    with (
        safe_open(found[_EMBEDDING], framework="pt") as one,
        safe_open(found[_HEAD], framework="pt") as other,
    ):
        rows, head = one.get_slice(_EMBEDDING), other.get_slice(_HEAD)
        if rows.get_shape() != head.get_shape():
            return False
        return all(
            _same(rows[at : at + _ROWS], head[at : at + _ROWS])
            for at in range(0, rows.get_shape()[0], _ROWS)
        )


def _same(one: Any, other: Any) -> bool:
    return bool((one == other).all())


def _listed(names: set[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:_SHOWN]) + (
        f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    )
