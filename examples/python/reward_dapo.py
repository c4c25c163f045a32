"""DAPO's reward of mathematical answers (arXiv 2503.14476, eq. 7): +1 if the answer is right, -1 if
it is not.

The answer is what follows the last ``Answer:`` in the last 300 characters of the completion, up to
the end of that line, as the prompts of DAPO-Math-17k ask for it
(``examples/python/prepare_data.py``) and as verl's ``math_dapo`` looks for it. It is compared with
the label as a number, then as text without LaTeX dressing (``openrlhf_ext/rewards/answers.py``);
DAPO-Math-17k's answers are whole numbers.

* ``rewards``: +1 or -1.
* ``scores``: 1 or 0. Accuracy and dynamic filtering use it.
* ``extra_logs``: ``accuracy`` (as the score) and ``answered`` (1 if there is an ``Answer:`` with
  something behind it).

The overlong penalty is an option: ``--reward.overlong_buffer_len``.

    openrlhf-ext train --config configs/recipes/qwen2.5_32b_dapo.yaml \\
        --reward.remote_url examples/python/reward_dapo.py ...
"""

from __future__ import annotations

from typing import Any

from openrlhf_ext.rewards.answers import answer_line, answers_equal, label_text
from openrlhf_ext.rewards.grading import completion_of


def reward_func(
    queries: list[str],
    prompts: list[str],
    labels: list[Any],
    completions: list[str] | None = None,
    **_: Any,
) -> dict[str, Any]:
    """OpenRLHF's reward convention, called with lists of one element; ``completions`` come without
    their end token."""
    (query,), (prompt,), (label,) = queries, prompts, labels
    stated = answer_line(completions[0] if completions else completion_of(query, prompt))
    correct = float(stated is not None and answers_equal(stated, gold_answer(label_text(label))))
    return {
        "rewards": 2.0 * correct - 1.0,
        "scores": correct,
        "extra_logs": {"accuracy": correct, "answered": float(stated is not None)},
    }


def gold_answer(label: str) -> str:
    """The bare answer, or what stands after ``####``; raises ValueError if there is none."""
    gold = label.rpartition("####")[2].strip()
    if not gold:
        raise ValueError(f"label must hold the answer (--data.label_key), got {label!r}")
    return gold
