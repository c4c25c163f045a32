"""The reward of the toy policy in benchmarks/end_to_end.py, for all systems:
examples/python/reward_arithmetic.py with its default credits, by the standard library alone. TRL's
environment has no openrlhf_ext.
"""

from __future__ import annotations

import re
from typing import Any

END_TOKENS = re.compile(r"(?:<\|(?:im_end|endoftext)\|>)+\Z")
FINAL_ANSWER = re.compile(r"<answer>(-?[0-9]{1,18})</answer>\Z")
WELL_FORMED = re.compile(r"<reasoning>[^<>]*</reasoning><answer>[^<>]*</answer>")
FORMAT_CREDIT = 0.1


def reward_func(
    queries: list[str], prompts: list[str], labels: list[str], **_: Any
) -> dict[str, Any]:
    """OpenRLHF's reward convention, called for one completion."""
    text = END_TOKENS.sub("", queries[0][len(prompts[0]) :].strip()).strip()
    stated = FINAL_ANSWER.search(text)
    only = text.count("<answer>") == text.count("</answer>") == 1
    correct = stated is not None and only and int(stated[1]) == int(labels[0].rpartition("####")[2])
    formed = WELL_FORMED.fullmatch(text) is not None
    logs = {"accuracy": float(correct), "format": float(formed)}
    return {
        "rewards": 1.0 if correct else FORMAT_CREDIT * formed,
        "scores": float(correct),
        "extra_logs": logs,
    }
