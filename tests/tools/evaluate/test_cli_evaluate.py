from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2ForCausalLM

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
    percent = re.escape(f"{100 * accuracy:.1f} %")
    assert re.search(rf"\| accuracy +\| {percent} +\| [\d.]+ to [\d.]+ % +\| {percent} +\|", shown)
    assert "problems: 8 problems x 2 completions" in shown and "pass@2" in shown
    assert shown.count("\nprompt  ") + 1 == shown.count("\nbefore  ") == 3 and "results in " in shown


def test_accuracy_is_the_share_of_right_ones_and_the_mean_score_stands_beside_it(
    arguments: list[str], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half a point for everything is no right answer; so it is in a result of a version that called it accuracy."""
    (tmp_path / "half.py").write_text("def reward_func(queries, prompts, labels):\n    return {'rewards': 0.5}\n")
    old = {"accuracy": 0.5, "standard_error": 0.0, "prompts": 8, "samples_per_prompt": 2, "pass_at_k": {"1": 0.0}}
    (tmp_path / "old.json").write_text(json.dumps(old))
    half = [*arguments, "--reward", str(tmp_path / "half.py"), "--compare", str(tmp_path / "old.json")]
    assert main([*half, "--min_gain", "0"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"accuracy +\| 0.0 % +\| 0.0 to 32.4 % +\| 0.0 % ", shown), "Wilson: 0 of 8"
    assert re.search(r"mean score +\| 0.500 +\| +\| 0.500 ", shown) and "no score reaches 1" in shown
    (written,) = (tmp_path / "runs/evaluation").iterdir()
    assert f"results in {written.relative_to(tmp_path)} (results.json" in shown
    (result,) = json.loads((written / "results.json").read_text())
    assert (result["accuracy"], result["pass_at_k"]["1"], result["score_mean"]) == (0, 0, 0.5)
    half[-1] = str(written / "results.json")
    assert main(half) == 0, "the same command goes on from what there is; results.json can be compared with"
    assert re.search(r"accuracy +\| 0.0 % +\| 0.0 to 32.4 % +\| 0.0 % ", capsys.readouterr().out)


def test_where_nothing_is_graded_there_are_no_numbers_but_the_reason(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.py").write_text("def reward_func(queries, prompts, labels):\n    return labels[0].missing\n")
    bad = [*arguments, "--reward", str(tmp_path / "bad.py"), "--limit", "2"]
    assert main(bad) == 1
    told = capsys.readouterr()
    assert told.out == "" and "problems: nothing was graded: RewardRaised: reward_func of" in told.err
    assert 'bad.py", line 2' in told.err and "has no attribute 'missing'" in told.err
    assert not list((tmp_path / "runs").rglob("*.json*")), "the next start samples again"


def test_a_model_that_is_no_checkpoint_is_refused_at_once(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--model", "absent"]) == 2
    assert "--model must be a folder with a Hugging Face checkpoint: absent" in capsys.readouterr().err
    assert main([*arguments, "--model", str(tmp_path)]) == 2
    assert "holds no tokenizer" in capsys.readouterr().err
    model = shutil.copytree(arguments[1], tmp_path / "model")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert main([*arguments, "--model", str(model)]) == 2
    told = capsys.readouterr().err
    assert "safetensors are needed" in told and "weights_only" not in told


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
    (["--label_key", "answr"], "needs the keys ['answr'], has ['answer', 'question']; did you mean 'answer'?"),
    (["--reward", "none.py"], "there is no file"),
    (["--reward", "reward.txt"], "--reward must be one Python file"),
    (["--compare", "none.json"], "none.json"),
    (["--system_prompt", "confict"], "is no protocol's name (conflict)"),
])  # fmt: skip
def test_mistakes_exit_with_2(
    arguments: list[str], more: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, *more]) == 2
    assert complaint in capsys.readouterr().err


def log_probs(model: Qwen2ForCausalLM, ids: list[int], tokens: int, temperature: float) -> Tensor:
    """Of the distributions from which the last tokens were drawn, (T, V) float64; a sequence alone, without cache."""
    logits_TV = model.double().eval()(torch.tensor([ids])).logits[0, -tokens - 1 : -1]
    return (logits_TV / temperature).log_softmax(-1)


def greedy_text(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, count: int) -> str:
    """What transformers' ``generate`` makes of one prompt alone."""
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=count, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id
    )
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    return tokenizer.decode(model.generate(ids, attention_mask=torch.ones_like(ids))[0, ids.shape[1] :])


