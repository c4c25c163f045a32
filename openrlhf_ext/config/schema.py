"""The JSON schema of all options, by which editors complete and check YAML files: ``options.schema.json``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openrlhf_ext.config.run_config import RunConfig
from openrlhf_ext.options.sections.algo import ESTIMATORS

SCHEMA = Path(__file__).resolve().parents[1] / "options.schema.json"
_DEFS = "#/$defs/"


def format_schema() -> str:
    """The schema as text. Names with dots in them are patterns, which editors check and do not offer."""
    from openrlhf_ext.algorithms.registry import algorithm_class  # late: algorithms import torch

    schema = RunConfig.model_json_schema()
    models = schema["$defs"]
    for estimator in ESTIMATORS:
        options = algorithm_class(estimator).Options.model_json_schema()
        models |= options.pop("$defs", {}) | {f"algo.{estimator}": options}
        models["Algo"]["properties"][estimator] = {"$ref": f"{_DEFS}algo.{estimator}"}
    for model in [schema, *models.values()]:
        model.pop("required", None)  # a file may leave to another one, or to the command line, what a run needs
        if dotted := dict(_dotted(model, models)):
            model["patternProperties"] = {f"^{re.escape(name)}$": {"$ref": place} for name, place in dotted.items()}
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Options of openrlhf-ext train"}
    schema = about | _plain(schema)
    groups = ",\n".join(f"{json.dumps(name)}: {json.dumps(model)}" for name, model in schema.pop("$defs").items())
    return f'{json.dumps(schema)[:-1]}, "$defs": {{\n{groups}\n}}}}\n'  # a line for each group: readable differences


def modeline(file: Path) -> str:
    """The line by which editors find the schema from a YAML file."""
    return f"# yaml-language-server: $schema={os.path.relpath(SCHEMA, file.resolve().parent)}\n"


def _dotted(model: dict[str, Any], models: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(name with dots, place in the schema) of every option below the groups of a model."""
    for name, about in model.get("properties", {}).items():
        for form in (about, *about.get("anyOf", ())):
            if group := form.get("$ref", "").removeprefix(_DEFS):
                yield from (
                    (f"{name}.{inner}", f"{_DEFS}{group}/properties/{inner}") for inner in models[group]["properties"]
                )
                yield from ((f"{name}.{inner}", place) for inner, place in _dotted(models[group], models))


def _plain(node: Any) -> Any:
    """Without pydantic's titles, and without what only our own declarations say."""
    if isinstance(node, list):
        return [_plain(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    said = {key: _plain(inner) for key, inner in node.items()}
    if "$ref" in said:
        return {"$ref": said["$ref"]}
    if isinstance(said.get("title"), str):
        del said["title"]
    if isinstance(said.get("option"), dict) and "unsupported" in said["option"]:
        if refused := said.pop("option")["unsupported"]:
            said |= {"deprecated": True, "description": f"refused: {refused['why']}; {refused['instead']}"}
    return said
