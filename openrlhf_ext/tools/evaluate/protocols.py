"""Evaluations as papers made them, each in one place: prompt, sampling, and where the answer
stands."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from openrlhf_ext.rewards.answers import Stated

MATH_TEMPLATE = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
"""The instruction of Qwen2.5-Math's evaluation."""
DAPO_TEMPLATE = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to "
    "put your answer "
    'on its own line after "Answer:".'
)
"""Of every prompt of DAPO-Math-17k."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What ``--protocol`` sets, options of the command by name; ``source`` says what of it the
    paper states."""

    source: str
    options: dict[str, Any]
    answers: Stated = "any"


PROTOCOLS = {
    "qwen_math": Protocol(
        source="the instruction of Qwen2.5-Math's evaluation, which benchmarks get without --protocol; "
        "n, temperature and lengths are the command's defaults, the answer is the last "
        "<answer>, else \\boxed{}, else what follows ####",
        options={"input_template": MATH_TEMPLATE},
    ),
    "entropy": Protocol(
        source="Tan et al., arXiv 2508.04349 v6, table 1: mean@32 (accuracy), pass@4, pass@32; longest "
        "response and sampling as stated of training (3.1). Prompt and 'Answer:' line are "
        "DAPO-Math-17k's, which the paper does not name; the first text states nothing of its "
        "evaluation",
        options={
            "input_template": DAPO_TEMPLATE,
            "apply_chat_template": True,
            "n_samples": 32,
            "temperature": 1.0,
            "top_p": 1.0,
            "max_new_tokens": 4096,
        },
        answers="line",
    ),
    "conflict": Protocol(
        source="Simoni et al., arXiv 2508.03772, table 1 and figure 2: the question alone, the system "
        "prompt of appendix 8.2, 64 samples, temperature 1 (stated of training), pass@k and "
        "maj@k of the content of <answer>; 1500 tokens are Listing 1's 5500 - 4000, the whole "
        "nucleus is ours",
        options={
            "input_template": "{}",
            "system_prompt": "You are a helpful assistant for solving math problems. Given a question, first "
            "think step by step between <reasoning> and </reasoning>. Then, give the final "
            "answer between <answer> and </answer>.",
            "apply_chat_template": True,
            "n_samples": 64,
            "temperature": 1.0,
            "top_p": 1.0,
            "max_new_tokens": 1500,
        },
        answers="tagged",
    ),
}
SYSTEM_PROMPTS: dict[str, str] = {
    name: each.options["system_prompt"]
    for name, each in PROTOCOLS.items()
    if "system_prompt" in each.options
}
"""System messages that protocols ask for, by name; the questions of these protocols stand alone
(template ``{}``)."""


def listed() -> str:
    """Every protocol with its options and its source, for ``--help``."""
    lines = []
    for name, protocol in PROTOCOLS.items():
        options = " ".join(f"--{option} {value!r}" for option, value in protocol.options.items())
        lines += textwrap.wrap(
            f"{name}: {protocol.source}", 110, initial_indent="  ", subsequent_indent="    "
        )
        lines += textwrap.wrap(options, 110, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)
