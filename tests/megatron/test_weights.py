from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from openrlhf_ext.config.tokenizers import tokenizer_fault
from openrlhf_ext.fp8.recipe import Recipe
from openrlhf_ext.inputs import InputError
from openrlhf_ext.megatron.layers.fp8 import FP8Layers
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.model.adapter import Adapter
from openrlhf_ext.megatron.model.hf_files import (
    HFCheckpoint,
    HFRows,
    describe,
    read_side_files,
    save_hf,
    set_aside_hf,
    unaccounted_parameters,
)
from openrlhf_ext.megatron.model.hf_weights import BUCKET_BYTES, Ownership
from openrlhf_ext.megatron.model.shape import ModelShape, read_model_shape
from openrlhf_ext.megatron.model.weight_map import (
    HFTensor,
    Rule,
    Shard,
    adapter_shape,
    fill_shard,
    hf_shapes,
    hf_tensors,
    parameters,
    placement,
    shard_runs,
    shard_shape,
    stage_rules,
)
from openrlhf_ext.megatron.policy import MegatronPolicy
from tests.launch import launch
from tests.models import HYBRIDS, make_tiny_model, make_tiny_policy, rows_of, save_tensors

FAMILIES = [("qwen2", False), ("qwen2", True), ("qwen3", False), ("llama", True)]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}
    for family, tied in FAMILIES:
        path = tmp_path_factory.mktemp("models") / f"{family}-{'tied' if tied else 'untied'}"
        make_tiny_model(path, family, tied=tied)
        made[family, tied] = path
    return made


def layout(tp: int = 1, pp: int = 1, cp: int = 1, vp: int = 1) -> dict:
    return {
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "context_parallel_size": cp,
        "virtual_pipeline_size": vp,
    }


LAYOUTS = {
    2: [layout(tp=2), layout(pp=2), layout(), layout(pp=2, vp=2), layout(cp=2)],
    # two key-value heads on four ranks; vocabulary 61 is padded to 64
    4: [layout(tp=2, pp=2), layout(tp=2), layout(tp=4), layout(tp=2, pp=2, vp=2)],
}


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_round_trip_is_bit_exact(models, tmp_path, world_size):
    layouts = LAYOUTS[world_size]
    arguments = {"models": list(map(str, models.values())), "layouts": layouts, "ranks": world_size}
    worker = "tests.megatron.weights_worker", "round_trips", world_size
    folders = launch(*worker, target=str(tmp_path), **arguments)[0]
    sources = [path for path in models.values() for _ in layouts]
    for source, folder in zip(sources, folders, strict=True):
        before, after = (
            load_file(source / "model.safetensors"),
            load_file(f"{folder}/model.safetensors"),
        )
        assert set(before) == set(after)
        assert all(torch.equal(before[name], after[name]) for name in before), folder
        assert json.loads((source / "config.json").read_text()) == json.loads(
            open(f"{folder}/config.json").read()
        )


def to_shard(rule: Rule, tensors: list[Tensor], shape: ModelShape, rank: int, size: int) -> Tensor:
    """The piece of the parameter that tensor-parallel rank ``rank`` of ``size`` holds."""
    shard = tensors[0].new_empty(shard_shape(rule, shape, size))
    runs = shard_runs(rule, shape, Shard(rank, size))
    fill_shard(shard, rule, runs, lambda i, run: tensors[i].narrow(rule.axis, run.start, len(run)))
    return shard


def from_shards(rule: Rule, shards: list[Tensor], shape: ModelShape) -> list[Tensor]:
    """The HF tensors of a rule from the pieces of all tensor-parallel ranks (inverse of
    ``to_shard``)."""
    tensors = [shards[0].new_empty(s) for s in hf_shapes(rule, shape)]
    for rank, shard in enumerate(shards):
        for piece in placement(rule, shape, Shard(rank, len(shards))):
            piece.of_tensor(tensors[piece.tensor]).copy_(piece.of_shard(shard))
    return tensors


