"""A reward function for generated arithmetic: is the answer right, and is the form as asked?

OpenRLHF calls ``reward_func(queries, prompts, labels)`` with lists of one element; ``queries[0]``
is the prompt and the completion as text, special tokens included. The completion should read::

    <reasoning>3+4=7;7*2=14</reasoning><answer>14</answer><|im_end|>

* ``scores``: 1 if the completion ends in its only ``<answer>`` block and this holds the label's
  number, else 0. Accuracy and dynamic filtering use it.
* ``rewards``: 1 if correct; otherwise ``REWARD_FORMAT_CREDIT`` if the form is as above, plus
  ``REWARD_PARTIAL_CREDIT`` times the share of the label's steps that stand at their place in the
  reasoning.
* ``extra_logs``: ``accuracy`` (as the score) and ``format`` (1 if the form is as above).

Both credits are environment variables read once at import, defaults 0.1 and 0 (off). Together they
must stay within 0.5, the threshold above which the entropy-shaped algorithms take a completion for
a successful one.

Left out on purpose: torch (floats are accepted) and any mercy for a second answer; the first hack a
policy finds is to write several.

    openrlhf-ext train --reward.remote_url examples/python/reward_arithmetic.py ...
    REWARD_PARTIAL_CREDIT=0.3 openrlhf-ext train ...
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openrlhf_ext.rewards.answers import answers_equal, label_text
from openrlhf_ext.rewards.grading import completion_of

# where completions are not passed
END_TOKENS = re.compile(r"(?:<\|(?:im_end|endoftext|eot_id|end_of_text)\|>)+\Z")
WELL_FORMED = re.compile(r"<reasoning>([^<>]*)</reasoning><answer>([^<>]*)</answer>")
FINAL_ANSWER = re.compile(r"<answer>([^<>]*)</answer>\Z")
INTEGER = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True)
class Credits:
    """What a wrong completion can still earn."""

    format: float
    partial: float

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Credits:
        """Reads REWARD_FORMAT_CREDIT and REWARD_PARTIAL_CREDIT; raises ValueError if they do not
        stay within 0..0.5."""
        found = {
            name: environment.get(name, default)
            for name, default in (("REWARD_FORMAT_CREDIT", "0.1"), ("REWARD_PARTIAL_CREDIT", "0"))
        }
        try:
            format_credit, partial_credit = (float(value) for value in found.values())
        except ValueError as error:
            raise ValueError(f"reward credits must be numbers, got {found}") from error
        if not (
            format_credit >= 0 and partial_credit >= 0 and format_credit + partial_credit <= 0.5
        ):
            raise ValueError(f"reward credits must be >= 0 and at most 0.5 together, got {found}")
        return cls(format_credit, partial_credit)


@dataclass(frozen=True)
class Grade:
    """What one completion is worth."""

    correct: bool
    well_formed: bool
    correct_steps: float  # share of the label's steps, 0..1

    def reward(self, credits: Credits) -> float:
        if self.correct:
            return 1.0
        return credits.format * self.well_formed + credits.partial * self.correct_steps


CREDITS = Credits.from_environment()


def reward_func(
    queries: list[str],
    prompts: list[str],
    labels: list[Any],
    completions: list[str] | None = None,
    **_: Any,
) -> dict[str, Any]:
    """OpenRLHF's reward convention; a call for one completion gets scalars back, a call for more
    gets lists.

    ``completions`` come without their end token.
    """
    if completions is None:
        completions = [
            completion_of(query, prompt) for query, prompt in zip(queries, prompts, strict=True)
        ]
    grades = [
        grade(completion, label_text(label))
        for completion, label in zip(completions, labels, strict=True)
    ]
    scores = _per_call([float(g.correct) for g in grades])
    return {
        "rewards": _per_call([g.reward(CREDITS) for g in grades]),
        "scores": scores,
        "extra_logs": {
            "accuracy": scores,
            "format": _per_call([float(g.well_formed) for g in grades]),
        },
    }


def grade(completion: str, label: str) -> Grade:
    """Grades a completion against a GSM8K label (steps, one a line, then ``#### number``).

    Raises:
        ValueError: the label holds no integer.
    """
    steps, answer = parse_label(label)
    text = END_TOKENS.sub("", completion.strip()).strip()
    form = WELL_FORMED.fullmatch(text)
    return Grade(
        correct=(stated := final_answer(text)) is not None and answers_equal(stated, answer),
        well_formed=form is not None,
        correct_steps=share_of_correct_steps(form[1], steps) if form else 0.0,
    )


def final_answer(text: str) -> str | None:
    """What is in the only answer block, which must end the text; None if there is no such block."""
    block = FINAL_ANSWER.search(text)
    if block is None or text.count("<answer>") != 1 or text.count("</answer>") != 1:
        return None
    return block[1]


def share_of_correct_steps(reasoning: str, steps: list[str]) -> float:
    """Share of the label's steps found at their place among the steps of the reasoning; 0 if the
    label has none."""
    if not steps:
        return 0.0
    written = [step.strip() for step in reasoning.split(";")]
    return sum(mine == right for mine, right in zip(written, steps, strict=False)) / len(steps)


def parse_label(label: str) -> tuple[list[str], str]:
    """``"3+4=7\\n7*2=14\\n#### 14"`` -> ``(["3+4=7", "7*2=14"], "14")``; of a bare number no steps.

    Raises ValueError if there is no integer.
    """
    solution, _, answer = label.rpartition("####")
    if not INTEGER.fullmatch(answer.strip()):
        raise ValueError(
            "label must end in '#### <integer>' as in GSM8K (--data.label_key answer), got "
            f"{label!r}"
        )
    return [line.strip() for line in solution.splitlines() if line.strip()], answer.strip()


def _per_call(values: list[float]) -> float | list[float]:
    return values[0] if len(values) == 1 else values
