"""The reward of SmolLM2-135M-Instruct in benchmarks/end_to_end.py, for all systems: as
examples/python/reward_gsm8k.py grades completions whose last number is an integer, by the standard
library alone. TRL's environment has no openrlhf_ext.
"""

from __future__ import annotations

import re
from typing import Any

NUMBER = re.compile(r"-?[0-9]+")


def reward_func(
    queries: list[str], prompts: list[str], labels: list[str], **_: Any
) -> dict[str, Any]:
    """OpenRLHF's reward convention, called for one completion."""
    numbers = NUMBER.findall(queries[0][len(prompts[0]) :])
    correct = float(bool(numbers) and int(numbers[-1]) == int(labels[0]))
    return {"rewards": correct, "scores": correct, "extra_logs": {"accuracy": correct}}
