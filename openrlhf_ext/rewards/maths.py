"""A ready-made reward function file for mathematical answers:
``--reward.remote_url openrlhf_ext/rewards/maths.py``.

Answers are compared as text and number first, then symbolically by math-verify, which can hang or
fail away from the main thread: a grading worker calls it there and kills it at the deadline. Reward
and score are 1 for an equal answer, else 0.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from math_verify import parse, verify

from openrlhf_ext.rewards.answers import (
    answers_equal,
    extract_answer,
    label_text,
    surely_different,
    with_roots,
)

# characters; longer ones are no final answers and only keep the parser busy
_LONGEST_SYMBOLIC = 300
# brackets within brackets; the parser's time doubles with each. MATH's answers have 3
_DEEPEST_SYMBOLIC = 8
_HUGE = re.compile(
    r"\^\s*\{?\s*-?\d{5}|\d\s*\^\s*\{?\s*\d+\s*\^|\d{6}\s*!|\de\+?\d{4}|"
    r"\\[dt]?binom\s*\{?\s*\d{5}|\\(?:int|sum|prod|lim)(?![a-z])"
)
"""Exponents of five digits, towers of powers, large factorials and binomials, what is to be
integrated or summed:
computing them takes seconds, or all memory. An answer of GSM8K or MATH has none of them."""
_DECIMALS = 9  # of a decimal that is compared with an expression
_SECONDS = 3  # of parsing an answer, and of a comparison; whole ones, by SIGALRM

# else every timeout of a completion is a warning
logging.getLogger("math_verify").setLevel(logging.CRITICAL)


def reward_func(
    queries: list[str],
    prompts: list[str],
    labels: list[Any],
    completions: list[str] | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Grade one completion, in OpenRLHF's convention: lists of length one.

    A label without ``####``, ``\\boxed{}`` or ``<answer>`` is taken as the answer itself; it may be
    a number. ``extra_logs["answered"]`` is 1 if the completion states an answer.
    """
    stated = extract_answer(completions[0] if completions else queries[0].removeprefix(prompts[0]))
    label = label_text(labels[0])
    gold = extract_answer(label) or label
    correct = float(stated is not None and same_value(gold, stated))
    return {
        "rewards": correct,
        "scores": correct,
        "extra_logs": {"answered": float(stated is not None)},
    }


def same_value(gold: str, stated: str) -> bool:
    """Whether two answers are equal as text, as numbers or symbolically. Call it on a main
    thread."""
    gold, stated = with_roots(gold), with_roots(stated)
    if answers_equal(gold, stated):
        return True
    if surely_different(gold, stated) or not (_is_computable(gold) and _is_computable(stated)):
        return False
    parsed = (parse(f"${answer}$", parsing_timeout=_SECONDS) for answer in (gold, stated))
    return verify(*parsed, float_rounding=_DECIMALS, timeout_seconds=_SECONDS)


def _is_computable(answer: str) -> bool:
    """Whether the parser and the computer algebra can be expected to come to an end with it."""
    if len(answer) > _LONGEST_SYMBOLIC or _HUGE.search(answer):
        return False
    depth = deepest = 0
    for character in answer:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest <= _DEEPEST_SYMBOLIC
