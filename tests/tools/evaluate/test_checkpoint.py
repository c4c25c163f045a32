from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from openrlhf_ext.options.sections.evaluate import Evaluate
from openrlhf_ext.rewards.grading import RewardFailureLimit, RewardImportError
from openrlhf_ext.tools.evaluate.checkpoint import evaluate, open_transformers
from openrlhf_ext.tools.evaluate.problems import PromptStyle, Store, Task, load_problems
from openrlhf_ext.tools.evaluate.result import EvaluationResult
from tests.tools.evaluate.conftest import POSITIONS


def evaluate_once(
    checkpoint: Path,
    data: Path,
    reward: Path,
    *,
    limit: int | None = None,
    n: int = 3,
    tokens: int = 6,
    max_failures: int = 0,
) -> EvaluationResult:
    task = Task("data", str(data), load_problems(data, limit=limit), str(reward), PromptStyle())
    options = Evaluate(
        model=str(checkpoint),
        n_samples=n,
        max_new_tokens=tokens,
        batch_size=8,
        num_workers=1,
        max_failures=max_failures,
    )
    with Store(None, {}) as store:
        (result,) = evaluate([task], [store], options, [1, 2][:n], open_transformers)
    return result


def test_numbers_agree_with_each_other(checkpoint: Path, data: Path, reward: Path) -> None:
    result = evaluate_once(checkpoint, data, reward)
    assert (result.prompts, result.samples_per_prompt) == (8, 3)
    assert result.reward_mean == pytest.approx(result.accuracy + 0.5)
    assert result.pass_at_k[1] == pytest.approx(result.accuracy)
    assert list(result.pass_at_k) == [1, 2] and result.pass_at_k[2] >= result.accuracy
    assert 0 < result.accuracy < 1 and 0 < result.standard_error < 0.5
    assert 1 <= result.response_length_mean <= 6 and 0 <= result.ended <= 1
    assert [sample["prompt"] for sample in result.sample_answers] == ["1+1=?", "2+2=?", "3+3=?"]
    assert (result.reward_failures, result.skipped_overlong) == (0, 0)
    assert json.loads(json.dumps(dataclasses.asdict(result)))["samples_per_prompt"] == 3


def test_the_same_seed_gives_the_same_result(checkpoint: Path, data: Path, reward: Path) -> None:
    first, again = (evaluate_once(checkpoint, data, reward) for _ in range(2))
    assert (first.accuracy, first.sample_answers) == (again.accuracy, again.sample_answers)


def test_the_error_of_one_prompt_is_unknown(checkpoint: Path, data: Path, reward: Path) -> None:
    assert evaluate_once(checkpoint, data, reward, limit=1, n=1).standard_error is None


def add_row(data: Path, question: str, answer: str) -> None:
    with data.open("a") as file:
        file.write(json.dumps({"question": question, "answer": answer}) + "\n")


def test_overlong_prompts_are_counted_and_left_out(
    checkpoint: Path, data: Path, reward: Path
) -> None:
    add_row(data, "1" * POSITIONS, "#### 1")
    result = evaluate_once(checkpoint, data, reward)
    assert (result.prompts, result.skipped_overlong) == (8, 1)


def test_a_file_of_overlong_prompts_is_refused(
    checkpoint: Path, tmp_path: Path, reward: Path
) -> None:
    data = tmp_path / "long.jsonl"
    add_row(data, "1" * POSITIONS, "#### 1")
    with pytest.raises(ValueError, match="--max_new_tokens"):
        evaluate_once(checkpoint, data, reward)


def failing_reward(tmp_path: Path) -> Path:
    path = tmp_path / "failing.py"
    path.write_text(
        "def reward_func(queries, prompts, labels):\n    return {'rewards': float('nan')}\n"
    )
    return path


def test_failed_gradings_count_as_wrong_up_to_the_limit(
    checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    result = evaluate_once(
        checkpoint, data, failing_reward(tmp_path), n=1, tokens=4, max_failures=8
    )
    assert (result.accuracy, result.reward_failures) == (0.0, 8)


def test_too_many_failed_gradings_stop_the_evaluation(
    checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(RewardFailureLimit, match="--reward.max_failures"):
        evaluate_once(checkpoint, data, failing_reward(tmp_path), n=1, tokens=4, max_failures=7)


def test_a_missing_reward_file_is_found_before_sampling(
    checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(RewardImportError, match="there is no file"):
        evaluate_once(checkpoint, data, tmp_path / "none.py")
