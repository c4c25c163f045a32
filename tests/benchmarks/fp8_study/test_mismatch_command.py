from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.fp8_study.mismatch import main
from tests.models import make_tiny_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    make_tiny_policy(path)
    return path


@pytest.fixture
def arguments(policy, tmp_path) -> list[str]:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(
        "\n".join(
            json.dumps({"prompt": "1+1=", "token_ids": list(range(n, n + 20))}) for n in (3, 40)
        )
    )
    return ["--model", str(policy), "--rollouts", str(path)]


def test_table_and_file(arguments, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert main([*arguments, "--trainer_tp", "2", "--per_layer", "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("EMULATED, 40 tokens, trainer TP 2, engine TP 1\n")
    assert "cut different 128x128 tiles of model.layers.*.self_attn.q_proj.weight" in text
    result = json.loads(out.read_text())
    assert result["emulated"] is True and result["settings"]["trainer_tp"] == 2
    assert {(c["trainer"], c["rollout"]) for c in result["cells"]} == {
        (t, r)
        for t in ("fp32", "bf16", "blockwise", "blockwise_pow2", "current", "delayed")
        for r in ("bf16", "blockwise", "blockwise_pow2", "current")
    }
    assert len(text.splitlines()) == 3 + 24 + 3 + 2


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (
            ["--model", "org/name"],
            "--model must be a folder with a Hugging Face checkpoint: org/name is none",
        ),
        (["--trainer_tp", "3"], "the trainer's tensor-parallel size 3 does not divide num_heads 4"),
        (["--rollouts", "nowhere.jsonl"], "No such file"),
    ],
)
def test_what_is_wrong_is_said(arguments, more, reason, capsys):
    assert main([*arguments, *more]) == 2
    assert reason in capsys.readouterr().err
