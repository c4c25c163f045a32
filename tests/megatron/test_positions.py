"""Rotary embedding: read, computed, and refused as transformers and vLLM do; vLLM's own numbers are
in tests/rollout/test_families.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from openrlhf_ext.inputs import InputError
from openrlhf_ext.megatron.model.positions import chosen_factors, engine_overrides, rotary
from openrlhf_ext.megatron.model.shape import read_model_shape
from openrlhf_ext.megatron.step.batch import PackShape, pack, sequence_batch
from tests.launch import launch
from tests.megatron.reference import TEMPERATURE, reference
from tests.megatron.test_policy import relative
from tests.models import make_tiny_model
from tests.sequences import masked_batch

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 8.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + n / 8 for n in range(6)],
    "long_factor": [1.0 + n for n in range(6)],
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 0.75,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("qwen2", {"rope_type": "default"}),
    "linear": ("llama", {"rope_type": "linear", "factor": 3.0}),
    "llama3": ("llama", LLAMA3),
    "llama3 as Megatron has it": ("llama", {**LLAMA3, "high_freq_factor": 4.0,
                                            "original_max_position_embeddings": 8192}),
    "yarn": ("qwen2", YARN),
    "yarn of qwen3": ("qwen3", {**YARN, "beta_fast": 16, "beta_slow": 2}),
    "yarn, attention_factor": ("qwen2", {**YARN, "attention_factor": 0.9}),
    "yarn, mscale": ("qwen3", {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}),
    "yarn, truncate": ("llama", {**YARN, "factor": 32, "truncate": False}),
    "longrope": ("phi3", LONG),
    "longrope, attention_factor": ("phi3", {**LONG, "attention_factor": 1.25}),
    "part of a head": ("phi3", {"rope_type": "default", "partial_rotary_factor": 0.5}),
}  # fmt: skip


def make(path: Path, kind: str, **more: Any) -> PreTrainedModel:
    family, rope = KINDS[kind]
    # Phi-3's class has 4096, which comes before that of the settings
    if rope["rope_type"] == "longrope":
        more |= {"original_max_position_embeddings": 64}
    return make_tiny_model(
        path, family, rope_parameters={"rope_theta": 5000.0, **rope}, layers=2, **more
    )


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_those_of_transformers_model_to_the_last_bit(tmp_path, kind):
    model = make(tmp_path, kind)
    theirs, settings = model.model.rotary_emb, read_model_shape(tmp_path).rotary
    found = []
    for longest in (64, 65):
        # longrope chooses by the longest position
        theirs(torch.zeros(1), torch.tensor([[longest - 1]]))
        frequencies_D, factor = rotary(settings, 16, longest)
        assert torch.equal(frequencies_D, theirs.inv_freq) and factor == theirs.attention_scaling
        found.append(frequencies_D)
    assert torch.equal(*found) == (settings["rope_type"] != "longrope")
    said = [str(chosen_factors(settings, longest)).split(" factors")[0] for longest in (64, 65)]
    ours = [f"positions: longrope's {which}" for which in ("short", "long")]
    assert said == (["None", "None"] if settings["rope_type"] != "longrope" else ours)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")  # as transformers 4 wrote it
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": rope}))
    assert read_model_shape(tmp_path).rotary == settings


def test_what_older_checkpoints_say_of_their_model_has_not_changed(tmp_path):
    shape = {
        kind: (make(tmp_path / kind, kind), read_model_shape(tmp_path / kind))[1]
        for kind in list(KINDS)[:4]
    }
    assert shape["plain"].rope is None and shape["plain"].rope_scaling_factor is None
    known = shape["llama3 as Megatron has it"]
    assert (
        known.rope is None
        and known.rope_scaling_factor == 16.0
        and known.rotary["high_freq_factor"] == 4.0
    )
    assert (
        json.loads(shape["llama3"].rope)["high_freq_factor"] == 8.0
        and shape["llama3"].rope_scaling_factor is None
    )


LAYOUTS = {
    1: [{}, {"recompute": {"recompute": "full"}}],
    2: [{"tp": 2, "sp": True}, {"cp": 2}, {"pp": 2, "recompute": {"recompute": "selective"}}],
}
SCALED = ("linear", "llama3", "yarn of qwen3", "yarn, attention_factor", "longrope")


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Of sequences beyond the 64 tokens that models were made for: (folder, reference) by kind."""
    generator = torch.Generator().manual_seed(3)
    sequences = [torch.randint(2, 61, (length,), generator=generator) for length in (200, 70, 131)]
    masks = [(torch.arange(len(s) - 1) >= len(s) // 3).long() for s in sequences]
    batch = masked_batch(sequences, masks)
    weights_N = torch.randn(batch.responses.tokens, generator=generator)
    made = {}
    for kind in SCALED:
        path = tmp_path_factory.mktemp("model")
        model = make(path, kind)
        loaded = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        made[kind] = str(path), reference(model, batch, weights_N, steps=1), loaded
    return batch, weights_N, made


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_beyond_the_original_window_the_policy_equals_transformers(expected, world_size):
    batch, weights_N, made = expected
    common = {"world_size": world_size, "temperature": TEMPERATURE, "steps": 0, "max_len": 200}
    cases = [
        {"model": made[kind][0], "kind": kind, **common, **layout}
        for kind in SCALED
        for layout in LAYOUTS[world_size]
    ]
    ranks = launch(
        "tests.megatron.parity",
        "run_cases",
        world_size,
        cases=cases,
        batch=batch,
        weights_N=weights_N,
    )
    for number, case in enumerate(cases):
        _, wanted, loaded = made[case["kind"]]
        for rank in ranks:
            for name in ("logprobs", "entropies"):
                theirs = batch.responses.take(wanted[name], rank[number]["rows"])
                assert torch.allclose(rank[number][name], theirs, atol=1e-5, rtol=1e-5), case
        first = ranks[0][number]
        assert set(first["weights"]) == set(loaded)
        for name, tensor in loaded.items():
            assert torch.equal(first["weights"][name], tensor), (case, name)
            assert relative(first["grads"][name], wanted["grads"][name]) < 1e-5, (case, name)


REFUSED = [
    ({"rope_type": "dynamic", "factor": 2.0}, "got 'dynamic': its frequencies change with the length of a sequence"),
    ({"rope_type": "mrope"}, "rope_type must be one of default, linear, llama3, yarn, longrope, got 'mrope'"),
    ({"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}},
     "rotary settings of their own for some layers (full_attention, sliding_attention) are not "
     "built"),
    ({**YARN, "attn_factor": 0.878}, "got attn_factor: transformers and vLLM do not read others alike; mend the name"),
    ({"rope_type": "default", "mrope_section": [1, 2]}, "are rope_theta, rope_type, got mrope_section: transformers"),
    ({"factor": 4.0}, "rotary settings with factor need a rope_type: linear, llama3, yarn, longrope"),
    ({"rope_type": "yarn", "original_max_position_embeddings": 64}, "rope_type yarn needs factor"),
    ({**YARN, "factor": 0.5}, "factor must be a number of at least 1, got 0.5"),
    ({**YARN, "beta_fast": "32"}, "beta_fast must be a number above 0, got '32'"),
    ({**YARN, "truncate": 1}, "truncate must be true or false, got 1"),
    ({"rope_type": "llama3", "factor": 8.0}, "rope_type llama3 needs high_freq_factor, low_freq_factor"),
    ({**LLAMA3, "low_freq_factor": 8.0}, "high_freq_factor must be above low_freq_factor, got 8.0 and 8.0"),
    ({**YARN, "beta_fast": 1, "beta_slow": 32}, "beta_fast must be at least beta_slow, got 1 and 32"),
    ({**YARN, "type": "linear"}, "rotary settings have rope_type 'yarn' and type 'linear': keep one of them"),
    ({"rope_type": 7}, "rope_type must be one of default, linear, llama3, yarn, longrope, got 7"),
    ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
    ({**LONG, "partial_rotary_factor": 1.0}, "short_factor must have an entry for each of 8 frequencies, got 6"),
    ({"rope_type": "linear", "factor": 2.0, "rope_theta": -1}, "rope_theta must be a number above 1, got -1"),
    ({"rope_type": "default", "rope_theta": 0}, "rope_theta must be a number above 1, got 0"),
    ({**YARN, "rope_theta": False}, "rope_theta must be a number above 1, got False"),
    ({**YARN, "rope_theta": 1}, "rope_theta must be a number above 1, got 1"),
]  # fmt: skip


@pytest.mark.parametrize(("rope", "said"), REFUSED, ids=[said[:40] for _, said in REFUSED])
def test_other_settings_are_refused_by_name(tmp_path, rope, said):
    make_tiny_model(tmp_path, "llama", layers=1)
    config = json.loads((tmp_path / "config.json").read_text())
    # transformers 5 and 4
    for form in ({"rope_parameters": rope}, {"rope_parameters": None, "rope_scaling": rope}):
        (tmp_path / "config.json").write_text(json.dumps({"rope_theta": 1e4, **config, **form}))
        with pytest.raises(InputError) as error:
            read_model_shape(tmp_path)
        assert said in str(error.value)


def test_how_images_are_placed_changes_nothing_in_a_family_of_text(tmp_path):
    make_tiny_model(tmp_path, "qwen3_5_text")
    config, shape = json.loads((tmp_path / "config.json").read_text()), read_model_shape(tmp_path)
    config["rope_parameters"] |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model_shape(tmp_path) == shape


def test_two_forms_that_differ_are_refused(tmp_path):
    make_tiny_model(tmp_path, "llama", layers=1)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_scaling": YARN}))
    with pytest.raises(
        InputError, match="rope_scaling and rope_parameters differ, of which transformers reads the"
    ):
        read_model_shape(tmp_path)


def test_phi3s_class_has_an_original_window_of_its_own(tmp_path):
    """Which transformers takes where config.json has none, and before that of the settings."""
    make(tmp_path, "longrope")
    config = json.loads((tmp_path / "config.json").read_text())
    del (
        config["original_max_position_embeddings"],
        config["rope_parameters"]["original_max_position_embeddings"],
    )
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert read_model_shape(tmp_path).rotary["original_max_position_embeddings"] == 4096
    assert theirs.rope_parameters["original_max_position_embeddings"] == 4096
    config["rope_parameters"]["original_max_position_embeddings"] = 64
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="original_max_position_embeddings differs"):
        read_model_shape(tmp_path)


def test_an_original_window_that_differs_beside_the_settings_is_refused(tmp_path):
    make_tiny_model(tmp_path, "llama", layers=1)
    config = json.loads((tmp_path / "config.json").read_text())
    more = {"rope_parameters": {**YARN, "rope_theta": 5e3}, "original_max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps({**config, **more}))
    with pytest.raises(
        InputError,
        match="original_max_position_embeddings differs in the rotary settings and beside",
    ):
        read_model_shape(tmp_path)


def test_a_part_of_a_head_beside_the_settings_is_not_overlooked(tmp_path):
    make_tiny_model(tmp_path, "llama", layers=1)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "partial_rotary_factor": 0.5}))
    with pytest.raises(InputError, match="partial_rotary_factor must be 1, got 0.5"):
        read_model_shape(tmp_path)