@pytest.fixture
def reference(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    """A checkpoint near the other one."""
    path = tmp_path / "reference"
    other = Qwen2ForCausalLM(model.config)
    weights = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    other.load_state_dict(weights)
    other.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@torch.no_grad()
def test_one_command_says_what_a_small_study_needs(
    arguments: list[str], reference: Path, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out, n = tmp_path / "out", 5
    options = ["--n", str(n), "--temperature", "0.7", "--max_new_tokens", "6", "--batch_size", "3", "--out", str(out)]
    asked = ["--greedy", "--short_tokens", "4", "--reference", str(reference)]
    assert main([*arguments, *options, *asked]) == 0
    shown = capsys.readouterr().out
    (result,) = json.loads((out / "results.json").read_text())
    problems = [json.loads(line) for line in (out / "problems.jsonl").read_text().splitlines()[1:]]
    other = Qwen2ForCausalLM.from_pretrained(reference)
    entropies: dict[bool, list[float]] = {True: [], False: []}
    divergences = []
    for problem in problems:
        assert problem["greedy"]["text"] == greedy_text(model.float(), tokenizer, problem["prompt"], 6)
        for completion in problem["completions"]:
            ids = tokenizer(problem["prompt"] + completion["text"])["input_ids"]
            logp_TV, reference_TV = (log_probs(m, ids, completion["tokens"], 0.7) for m in (model, other))
            entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
            kl_T = (logp_TV.exp() * (logp_TV - reference_TV)).sum(-1)
            assert completion["entropy"] == pytest.approx(entropy_T.mean().item(), rel=1e-4)
            assert completion["kl"] == pytest.approx(kl_T.mean().item(), rel=1e-3, abs=1e-6)
            entropies[completion["score"] == 1] += entropy_T.tolist()
            divergences += kl_T.tolist()
    assert result["entropy_right"] == pytest.approx(statistics.fmean(entropies[True]), rel=1e-4)
    assert result["entropy_wrong"] == pytest.approx(statistics.fmean(entropies[False]), rel=1e-4)
    assert result["kl_to_reference"] == pytest.approx(statistics.fmean(divergences), rel=1e-3) and min(divergences) > 0
    _check_counts(result, problems)
    for measure in ("greedy", "short (up to 4)", "entropy, wrong", "KL to reference", "reward log hashes"):
        assert f"\n| {measure} " in shown and f"| {measure} " in (out / "tables.md").read_text()


def _check_counts(result: dict[str, Any], problems: list[dict[str, Any]]) -> None:
    completions = [completion for problem in problems for completion in problem["completions"]]
    mean_score = {
        name: statistics.fmean(c["score"] for c in completions if (c["tokens"] <= 4) is name) for name in (True, False)
    }
    assert (result["short_accuracy"], result["long_accuracy"]) == pytest.approx((mean_score[True], mean_score[False]))
    assert result["short_share"] == pytest.approx(statistics.fmean(c["tokens"] <= 4 for c in completions))
    assert result["ended"] == pytest.approx(statistics.fmean("<|im_end|>" in c["text"] for c in completions))
    assert 0 < result["ended"] < 1 and 0 < result["short_share"] < 1
    greedy_scores = [problem["greedy"]["score"] for problem in problems]
    assert result["greedy_accuracy"] == pytest.approx(statistics.fmean(greedy_scores))
    low, high = result["greedy_accuracy_interval"]
    assert low <= result["greedy_accuracy"] <= high
    assert result["accuracy"] == pytest.approx(statistics.fmean(c["score"] for c in completions)), "without the greedy"
    logs = {"hashes": [c["text"].count("#") for c in completions], "ones": ["1" in c["text"] for c in completions]}
    assert result["extra_logs"] == pytest.approx({name: statistics.fmean(values) for name, values in logs.items()})


def test_what_is_not_asked_for_is_not_there(arguments: list[str], tmp_path: Path) -> None:
    assert main([*arguments, "--json", str(tmp_path / "result.json"), "--limit", "2"]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    names = ("short_share", "greedy_accuracy", "entropy_right", "entropy_wrong", "kl_to_reference")
    assert [result[name] for name in names] == [None] * len(names)


def test_a_reference_of_another_vocabulary_is_refused_before_weights_are_loaded(
    arguments: list[str], checkpoint: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (reference / "model.safetensors").unlink()
    tokenizer, config = reference / "tokenizer.json", reference / "config.json"
    tokenizer.write_text(tokenizer.read_text().replace('"="', '"~"'))
    assert main([*arguments, "--reference", str(reference)]) == 2
    assert "--reference: must have the tokenizer of --model" in capsys.readouterr().err
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 21}))
    assert main([*arguments, "--reference", str(reference)]) == 2
    assert f"of --model: {reference} has 21 tokens, {checkpoint} has 19; give" in capsys.readouterr().err


def test_help_is_quick_and_needs_no_torch() -> None:
    program = "import sys; from openrlhf_ext.cli import evaluate; print({'torch', 'transformers'} & set(sys.modules))"
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert output.stdout.strip() == "set()"
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
