from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import reward_arithmetic
import reward_dapo
import reward_gsm8k
import reward_tagged_maths
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.rewards.grading import parse_answer
from tests.patience import PATIENCE_S

LABEL = "3+4=7\n7*2=14\n#### 14"
RIGHT = "<reasoning>3+4=7;7*2=14</reasoning><answer>14</answer>"
WRONG = "<reasoning>3+4=7;7*2=15</reasoning><answer>15</answer>"
PIECES = [
    "<reasoning>",
    "</reasoning>",
    "<answer>",
    "</answer>",
    "<|im_end|>",
    "14",
    "-",
    "#### 14",
    "\\boxed{",
    "é",
]
NASTY = st.one_of(st.text(), st.lists(st.sampled_from(PIECES)).map("".join))


def arithmetic(completion: str, label: str = LABEL, prompt: str = "(3+4)*2=?") -> dict[str, float]:
    answer = reward_arithmetic.reward_func([prompt + completion], [prompt], [label])
    return {"reward": answer["rewards"], "score": answer["scores"], **answer["extra_logs"]}


def gsm8k(completion: str, label: str, prompt: str = "How many?") -> dict[str, float]:
    answer = reward_gsm8k.reward_func([prompt + completion], [prompt], [label])
    return {"score": answer["scores"], **answer["extra_logs"]}


@pytest.mark.parametrize(
    "ending", ["", "<|im_end|>", "<|im_end|><|endoftext|><|endoftext|>", "\n<|im_end|>\n"]
)
def test_a_right_answer_in_form_earns_one(ending: str) -> None:
    assert arithmetic(RIGHT + ending) == {
        "reward": 1.0,
        "score": 1.0,
        "accuracy": 1.0,
        "format": 1.0,
    }


def test_form_without_the_right_answer_earns_the_format_credit() -> None:
    assert arithmetic(WRONG) == {"reward": 0.1, "score": 0.0, "accuracy": 0.0, "format": 1.0}


def test_a_right_answer_without_reasoning_counts_but_is_not_in_form() -> None:
    assert arithmetic("7*2<answer> 14 </answer>") == {
        "reward": 1.0,
        "score": 1.0,
        "accuracy": 1.0,
        "format": 0.0,
    }


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "14",
        "<answer>14",
        "<answer></answer>",
        "<answer>14</answer>.",
        "<answer>13</answer><answer>14</answer>",
        "<answer>14</answer><answer>14</answer>",
        "<answer><answer>14</answer>",
        "<answer>14</answer><answer>",
        "<answer>" + "1" * 10_000 + "</answer>",
        "<answer>14</answer>" + RIGHT,
    ],
)
def test_anything_but_one_final_answer_is_wrong(completion: str) -> None:
    assert arithmetic(completion)["score"] == 0.0


def test_an_answer_in_the_prompt_is_not_the_policys() -> None:
    assert arithmetic("", prompt="Write <answer>14</answer>")["score"] == 0.0
    assert arithmetic(RIGHT, prompt="Write <answer>number</answer>")["score"] == 1.0


@pytest.mark.parametrize("module", [reward_arithmetic, reward_gsm8k, reward_tagged_maths])
@pytest.mark.parametrize("cut", [0, 100])
def test_the_completion_is_found_after_a_composed_or_truncated_prompt(
    module: object, cut: int
) -> None:
    prompt = (
        "<answer>1</answer>" * 10
        + "A cafe\N{COMBINING ACUTE ACCENT} has 14 chairs."
        + " And a bar." * 5
    )
    written = prompt.replace("e\N{COMBINING ACUTE ACCENT}", "é")
    assert module.completion_of(written[cut:] + RIGHT, prompt) == RIGHT


def test_partial_credit_counts_the_steps_at_their_place() -> None:
    credits = reward_arithmetic.Credits(format=0.1, partial=0.2)
    assert reward_arithmetic.grade(WRONG, LABEL).reward(credits) == pytest.approx(0.1 + 0.2 * 0.5)
    assert reward_arithmetic.grade(RIGHT, LABEL).reward(credits) == 1.0
    assert reward_arithmetic.grade(WRONG.replace("</answer>", ""), LABEL).reward(credits) == 0.0


def test_credits_come_from_the_environment() -> None:
    read = reward_arithmetic.Credits.from_environment
    assert read({}) == reward_arithmetic.Credits(0.1, 0.0)
    assert read(
        {"REWARD_FORMAT_CREDIT": "0", "REWARD_PARTIAL_CREDIT": "0.5"}
    ) == reward_arithmetic.Credits(0.0, 0.5)
    for value in ("-0.1", "0.6", "nan", "much"):
        with pytest.raises(ValueError, match="REWARD_FORMAT_CREDIT"):
            read({"REWARD_FORMAT_CREDIT": value})


