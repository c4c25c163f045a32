from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import reward_tagged_maths
from hypothesis import given
from hypothesis import strategies as st
from reward_tagged_maths import gold_answer, tagged_reward

from openrlhf_ext.options.sections import Reward
from openrlhf_ext.rewards.pool import RewardPool
from tests.patience import PATIENCE_S

FILE = Path(reward_tagged_maths.__file__)
GOOD = "<reasoning>48+24=72</reasoning><answer>72</answer>"


@pytest.mark.parametrize(
    ("text", "paper", "official"),
    [
        (GOOD, (10, 10), (10, 10)),
        (GOOD + "\n", (10, 10), (10, 10)),
        (GOOD + "\n\n", (10, 10), (1.5, 0)),
        (GOOD + " That is all.", (10, 10), (1.5, 0)),
        ("<answer>72</answer>", (1, 10), (1, 0)),
        ("72", (0, 0), (0, 0)),
        ("", (0, 0), (0, 0)),
        ("<reasoning>so 72</reasoning>", (1, 0), (1, 0)),
        ("<reasoning>so</reasoning>72</answer>", (1, 0), (1.5, 0)),
        ("</reasoning><answer>72</answer>", (1, 10), (1.5, 0)),
        ("</answer>72<answer></reasoning>x<reasoning>", (10, 0), (0, 0)),
        ("<answer>72</answer><reasoning>r</reasoning>", (10, 10), (1.5, 0)),
        ("<reasoning>a\nb</reasoning>\n<answer>\n 72 \n</answer>", (10, 10), (10, 10)),
        ("<reasoning>r</reasoning><answer>the 72 things</answer>", (10, 0), (10, 10)),
        ("<reasoning>r</reasoning><answer>172</answer>", (10, 0), (10, 10)),
        ("<reasoning>r</reasoning><answer>72.0</answer>", (10, 0), (10, 10)),
        ("<reasoning>r</reasoning><answer>72.0107</answer>", (10, 0), (10, 10)),
        ("<reasoning>r</reasoning><answer>71.9892</answer>", (10, 0), (10, 0)),
        ("<reasoning>r</reasoning><answer>71.9893</answer>", (10, 0), (10, 10)),
        ("<reasoning>r</reasoning><answer>7.2e1</answer>", (10, 0), (10, 10)),
        ("<reasoning>r</reasoning><answer>seven</answer>", (10, 0), (10, 0)),
        ("<reasoning>r</reasoning><answer></answer>", (10, 0), (10, 0)),
        ("<reasoning>r</reasoning><answer>nan</answer>", (10, 0), (10, 0)),
        ("<reasoning>r</reasoning><answer>72</answer><answer>5</answer>", (10, 10), (10, 10)),
        ("<reasoning>r</reasoning><answer>5</answer><answer>72</answer>", (10, 0), (10, 10)),
        ("<reasoning>r</reasoning><answer>5<answer>72</answer>", (10, 0), (10, 10)),
        ("<answer><reasoning>72</reasoning></answer>", (10, 0), (10, 10)),
        ("<ANSWER>72</ANSWER>", (0, 0), (0, 0)),
    ],
)
def test_points(text: str, paper: tuple[float, float], official: tuple[float, float]) -> None:
    for mode, wanted in (("paper", paper), ("official", official)):
        reward = tagged_reward(text, "72", mode)
        assert (reward.format, reward.accuracy) == wanted, mode
        assert reward.total == sum(wanted)


def regex_paper(text: str, gold: str) -> tuple[float, float]:
    tags = [tag in text for tag in ("<reasoning>", "</reasoning>", "<answer>", "</answer>")]
    match = re.search("<answer>(.*?)</answer>", text, re.DOTALL)
    right = match is not None and match[1].strip() == gold.strip()
    return 10.0 if all(tags) else float(any(tags)), 10.0 * right


def regex_official(text: str, gold: str) -> tuple[float, float]:
    has_r = re.search("<reasoning>.*?</reasoning>", text, re.DOTALL)
    has_a = re.search("<answer>.*?</answer>$", text, re.DOTALL)
    if not (has_r and has_a):
        others = ("<answer>", "</answer>") if has_r else ("<reasoning>", "</reasoning>")
        return 0.0 if not has_r and not has_a else 1.5 if any(
            tag in text for tag in others
        ) else 1.0, 0.0
    stated = re.search(r"<answer>\s*(.*?)\s*</answer>$", text, re.DOTALL)[1].strip()
    try:
        close = abs(float(stated) - float(gold)) <= 1e-2 + 1e-5 * abs(float(gold))
    except ValueError:
        close = False
    return 10.0, 10.0 * (close or gold in stated)


