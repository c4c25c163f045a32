"""The mathematics reward of the conflict paper, in its two published forms.

M. Simoni et al., "GTPO: Stabilizing Group Relative Policy Optimization via Gradient and Entropy Control", arXiv
2508.03772: mode ``paper`` is its appendix 8.2, mode ``official`` the authors' released ``reward_math.py``. They
differ in what earns partial format credit, in whether ``</answer>`` must end the text, and in whether a wrong format
forfeits the accuracy. A text is searched as ``re.search`` with ``DOTALL`` would, but with ``str.find``: the lazy
patterns need quadratic time on a text that repeats an opening tag, which a policy finds soon enough.
"""

from __future__ import annotations

from dataclasses import dataclass

MODES = ("paper", "official")
FULL = 10.0  # points of a complete format, and of a right answer
_ONE_BLOCK, _ONE_BLOCK_AND_A_TAG = 1.0, 1.5  # official partial format credit
_REASONING = ("<reasoning>", "</reasoning>")
_ANSWER = ("<answer>", "</answer>")


@dataclass(frozen=True)
class TaggedReward:
    """Points of one completion: 0 to 10 for the format, 0 or 10 for the answer."""

    format: float
    accuracy: float

    @property
    def total(self) -> float:
        """What the policy is trained on, 0 to 20; above 10.5 exactly when the answer is right."""
        return self.format + self.accuracy


def tagged_reward(completion: str, gold: str, mode: str = "paper") -> TaggedReward:
    """Grade a completion of the form ``<reasoning>...</reasoning><answer>...</answer>``, without prompt and
    end-of-sequence.

    ``paper`` compares the first answer block with the gold string literally, whatever surrounds it; ``official``
    wants the answer block to end the text and a complete format, and then accepts a number within 1e-2 + 1e-5 |gold|
    or any answer that contains the gold string. Raises ValueError: a blank gold answer, which every text would
    contain.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if not gold.strip():
        raise ValueError(f"the gold answer must not be blank, got {gold!r}")
    return _paper(completion, gold) if mode == "paper" else _official(completion, gold)


def gold_answer(label: str) -> str:
    """What stands after the last ``####`` of a label, or the whole label, stripped. Raises ValueError: nothing stands
    there."""
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
    """Group 1 of ``<tag>(.*?)</tag>$``: from the first opening tag to the end of the text or its final newline."""
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
