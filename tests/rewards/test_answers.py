from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.rewards.answers import answers_equal, extract_answer, label_text, last_number
from openrlhf_ext.rewards.maths import same_value


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Natalia sold 48+24 = <<48+24=72>>72 clips.\n#### 72", "72"),
        ("#### 1,234\n", "1,234"),
        ("<reasoning>3+4=7;7*2=14</reasoning><answer>14</answer><|im_end|>", "14"),
        ("<answer>1</answer> no, <answer> 2 </answer>", "2"),
        ("<answer>12", "12"),
        (r"so \boxed{\frac{1}{2}} holds", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{f(\{x\})}", r"f(\{x\})"),
        (r"\boxed{1", None),
        ("<answer></answer>", None),
        ("no answer", None),
        ("", None),
    ],
)
def test_finds_the_final_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


def pairs(relation: str, file: str) -> list[tuple[str, str]]:
    lines = Path(__file__).with_name(file).read_text().splitlines()
    return [
        (one, other)
        for one, _, other in (x.partition(relation) for x in lines if not x.startswith("#"))
    ]


EQUAL = pairs(" == ", "equal_answers.txt")
DIFFERENT = [*pairs(" != ", "different_answers.txt"), ("9" * 5000, "9" * 5001)]


@pytest.mark.parametrize(("first", "second"), EQUAL)
def test_equal_answers(first: str, second: str) -> None:
    assert answers_equal(first, second) and answers_equal(second, first)


@pytest.mark.parametrize(("first", "second"), DIFFERENT)
def test_different_answers(first: str, second: str) -> None:
    assert not answers_equal(first, second) and not answers_equal(second, first)


def test_the_symbolic_comparison_takes_no_different_answers_for_equal() -> None:
    """math-verify takes 5 cm for 5 m and 12_7 for 12; it is asked only where the answers are not
    surely different."""
    wrong = [
        pair
        for one, other in DIFFERENT
        for pair in ((one, other), (other, one))
        if same_value(*pair)
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("label", "text"),
    [
        (4, "4"),
        (4.0, "4"),
        ("4", "4"),
        (["4"], "4"),
        ([4], "4"),
        (0.1, "0.1"),
        (True, "true"),
        (1e20, str(10**20)),
        (np.int64(4), "4"),
        (np.float64(0.5), "0.5"),
        (-3, "-3"),
    ],
)
def test_a_label_of_any_type_is_a_text(label: Any, text: str) -> None:
    assert answers_equal(label_text(label), text)


@pytest.mark.parametrize("label", [None, {}, {"a": 1}, [], ["4", "5"], math.nan, math.inf])
def test_a_label_that_is_no_answer_is_refused(label: Any) -> None:
    with pytest.raises(ValueError, match="data.label_key"):
        label_text(label)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so it is 3/2.", "3/2"),
        ("It takes 1 1/2 hours", "1 1/2"),
        ("12-5=7", "7"),
        ("= −5", "-5"),
        ("x=-5", "-5"),
        (r"The answer is $\frac{3}{2}$.", r"\frac{3}{2}"),
        ("costs $1,234, which", "1,234"),
        ("2, 125", "125"),
        ("7-2", "2"),
        ("it costs -$5", "-5"),
        (r"\$32,\!348", "32,348"),
        (r"3 \times 10^8", r"3 \times 10^8"),
        ("no", None),
    ],
)
def test_the_last_number_of_a_text(text: str, number: str | None) -> None:
    assert last_number(text) == number


@given(st.integers())
def test_any_integer_survives_extraction(number: int) -> None:
    found = extract_answer(f"<reasoning></reasoning><answer>{number:,}</answer>")
    assert found is not None and answers_equal(found, str(number))


@given(st.text())
def test_extraction_and_comparison_never_raise(text: str) -> None:
    found = extract_answer(text)
    assert found is None or answers_equal(found, found)
