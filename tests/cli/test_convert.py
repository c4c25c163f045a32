from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import NemotronConfig, NemotronForCausalLM

from openrlhf_ext.cli import convert
from openrlhf_ext.megatron.model.hf_files import HFCheckpoint
from openrlhf_ext.tools.plan import conversion_check
from openrlhf_ext.tools.plan.conversion_check import CheckReport, compare_export, same_bits
from tests.models import make_tiny_model, rows_of, save_tensors
from tests.patience import PATIENCE_S


def sharded(folder: Path, family: str) -> Path:
    """A checkpoint in several files, rounded to bf16."""
    make_tiny_model(folder / "m", family)
    tensors = {name: t.bfloat16() for name, t in load_file(folder / "m/model.safetensors").items()}
    save_tensors(tensors, folder / "m", folder / "sharded", max_shard_bytes=20_000)
    return folder / "sharded"


UNCHANGED = ("bit-identical to the files", "is loaded and exported unchanged")


def test_a_sharded_bf16_checkpoint_goes_in_and_out_unchanged(tmp_path):
    """Read as fp32: nothing may be lost on the way. Stages and tensor parallelism at once:
    tests/megatron/test_weights.py."""
    words = ["--check", str(sharded(tmp_path, "qwen3")), "--pp", "2", "--last_layers", "1"]
    command = [sys.executable, "-m", "openrlhf_ext.cli.convert", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stderr == "", "libraries have no word"
    assert all(part in done.stdout for part in UNCHANGED)


def test_a_mixtures_experts_are_dealt_on_the_way(tmp_path, capsys):
    words = ["--check", str(sharded(tmp_path, "qwen2_moe")), "--ep", "2", "--tp", "2", "--sp"]
    assert convert.main(words) == 0
    said = capsys.readouterr().out
    assert all(part in said for part in UNCHANGED)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path, "qwen2")
    return path


def test_different_and_missing_tensors_are_named(checkpoint):
    files = HFCheckpoint(checkpoint)
    exported = {name: files.read(name).clone() for name in files.names}
    assert compare_export(rows_of(exported), files)[:2] == ((), ())
    exported["model.norm.weight"][3] *= 1 + 2**-23
    exported["lm_head.weight"] = exported["lm_head.weight"].T
    del exported["model.layers.2.mlp.up_proj.weight"]
    exported["surprise.weight"] = torch.ones(1)
    different, missing, _ = compare_export(rows_of(exported), files)
    assert different == ("lm_head.weight", "model.norm.weight", "surprise.weight")
    assert missing == ("model.layers.2.mlp.up_proj.weight",)
    assert compare_export([], files, rank=1) == ((), (), (0, 0)), "only rank 0 receives tensors"


def test_bits_are_compared_not_values():
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert same_bits(nan, nan.clone()) and not same_bits(zero, -zero)
    assert not same_bits(zero, zero.bfloat16())


@pytest.mark.parametrize(
    ("found", "code", "text"),
    [
        ({}, 0, "is loaded and exported unchanged"),
        ({"different": ("model.norm.weight",)}, 1, "different: model.norm.weight"),
        ({"missing": ("lm_head.weight",)}, 1, "not exported: lm_head.weight"),
        ({"mean_logprob_difference": 0.01}, 1, "ABOVE the tolerance 0.0001"),
        ({"mean_logprob_difference": float("nan")}, 1, "CHECK FAILED"),
        # of one token in bf16, which is rounding
        ({"max_logprob_difference": 0.3}, 0, "largest 3.00e-01"),
    ],
)
def test_the_exit_code_says_whether_it_passed(checkpoint, monkeypatch, capsys, found, code, text):
    report = {
        "tensors": 3,
        "parameters": 10,
        "different": (),
        "missing": (),
        "max_logprob_difference": 1e-6,
        "mean_logprob_difference": 1e-7,
        "seconds": {},
    } | found
    monkeypatch.setattr(
        conversion_check, "check_conversion", lambda settings: CheckReport(**report)
    )
    assert convert.main(["--check", str(checkpoint)]) == code
    assert text in capsys.readouterr().out


def _report_much(rank, settings, port, report):
    # far more than a pipe holds
    names = tuple(f"model.layers.{i}.some.weight" for i in range(10_000))
    report.write_bytes(pickle.dumps(CheckReport(1, 1, names, (), 0.0, 0.0, {})))


def _killed(rank, settings, port, report):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_long_report_arrives(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(conversion_check, "_run_rank", _report_much)
    assert convert.main(["--check", str(checkpoint), "--timeout_s", "120"]) == 1
    assert "model.layers.9999.some.weight" in capsys.readouterr().out


def test_a_killed_rank_is_reported(checkpoint, monkeypatch, capsys):
    """As the kernel does when memory runs out: no exception leaves the rank."""
    monkeypatch.setattr(conversion_check, "_run_rank", _killed)
    assert convert.main(["--check", str(checkpoint)]) == 1
    error = capsys.readouterr().err
    assert (
        "terminated with signal SIGKILL" in error and "run out of memory: try --dtype bf16" in error
    )


def test_random_sequences_fit_an_attention_window(tmp_path, capsys):
    make_tiny_model(tmp_path, "mistral", sliding_window=32)
    assert convert.main(["--check", str(tmp_path)]) == 2
    assert "got 64 > 32 tokens; set --tokens to at most 32" in capsys.readouterr().err


def test_the_family_that_an_unknown_type_resembles_is_named_with_what_is_different(
    tmp_path, capsys
):
    sizes = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    NemotronForCausalLM(NemotronConfig(**sizes, **heads)).save_pretrained(tmp_path)
    assert convert.main(["--check", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "got 'nemotron': it would need a LayerNorm scaled by 1 + w" in said
    assert (
        "nearest: llama; what differs: tensors that llama has not: "
        "model.layers.N.input_layernorm.bias, " in said
    )
    assert "tensors that it alone has: model.layers.N.mlp.gate_proj.weight; " in said
    assert "hidden_act must be 'silu', got 'relu2'" in said
    (tmp_path / "model.safetensors").unlink()
    assert (
        convert.main(["--check", str(tmp_path)]) == 2 and "nearest" not in capsys.readouterr().err
    )


def test_files_that_do_not_fit_are_refused_before_any_process_starts(checkpoint, tmp_path, capsys):
    tensors = load_file(checkpoint / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_tensors(tensors, checkpoint, tmp_path / "m")
    assert convert.main(["--check", str(tmp_path / "m")]) == 2
    assert "missing from the checkpoint: ['model.norm.weight']" in capsys.readouterr().err
    (tmp_path / "m/model.safetensors").write_bytes(b"nothing of the kind")
    assert convert.main(["--check", str(tmp_path / "m")]) == 2
    assert "model.safetensors cannot be read as safetensors" in capsys.readouterr().err


def test_a_model_that_cannot_be_cut_is_refused_before_any_process_starts(checkpoint, capsys):
    assert convert.main(["--check", str(checkpoint), "--tp", "3"]) == 2
    assert (
        "--tp must divide the model's attention heads: got 3, the model of --check has 4"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--vp", "2"], "--vp needs --pp > 1: got 2 and 1"),
        (["--last_layers", "2"], "--last_layers needs --pp > 1"),
        (["--sp"], "--sp needs --tp > 1"),
        ([], "config.json"),
    ],
)
def test_what_cannot_be_built_is_refused_before_any_process_starts(tmp_path, capsys, words, text):
    assert convert.main(["--check", str(tmp_path), *words]) == 2
    assert text in capsys.readouterr().err