# ---- the map


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_put_together_give_the_tensor_back(models, family, tied, size):
    shape, checkpoint = read_model_shape(models[family, tied]), HFCheckpoint(models[family, tied])
    for rule in stage_rules(shape, range(4), True, True):
        tensors = [checkpoint.read(name) for name in rule.hf_names]
        assert [tuple(t.shape) for t in tensors] == hf_shapes(rule, shape)
        shards = [to_shard(rule, tensors, shape, rank, size) for rank in range(size)]
        assert all(tuple(shard.shape) == shard_shape(rule, shape, size) for shard in shards)
        for before, after in zip(tensors, from_shards(rule, shards, shape), strict=True):
            assert torch.equal(before, after), rule


@pytest.mark.parametrize("family", HYBRIDS)
def test_parts_of_unlike_layers_put_together_give_the_tensors_back(tmp_path, family):
    """Several parts in one of several tensors, queries beside their gates, and adapters of some."""
    make_tiny_model(tmp_path, family, linear_num_key_heads=4)
    shape = read_model_shape(tmp_path)
    adapted = adapter_shape(shape, Adapter(4, 8, 0.0, ("q_proj", "out_proj")))
    for one, size in itertools.product((shape, adapted), (1, 2, 4)):
        for rule in stage_rules(one, range(4), True, True):
            tensors = [torch.randn(sizes) for sizes in hf_shapes(rule, one)]
            shards = [to_shard(rule, tensors, one, rank, size) for rank in range(size)]
            assert all(tuple(shard.shape) == shard_shape(rule, one, size) for shard in shards)
            back = from_shards(rule, shards, one)
            for name, before, after in zip(rule.hf_names, tensors, back, strict=True):
                assert not name or torch.equal(before, after), rule


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 3),
    st.integers(3, 70),
    st.data(),
)
def test_every_entry_of_an_hf_tensor_has_exactly_one_place(size, kv_heads, queries, vocab, data):
    shape = ModelShape(
        model_type="qwen2",
        num_layers=1,
        hidden_size=16,
        ffn_hidden_size=8 * size,
        num_heads=kv_heads * queries * 8,
        num_kv_heads=kv_heads,
        head_dim=8,
        vocab_size=vocab,
        max_positions=8,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling_factor=None,
        tied_embeddings=data.draw(st.booleans()),
        qkv_bias=True,
        qk_norm=False,
    )
    for rule in stage_rules(shape, range(1), True, True):
        if rule.split == "replicated":
            continue
        ranks = [shard_runs(rule, shape, Shard(rank, size)) for rank in range(size)]
        assert len({sum(map(len, runs)) for runs in ranks}) == 1, "shards of one size"
        for tensor, whole in enumerate(hf_shapes(rule, shape)):
            held = Counter(
                i
                for runs in ranks
                for r in runs
                if r.tensor == tensor
                for i in range(r.start, r.stop)
            )
            assert held == Counter(range(whole[rule.axis])), rule


def test_query_rows_stand_beside_their_key_and_value(models):
    """Megatron's layout of a group: its queries, its key, its value."""
    shape = read_model_shape(models["qwen2", False])
    (rule,) = [
        r
        for r in stage_rules(shape, range(1), False, False)
        if r.parameter.endswith("linear_qkv.bias")
    ]
    q, k, v = torch.arange(64), 1000 + torch.arange(32), 2000 + torch.arange(32)
    expected = torch.cat([q[32:], k[16:], v[16:]])
    assert torch.equal(to_shard(rule, [q, k, v], shape, 1, 2), expected)
    assert torch.equal(
        torch.cat([to_shard(rule, [q, k, v], shape, r, 4) for r in (2, 3)]), expected
    )


@pytest.mark.parametrize("chunks", [1, 2])
def test_every_hf_tensor_is_listed_and_owned_once(models, chunks):
    for path in models.values():
        shape = read_model_shape(path)
        names = [t.name for t in hf_tensors(shape)]
        with safe_open(path / "model.safetensors", "pt") as f:
            assert sorted(names) == sorted(f.keys())
        places = ParallelLayout(2, **layout(pp=2, vp=chunks))
        owned = [
            name for held in parameters(shape, places) if held.gives for name in held.rule.hf_names
        ]
        assert owned == names, "exported in the order in which they are announced"


# ---- who gives what, and vLLM's own sender over it


UNEVEN = {**layout(tp=2, pp=2), "decoder_last_pipeline_num_layers": 1}