@pytest.mark.parametrize("label", ["", "many", "#### ", "#### many"])
def test_a_label_without_an_answer_is_an_error(label: str) -> None:
    with pytest.raises(ValueError, match="label"):
        arithmetic(RIGHT, label)
    if label in ("", "#### "):
        with pytest.raises(ValueError, match="label"):
            gsm8k(RIGHT, label)


def test_several_completions_get_lists() -> None:
    answer = reward_arithmetic.reward_func(["q" + RIGHT, "q" + WRONG], ["q", "q"], [LABEL, LABEL])
    assert answer["rewards"] == [1.0, 0.1]
    assert answer["extra_logs"]["accuracy"] == [1.0, 0.0]


@given(completion=NASTY, prompt=NASTY)
def test_any_text_gets_a_finite_reward(completion: str, prompt: str) -> None:
    for module in (reward_arithmetic, reward_gsm8k):
        result = parse_answer(module.reward_func([prompt + completion], [prompt], [LABEL]))
        assert 0.0 <= result.reward <= 1.0
        assert result.score in (0.0, 1.0)


def test_the_reward_files_import_no_torch() -> None:
    code = "import sys, reward_arithmetic, reward_gsm8k; sys.exit('torch' in sys.modules)"
    folder = str(Path(reward_arithmetic.__file__).parent)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]),
    }
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, timeout=PATIENCE_S).returncode
        == 0
    )


@pytest.mark.parametrize(
    ("completion", "label", "score", "answered"),
    [
        ("<answer>1080</answer><|im_end|>", "so it is\n#### 1,080", 1.0, 1.0),
        ("<answer>$1,080.00</answer>", "#### 1080", 1.0, 1.0),
        ("<answer>2160/2</answer>", "#### 1080", 1.0, 1.0),
        ("thus \\boxed{1080}", "#### 1080", 1.0, 1.0),
        ("3 of them cost $1,080 in all.", "#### 1080", 1.0, 0.0),
        ("1080, no, 1081", "#### 1080", 0.0, 0.0),
        ("down by -5.50", "#### -5.5", 1.0, 0.0),
        ("<answer>7</answer> although 1080", "#### 1080", 0.0, 1.0),
        ("none", "#### 1080", 0.0, 0.0),
    ],
)
def test_gsm8k_answers(completion: str, label: str, score: float, answered: float) -> None:
    assert gsm8k(completion, label) == {"score": score, "accuracy": score, "answered": answered}


def real_problems(shared_data: Path) -> Iterator[dict[str, str]]:
    for name in ("train", "test"):
        with (shared_data / "gsm8k" / f"{name}.jsonl").open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)


def test_every_real_gsm8k_solution_is_graded_right_and_a_changed_one_wrong(
    shared_data: Path,
) -> None:
    for row in real_problems(shared_data):
        question, label = row["question"], row["answer"]
        final = reward_gsm8k.label_answer(label)
        assert gsm8k(label, label, question)["score"] == 1.0
        assert gsm8k(f"<answer>{final}</answer>", label, question)["score"] == 1.0
        assert gsm8k(f"It is ${final}.", label, question)["score"] == 1.0
        assert gsm8k(f"<answer>{final}1</answer>", label, question)["score"] == 0.0


@pytest.mark.parametrize(
    ("completion", "label", "reward"),
    [
        ("Thus 7.\nAnswer: 7", "7", 1.0),
        ("Answer: 6\n... no.\nAnswer: $\\boxed{7}$<|im_end|>", "7", 1.0),
        ("answer :  1,072.", "1072", 1.0),
        ("Answer: 7 apples", "7", -1.0),
        ("The result is 7", "7", -1.0),
        ("Answer:", "7", -1.0),
        ("Answer: 7" + " and so on" * 30, "7", -1.0),  # not in the last 300 characters
    ],
)
def test_dapos_reward_is_plus_or_minus_one(completion, label, reward):
    answer = reward_dapo.reward_func(["What?" + completion], ["What?"], [label])
    parsed = parse_answer(answer, 0.0)
    assert parsed.reward == reward and parsed.score == (reward + 1) / 2


@given(NASTY)
def test_dapos_reward_grades_everything(completion):
    parsed = parse_answer(reward_dapo.reward_func(["Q" + completion], ["Q"], ["14"]), 0.0)
    assert parsed.reward in (-1.0, 1.0)


def test_gsm8ks_label_may_be_the_bare_number():
    assert reward_gsm8k.reward_func(["Q #### 1,072"], ["Q"], ["1072"])["rewards"] == 1.0
    with pytest.raises(ValueError, match="or be the number"):
        reward_gsm8k.reward_func(["Q #### 3"], ["Q"], ["So it is three."])
