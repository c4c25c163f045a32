from __future__ import annotations

from pathlib import Path

import pytest

from openrlhf_ext.reporting import METRICS, is_documented, names
from openrlhf_ext.rewards.result import RESERVED_LOG_KEYS

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_document_shows_the_table_as_it_is() -> None:
    assert names.markdown_table() in DOCUMENT.read_text(), "paste names.markdown_table() into it"


def test_document_lists_the_reserved_keys() -> None:
    listed = ", ".join(f"`{key}`" for key in sorted(RESERVED_LOG_KEYS))
    assert listed in DOCUMENT.read_text()


def test_names_are_unique_and_every_constant_is_documented() -> None:
    table = [metric.name for metric in METRICS]
    assert len(set(table)) == len(table)
    constants = [value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)]
    assert [name for name in constants if not is_documented(name)] == []


@pytest.mark.parametrize("name", ["reward/mean", "reward_log/format", "algorithm/entropy_correct", "step"])
def test_documented(name: str) -> None:
    assert is_documented(name)


@pytest.mark.parametrize("name", ["reward", "reward/median", "reward_log", ""])
def test_not_documented(name: str) -> None:
    assert not is_documented(name)