@pytest.mark.parametrize(
    ("kind", "window"),
    [("plain", 256), ("linear", 768), ("llama3", 256), ("yarn", 256), ("longrope", 256)],
)
def test_the_window_is_that_of_vllm(tmp_path, kind, window):
    make(tmp_path, kind)
    assert read_model_shape(tmp_path).max_positions == window


def test_engines_are_told_what_they_would_ignore(tmp_path):
    told = {}
    for kind in KINDS:
        make(tmp_path / kind, kind)
        told[kind] = engine_overrides(read_model_shape(tmp_path / kind).rotary)
    assert {kind for kind, own in told.items() if own} == {
        kind for kind in KINDS if kind[:4] in ("yarn", "long")
    }
    assert (
        told["yarn"]["max_position_embeddings"]
        == read_model_shape(tmp_path / "yarn").max_positions
        == 256
    )
    assert told["longrope, attention_factor"]["rope_parameters"]["short_mscale"] == 1.25


def test_packs_grow_with_their_tokens_to_131072():
    sizes = []
    for length in (16_384, 131_072):
        batch = sequence_batch([np.full(length, 5, np.int32)], [((length // 32, length),)])
        for ranks in (1, 8):
            part = pack(batch, PackShape(context_parallel_size=ranks))
            sizes.append(
                sum(value.nbytes for value in vars(part).values() if torch.is_tensor(value))
            )
    assert sizes[2] <= 8.2 * sizes[0] and sizes[3] <= 8.2 * sizes[1] and sizes[2] < 64 * 131_072
