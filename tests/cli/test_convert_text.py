"""``openrlhf-ext convert --text_only``, as a user types it: tiny checkpoints of images and text, as
Qwen3.5's are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from openrlhf_ext.cli import convert
from tests.models import HYBRID, make_tiny_model

CLASSES = {
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
}
TEXT: dict[str, Any] = {
    **HYBRID,
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "initializer_range": 0.1,
    "moe_intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 80,
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
IN_FP32 = ("A_log", "linear_attn.norm.weight")


def publish(folder: Path, kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """A checkpoint with vision, multi-token prediction, stacked experts, and the side files of a
    text model; returns the model."""
    torch.manual_seed(0)
    config_class, model_class = CLASSES[kind]
    config = config_class(text_config=TEXT, vision_config=VISION)
    model = model_class(config).float()
    tensors = {
        name: tensor.clone() if name.endswith(IN_FP32) else tensor.to(dtype)
        for name, tensor in model.state_dict().items()
    }
    folder.mkdir()
    save_file(tensors | {"mtp.norm.weight": torch.ones(64)}, folder / "model.safetensors")
    saved = config.to_dict()
    saved["text_config"] |= {"mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(saved))
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        (folder / name).write_text("{}")
    (folder / "preprocessor_config.json").write_text("{}")
    return model


@pytest.mark.parametrize("kind", CLASSES)
def test_the_text_model_is_that_of_transformers(tmp_path, capsys, kind):
    model = publish(tmp_path / "published", kind).eval()
    words = ["--text_only", str(tmp_path / "published"), "--to", str(tmp_path / "text")]
    assert convert.main(words) == 0
    said = capsys.readouterr().out
    vision = sum(name.startswith("model.visual.") for name in model.state_dict())
    assert said.endswith(
        f"in 5 files, a model of type {kind}_text\nleft out (numbers of tensors): vision {vision}, "
        "multi-token prediction 1\n"
    )
    assert sorted(path.name for path in (tmp_path / "text").iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    found, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "text", dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading[what] for what in ("missing_keys", "unexpected_keys"))
    tokens = torch.arange(2, 40)[None]
    with torch.no_grad():
        assert torch.equal(found.eval()(tokens).logits, model(tokens).logits)
    # which transformers saves under the names that it read
    AutoModelForCausalLM.from_pretrained(tmp_path / "published").save_pretrained(tmp_path / "saved")
    words = ["--text_only", str(tmp_path / "saved"), "--to", str(tmp_path / "again")]
    assert convert.main(words) == 0
    again, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "text"))
    assert again.keys() == wanted.keys()
    assert all(torch.equal(again[name], wanted[name]) for name in wanted)
    config = json.loads((tmp_path / "text/config.json").read_text())
    assert config["mamba_ssm_dtype"] == "float32" and "mtp_num_hidden_layers" not in config
    assert config["architectures"] == [type(found).__name__]


def test_a_text_model_is_used_as_it_is(tmp_path, capsys):
    make_tiny_model(tmp_path, "qwen3_5_text")
    assert convert.main(["--text_only", str(tmp_path), "--to", str(tmp_path / "text")]) == 2
    assert "model_type qwen3_5_text is a text model already: use it as" in capsys.readouterr().err


def test_tensors_in_fp32_beside_others_are_rounded_and_named(tmp_path, capsys):
    publish(tmp_path / "published", "qwen3_5", torch.bfloat16)
    words = ["--text_only", str(tmp_path / "published"), "--to", str(tmp_path / "text")]
    assert convert.main(words) == 0
    assert (
        "rounded to BF16 (numbers of tensors): linear_attn.A_log 3, "
        "linear_attn.norm.weight 3" in capsys.readouterr().out
    )
    whole = load_file(tmp_path / "published/model.safetensors")
    for name, tensor in load_file(tmp_path / "text/model.safetensors").items():
        published = whole[name.replace("model.", "model.language_model.")]
        assert torch.equal(tensor, published.bfloat16()), name


A_LOG = "model.language_model.layers.0.linear_attn.A_log"


@pytest.mark.parametrize(
    ("changes", "removed", "message"),
    [
        ({"model_type": "qwen4_exp"}, "", "qwen3_5 or qwen3_5_moe, got 'qwen4_exp'"),
        ({"text_config": None}, "", "text_config must be a map, got null"),
        ({"tie_word_embeddings": True}, "", "tie_word_embeddings, and there is a lm_head.weight"),
        ({"quantization_config": {"a": 1}}, "", "only fp32, bf16 and fp16 weights are loaded"),
        ({}, A_LOG, "missing from the checkpoint: ['model.layers.0.linear_attn.A_log']"),
    ],
)
def test_what_is_no_such_checkpoint_is_refused_by_name(
    published, tmp_path, capsys, changes, removed, message
):
    config = json.loads((published / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(published / "model.safetensors")
    tensors.pop(removed, None)
    save_file(tensors, tmp_path / "model.safetensors")
    words = ["--text_only", str(tmp_path), "--to", str(tmp_path / "text")]
    assert convert.main(words) == 2
    said = capsys.readouterr().err
    assert message in said and str(tmp_path) in said
    assert not (tmp_path / "text").exists()


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    path = tmp_path_factory.mktemp("published") / "checkpoint"
    publish(path, "qwen3_5")
    return path


def test_the_command_is_named_where_the_published_form_is_given(published, capsys):
    assert convert.main(["--check", str(published)]) == 2
    said = capsys.readouterr().err
    assert f"by openrlhf-ext convert --text_only {published} --to FOLDER, and give FOLDER" in said
    assert "nearest" not in said


@pytest.mark.parametrize("target", ["a folder", "a file", "itself"])
def test_nothing_is_overwritten(published, tmp_path, capsys, target):
    kept = tmp_path / "model"
    if target == "a folder":
        kept.mkdir()
        (kept / "metrics.jsonl").write_text("{}")
    elif target == "a file":
        kept.write_text("")
    else:
        kept.symlink_to(published)
    before = sorted(kept.rglob("*"))
    assert convert.main(["--text_only", str(published), "--to", str(kept)]) == 2
    said = capsys.readouterr().err
    assert (
        f"--to must be a new or an empty folder, because nothing is overwritten: got {kept}" in said
    )
    assert sorted(kept.rglob("*")) == before


@pytest.mark.parametrize("words", [["--text_only", "a"], ["--check", "a", "--to", "b"]])
def test_a_folder_to_write_to_belongs_to_what_is_written(words, capsys):
    with pytest.raises(SystemExit):
        convert.main(words)
    assert "--to FOLDER belongs to --merge ADAPTER or --text_only" in capsys.readouterr().err
