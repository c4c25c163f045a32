"""Makes the toy policy importable, and lets no method of a study stay behind in the test
process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from openrlhf_ext.algorithms import registry

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "python"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))


@pytest.fixture(autouse=True, scope="module")
def methods_of_studies_go() -> Iterator[None]:
    """Other tests say which methods have an option."""
    registry.algorithm_of_file.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_ALGORITHMS", dict(registry._ALGORITHMS))
        yield
    registry.algorithm_of_file.cache_clear()
