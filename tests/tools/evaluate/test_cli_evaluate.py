from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from openrlhf_ext.cli.evaluate import main
from tests.patience import PATIENCE_S


@pytest.fixture
def arguments(checkpoint: Path, data: Path, reward: Path) -> list[str]:
    fixed = ["--n_samples", "2", "--max_new_tokens", "6", "--num_workers", "1"]
    return ["--model", str(checkpoint), "--data", str(data), "--reward", str(reward), *fixed]


def test_before_and_after(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = str(tmp_path / "out" / "before.json")
    assert main([*arguments, "--json", before]) == 0
    accuracy = json.loads(Path(before).read_text())["accuracy"]
    capsys.readouterr()
    assert (
        main(
            [*arguments, "--compare", before, "--min_gain", "0", "--expect_accuracy", str(accuracy)]
        )
        == 0
    )
    shown = capsys.readouterr().out
    percent = re.escape(f"{100 * accuracy:.1f} %")
    assert re.search(rf"\| accuracy +\| {percent} +\| [\d.]+ to [\d.]+ % +\| {percent} +\|", shown)
    assert "problems: 8 problems x 2 completions" in shown and "pass@2" in shown
    assert (
        shown.count("\nprompt  ") + 1 == shown.count("\nbefore  ") == 3 and "results in " in shown
    )


def test_accuracy_is_the_share_of_right_ones_and_the_mean_score_stands_beside_it(
    arguments: list[str], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half a point for everything is no right answer."""
    (tmp_path / "half.py").write_text(
        "def reward_func(queries, prompts, labels):\n    return {'rewards': 0.5}\n"
    )
    old = {
        "accuracy": 0.0,
        "standard_error": 0.0,
        "score_mean": 0.5,
        "prompts": 8,
        "samples_per_prompt": 2,
    }
    (tmp_path / "old.json").write_text(json.dumps(old))
    half = [
        *arguments,
        "--reward",
        str(tmp_path / "half.py"),
        "--compare",
        str(tmp_path / "old.json"),
    ]
    assert main([*half, "--min_gain", "0"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"accuracy +\| 0.0 % +\| 0.0 to 32.4 % +\| 0.0 % ", shown), "Wilson: 0 of 8"
    assert (
        re.search(r"mean score +\| 0.500 +\| +\| 0.500 ", shown) and "no score reaches 1" in shown
    )
    (written,) = (tmp_path / "runs/evaluation").iterdir()
    assert f"results in {written.relative_to(tmp_path)} (results.json" in shown
    (result,) = json.loads((written / "results.json").read_text())
    assert (result["accuracy"], result["pass_at_k"]["1"], result["score_mean"]) == (0, 0, 0.5)
    half[-1] = str(written / "results.json")
    assert main(half) == 0, (
        "the same command goes on from what there is; results.json can be compared with"
    )
    assert re.search(r"accuracy +\| 0.0 % +\| 0.0 to 32.4 % +\| 0.0 % ", capsys.readouterr().out)


def test_where_nothing_is_graded_there_are_no_numbers_but_the_reason(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.py").write_text(
        "def reward_func(queries, prompts, labels):\n    return labels[0].missing\n"
    )
    bad = [*arguments, "--reward", str(tmp_path / "bad.py"), "--limit", "2"]
    assert main(bad) == 1
    told = capsys.readouterr()
    assert (
        told.out == "" and "problems: nothing was graded: RewardRaised: reward_func of" in told.err
    )
    assert 'bad.py", line 2' in told.err and "has no attribute 'missing'" in told.err
    assert not list((tmp_path / "runs").rglob("*.json*")), "the next start samples again"


def test_a_model_that_is_no_checkpoint_is_refused_at_once(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--model", "absent"]) == 2
    assert (
        "--model must be a folder with a Hugging Face checkpoint: absent" in capsys.readouterr().err
    )
    assert main([*arguments, "--model", str(tmp_path)]) == 2
    assert "holds no tokenizer" in capsys.readouterr().err
    model = shutil.copytree(arguments[1], tmp_path / "model")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert main([*arguments, "--model", str(model)]) == 2
    told = capsys.readouterr().err
    assert "safetensors are needed" in told and "weights_only" not in told


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda tensors: tensors.pop("lm_head.weight"), "lacks: lm_head.weight (1 tensors)"),
        (
            lambda tensors: tensors["model.norm.weight"].mul_(float("nan")),
            "not finite in: model.norm.weight (1 tensors)",
        ),
        (
            lambda tensors: tensors.update(
                {"lm_head.weight": tensors["lm_head.weight"][1:].clone()}
            ),
            "has in another shape than its config.json says: lm_head.weight (1 tensors)",
        ),
        (
            lambda tensors: [
                tensors.update({f"base.{name}": tensors.pop(name)}) for name in [*tensors]
            ],
            "lacks: lm_head",
        ),
        (
            lambda tensors: tensors.update({"lora_A": torch.zeros(2)}),
            "1 tensors are not of this model: lora_A",
        ),
    ],
)
def test_weights_that_are_not_the_models_are_not_made_up(
    change: Callable[[dict[str, torch.Tensor]], object],
    complaint: str,
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = shutil.copytree(arguments[1], tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    is_refused = "not of this" not in complaint
    assert main([*arguments, "--model", str(model), "--limit", "2"]) == is_refused * 2
    assert complaint in capsys.readouterr().err + caplog.text


def test_a_chat_template_that_raises_is_refused_with_its_words(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(arguments[1], tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ raise_exception('it needs a system message') }}")
    assert main([*arguments, "--model", str(model), "--apply_chat_template"]) == 2
    assert "it needs a system message" in capsys.readouterr().err


def test_unmet_requirements_exit_with_1_and_say_so(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tmp_path / "before.json"
    before.write_text(
        '{"accuracy": 0.9, "standard_error": 0.01, "score_mean": 0.9, "prompts": 8, '
        '"samples_per_prompt": 2}'
    )
    assert (
        main([*arguments, "--compare", str(before), "--min_gain", "0.25", "--expect_accuracy", "3"])
        == 1
    )
    complaints = capsys.readouterr().err
    assert (
        "--min_gain requires 25.0" in complaints
        and "standard errors away from --expect_accuracy" in complaints
    )


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["--min_gain", "0.1"], "--min_gain needs --compare"),
        (["--input_key", "problem"], "--input_key"),
        (
            ["--label_key", "answr"],
            "needs the keys ['answr'], has ['answer', 'question']; did you mean 'answer'?",
        ),
        (["--reward", "none.py"], "there is no file"),
        (["--reward", "reward.txt"], "--reward must be one Python file"),
        (["--compare", "none.json"], "none.json"),
        (["--system_prompt", "confict"], "is no protocol's name (conflict)"),
    ],
)
def test_mistakes_exit_with_2(
    arguments: list[str], more: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, *more]) == 2
    assert complaint in capsys.readouterr().err


def test_counts_are_those_of_the_lines(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    options = [
        "--n",
        "5",
        "--temperature",
        "0.7",
        "--max_new_tokens",
        "6",
        "--batch_size",
        "3",
        "--out",
        str(out),
    ]
    assert main([*arguments, *options]) == 0
    shown = capsys.readouterr().out
    (result,) = json.loads((out / "results.json").read_text())
    problems = [json.loads(line) for line in (out / "problems.jsonl").read_text().splitlines()[1:]]
    completions = [completion for problem in problems for completion in problem["completions"]]
    assert result["ended"] == pytest.approx(
        statistics.fmean("<|im_end|>" in c["text"] for c in completions)
    )
    assert 0 < result["ended"] < 1
    assert result["accuracy"] == pytest.approx(statistics.fmean(c["score"] for c in completions))
    logs = {
        "hashes": [c["text"].count("#") for c in completions],
        "ones": ["1" in c["text"] for c in completions],
    }
    assert result["extra_logs"] == pytest.approx(
        {name: statistics.fmean(values) for name, values in logs.items()}
    )
    for measure in ("mean score", "ended", "reward log hashes"):
        assert f"\n| {measure} " in shown and f"| {measure} " in (out / "tables.md").read_text()


def test_help_is_quick_and_needs_no_torch() -> None:
    program = (
        "import sys; from openrlhf_ext.cli import evaluate; print({'torch', 'transformers'} & "
        "set(sys.modules))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert output.stdout.strip() == "set()"
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0


TRLS = """
def brevity(completions, solution, **kwargs):
    lengths = [len(one) for one in completions]
    least, most = min(lengths), max(lengths)
    if least == most:
        return [0.0] * len(completions)
    shares = [0.5 - (length - least) / (most - least) for length in lengths]
    return [share if str(s) in one else min(0.0, share) for one, s, share in zip(completions, solution, shares)]
"""


def test_a_function_of_trl_gets_all_completions_of_a_problem(tmp_path: Path) -> None:
    """More of them than are graded at a time otherwise."""
    (tmp_path / "reward.py").write_text(TRLS)
    (tmp_path / "data.jsonl").write_text(
        '{"question": "1+1=", "answer": "2"}\n{"question": "1+2=", "answer": "3"}\n'
    )
    saved = [["x=2", "the sum of them is x=2", "x=5"] * 3, ["x=5", "x=5", "x=3"] * 3]
    lines = [
        json.dumps({"problem": place, "completions": texts}) for place, texts in enumerate(saved)
    ]
    (tmp_path / "saved.jsonl").write_text("\n".join(lines))
    given = {
        "data": "data.jsonl",
        "completions": "saved.jsonl",
        "reward": "reward.py",
        "out": "out",
    }
    words = [word for name, file in given.items() for word in (f"--{name}", str(tmp_path / file))]
    assert main([*words, "--k", "1", "--num_workers", "2"]) == 0
    results = [
        json.loads(line) for line in (tmp_path / "out/data.jsonl").read_text().splitlines()[1:]
    ]
    rewards = [[completion["reward"] for completion in result["completions"]] for result in results]
    assert rewards == [[0.5, -0.5, 0.0] * 3, [0.0] * 9]
