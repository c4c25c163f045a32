from __future__ import annotations

import json
import sys
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


def test_table_file_and_figure(arguments, tmp_path, capsys):
    out, png = tmp_path / "out.json", tmp_path / "folder" / "out.png"
    assert (
        main(
            [
                *arguments,
                "--trainer_tp",
                "2",
                "--per_layer",
                "--json",
                str(out),
                "--figure",
                str(png),
            ]
        )
        == 0
    )
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
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 10_000


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


def test_without_matplotlib_the_figure_is_refused(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    pair = ["--trainer", "fp32", "--rollout", "bf16", "--figure", str(tmp_path / "out.png")]
    assert main([*arguments, *pair]) == 2
    assert "--figure needs matplotlib: pip install matplotlib" in capsys.readouterr().err
