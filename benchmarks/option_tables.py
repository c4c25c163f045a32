"""The tables of docs/configuration.md, printed; with ``--schema`` options.schema.json, by which
editors complete and check YAML files.

    python benchmarks/option_tables.py [--schema]
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import markdown_table
from openrlhf_ext.algorithms.registry import algorithm_class
from openrlhf_ext.config.run_config import RunConfig, option_table
from openrlhf_ext.config.show import group_of, method_options, shown_name, supported_and_refused
from openrlhf_ext.config.upstream import DIFFERENCES
from openrlhf_ext.options import Option, value_text
from openrlhf_ext.options.sections.algo import ESTIMATORS

_DEFS = "#/$defs/"


def format_markdown() -> str:
    """The section of docs/configuration.md that is generated."""
    supported, refused = supported_and_refused(list(option_table().values()))
    lines: list[str] = []
    for group, members in groupby(supported, key=group_of):
        rows = [_markdown_row(option) for option in members]
        lines += [
            f"### {group}",
            "",
            markdown_table(("option", "type", "default", "meaning"), rows),
            "",
        ]
    lines += ["### Options of the estimators", ""]
    lines += ["As `algo.<estimator>.<option>`; what they do is in [methods.md](methods.md).", ""]
    lines += [
        markdown_table(("option", "type", "default", "estimators", "meaning"), _method_rows()),
        "",
    ]
    lines += ["### Options of OpenRLHF that are refused or mean nothing here", ""]
    lines += [
        "Any other value than the inert one is refused, or accepted with a line that says why.",
        "",
    ]
    lines += [
        markdown_table(
            ("option", "inert value", "else", "why", "instead"), map(_refused_row, refused)
        ),
        "",
    ]
    lines += ["### Where defaults or choices differ from OpenRLHF", ""]
    rows = [(f"`{entry.name}`", entry.upstream, entry.ours, entry.why) for entry in DIFFERENCES]
    lines += [markdown_table(("option", "OpenRLHF", "here", "why"), rows)]
    return "\n".join(lines) + "\n"


def _method_rows() -> Iterator[Sequence[str]]:
    """One row for all estimators that have an option with this type, default and meaning."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for estimator in ESTIMATORS:
        for option in method_options(estimator):
            key = option.name.removeprefix(f"algo.{estimator}.")
            published = option.info.recommended
            taken = "" if published is None else f"; a run takes {value_text(published)}"
            default = "required" if option.required else _code(option.shown_default) + taken
            rows.setdefault((f"`{key}`", option.expects, default, option.help), []).append(
                estimator
            )
    for (key, expects, default, meaning), estimators in sorted(rows.items()):
        others = [estimator for estimator in ESTIMATORS if estimator not in estimators]
        all_but = "all but " + ", ".join(others) if others else "all"
        yield key, expects, default, all_but if len(others) < 4 else ", ".join(estimators), meaning


def _markdown_row(option: Option) -> Sequence[str]:
    mark = " +" if option.info.added else ""
    return f"`{shown_name(option)}`{mark}", option.expects, _code(option.shown_default), option.help


def _refused_row(option: Option) -> Sequence[str]:
    assert option.unsupported is not None
    reason = option.unsupported
    verdict = "refused" if reason.yet else "a line"
    return f"`{option.name}`", _code(option.shown_default), verdict, reason.why, reason.instead


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def format_schema() -> str:
    """The schema as text. Names with dots in them are patterns, which editors check and do not
    offer."""
    schema = RunConfig.model_json_schema()
    models = schema["$defs"]
    for estimator in ESTIMATORS:
        options = algorithm_class(estimator).Options.model_json_schema()
        models |= options.pop("$defs", {}) | {f"algo.{estimator}": options}
        models["Algo"]["properties"][estimator] = {"$ref": f"{_DEFS}algo.{estimator}"}
    for model in [schema, *models.values()]:
        # a file may leave to another one, or to the command line, what a run needs
        model.pop("required", None)
        if dotted := dict(_dotted(model, models)):
            model["patternProperties"] = {
                f"^{re.escape(name)}$": {"$ref": place} for name, place in dotted.items()
            }
    about = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Options of openrlhf-ext train",
    }
    schema = about | _plain(schema)
    groups = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(model)}" for name, model in schema.pop("$defs").items()
    )
    # a line for each group: readable differences
    return f'{json.dumps(schema)[:-1]}, "$defs": {{\n{groups}\n}}}}\n'


def _dotted(model: dict[str, Any], models: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(name with dots, place in the schema) of every option below the groups of a model."""
    for name, about in model.get("properties", {}).items():
        for form in (about, *about.get("anyOf", ())):
            if group := form.get("$ref", "").removeprefix(_DEFS):
                yield from (
                    (f"{name}.{inner}", f"{_DEFS}{group}/properties/{inner}")
                    for inner in models[group]["properties"]
                )
                yield from (
                    (f"{name}.{inner}", place) for inner, place in _dotted(models[group], models)
                )


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
            said |= {
                "deprecated": True,
                "description": f"refused: {refused['why']}; {refused['instead']}",
            }
    return said


if __name__ == "__main__":
    sys.stdout.write(format_schema() if sys.argv[1:] == ["--schema"] else format_markdown())
