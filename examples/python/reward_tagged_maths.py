"""The mathematics reward of the conflict paper (arXiv 2508.03772): format and answer, ten points each.

The completion should read::

    <reasoning>48+24=72</reasoning><answer>72</answer><|im_end|>

``REWARD_TAGGED_MODE`` chooses the form, read once at import: ``paper`` (default; the paper's appendix 8.2) or
``official`` (the authors' released code). openrlhf_ext/rewards/tagged.py says how they differ.

* ``rewards``: format + accuracy, 0 to 20.
* ``scores``: 1 if the answer is right, else 0. Accuracy and dynamic filtering use it.
* ``extra_logs``: ``accuracy`` (as the score), ``format`` (points, 0 to 10), and ``tags``: 1 if the completion begins
  with the two blocks, whatever follows them. Neither mode asks for a completion that ends there.

The label is GSM8K's (``... #### 72``) or the bare answer. The gold string is compared as it stands: the paper's mode
takes ``1080`` for wrong where the label says ``1,080``.

gtpo_conflict reads these rewards as they are. The other methods ask whether a reward is above ``success_threshold``,
whose default of 0.5 would call every well-formed wrong answer a success: set it to 10.5.

    REWARD_TAGGED_MODE=paper openrlhf-ext train \\
        --reward.remote_url examples/python/reward_tagged_maths.py --algo.advantage.estimator gtpo_conflict ...
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from openrlhf_ext.rewards.grading import completion_of
from openrlhf_ext.rewards.tagged import FULL, MODES, gold_answer, tagged_reward

BLOCKS = re.compile(r"\s*<reasoning>[^<>]*</reasoning>\s*<answer>[^<>]*</answer>")


def mode_from_environment(environment: Mapping[str, str] = os.environ) -> str:
    """Reads REWARD_TAGGED_MODE; raises ValueError if it is not a mode."""
    mode = environment.get("REWARD_TAGGED_MODE", MODES[0])
    if mode not in MODES:
        raise ValueError(f"REWARD_TAGGED_MODE must be one of {', '.join(MODES)}, got {mode!r}")
    return mode


MODE = mode_from_environment()


def reward_func(
    queries: list[str], prompts: list[str], labels: list[str], completions: list[str] | None = None, **_: Any
) -> dict[str, Any]:
    """OpenRLHF's reward convention, called with lists of one element; ``completions`` come without their end token."""
    (query,), (prompt,), (label,) = queries, prompts, labels
    completion = completions[0] if completions else completion_of(query, prompt)
    reward = tagged_reward(completion, gold_answer(label), MODE)
    score = reward.accuracy / FULL
    logs = {"accuracy": score, "format": reward.format, "tags": float(BLOCKS.match(completion) is not None)}
    return {"rewards": reward.total, "scores": score, "extra_logs": logs}
