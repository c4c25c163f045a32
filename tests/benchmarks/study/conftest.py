"""Makes the toy policy importable."""

from __future__ import annotations

import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "python"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))
