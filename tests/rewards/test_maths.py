from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from openrlhf_ext import rewards
from openrlhf_ext.options.sections import Reward
from openrlhf_ext.rewards.pool import RewardPool
from tests.patience import PATIENCE_S


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    file = str(Path(rewards.__file__).with_name("maths.py"))
    with RewardPool(Reward(remote_url=file, num_workers=1, timeout_s=PATIENCE_S)) as pool:
        yield pool


@pytest.mark.parametrize(
    ("label", "completion", "score", "answered"),
    [
        ("48+24=72\n#### 72", "<reasoning>48+24=72</reasoning><answer>72</answer><|im_end|>", 1, 1),
        ("#### 72", "<answer>73</answer>", 0, 1),
        ("#### 72", "72", 0, 0),
        (r"\frac{\sqrt{3}}{2}", r"so \boxed{\sqrt{3}/2}", 1, 1),
        (r"(x+1)^2", r"\boxed{x^2+2x+1}", 1, 1),
        (r"(x+1)^2", r"\boxed{x^2+2x+2}", 0, 1),
        ("3", r"\boxed{\frac{}", 0, 0),
        ("3", r"\boxed{" + "9^" * 5000 + "9}", 0, 1),
        (r"\frac{7}{4}", r"\boxed{\dfrac{7}{4}}", 1, 1),
        (r"\frac{7}{4}", r"\boxed{\tfrac 74}", 1, 1),
        (r"\frac{7}{4}", r"\boxed{1.75}", 1, 1),
        (r"\frac{7}{4}", r"\boxed{1.7}", 0, 1),
        ("1250", r"\boxed{1{,}250}", 1, 1),
        ("1250", r"\boxed{\$1,250.00}", 1, 1),
        ("12", r"\boxed{x = 12}", 1, 1),
        ("12", r"\boxed{12\text{ cm}^2}", 1, 1),
        ("12", r"\boxed{12 dozen}", 0, 1),
        (r"(1,\frac{\pi}{3})", r"\boxed{\left( 1, \dfrac{\pi}{3} \right)}", 1, 1),
        (r"(1,2]", r"\boxed{(1,2)}", 0, 1),
        (r"2\sqrt{3}", r"\boxed{√12}", 1, 1),
        ("xy", r"\boxed{yx}", 1, 1),
        (r"\frac{\sqrt{2}}{4}", r"\boxed{0.25\sqrt{2}}", 1, 1),
        ("1,2", r"\boxed{2,1}", 1, 1),
        ("listen", r"\boxed{silent}", 0, 1),
        ("1,2,2", r"\boxed{1,1,2}", 0, 1),
        (r"\pi", r"\boxed{3.1415926}", 0, 1),
    ],
)
def test_equal_answers_are_rewarded(
    pool: RewardPool, label: str, completion: str, score: int, answered: int
) -> None:
    result = asyncio.run(pool.grade("What?" + completion, "What?", label))
    assert (result.reward, result.score, result.extra_logs) == (
        score,
        score,
        {"answered": answered},
    )


@pytest.mark.parametrize(
    "answer",
    [
        r"\int_0^1 " * 12 + "e^{-x^2} dx" * 12,
        r"\binom{999999999999}{444444444444}",
        r"\sum_{k=1}^{99999999} k^k",
        "999999999!",
        "9^{9^{9^{9}}}",
        "1e9999999",
        r"\frac{" * 5000,
        "(" * 290 + "1" + ")" * 290,
        "\0" * 1000,
        "1," * 100_000,
    ],
)
def test_an_attack_costs_a_verdict_and_no_worker(pool: RewardPool, answer: str) -> None:
    result = asyncio.run(pool.grade(f"<answer>{answer}</answer>", "", "14/3"))
    assert (result.score, result.extra_logs) == (0, {"answered": 1})
