"""What a checkpoint says of the model whose state it holds, compared with the one that is to go on
from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

STATE = "state.json"


def model_faults(folder: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[str]:
    """Why the state in ``folder`` does not fit a model by shape, type, adapters; ``theirs``: its
    ``state.json``. What ``ours`` does not know of its adapters is not compared."""
    shape = ours["shape"]
    different = [
        f"{k} {v!r}, the model has {shape.get(k)!r}"
        for k, v in theirs["shape"].items()
        if shape.get(k) != v
    ]
    if different:
        yield f"{folder} is of another model: {'; '.join(different)}"
    if theirs["param_dtype"] != (dtype := ours["param_dtype"]):
        yield (
            f"{folder} holds {theirs['param_dtype']} parameters, megatron.param_dtype is "
            f"{dtype}: resume with the type of the run that wrote it"
        )
    here, there = ours.get("adapters"), theirs.get("adapters")
    if (here is None) != (there is None):
        what = (
            "whole weights, this run trains adapters"
            if there is None
            else "adapters, this run trains whole weights"
        )
        yield f"{folder} holds {what}: resume with the ds.lora.rank of the run that wrote it"
    if (
        here
        and there
        and (other := [f"{n} {there[n]}, here {here[n]}" for n in here if there[n] != here[n]])
    ):
        yield (
            f"{folder} holds adapters of another run: {'; '.join(other)}: resume with the base "
            "(ds.lora.* and actor.model_name_or_path) of the run that wrote it"
        )
