"""docs/algorithms.md and docs/methods.md: their examples run, and options have the defaults that
are written there."""

from __future__ import annotations

import doctest
import math
import re
from pathlib import Path

import pytest

from benchmarks import algorithm_tables
from openrlhf_ext.algorithms import algorithm_names, describe_options, registry

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "docs" / name for name in ("algorithms.md", "methods.md")]
TEXT = "\n".join(document.read_text() for document in DOCUMENTS)


def section(name: str) -> str:
    return re.search(rf"^### {name}\n(.*?)(?=^##)", TEXT, re.MULTILINE | re.DOTALL).group(1)


def test_examples_give_the_printed_numbers() -> None:
    known = dict(registry._ALGORITHMS)
    try:
        # methods.md goes on
        examples = doctest.DocTestParser().get_doctest(TEXT, {}, "docs", "docs", 0)
        result = doctest.DocTestRunner(verbose=False).run(examples)
    finally:
        registry._ALGORITHMS.clear()
        registry._ALGORITHMS.update(known)
    assert result.attempted > 40 and result.failed == 0


@pytest.mark.parametrize("name", algorithm_names())
def test_every_method_and_option_is_documented(name: str) -> None:
    """Options are in the table that `python benchmarks/option_tables.py` writes, with their
    defaults."""
    table = (
        (ROOT / "docs/reference/options.md")
        .read_text()
        .split("## Options of the estimators")[1]
        .split("\n## ")[0]
    )
    assert section(name)
    for info in describe_options(name):
        assert f"| `{info.name}` |" in table, info.name


def stated_defaults(name: str) -> dict[str, str]:
    """Defaults in a method's section: "`key` = value" in its text, and the rows of its table of
    options."""
    text = section(name)
    stated = dict(re.findall(r"`(\w+)` = `?([\w.-]+?)`?(?=[\s,;:.)](?!\d))", text))
    for keys, defaults in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([^|]+?) \|", text, re.MULTILINE):
        names, values = re.findall(r"`(\w+)`", keys), defaults.replace("`", "").split(", ")
        stated.update(
            zip(
                names, values if len(values) == len(names) else [defaults] * len(names), strict=True
            )
        )
    return stated


def says(text: str, default: object) -> bool:
    if default is None:
        return text == "null" or text.startswith("required")
    if default == math.log(2):
        return text == "ln 2"
    if isinstance(default, float):
        return float(text) == default
    return text == (str(default).lower() if isinstance(default, bool) else str(default))


@pytest.mark.parametrize("name", algorithm_names())
def test_defaults_that_differ_are_stated(name: str) -> None:
    """Defaults of a method's own must be there, and whatever default is there must be right."""
    stated = stated_defaults(name)
    for info in describe_options(name):
        if info.name in {"degenerate", "clip_high", "agg"} and info.default is not None:
            assert info.name in stated, f"{name}: the default of {info.name} is not stated"
        if info.name in stated:
            assert says(stated[info.name], info.default), (
                f"{name}: {info.name} = {stated[info.name]}"
            )


@pytest.mark.parametrize("name", algorithm_names())
def test_every_method_says_what_it_costs(name: str) -> None:
    assert "Cost: " in section(name)


def test_costs_of_the_overview_are_those_of_the_committed_record() -> None:
    page = algorithm_tables.OVERVIEW.read_text()
    assert algorithm_tables.updated(page) == page, "python benchmarks/algorithm_tables.py"
