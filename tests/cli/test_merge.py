"""``openrlhf-ext convert --merge`` and ``evaluate`` with an adapter, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from openrlhf_ext.cli import convert, evaluate
from tests.models import make_tiny_policy

REWARD = """
def reward_func(queries, prompts, labels, **kwargs):
    return {"rewards": sum(map(ord, queries[0])) / 1e3}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, and an adapter of some of its linears with B off zero."""
    folder = tmp_path_factory.mktemp("merge")
    make_tiny_policy(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    torch.manual_seed(0)
    wrapped = get_peft_model(
        model, LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"])
    )
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    wrapped.save_pretrained(folder / "adapter")
    for file in (folder / "base").glob("token*.json"):
        (folder / "adapter" / file.name).write_bytes(file.read_bytes())
    torch.save(dict(wrapped.merge_and_unload().named_parameters()), folder / "merged.pt")
    return folder


def test_a_merged_checkpoint_is_pefts(folder, capsys):
    assert convert.main(["--merge", str(folder / "adapter"), "--to", str(folder / "whole")]) == 0
    assert "with the adapter merged" in capsys.readouterr().out
    wanted = torch.load(folder / "merged.pt", weights_only=False)
    found = dict(
        AutoModelForCausalLM.from_pretrained(
            folder / "whole", dtype=torch.float32
        ).named_parameters()
    )
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.allclose(found[name], tensor, atol=1e-7), name
    base = dict(
        AutoModelForCausalLM.from_pretrained(
            folder / "base", dtype=torch.float32
        ).named_parameters()
    )
    moved = {name.split(".")[-2] for name in wanted if not torch.equal(found[name], base[name])}
    assert moved == {"q_proj", "down_proj"}


def test_an_adapter_is_evaluated_as_its_merged_checkpoint(folder, capsys):
    lines = (json.dumps({"question": f"{n}+1=", "answer": "2"}) + "\n" for n in "123")
    (folder / "data.jsonl").write_text("".join(lines))
    (folder / "reward.py").write_text(REWARD)
    assert convert.main(["--merge", str(folder / "adapter"), "--to", str(folder / "again")]) == 0
    results = []
    for name in ("adapter", "again", "base"):
        words = [
            "--data",
            str(folder / "data.jsonl"),
            "--reward",
            str(folder / "reward.py"),
            "--n",
            "2",
            "--max_new_tokens",
            "6",
            "--json",
            str(folder / f"{name}.json"),
        ]
        assert evaluate.main(["--model", str(folder / name), *words]) == 0
        results.append(json.loads((folder / f"{name}.json").read_text()))
    adapter, merged, base = results
    assert adapter["model"] == str(folder / "adapter")
    same = [name for name in adapter if name not in ("model", "seconds", "options")]
    assert {name: adapter[name] for name in same} == {name: merged[name] for name in same}
    assert any(adapter[name] != base[name] for name in same), "the base says something else"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"base_model_name_or_path": "nowhere"}, "is nowhere, which is no folder here"),
        ({"use_dora": True}, "only plain LoRA adapters are built, this one has use_dora true"),
        ({"target_modules": ["q_proj", "lm_head"]}, "must be all-linear or some of q_proj"),
        ({"r": 4}, "tensors of another shape"),
        ({"target_modules": ["q_proj"]}, "tensors of the checkpoint that no rule uses"),
    ],
)
def test_what_is_no_adapter_of_the_base_is_refused(folder, tmp_path, capsys, change, says):
    for file in (folder / "adapter").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "adapter_config.json").read_text()) | change
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert convert.main(["--merge", str(tmp_path), "--to", str(tmp_path / "out")]) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "out").exists()
