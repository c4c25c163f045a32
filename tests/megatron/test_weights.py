from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from openrlhf_ext.megatron.hf_config import UnsupportedModelError, read_model_shape
from openrlhf_ext.megatron.weights import (
    HFCheckpoint,
    WeightMapError,
    _check_accounted,
    from_shards,
    hf_shapes,
    hf_tensors,
    save_hf,
    stage_rules,
    to_shard,
)  # fmt: skip
from tests.launch import launch
from tests.models import make_tiny_model

FAMILIES = [("qwen2", False), ("qwen2", True), ("qwen3", False), ("llama", True)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}
    for family, tied in FAMILIES:
        path = tmp_path_factory.mktemp("models") / f"{family}-{'tied' if tied else 'untied'}"
        make_tiny_model(path, family, tied=tied)
        made[family, tied] = path
    return made


@pytest.mark.parametrize("world_size", [2, 4])
def test_round_trip_is_bit_exact(models, tmp_path, world_size):
    layouts = {2: [{"tp": 2}, {"pp": 2}, {}], 4: [{"tp": 2, "pp": 2}, {"tp": 2}]}[world_size]
    arguments = {
        "models": list(map(str, models.values())),
        "layouts": layouts,
        "ranks": world_size,
        "target": str(tmp_path),
    }
    folders = launch("tests.megatron.weights_worker", "round_trips", world_size, **arguments)[0]
    sources = [path for path in models.values() for _ in layouts]
    for source, folder in zip(sources, folders, strict=True):
        before, after = load_file(source / "model.safetensors"), load_file(f"{folder}/model.safetensors")
        assert set(before) == set(after)
        assert all(torch.equal(before[name], after[name]) for name in before), folder
        assert json.loads((source / "config.json").read_text()) == json.loads(open(f"{folder}/config.json").read())


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
@pytest.mark.parametrize("size", [1, 2])
def test_shards_put_together_give_the_tensor_back(models, family, tied, size):
    shape = read_model_shape(models[family, tied])
    for rule, tensors in HFCheckpoint(models[family, tied]).tensors(stage_rules(shape, range(4), True, True)):
        assert [tuple(t.shape) for t in tensors] == hf_shapes(rule, shape)
        shards = [to_shard(rule, tensors, shape, rank, size) for rank in range(size)]
        for before, after in zip(tensors, from_shards(rule, shards, shape), strict=True):
            assert torch.equal(before, after), rule


def test_every_hf_tensor_is_listed_once(models):
    for path in models.values():
        names = [t.name for t in hf_tensors(read_model_shape(path))]
        with safe_open(path / "model.safetensors", "pt") as f:
            assert sorted(names) == sorted(f.keys())


def test_missing_and_unknown_tensors_are_listed_together(models):
    shape = read_model_shape(models["qwen2", False])
    rules = stage_rules(shape, range(4), True, True)
    names = {t.name for t in hf_tensors(shape)}
    with pytest.raises(WeightMapError) as error:
        _check_accounted(
            names - {"model.norm.weight"} | {"surprise.weight"}, shape, rules, {r.parameter for r in rules} | {"extra"}
        )
    for part in ("surprise.weight", "model.norm.weight", "extra"):
        assert part in str(error.value)


def test_sharded_files_are_written_and_read(models, tmp_path):
    source = models["qwen2", False]
    tensors = load_file(source / "model.safetensors")
    save_hf(tensors.items(), source, tmp_path / "out", max_shard_bytes=20_000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors) and len(set(index["weight_map"].values())) > 3
    rules = stage_rules(read_model_shape(source), range(4), True, True)
    for rule, loaded in HFCheckpoint(tmp_path / "out").tensors(rules):
        assert all(torch.equal(tensors[n], t) for n, t in zip(rule.hf_names, loaded, strict=True))


def test_an_interrupted_save_leaves_the_previous_checkpoint(models, tmp_path):
    source, target = models["qwen2", False], tmp_path / "out"
    tensors = load_file(source / "model.safetensors")
    save_hf(tensors.items(), source, target)

    def breaks():
        yield from list(tensors.items())[:3]
        raise RuntimeError("killed in the middle")

    (target / "metrics.jsonl").write_text("{}")
    with pytest.raises(RuntimeError, match="killed"):
        save_hf(breaks(), source, target)
    assert set(load_file(target / "model.safetensors")) == set(tensors)
    save_hf(tensors.items(), source, target, max_shard_bytes=20_000)
    assert not (target / "model.safetensors").exists() and (target / "config.json").exists()
    assert (target / "metrics.jsonl").read_text() == "{}", "other files in the folder are kept"


def test_unsupported_models_are_refused_with_the_reason(models, tmp_path):
    shutil.copytree(models["qwen2", False], tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    for change, reason in [
        ({"model_type": "mixtral"}, "model_type"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True}, "use_sliding_window"),
    ]:
        (tmp_path / "m/config.json").write_text(json.dumps(config | change))
        with pytest.raises(UnsupportedModelError, match=reason):
            read_model_shape(tmp_path / "m")


def test_the_transformers_4_form_of_the_rotary_settings_is_read(models, tmp_path):
    config = json.loads((models["llama", True] / "config.json").read_text())
    config.pop("rope_parameters", None)
    rope = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5, "rope_scaling": rope}))
    shape = read_model_shape(tmp_path)
    assert (shape.rope_theta, shape.rope_scaling_factor) == (5e5, 32.0)


def test_a_wrong_shape_names_the_tensor(models, tmp_path):
    target = tmp_path / "m"
    shutil.copytree(models["qwen2", False], target)
    tensors = load_file(target / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(5)
    save_file(tensors, target / "model.safetensors")
    with pytest.raises(AssertionError, match="model.norm.weight"):
        launch(
            "tests.megatron.weights_worker",
            "round_trips",
            1,
            models=[str(target)],
            layouts=[{}],
            ranks=1,
            target=str(tmp_path),
        )
