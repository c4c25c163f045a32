"""docs/algorithms.md: its examples run, and it names every option with the default it has."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from openrlhf_ext.algorithms import algorithm_names, describe_options, registry

DOCUMENT = Path(__file__).parents[2] / "docs" / "algorithms.md"
TEXT = DOCUMENT.read_text()


def section(name: str) -> str:
    return re.search(rf"^### {name}\n(.*?)(?=^##)", TEXT, re.MULTILINE | re.DOTALL).group(1)


def test_examples_give_the_printed_numbers() -> None:
    known = dict(registry._ALGORITHMS)
    try:
        result = doctest.testfile(str(DOCUMENT), module_relative=False, verbose=False)
    finally:
        registry._ALGORITHMS.clear()
        registry._ALGORITHMS.update(known)
    assert result.attempted > 40 and result.failed == 0


@pytest.mark.parametrize("name", algorithm_names())
def test_every_method_and_option_is_documented(name: str) -> None:
    shared = TEXT[TEXT.index("## Shared options") : TEXT.index("## Importance correction")]
    for info in describe_options(name):
        assert f"`{info.name}`" in section(name) or f"`{info.name}`" in shared, info.name


@pytest.mark.parametrize("name", algorithm_names())
def test_defaults_that_differ_are_stated(name: str) -> None:
    stated = dict(re.findall(r"`(\w+)` = `?([\w.-]+?)`?(?=[\s,;.)](?!\d))", section(name)))
    own = {"degenerate", "clip_high", "agg"}
    for info in describe_options(name):
        if info.name in own and name not in ("gtpo_conflict", "kl_cov") or info.name in stated:
            if info.name == "degenerate" or info.name in stated:
                wanted = str(info.default).lower() if isinstance(info.default, bool) else str(info.default)
                assert stated.get(info.name) == wanted, f"{name}: {info.name} = {stated.get(info.name)}"
