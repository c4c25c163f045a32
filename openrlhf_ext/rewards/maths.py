"""A ready-made reward function file for mathematical answers: ``--reward.remote_url openrlhf_ext/rewards/maths.py``.

The stated answer of the completion is compared with that of the label: as text and number first, then symbolically by
math-verify, which can hang or fail away from the main thread. A grading worker calls it on its main thread and kills it
at the deadline. Reward and score are 1 for an equal answer and 0 otherwise.
"""

from __future__ import annotations

from typing import Any

from math_verify import parse, verify

from openrlhf_ext.rewards.answers import answers_equal, extract_answer

_LONGEST_SYMBOLIC = 300  # characters; longer ones are no final answers and only keep the parser busy


def reward_func(queries: list[str], prompts: list[str], labels: list[str], **_: Any) -> dict[str, Any]:
    """Grade one completion, in OpenRLHF's convention: lists of length one.

    A label without ``####``, ``\\boxed{}`` or ``<answer>`` is taken as the answer itself. ``extra_logs["answered"]``
    is 1 if the completion states an answer.
    """
    stated = extract_answer(queries[0].removeprefix(prompts[0]))
    gold = extract_answer(labels[0]) or labels[0]
    correct = float(stated is not None and same_value(gold, stated))
    return {"rewards": correct, "scores": correct, "extra_logs": {"answered": float(stated is not None)}}


def same_value(gold: str, stated: str) -> bool:
    """Whether two answers are equal as text, as numbers or symbolically. Call it on a main thread."""
    if answers_equal(gold, stated):
        return True
    if max(len(gold), len(stated)) > _LONGEST_SYMBOLIC:
        return False
    return verify(parse(f"${gold}$"), parse(f"${stated}$"))
