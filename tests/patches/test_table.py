from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from openrlhf_ext import patches
from openrlhf_ext.patches.__main__ import render_table

ROOT = Path(__file__).resolve().parents[2]


def test_documented_table_is_the_printed_one() -> None:
    text = (ROOT / "docs" / "operating.md").read_text()
    documented = re.search(r"<!-- table: .*? -->\n(.*)\n<!-- end of table -->", text, re.DOTALL)
    assert documented and documented[1] == render_table(), (
        "replace it by `python -m openrlhf_ext.patches`"
    )


@pytest.mark.parametrize("patch", patches.PATCHES, ids=lambda patch: patch.name)
def test_each_patch_is_documented_in_its_file(patch: patches.Patch) -> None:
    module = sys.modules[f"openrlhf_ext.patches.{patch.name}"]
    text = module.__doc__ or ""
    assert f"{patch.dependency} {patch.versions[0]}" in text
    assert all(word in text for word in ("Wrong there", "Changes", "Remove when"))
    assert re.search(r"\.py:\d+|:\d+-\d+", patch.problem), "name file and line"


def test_status_lists_every_patch() -> None:
    assert [status.name for status in patches.status()] == [patch.name for patch in patches.PATCHES]
