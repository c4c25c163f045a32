"""A reward function for Python answers: does the code pass the problem's asserts?

A label is the asserts, as MBPP and HumanEval's users have them, one statement a line or a list of
them; every name in them that is not Python's and that they do not define is a function of the
answer::

    {"question": "Write a function add(a, b) that returns the sum.", "answer": "assert add(1, 2) ==
    3\\nassert ..."}

The answer is the last fenced block of the completion, or, without one, all of it. Its code runs in
a process that can compute and nothing else (openrlhf_ext/rewards/sandbox.py,
docs/operating.md#code-that-a-model-wrote): the asserts stay outside, arguments and values pass as
copies, so functions that change their argument in place, classes, and asserts of raised exceptions
cannot be graded.

* ``rewards`` and ``scores``: 1 if every assert holds, else 0.
* ``extra_logs``: ``accuracy`` (as the score) and ``asserts_passed``, the share of asserts that
  hold.

Environment variables, read at import: ``REWARD_CODE_SECONDS`` (5) for an answer with all of its
calls, which must be below ``reward.timeout_s``, and ``REWARD_CODE_MIB`` (256) of address space. A
machine that cannot confine the code is refused before the first step.

    openrlhf-ext train --reward.remote_url examples/python/reward_code.py ...
"""

from __future__ import annotations

import math
import os
import re
from typing import Any

from openrlhf_ext.rewards.sandbox import Answer, Limits, run_asserts

BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def _limits() -> Limits:
    """Raises ValueError: a variable is no number above its least value."""
    found = {}
    for name, default, least in (("REWARD_CODE_SECONDS", "5", 0.1), ("REWARD_CODE_MIB", "256", 64)):
        try:
            found[name] = float(os.environ.get(name, default))
        except ValueError as error:
            raise ValueError(f"{name} must be a number, got {os.environ[name]!r}") from error
        if not least <= found[name] < math.inf:
            raise ValueError(f"{name} must be at least {least:g}, got {found[name]:g}")
    seconds = found["REWARD_CODE_SECONDS"]
    return Limits(seconds, math.ceil(seconds), int(found["REWARD_CODE_MIB"]))


LIMITS = _limits()
Answer("", LIMITS).close()  # whether this machine can confine it is known before the first step


def reward_func(
    queries: list[str], prompts: list[str], labels: list[Any], completions: list[str], **_: Any
) -> dict[str, Any]:
    """OpenRLHF's reward convention, called with lists of one element; ``completions`` come without
    their end token."""
    (label,), (completion,) = labels, completions
    asserts = "\n".join(label) if isinstance(label, list) else label
    outcome = run_asserts(code_of(completion), asserts, LIMITS)
    correct = float(outcome.passed == outcome.asserts)
    passed = outcome.passed / outcome.asserts
    return {
        "rewards": correct,
        "scores": correct,
        "extra_logs": {"accuracy": correct, "asserts_passed": passed},
    }


def code_of(completion: str) -> str:
    """The last fenced block, or the whole text."""
    blocks = BLOCK.findall(completion)
    return blocks[-1] if blocks else completion
