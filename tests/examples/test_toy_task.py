from __future__ import annotations

import json
import random
import re
from itertools import islice
from pathlib import Path

import pytest
import toy_task
from hypothesis import given
from hypothesis import strategies as st


@given(seed=st.integers(0, 10**6), operands=st.integers(2, 4), largest_value=st.integers(9, 60))
def test_the_label_agrees_with_python(seed: int, operands: int, largest_value: int) -> None:
    problem = toy_task.draw_problem(random.Random(seed), operands, largest_value)
    solution = problem.solution
    assert re.fullmatch(r"[0-9+*()-]+=\?", problem.question)
    # digits, brackets and + - * only
    assert solution.answer == eval(problem.question.removesuffix("=?"))
    assert len(solution.steps) == operands - 1
    for step in solution.steps:
        left, right = step.split("=")
        assert eval(left) == int(right)
        assert 0 <= int(right) <= largest_value


def test_brackets_stand_only_where_left_to_right_order_needs_them() -> None:
    assert toy_task.Problem(3, (("+", 4), ("*", 2), ("-", 5))).question == "(3+4)*2-5=?"
    assert toy_task.Problem(3, (("*", 4), ("*", 2), ("+", 5))).question == "3*4*2+5=?"


def test_label_and_completion_have_the_agreed_form() -> None:
    solution = toy_task.Problem(3, (("+", 4), ("*", 2))).solution
    assert solution.label == "3+4=7\n7*2=14\n#### 14"
    assert solution.completion == "<reasoning>3+4=7;7*2=14</reasoning><answer>14</answer>"


def test_files_are_in_gsm8k_form_disjoint_and_without_repeats(tmp_path: Path) -> None:
    paths = toy_task.write_task(tmp_path, train_size=600, heldout_size=150)
    questions = {}
    for split, path in paths.items():
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert all(row.keys() == {"question", "answer"} for row in rows)
        assert all(re.search(r"\n#### [0-9]+\Z", row["answer"]) for row in rows)
        questions[split] = [row["question"] for row in rows]
    assert [len(questions["train"]), len(questions["heldout"])] == [600, 150]
    assert len({*questions["train"], *questions["heldout"]}) == 750


def test_splits_stay_disjoint_across_seeds() -> None:
    train = {problem.question for problem in islice(toy_task.problem_stream(1, "train"), 3000)}
    heldout = {problem.question for problem in islice(toy_task.problem_stream(2, "heldout"), 3000)}
    assert not train & heldout


def test_the_same_seed_writes_the_same_files(tmp_path: Path) -> None:
    def written(name: str, seed: int) -> bytes:
        return toy_task.write_task(tmp_path / name, train_size=50, heldout_size=10, seed=seed)[
            "train"
        ].read_bytes()

    assert written("a", 3) == written("b", 3) != written("c", 4)


def test_the_difficulty_mix_is_an_option() -> None:
    problems = islice(toy_task.problem_stream(0, "train", {2: 0.0, 4: 1.0}), 50)
    assert {len(problem.operations) for problem in problems} == {3}
    assert toy_task.parse_difficulty(["2:0.25", "3:0.75"]) == {2: 0.25, 3: 0.75}


@pytest.mark.parametrize("shares", [["5:1"], ["3:-1"], ["3:0"], ["3"], ["x:1"]])
def test_a_wrong_difficulty_is_refused(shares: list[str]) -> None:
    with pytest.raises(ValueError, match="difficulty"):
        toy_task.parse_difficulty(shares)


def test_the_largest_value_is_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "toy_task.py",
        "--output_dir",
        str(tmp_path),
        "--largest_value",
        "9",
        "--train_size",
        "40",
    ]
    monkeypatch.setattr("sys.argv", [*words, "--heldout_size", "10"])
    toy_task.main()
    answers = re.findall(r"=(\d+)", (tmp_path / "train.jsonl").read_text())
    assert len(answers) >= 40 and max(map(int, answers)) <= 9
    with pytest.raises(ValueError, match="largest_value must be at least 9, got 8"):
        next(toy_task.problem_stream(0, "train", largest_value=8))


def test_too_many_problems_of_a_kind_are_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="--difficulty"):
        toy_task.distinct_problems(toy_task.problem_stream(0, "heldout", {2: 1.0}), 1000)