@pytest.mark.parametrize("most_streams", [1, 8])
@pytest.mark.parametrize(
    "degrees", [layout(tp=2, pp=2), layout(cp=2), layout(pp=2, vp=2), layout(tp=4, cp=2), UNEVEN]
)
def test_every_entry_is_given_by_one_rank(models, degrees, most_streams):
    """Of the first replica; or of the tensor-parallel group whose share it is."""
    for path in models.values():
        shape, ranks = read_model_shape(path), ParallelLayout(8, **degrees)
        ownership = Ownership(shape, ranks, most_streams)
        if most_streams == 1:
            assert ownership.streams == (ranks.ranks(context=0, replica=0),)
        else:
            assert ownership.streams[0][0] == 0 and len(ownership.streams) > 1
            for members in ownership.streams:
                assert len({ranks.place(rank)[1:4] for rank in members}) == 1
        assert [(name, tensor.shape) for name, tensor in ownership.tensors.items()] == [
            (tensor.name, tensor.shape) for tensor in hf_tensors(shape)
        ]
        for name, tensor in ownership.tensors.items():
            given = torch.zeros(tensor.shape, dtype=torch.int)
            for pieces in tensor.slices.values():
                for piece in pieces:
                    piece.of_tensor(given).add_(1)
            assert bool((given == 1).all()), name


def test_vllms_own_sender_takes_the_exporter_as_its_source(models):
    """vllm 0.32.0 distributed/weight_transfer: its checks of a source, its packing, its groups;
    NCCL is missing."""
    path = models["qwen2", False]
    arguments = {"model": str(path), "layout": {"tensor_parallel_size": 2}, "ranks": 2}
    first, other = launch("tests.megatron.weight_source", "send", 2, **arguments)
    before = load_file(path / "model.safetensors")
    assert first["calls"] == ["start", "update", "finish"] * 2 and other["calls"] == []
    assert first["info"]["names"] == [tensor.name for tensor in hf_tensors(read_model_shape(path))]
    for moved, received in enumerate(first["rounds"]):
        assert received.keys() == before.keys()
        assert all(torch.equal(received[name], before[name] + moved) for name in before)
    assert [len(group) for group in first["groups"]] == [1, 12, 12, 12, 12, 2]


# ---- refusals: each names what is wrong


def test_parameters_without_a_rule_and_rules_without_a_parameter_are_listed(models):
    shape = read_model_shape(models["qwen2", False])
    rules = stage_rules(shape, range(4), True, True)
    parameters = {
        rule.parameter: torch.empty(shard_shape(rule, shape, 1), device="meta") for rule in rules
    }
    assert unaccounted_parameters(rules, shape, parameters, lambda rule: Shard()) == {}
    parameters["extra"] = parameters.pop("decoder.final_layernorm.weight")
    parameters["output_layer.weight"] = torch.empty(3, 3, device="meta")
    problems = unaccounted_parameters([*rules, rules[0]], shape, parameters, lambda rule: Shard())
    assert {what: " ".join(names) for what, names in problems.items()} == {
        "parameters that no rule fills": "extra",
        "parameters that the model lacks": "decoder.final_layernorm.weight",
        "parameters filled twice": "embedding.word_embeddings.weight",
        "parameters of another shape": "output_layer.weight: (3, 3), its rule makes (61, 64)",
    }


def damaged(models, folder, change) -> str:
    shutil.copytree(models["qwen2", False], folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def test_what_does_not_fit_is_listed_by_name(models, tmp_path):
    """One launch for all: several mistakes in one message, and files that are damaged."""

    def several(tensors):
        tensors["surprise.weight"] = torch.ones(1)
        tensors.pop("model.norm.weight")
        tensors["lm_head.weight"] = torch.ones(5)
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].to(
            torch.float8_e4m3fn
        )

    paths = [
        str(models["qwen2", False]),
        damaged(models, tmp_path / "several", several),
        damaged(models, tmp_path / "cut", lambda tensors: None),
    ]
    file = tmp_path / "cut/model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    good, listed, cut = launch("tests.megatron.weights_worker", "errors_of", 1, models=paths)[0]
    assert good == ""
    for part in (
        "WeightMapError",
        "several",
        "no rule uses: ['surprise.weight']",
        "missing from the checkpoint: ['model.norm.w",
        "lm_head.weight: (5,), config.json says (61, 64)",
        "F32/BF16/F16: ['model.embed_tokens.weight: F8_E4M3']",
    ):
        assert part in listed, listed
    assert cut.startswith("InputError") and "model.safetensors cannot be read as safetensors" in cut


