from __future__ import annotations

import json
from pathlib import Path

import pytest

from openrlhf_ext.rewards.errors import RewardFailureLimit, RewardImportError
from openrlhf_ext.tools.evaluate import EvaluationOptions, evaluate_checkpoint
from tests.tools.evaluate.conftest import POSITIONS

OPTIONS = EvaluationOptions(n_samples=3, max_new_tokens=6, batch_size=8, num_workers=1)


def test_numbers_agree_with_each_other(checkpoint: Path, data: Path, reward: Path) -> None:
    result = evaluate_checkpoint(checkpoint, data, str(reward), OPTIONS)
    assert (result.prompts, result.samples_per_prompt) == (8, 3)
    assert result.reward_mean == pytest.approx(result.accuracy + 0.5)
    assert result.pass_at_k[1] == pytest.approx(result.accuracy)
    assert list(result.pass_at_k) == [1, 2] and result.pass_at_k[2] >= result.accuracy
    assert 0 < result.accuracy < 1 and 0 < result.standard_error < 0.5
    assert 1 <= result.response_length_mean <= 6 and 0 <= result.truncated_rate <= 1
    assert [sample.prompt for sample in result.sample_answers] == ["1+1=?", "2+2=?", "3+3=?"]
    assert (result.reward_failures, result.skipped_overlong) == (0, 0)
    assert json.loads(json.dumps(result.to_json()))["options"]["n_samples"] == 3


def test_the_same_seed_gives_the_same_result(checkpoint: Path, data: Path, reward: Path) -> None:
    first, again = (evaluate_checkpoint(checkpoint, data, str(reward), OPTIONS) for _ in range(2))
    assert (first.accuracy, first.sample_answers) == (again.accuracy, again.sample_answers)


def test_the_error_of_one_prompt_is_unknown(checkpoint: Path, data: Path, reward: Path) -> None:
    options = EvaluationOptions(limit=1, n_samples=1, max_new_tokens=6, num_workers=1)
    result = evaluate_checkpoint(checkpoint, data, str(reward), options)
    assert result.standard_error is None


def add_row(data: Path, question: str, answer: str) -> None:
    with data.open("a") as file:
        file.write(json.dumps({"question": question, "answer": answer}) + "\n")


def test_overlong_prompts_are_counted_and_left_out(checkpoint: Path, data: Path, reward: Path) -> None:
    add_row(data, "1" * POSITIONS, "#### 1")
    result = evaluate_checkpoint(checkpoint, data, str(reward), OPTIONS)
    assert (result.prompts, result.skipped_overlong) == (8, 1)


def test_a_file_of_overlong_prompts_is_refused(checkpoint: Path, tmp_path: Path, reward: Path) -> None:
    data = tmp_path / "long.jsonl"
    add_row(data, "1" * POSITIONS, "#### 1")
    with pytest.raises(ValueError, match="--max_new_tokens"):
        evaluate_checkpoint(checkpoint, data, str(reward), OPTIONS)


def failing_reward(tmp_path: Path) -> Path:
    path = tmp_path / "failing.py"
    path.write_text("def reward_func(queries, prompts, labels):\n    return {'rewards': float('nan')}\n")
    return path


def test_failed_gradings_count_as_wrong_up_to_the_limit(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    options = EvaluationOptions(n_samples=1, max_new_tokens=4, num_workers=1, max_failures=8)
    result = evaluate_checkpoint(checkpoint, data, str(failing_reward(tmp_path)), options)
    assert (result.accuracy, result.reward_failures) == (0.0, 8)


def test_too_many_failed_gradings_stop_the_evaluation(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    options = EvaluationOptions(n_samples=1, max_new_tokens=4, num_workers=1, max_failures=7)
    with pytest.raises(RewardFailureLimit, match="--reward.max_failures"):
        evaluate_checkpoint(checkpoint, data, str(failing_reward(tmp_path)), options)


def test_a_missing_reward_file_is_found_before_sampling(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(RewardImportError, match="there is no file"):
        evaluate_checkpoint(checkpoint, data, str(tmp_path / "none.py"), OPTIONS)