@given(
    st.lists(
        st.sampled_from(
            [
                "<reasoning>",
                "</reasoning>",
                "<answer>",
                "</answer>",
                "7",
                "2",
                ".",
                " ",
                "\n",
                "x",
                "\u3000",
            ]
        ),
        max_size=12,
    ),
    st.sampled_from(["7", "72", "7.2", "x"]),
)
def test_the_searches_are_those_of_the_regular_expressions(pieces: list[str], gold: str) -> None:
    text = "".join(pieces)
    for mode, reference in (("paper", regex_paper), ("official", regex_official)):
        reward = tagged_reward(text, gold, mode)
        assert (reward.format, reward.accuracy) == reference(text, gold), mode
        assert (reward.total > 10.5) == (reward.accuracy == 10), mode


@pytest.mark.parametrize("mode", ["paper", "official"])
def test_repeated_tags_take_linear_time(mode: str) -> None:
    start = time.process_time()
    for tag in ("<answer>", "<reasoning>", "<answer> \n", "</answer>"):
        tagged_reward(tag * 200_000, "72", mode)
    assert time.process_time() - start < 4


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="mode must be one of paper, official, got 'Paper'"):
        tagged_reward(GOOD, "72", "Paper")
    with pytest.raises(ValueError, match="gold answer must not be blank"):
        tagged_reward(GOOD, " ", "official")


def test_labels() -> None:
    assert (
        gold_answer("48/2=24\n48+24=72\n#### 72\n")
        == gold_answer("72")
        == gold_answer("a #### b #### 72")
        == "72"
    )
    with pytest.raises(ValueError, match="end in '#### answer'"):
        gold_answer("so ####  ")


@pytest.mark.parametrize(
    ("mode", "completion", "reward", "score", "points", "tags"),
    [
        ("paper", GOOD + "<|im_end|>", 20, 1, 10, 1),
        ("official", GOOD + "<|im_end|><|endoftext|>", 20, 1, 10, 1),
        ("official", GOOD + "<|eot_id|>", 20, 1, 10, 1),
        ("official", GOOD + " and on", 1.5, 0, 1.5, 1),
        ("paper", "<answer>72</answer><|im_end|>", 11, 1, 1, 0),
        ("official", "<answer>72</answer><|im_end|>", 1, 0, 1, 0),
        ("paper", "<reasoning>48+24<reasoning>=72</reasoning><answer>72</answer>", 20, 1, 10, 0),
    ],
)
def test_reward_file(
    mode: str,
    completion: str,
    reward: float,
    score: float,
    points: float,
    tags: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REWARD_TAGGED_MODE", mode)
    prompt = "Answer as <reasoning>...</reasoning><answer>...</answer>. 48+24? "
    answer = load_file()["reward_func"](
        queries=[prompt + completion], prompts=[prompt], labels=["x\n#### 72"], extra=1
    )
    assert answer == {
        "rewards": reward,
        "scores": score,
        "extra_logs": {"accuracy": score, "format": points, "tags": tags},
    }


def load_file() -> dict:
    namespace = {"__name__": "reward_tagged_maths"}
    exec(compile(FILE.read_text(), str(FILE), "exec"), namespace)
    return namespace


def test_reward_file_in_the_pool() -> None:
    with RewardPool(Reward(remote_url=str(FILE), num_workers=1, timeout_s=PATIENCE_S)) as pool:
        result = asyncio.run(pool.grade("What?" + GOOD + "<|im_end|>", "What?", "#### 72"))
    assert (result.reward, result.score, result.extra_logs) == (
        20,
        1,
        {"accuracy": 1, "format": 10, "tags": 1},
    )


def test_a_wrong_mode_is_refused_when_the_file_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TAGGED_MODE", "strict")
    with pytest.raises(
        ValueError, match="REWARD_TAGGED_MODE must be one of paper, official, got 'strict'"
    ):
        load_file()


def test_the_module_is_light() -> None:
    program = (
        "import sys, reward_tagged_maths; print({'torch', 'numpy', 'matplotlib'} & "
        "set(sys.modules))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
        cwd=FILE.parent,
    )
    assert shown.stdout.strip() == "set()"