def test_an_index_that_does_not_match_its_files_is_refused(models, tmp_path):
    source, target = models["qwen2", False], tmp_path / "out"
    save_tensors(load_file(source / "model.safetensors"), source, target, max_shard_bytes=20_000)
    index_path = target / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    file = index["weight_map"].pop("model.norm.weight")
    index_path.write_text(json.dumps(index))
    with pytest.raises(InputError, match=rf"{file}.*not listed \['model.norm.weight'\]"):
        HFCheckpoint(target)
    (target / file).unlink()
    with pytest.raises(InputError, match=f"names {file}, which is not there"):
        HFCheckpoint(target)
    with pytest.raises(InputError, match="neither model.safetensors nor"):
        HFCheckpoint(tmp_path)


def test_very_many_names_are_counted():
    text = describe({"tensors missing": [f"t{i:03}" for i in range(50)]})
    assert "'t000'" in text and "'t039'] and 10 more" in text and "t040" not in text


# ---- files


def test_sharded_files_are_written_and_read(models, tmp_path):
    source = models["qwen2", False]
    tensors = load_file(source / "model.safetensors")
    save_tensors(tensors, source, tmp_path / "out", max_shard_bytes=20_000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors) and len(set(index["weight_map"].values())) > 3
    checkpoint = HFCheckpoint(tmp_path / "out")
    for name, tensor in tensors.items():
        assert checkpoint.header(name) == (tuple(tensor.shape), "F32")
        assert torch.equal(checkpoint.read(name), tensor)
        assert torch.equal(checkpoint.read(name, 0, 3, 7), tensor[3:7])
        if tensor.dim() == 2:
            assert torch.equal(checkpoint.read(name, 1, 3, 7), tensor[:, 3:7])


def test_an_interrupted_save_leaves_the_previous_checkpoint(models, tmp_path):
    source, target = models["qwen2", False], tmp_path / "out"
    tensors = load_file(source / "model.safetensors")
    save_tensors(tensors, source, target)

    specs = [HFTensor(name, tuple(tensor.shape)) for name, tensor in tensors.items()]

    def breaks():
        yield from itertools.islice(rows_of(tensors), 5)
        raise RuntimeError("killed in the middle")

    (target / "metrics.jsonl").write_text("{}")
    with pytest.raises(RuntimeError, match="killed"):
        save_hf(breaks(), specs, torch.float32, read_side_files(source), target)
    assert set(load_file(target / "model.safetensors")) == set(tensors)
    save_tensors(tensors, source, target, max_shard_bytes=20_000)
    assert not (target / "model.safetensors").exists() and (target / "config.json").exists()
    assert (target / "metrics.jsonl").read_text() == "{}", "other files in the folder are kept"


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([("a", 0, (2, 3))], r"no rows come after row 2 of a, which has 4"),
        ([("a", 0, (4, 3))], r"no rows come after row 0 of b"),
        (
            [("a", 0, (2, 3)), ("a", 3, (1, 3))],
            r"row 2 of a \(4, 3\) was expected, row 3 of a came, of shape \(1, 3\)",
        ),
        ([("b", 0, (5,))], r"row 0 of a .* was expected, row 0 of b"),
        ([("a", 0, (4, 2))], r"row 0 of a .* was expected, row 0 of a came, of shape \(4, 2\)"),
        ([("a", 0, (5, 3))], r"a \(4, 3\) torch.float32: 5 rows of torch.float32 came"),
        (
            [("a", 0, (4, 3)), ("b", 0, (5,)), ("b", 5, (1,))],
            r"rows of b come after the last tensor",
        ),
    ],
    ids=["cut", "one tensor", "a gap", "another tensor", "columns", "too many", "extra"],
)
def test_rows_that_do_not_make_the_tensors_are_refused(tmp_path, rows, problem):
    parts = [HFRows(name, start, torch.zeros(size)) for name, start, size in rows]
    with pytest.raises(ValueError, match=problem):
        save_hf(
            parts, [HFTensor("a", (4, 3)), HFTensor("b", (5,))], torch.float32, {}, tmp_path / "out"
        )
    assert not (tmp_path / "out").exists()


