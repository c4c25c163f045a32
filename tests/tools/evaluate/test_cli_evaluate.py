from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf_ext.cli.evaluate import main
from tests.patience import PATIENCE_S


@pytest.fixture
def arguments(checkpoint: Path, data: Path, reward: Path) -> list[str]:
    fixed = ["--n_samples", "2", "--max_new_tokens", "6", "--num_workers", "1"]
    return ["--model", str(checkpoint), "--data", str(data), "--reward", str(reward), *fixed]


def test_before_and_after(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = str(tmp_path / "out" / "before.json")
    assert main([*arguments, "--json", before]) == 0
    accuracy = json.loads(Path(before).read_text())["accuracy"]
    capsys.readouterr()
    assert main([*arguments, "--compare", before, "--min_gain", "0", "--expect_accuracy", str(accuracy)]) == 0
    shown = capsys.readouterr().out
    assert f"accuracy before  {100 * accuracy:.1f} %" in shown
    assert "8 prompts x 2 samples" in shown and "pass@2" in shown
    assert shown.count("question  ") == shown.count("  before  ") == 3


def test_a_model_that_is_no_checkpoint_is_refused_at_once(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--model", "absent"]) == 2
    assert "--model must be a folder with a Hugging Face checkpoint: absent" in capsys.readouterr().err
    assert main([*arguments, "--model", str(tmp_path)]) == 2
    assert "holds no tokenizer" in capsys.readouterr().err


def test_unmet_requirements_exit_with_1_and_say_so(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tmp_path / "before.json"
    before.write_text('{"accuracy": 0.9, "standard_error": 0.01, "prompts": 8, "samples_per_prompt": 2}')
    assert main([*arguments, "--compare", str(before), "--min_gain", "0.25", "--expect_accuracy", "3"]) == 1
    complaints = capsys.readouterr().err
    assert "--min_gain asks for 25.0" in complaints and "standard errors away from --expect_accuracy" in complaints


@pytest.mark.parametrize(("more", "complaint"), [
    (["--min_gain", "0.1"], "--min_gain needs --compare"),
    (["--input_key", "problem"], "--input_key"),
    (["--reward", "none.py"], "there is no file"),
    (["--reward", "reward.txt"], "--reward.remote_url"),
    (["--compare", "none.json"], "none.json"),
])  # fmt: skip
def test_mistakes_exit_with_2(
    arguments: list[str], more: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, *more]) == 2
    assert complaint in capsys.readouterr().err


def test_help_is_quick_and_needs_no_torch() -> None:
    program = "import sys; from openrlhf_ext.cli import evaluate; print({'torch', 'transformers'} & set(sys.modules))"
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert output.stdout.strip() == "set()"
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
