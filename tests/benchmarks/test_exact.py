"""What benchmarks/exact.py measures, on a random policy: no log-prob differs."""

from __future__ import annotations

import pytest

from benchmarks import exact
from openrlhf_ext.exact.limits import processor_problem
from tests.exact import sides
from tests.models import make_tiny_policy
from tests.patience import PATIENCE_S

if (_PROBLEM := processor_problem()) is not None:
    pytest.skip(_PROBLEM, allow_module_level=True)


@pytest.mark.parametrize("kind", sides.TYPES)
def test_no_bit_differs(kind, tmp_path, monkeypatch):
    """The engine with prompts in chunks and cached beginnings; two packings."""
    make_tiny_policy(tmp_path / "model")
    packings = exact.PACKINGS[1:3]
    for name, value in {
        "WAYS": ("exact",),
        "ENGINES": (exact.CHUNKS | {"seed": 3},),
        "PACKINGS": packings,
        "PROCESS_S": PATIENCE_S,
    }.items():
        monkeypatch.setattr(exact, name, value)
    given = {"model": str(tmp_path / "model"), "type": kind, "tp": 1, "tokens": 150}
    checks = exact.bits(tmp_path / "work", given)["exact"]
    assert [check["packing"] for check in checks] == [*packings]
    for check in checks:
        assert check["tokens"] >= 300 and check["differ"] == 0 and check["largest"] == 0.0, check
