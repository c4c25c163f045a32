"""A reward function for GSM8K itself: the number after ``####`` in the label against the one the
completion states.

The stated answer is looked for in this order: the last ``<answer>...</answer>``, the last
``\\boxed{...}``, the last ``#### ...``, and, where a completion has none of them, its last number.
Numbers are compared exactly, as fractions: ``$1,080.00``, ``1080`` and ``2160/2`` are equal, ``1
1/2`` and ``3/2`` too; see openrlhf_ext/rewards/answers.py.

* ``rewards`` and ``scores``: 1 if the numbers are equal, else 0.
* ``extra_logs``: ``accuracy`` (as the score) and ``answered`` (1 if the answer was marked, not
  guessed from the text).

Left out on purpose: partial credit (see reward_arithmetic.py for that) and symbolic answers (see
openrlhf_ext/rewards/maths.py).

    openrlhf-ext train --reward.remote_url examples/python/reward_gsm8k.py \\
        --data.prompt_dataset gsm8k/train.jsonl --data.input_key question --data.label_key answer
        ...
"""

from __future__ import annotations

import re
from typing import Any

from openrlhf_ext.rewards.answers import (
    answers_equal,
    extract_answer,
    is_number,
    label_text,
    last_number,
)
from openrlhf_ext.rewards.grading import completion_of

LABEL_ANSWER = re.compile(r"####[ \t]*(\S.*)")


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
    completion = completions[0] if completions else completion_of(query, prompt)
    marked = extract_answer(completion)
    stated = marked if marked is not None else last_number(completion)
    correct = float(stated is not None and answers_equal(stated, label_answer(label_text(label))))
    return {
        "rewards": correct,
        "scores": correct,
        "extra_logs": {"accuracy": correct, "answered": float(marked is not None)},
    }


def label_answer(label: str) -> str:
    """The text after the last ``####`` of a GSM8K label, or a label that is a number; otherwise
    raises ValueError."""
    answers = LABEL_ANSWER.findall(label)
    if not answers and not is_number(label):
        raise ValueError(
            "label must hold '#### <answer>' as in GSM8K, or be the number (--data.label_key "
            f"answer), got {label!r}"
        )
    return answers[-1].strip() if answers else label.strip()
