"""The reward of the large policy in benchmarks/end_to_end.py: the share of digits among the
characters it wrote.

Its weights are random, so arithmetic would give every completion the same reward, and a group
without differences trains nothing.
"""

from __future__ import annotations

from typing import Any


def reward_func(
    queries: list[str], prompts: list[str], labels: list[str], **_: Any
) -> dict[str, Any]:
    """OpenRLHF's reward convention, called for one completion."""
    completion = queries[0][len(prompts[0]) :]
    share = sum(character.isdigit() for character in completion) / max(1, len(completion))
    return {"rewards": share, "scores": share, "extra_logs": {}}
