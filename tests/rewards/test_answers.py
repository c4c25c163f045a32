from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.rewards.answers import answers_equal, extract_answer


@pytest.mark.parametrize(("text", "answer"), [
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
])  # fmt: skip
def test_finds_the_final_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(("first", "second"), [
    ("72", "72.0"), ("1,234", "1234"), ("$18", "18"), ("0.5", "1/2"), (r"\frac{1}{2}", "0.5"), ("-3", " -3. "),
    ("x + 1", "x+1"), (r"\text{yes}", "yes"), ("+4", "4"), ("50%", "50"),
])  # fmt: skip
def test_equal_answers(first: str, second: str) -> None:
    assert answers_equal(first, second) and answers_equal(second, first)


@pytest.mark.parametrize(("first", "second"), [("72", "73"), ("1/0", "1"), ("", "0"), ("12", "1,2"), ("yes", "no"),
                                                ("9" * 5000, "9" * 5001)])  # fmt: skip
def test_different_answers(first: str, second: str) -> None:
    assert not answers_equal(first, second) and not answers_equal(second, first)


@given(st.integers())
def test_any_integer_survives_extraction(number: int) -> None:
    found = extract_answer(f"<reasoning></reasoning><answer>{number:,}</answer>")
    assert found is not None and answers_equal(found, str(number))


@given(st.text())
def test_extraction_and_comparison_never_raise(text: str) -> None:
    found = extract_answer(text)
    assert found is None or answers_equal(found, found)
