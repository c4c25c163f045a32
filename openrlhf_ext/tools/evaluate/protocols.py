"""Evaluations as papers made them, each in one place: prompt, sampling, and where the answer stands."""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import dataclass
from typing import Any

from openrlhf_ext.rewards.answers import Stated

MATH_TEMPLATE = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
"""The instruction of Qwen2.5-Math's evaluation."""
DAPO_TEMPLATE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to put your answer "
    'on its own line after "Answer:".'
)
"""Of every prompt of DAPO-Math-17k."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What ``--protocol`` sets; ``source`` says what of it the paper states. None leaves an option's own default."""

    source: str
    template: str
    system_prompt: str | None = None
    chat: bool = False
    n_samples: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_new_tokens: int | None = None
    answers: Stated = "any"

    @property
    def options(self) -> dict[str, Any]:
        """Values of the command's options by name."""
        named = {
            "input_template": self.template, "system_prompt": self.system_prompt,
            "apply_chat_template": self.chat or None, "n_samples": self.n_samples, "temperature": self.temperature,
            "top_p": self.top_p, "max_new_tokens": self.max_new_tokens,
        }  # fmt: skip
        return {name: value for name, value in named.items() if value is not None}


DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 64, "apply_chat_template": False}
"""Of the options that a protocol may set, where there is none."""
_BENCHMARK_TOKENS = 1024  # a worked solution; in 64 tokens no model ends one
PROTOCOLS = {
    "qwen_math": Protocol(
        source="the instruction of Qwen2.5-Math's evaluation, which benchmarks get without --protocol; n, temperature "
        "and lengths are the command's defaults, the answer is the last <answer>, else \\boxed{}, else what follows "
        "####",
        template=MATH_TEMPLATE,
    ),
    "entropy": Protocol(
        source="Tan et al., arXiv 2508.04349 v6, table 1: mean@32 (accuracy), pass@4, pass@32; longest response and "
        "sampling as stated of training (3.1). Prompt and 'Answer:' line are DAPO-Math-17k's, which the paper does not "
        "name; the first text states nothing of its evaluation",
        template=DAPO_TEMPLATE, chat=True, n_samples=32, temperature=1.0, top_p=1.0, max_new_tokens=4096,
        answers="line",
    ),
    "conflict": Protocol(
        source="Simoni et al., arXiv 2508.03772, table 1 and figure 2: the question alone, the system prompt of "
        "appendix 8.2, 64 samples, temperature 1 (stated of training), pass@k and maj@k of the content of <answer>; "
        "1500 tokens are Listing 1's 5500 - 4000, the whole nucleus is ours",
        template="{}",
        system_prompt="You are a helpful assistant for solving math problems. Given a question, first think step by "
        "step between <reasoning> and </reasoning>. Then, give the final answer between <answer> and </answer>.",
        chat=True, n_samples=64, temperature=1.0, top_p=1.0, max_new_tokens=1500, answers="tagged",
    ),
}  # fmt: skip
SYSTEM_PROMPTS = {name: each.system_prompt for name, each in PROTOCOLS.items() if each.system_prompt is not None}
"""System messages that protocols ask for, by name; the questions of these protocols stand alone (template ``{}``)."""


def settle(given: argparse.Namespace) -> list[str]:
    """Fills the options that were not given (None) from the protocol, else with their defaults; returns what was given
    besides the protocol and wins over it, as words for the settings."""
    sampled = given.protocol is not None and not given.completions  # else only where the answer stands is asked
    options = PROTOCOLS[given.protocol].options if sampled else {}
    defaults = DEFAULTS | ({"max_new_tokens": _BENCHMARK_TOKENS} if given.benchmark else {})
    instead = []
    for name in (*options, *DEFAULTS):
        value, meant = getattr(given, name), options.get(name, defaults.get(name))
        if value is None:
            setattr(given, name, meant)
        elif name in options and value != meant:
            instead.append(f"--{name} {value!r} instead of {meant!r}")
    return list(dict.fromkeys(instead))


def listed() -> str:
    """Every protocol with its options and its source, for ``--help``."""
    lines = []
    for name, protocol in PROTOCOLS.items():
        options = " ".join(f"--{option} {value!r}" for option, value in protocol.options.items())
        lines += textwrap.wrap(f"{name}: {protocol.source}", 110, initial_indent="  ", subsequent_indent="    ")
        lines += textwrap.wrap(options, 110, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)
