"""A family that the package does not know, declared in this one file: Phi-3's stacked projections by another name."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from openrlhf_ext.inputs import InputError
from openrlhf_ext.megatron.families import family_of
from openrlhf_ext.megatron.model.family import LAYER, Family
from openrlhf_ext.megatron.model.shape import read_model_shape
from tests.launch import launch
from tests.megatron.reference import TEMPERATURE, make_batch, reference
from tests.megatron.test_policy import relative

PHI3 = Family(
    model_type="stacked",
    critic_class="Phi3ForSequenceClassification",
    layer={
        **LAYER,
        "self_attention.linear_qkv.weight": ("self_attn.qkv_proj.weight",),
        "mlp.linear_fc1.weight": ("mlp.gate_up_proj.weight",),
    },
    config_defaults={"rms_norm_eps": 1e-5},
    rope_types=("default",),
    refused={"sliding_window": "attention to a window is not built: set it to null, which is exact up to its length"},
)


@contextmanager
def installed_as_phi3(site: Path, family: str) -> Iterator[None]:
    """Installs an entry point, as the package of a user would, for this process and those it starts."""
    info = site / "my_families-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-families\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[openrlhf_ext.families]\nstacked = {family}\n")
    path = os.environ.get("PYTHONPATH")
    family_of.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        patch.setenv("PYTHONPATH", f"{site}{os.pathsep}{path}" if path else str(site))
        yield
    family_of.cache_clear()


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    with installed_as_phi3(tmp_path_factory.mktemp("site-packages"), f"{__name__}:PHI3"):
        yield


def make_phi3(path: Path, **more: str) -> Phi3ForCausalLM:
    """A random Phi-3 as transformers saves it; vocabulary 61 is not divisible by 2."""
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.1, pad_token_id=0, eos_token_id=1,
        bos_token_id=None, **more,
    )  # fmt: skip
    model = Phi3ForCausalLM(config).float()
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": "stacked", **more}))
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> tuple[Path, Phi3ForCausalLM]:
    path = tmp_path_factory.mktemp("phi3")
    return path, make_phi3(path)


def test_a_family_from_outside_equals_transformers_and_goes_out_as_it_came_in(installed, checkpoint):
    path, model = checkpoint
    layouts = [{}, {"tp": 2, "sp": True, "max_tokens": 30}, {"pp": 2}]
    require_transformers_numbers(path, model, layouts)


def require_transformers_numbers(path: Path, model: Phi3ForCausalLM, layouts: list[dict]) -> None:
    """Log-probs, entropies, and gradients in every layout of two ranks, and the weights bit for bit."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batch, weights_N = make_batch(61)
    expected = reference(model, batch, weights_N, steps=1)
    cases = [
        {"model": str(path), "world_size": 2, "temperature": TEMPERATURE, "steps": 0, **layout} for layout in layouts
    ]
    ranks = launch("tests.megatron.parity", "run_cases", 2, cases=cases, batch=batch, weights_N=weights_N)
    for rank in ranks:
        for case, got in zip(cases, rank, strict=True):
            for name in ("logprobs", "entropies"):
                wanted = batch.responses.take(expected[name], got["rows"])
                assert torch.allclose(got[name], wanted, atol=2e-5, rtol=1e-5), case
    for case, got in zip(cases, ranks[0], strict=True):
        assert set(got["weights"]) == set(before), case
        for name, tensor in before.items():
            assert torch.equal(got["weights"][name], tensor), (case, name)
            assert relative(got["grads"][name], expected["grads"][name]) < 1e-5, (case, name)


def test_what_a_family_refuses_is_refused_with_its_reason(installed, checkpoint, tmp_path):
    config = json.loads((checkpoint[0] / "config.json").read_text())
    for change, reason in [
        ({"sliding_window": 2047}, "phi3 with sliding_window = 2047 is not supported: attention to a window"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, r"rope_type must be one of \('default',\)"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1, got 0.5"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(InputError, match=reason):
            read_model_shape(tmp_path)


def test_entries_of_config_json_may_have_other_names_or_be_left_out(installed, tmp_path):
    family = Family(
        model_type="renamed",
        critic_class="",
        config_names={"hidden_size": "n_embd"},
        config_defaults={"rms_norm_eps": 1.0},
    )
    usual = family.usual({"n_embd": 8, "num_hidden_layers": 2})
    assert (usual["hidden_size"], usual["num_hidden_layers"], usual["rms_norm_eps"]) == (8, 2, 1.0)
    assert family.usual({"rms_norm_eps": 0.5})["rms_norm_eps"] == 0.5


def test_an_unknown_model_type_is_refused_with_those_that_are_known(installed):
    known = "llama, phi3, qwen2, qwen2_moe, qwen3, qwen3_moe"
    with pytest.raises(InputError, match=f"must be one of {known}, got 'mixtral': it would need its experts' names"):
        family_of("mixtral")


def test_a_declaration_names_parameters_that_a_layer_has():
    with pytest.raises(ValueError, match=r"a decoder layer has no \['mlp.linear_fc3.weight'\]"):
        Family(model_type="new", critic_class="", layer={"mlp.linear_fc3.weight": ("w",)})