def test_never_more_than_one_bucket_above_the_own_shard(tmp_path):
    """Of a tensor that is larger than a bucket some rows at a time are loaded, exported and
    written."""
    # 2 x 102 MB of embeddings
    make_tiny_model(tmp_path / "m", "llama", vocab=100_000, layers=2, heads=16)
    slack = 12 << 20  # of the allocator and the measurement
    bucket = 4 << 20
    layouts = [layout(tp=2), layout(pp=2)]
    arguments = {
        "model": str(tmp_path / "m"),
        "ranks": 2,
        "bucket": bucket,
        "target": str(tmp_path / "out"),
    }
    for rank in launch("tests.megatron.weights_worker", "measure", 2, layouts=layouts, **arguments):
        for found in rank:
            assert found["shard"] > 90 << 20
            assert max(found["load"], found["export"], found["save"]) < bucket + slack, rank
    assert BUCKET_BYTES <= 512 << 20


# ---- config.json


def test_unsupported_models_are_refused_with_the_reason(models, tmp_path):
    shutil.copytree(models["qwen2", False], tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    for change, reason in [
        ({"model_type": "mixtral"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ]:
        (tmp_path / "m/config.json").write_text(json.dumps(config | change))
        with pytest.raises(InputError, match=reason):
            read_model_shape(tmp_path / "m")


def test_the_transformers_4_form_of_the_rotary_settings_is_read(models, tmp_path):
    config = json.loads((models["llama", True] / "config.json").read_text())
    config.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE})
    )
    shape = read_model_shape(tmp_path)
    assert (shape.rope_theta, shape.rope_scaling_factor) == (5e5, 32.0)


def test_weights_say_that_the_fp8_they_were_trained_in_was_emulated(tmp_path):
    fp8, entries = (
        FP8Layers(Recipe(emulate=True)),
        {"trained_in_fp8": "blockwise e4m3 fp32, EMULATED"},
    )
    for converters, changes in (((fp8,), entries), ((), None)):
        policy = SimpleNamespace(
            settings=SimpleNamespace(converters=converters),
            average=None,
            trained=SimpleNamespace(write=lambda target, entries, value: entries),
        )
        assert MegatronPolicy.save_hf(policy, tmp_path) == changes


def test_side_files_are_all_that_a_tokenizer_is_read_from(tmp_path):
    """Also templates in a folder of their own; an earlier checkpoint's are set aside."""
    make_tiny_policy(tmp_path / "source", chat_template="{{ messages[0].content }}")
    source = tmp_path / "source"
    settings = json.loads((source / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (source / "chat_template.jinja").unlink(missing_ok=True)
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    (source / "additional_chat_templates").mkdir()
    for name in ("default", "tools"):
        (source / f"additional_chat_templates/{name}.jinja").write_text(
            f"{name}: {{{{ messages[0].content }}}}"
        )
    assert tokenizer_fault(str(source), chat=True) is None
    target, chat = tmp_path / "target", [{"role": "user", "content": "1"}]
    tensors = load_file(source / "model.safetensors")
    save_tensors(tensors, source, target)
    save_tensors(tensors, source, target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "default: 1"
    assert tokenizer.apply_chat_template(chat, chat_template="tools", tokenize=False) == "tools: 1"
    aside = set_aside_hf(target)
    assert (aside / "additional_chat_templates/tools.jinja").exists()
    assert [path.name for path in target.iterdir()] == ["superseded.1"]
    assert read_side_files(source, "[{{ m }}]")["chat_template.jinja"] == b"[{{ m }}]"
    assert "additional_chat_templates/default.jinja" not in read_side_files(source, "x")
    shutil.rmtree(source / "additional_chat_templates")
    (source / "chat_template.json").write_text('{"chat_template": "x"}')
    assert "chat_template.json is read only for processors" in tokenizer_fault(
        str(source), chat=True
    )
