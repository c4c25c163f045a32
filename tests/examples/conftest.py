"""Makes the example programs importable; they are scripts beside the package, not part of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "python"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real benchmark files beside the checkout; tests that need it are skipped where
    it is missing."""
    folder = Path(__file__).resolve().parents[3] / "shared" / "data"
    if not (folder / "gsm8k" / "train.jsonl").is_file():
        pytest.skip(f"no real data: {folder / 'gsm8k' / 'train.jsonl'} is missing")
    return folder
