"""The mathematics reward of the conflict paper (arXiv 2508.03772): format and answer, ten points
each.

The completion should read::

    <reasoning>48+24=72</reasoning><answer>72</answer><|im_end|>

``REWARD_TAGGED_MODE`` chooses the form, read once at import: ``paper`` (default; the paper's
appendix 8.2) or ``official`` (the authors' released ``reward_math.py``). They differ in what earns
partial format credit, in whether ``</answer>`` must end the text, and in whether a wrong format
forfeits the accuracy. A text is searched as ``re.search`` with ``DOTALL`` would, but with
``str.find``: the lazy patterns need quadratic time on a text that repeats an opening tag, which a
policy finds soon enough.

* ``rewards``: format + accuracy, 0 to 20.
* ``scores``: 1 if the answer is right, else 0. Accuracy and dynamic filtering use it.
* ``extra_logs``: ``accuracy`` (as the score), ``format`` (points, 0 to 10), and ``tags``: 1 if the
  completion begins with the two blocks, whatever follows them. Neither mode asks for a completion
  that ends there.

The label is GSM8K's (``... #### 72``) or the bare answer. The gold string is compared as it stands:
the paper's mode takes ``1080`` for wrong where the label says ``1,080``.

gtpo_conflict reads these rewards as they are. The other methods ask whether a reward is above
``success_threshold``, whose default of 0.5 would call every well-formed wrong answer a success: set
it to 10.5.

    REWARD_TAGGED_MODE=paper openrlhf-ext train \\
        --reward.remote_url examples/python/reward_tagged_maths.py --algo.advantage.estimator
        gtpo_conflict ...
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from openrlhf_ext.rewards.answers import label_text
from openrlhf_ext.rewards.grading import completion_of

MODES = ("paper", "official")
FULL = 10.0  # points of a complete format, and of a right answer
_ONE_BLOCK, _ONE_BLOCK_AND_A_TAG = 1.0, 1.5  # official partial format credit
_REASONING = ("<reasoning>", "</reasoning>")
_ANSWER = ("<answer>", "</answer>")
BLOCKS = re.compile(r"\s*<reasoning>[^<>]*</reasoning>\s*<answer>[^<>]*</answer>")


def mode_from_environment(environment: Mapping[str, str] = os.environ) -> str:
    """Reads REWARD_TAGGED_MODE; raises ValueError if it is not a mode."""
    mode = environment.get("REWARD_TAGGED_MODE", MODES[0])
    if mode not in MODES:
        raise ValueError(f"REWARD_TAGGED_MODE must be one of {', '.join(MODES)}, got {mode!r}")
    return mode


MODE = mode_from_environment()


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
    reward = tagged_reward(completion, gold_answer(label_text(label)), MODE)
    score = reward.accuracy / FULL
    logs = {
        "accuracy": score,
        "format": reward.format,
        "tags": float(BLOCKS.match(completion) is not None),
    }
    return {"rewards": reward.total, "scores": score, "extra_logs": logs}


class TaggedReward(NamedTuple):
    """Points of one completion: 0 to 10 for the format, 0 or 10 for the answer."""

    format: float
    accuracy: float

    @property
    def total(self) -> float:
        """What the policy is trained on, 0 to 20; above 10.5 exactly when the answer is right."""
        return self.format + self.accuracy


def tagged_reward(completion: str, gold: str, mode: str = "paper") -> TaggedReward:
    """Grade a completion of the form ``<reasoning>...</reasoning><answer>...</answer>``, without
    prompt and end-of-sequence.

    ``paper`` compares the first answer block with the gold string literally, whatever surrounds it;
    ``official`` wants the answer block to end the text and a complete format, and then accepts a
    number within 1e-2 + 1e-5 |gold| or any answer that contains the gold string. Raises ValueError:
    a blank gold answer, which every text would contain.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if not gold.strip():
        raise ValueError(f"the gold answer must not be blank, got {gold!r}")
    return _paper(completion, gold) if mode == "paper" else _official(completion, gold)


def gold_answer(label: str) -> str:
    """What stands after the last ``####`` of a label, or the whole label, stripped. Raises
    ValueError: nothing stands there."""
    answer = label.rpartition("####")[2].strip()
    if not answer:
        raise ValueError(f"a label must be an answer or end in '#### answer', got {label!r}")
    return answer


def _paper(text: str, gold: str) -> TaggedReward:
    present = sum(tag in text for tag in _REASONING + _ANSWER)
    stated = _first_block(text, _ANSWER)
    right = stated is not None and stated.strip() == gold.strip()
    return TaggedReward(format=FULL if present == 4 else float(present > 0), accuracy=FULL * right)


def _official(text: str, gold: str) -> TaggedReward:
    stated = _final_block(text, _ANSWER)
    has_reasoning = _first_block(text, _REASONING) is not None
    if has_reasoning and stated is not None:
        return TaggedReward(FULL, FULL * _same_answer(stated.strip(), gold))
    if has_reasoning:
        return TaggedReward(_partial_credit(text, _ANSWER), 0.0)
    if stated is not None:
        return TaggedReward(_partial_credit(text, _REASONING), 0.0)
    return TaggedReward(0.0, 0.0)


def _partial_credit(text: str, missing: tuple[str, str]) -> float:
    """Credit of one complete block: a little more if some tag of the missing one is there."""
    return _ONE_BLOCK_AND_A_TAG if any(tag in text for tag in missing) else _ONE_BLOCK


def _first_block(text: str, tags: tuple[str, str]) -> str | None:
    """Group 1 of ``<tag>(.*?)</tag>``."""
    _, opening, rest = text.partition(tags[0])
    content, closing, _ = rest.partition(tags[1])
    return content if opening and closing else None


def _final_block(text: str, tags: tuple[str, str]) -> str | None:
    """Group 1 of ``<tag>(.*?)</tag>$``: from the first opening tag to the end of the text or its
    final newline."""
    _, opening, rest = text.removesuffix("\n").partition(tags[0])
    return rest.removesuffix(tags[1]) if opening and rest.endswith(tags[1]) else None


def _same_answer(stated: str, gold: str) -> bool:
    if gold in stated:
        return True
    try:
        difference, size = abs(float(stated) - float(gold)), abs(float(gold))
    except ValueError:
        return False
    return difference <= 1e-2 + 1e-5 * size
