"""A model folder holds one model, and every command that reads it says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from openrlhf_ext.cli.main import main
from openrlhf_ext.inputs import InputError
from openrlhf_ext.megatron.model.folder import require_one_model, require_tied_head
from openrlhf_ext.megatron.model.shape import read_model_shape
from tests.models import make_tiny_policy


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "model"
    make_tiny_policy(path)
    return path


@pytest.fixture
def model(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "model")
    return tmp_path / "model"


def shard(model: Path, *, index: bool) -> None:
    """The weights once more, in two files."""
    tensors, listed = load_file(model / "model.safetensors"), {}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, model / file)
        listed |= dict.fromkeys(names, file)
    if index:
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))


@pytest.mark.parametrize("index", [True, False])
def test_shards_beside_a_single_file_are_two_models(model: Path, index: bool) -> None:
    require_one_model(model)
    shard(model, index=index)
    with pytest.raises(
        InputError,
        match="holds two models: model.*safetensors beside model.*remove the files of the",
    ):
        read_model_shape(model)
    (model / "model.safetensors").unlink()
    require_one_model(model)


def test_an_adapter_is_no_model(model: Path) -> None:
    (model / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="holds a model and an adapter"):
        read_model_shape(model)
    (model / "config.json").unlink()
    with pytest.raises(InputError, match="holds an adapter, and no model.*convert --merge"):
        read_model_shape(model)


def test_a_head_beside_tied_embeddings_has_to_be_the_embedding(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, model / "model.safetensors")
    require_tied_head(model)
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(
        InputError,
        match="tie_word_embeddings, and model.safetensors holds a lm_head.weight that is",
    ):
        require_tied_head(model)
    tensors["lm_head.weight"] = torch.zeros(1)
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(InputError, match="tie_word_embeddings"):
        require_tied_head(model)


def test_every_command_that_reads_a_model_refuses_two(model: Path, tmp_path: Path, capsys) -> None:
    shard(model, index=True)
    data = tmp_path / "data.jsonl"
    data.write_text('{"input": "1", "label": "1", "question": "1", "answer": "1", "output": "1"}\n')
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def reward_func(queries, prompts, labels, **_):\n    return {'rewards': 1.0}\n"
    )
    train = [
        "--actor.model_name_or_path",
        str(model),
        "--data.prompt_dataset",
        str(data),
        "--reward.remote_url",
        str(reward),
        "--rollout.batch_size",
        "1",
        "--rollout.n_samples_per_prompt",
        "1",
        "--train.batch_size",
        "1",
        "--actor.num_gpus_per_node",
        "1",
    ]
    commands = {
        "train": [*train, "--dry_run"],
        "train_sft": [
            "--model.model_name_or_path",
            str(model),
            "--data.dataset",
            str(data),
            "--data.input_key",
            "question",
            "--data.output_key",
            "answer",
            "--dry_run",
        ],
        "plan": train,
        "convert": ["--check", str(model)],
        "evaluate": ["--model", str(model), "--data", str(data), "--reward", str(reward)],
    }
    for command, words in commands.items():
        assert main([command, *words]) != 0, command
        said = capsys.readouterr()
        assert (
            "holds two models: model.safetensors beside model-00001-of-00002" in said.err + said.out
        ), command
