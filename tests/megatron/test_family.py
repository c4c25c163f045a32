"""A family that the package does not know, declared in this one file: Phi-3's stacked projections
by another name."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from openrlhf_ext.inputs import InputError
from openrlhf_ext.megatron import families
from openrlhf_ext.megatron.families import UnknownModelType, family_of
from openrlhf_ext.megatron.mlps.dense import DenseMLP
from openrlhf_ext.megatron.model.family import LAYER, Family
from openrlhf_ext.megatron.model.shape import ModelShape, read_model_shape
from openrlhf_ext.megatron.step.batch import SequenceBatch
from tests.launch import launch
from tests.megatron.reference import TEMPERATURE, make_batch, reference
from tests.megatron.test_policy import relative
from tests.models import FAMILIES, HYBRIDS, MIXTURES, make_tiny_model

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
    refused={
        "sliding_window": "attention to a window is not built: set it to null, which is exact up to its length"
    },
)


@contextmanager
def installed_as_phi3(site: Path, family: str) -> Iterator[None]:
    """Installs an entry point, as the package of a user would, for this process and those it
    starts."""
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
        vocab_size=61,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.1,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **more,
    )
    model = Phi3ForCausalLM(config).float()
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": "stacked", **more}))
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> tuple[Path, Phi3ForCausalLM]:
    path = tmp_path_factory.mktemp("phi3")
    return path, make_phi3(path)


def test_a_family_from_outside_equals_transformers_and_goes_out_as_it_came_in(
    installed, checkpoint
):
    path, model = checkpoint
    layouts = [{}, {"tp": 2, "sp": True, "max_tokens": 30}, {"pp": 2}]
    require_transformers_numbers(path, model, layouts)


def require_transformers_numbers(path: Path, model: PreTrainedModel, layouts: list[dict]) -> None:
    """Log-probs, entropies, and gradients in every layout of two ranks, and the weights bit for
    bit."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batch, weights_N = make_batch(61)
    expected = reference(model, batch, weights_N, steps=1)
    require_numbers(path, layouts, (batch, weights_N), expected, before)


def require_numbers(
    path: Path,
    layouts: list[dict],
    given: tuple[SequenceBatch, Tensor],
    expected: dict,
    before: dict[str, Tensor],
    gradients: float = 1e-5,
) -> None:
    """What ``reference`` found for the batch and weights ``given``, and the weights ``before``.
    ``gradients``: the largest relative difference."""
    batch, weights_N = given
    cases = [
        {"model": str(path), "world_size": 2, "temperature": TEMPERATURE, "steps": 0, **layout}
        for layout in layouts
    ]
    ranks = launch(
        "tests.megatron.parity", "run_cases", 2, cases=cases, batch=batch, weights_N=weights_N
    )
    for rank in ranks:
        for case, got in zip(cases, rank, strict=True):
            for name in ("logprobs", "entropies"):
                wanted = batch.responses.take(expected[name], got["rows"]).to(got[name].dtype)
                assert torch.allclose(got[name], wanted, atol=2e-5, rtol=1e-5), case
    for case, got in zip(cases, ranks[0], strict=True):
        assert set(got["weights"]) == set(before), case
        for name, tensor in before.items():
            assert torch.equal(got["weights"][name], tensor), (case, name)
            assert relative(got["grads"][name], expected["grads"][name]) < gradients, (case, name)


def test_what_a_family_refuses_is_refused_with_its_reason(installed, checkpoint, tmp_path):
    config = json.loads((checkpoint[0] / "config.json").read_text())
    for change, reason in [
        (
            {"sliding_window": 2047},
            "stacked with sliding_window = 2047 is not supported: attention to a window",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            "rope_type must be one of default, got 'llama3'",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor must be 1, got 0.5",
        ),
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


# entries of transformers' configuration classes that say nothing of what an evaluated model
# computes
NO_MATTER = {
    "initializer_range", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "keys_to_ignore_at_inference",
    "pretraining_tp",  # read by no model of transformers 5
    # of training: log-probs of a step are those that were sampled from
    "attention_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop",
    "max_window_layers",  # which layers have a window, where no sequence is longer than it
    "original_max_position_embeddings",  # of scaled rotary embedding: test_positions
    "output_router_logits", "router_aux_loss_coef",  # actor.aux_loss_coef
}  # fmt: skip
OTHERS = {
    "hidden_act": "gelu",
    "layer_types": ["linear_attention"] * 4,
    "mlp_only_layers": [0],
    "sliding_window": 7,
    "rope_parameters": {"rope_type": "dynamic", "factor": 2.0},
    "no_rope_layers": [0, 1, 1, 1],
}


OWN = {**MIXTURES, **HYBRIDS}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_entry_of_a_families_configuration_is_built_or_refused(name, tmp_path):
    kind, _ = FAMILIES[name]
    own = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    switch = (
        {"use_sliding_window": True, "sliding_window": 32}
        if "use_sliding_window" in kind.__annotations__
        else {}
    )
    usual = kind(**own, num_key_value_heads=2, **switch, **OWN.get(name, {})).to_dict()
    usual["layer_types"] = None

    def shape(**changes: Any) -> ModelShape | None:
        (tmp_path / "config.json").write_text(json.dumps(usual | changes))
        try:
            return read_model_shape(tmp_path)
        except InputError:
            return None

    built = shape()
    assert built is not None
    # of layers without experts
    ignored = NO_MATTER | ({"intermediate_size"} if built.num_experts else set())
    for entry in kind.__annotations__.keys() - ignored - set(dir(PreTrainedConfig)):
        entry = kind.attribute_map.get(entry, entry)
        value = OTHERS.get(entry, usual.get(entry))
        other = (
            value if entry in OTHERS else not value if isinstance(value, bool) else 2 * (value or 1)
        )
        more = {"no_rope_layers": None} if entry == "no_rope_layer_interval" else {}
        assert shape(**{entry: other}, **more) != shape(**more), f"{entry} {other!r}"


@pytest.mark.parametrize("name", FAMILIES)
def test_what_config_json_leaves_out_is_what_transformers_class_has(name, tmp_path):
    least = {
        "model_type": name,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "vocab_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **OWN.get(name, {}),
    }
    (tmp_path / "config.json").write_text(json.dumps(least))
    shape, theirs = read_model_shape(tmp_path), AutoConfig.from_pretrained(tmp_path)
    assert shape.rotary | {"partial_rotary_factor": shape.rotary_width / shape.head_dim} == {
        "rope_type": "default",
        "rope_theta": theirs.rope_parameters["rope_theta"],
        "partial_rotary_factor": theirs.rope_parameters.get("partial_rotary_factor", 1),
    }
    assert (shape.rms_norm_eps, shape.tied_embeddings) == (
        theirs.rms_norm_eps,
        theirs.tie_word_embeddings,
    )
    assert shape.head_dim == (getattr(theirs, "head_dim", None) or 16)
    switched = getattr(theirs, "use_sliding_window", True)
    assert shape.window == (getattr(theirs, "sliding_window", None) if switched else None)


@pytest.mark.parametrize(
    ("family", "changes", "found"),
    [
        ("mistral", {"sliding_window": ...}, {"window": 4096}),
        ("mistral", {"sliding_window": None}, {"window": None}),
        (
            "mistral",
            {"sliding_window": 0},
            "sliding_window must be null or an integer above 0, got 0",
        ),
        ("llama", {"sliding_window": 512}, {"window": 512}),  # vLLM would, transformers would not
        ("qwen2", {"sliding_window": 512, "use_sliding_window": False}, {"window": None}),
        ("qwen2", {"sliding_window": 512, "use_sliding_window": True}, {"window": 512}),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "needs the window"),
        (
            "qwen3",
            {"layer_types": ["chunked_attention"] * 4},
            "others are not built, got chunked_attention",
        ),
        ("smollm3", {"no_rope_layers": None}, {"layers_without_rope": (3,)}),
        (
            "smollm3",
            {"no_rope_layers": None, "no_rope_layer_interval": 2},
            {"layers_without_rope": (1, 3)},
        ),
        (
            "smollm3",
            {"no_rope_layers": None, "no_rope_layer_interval": 0},
            "no_rope_layer_interval must be an integer",
        ),
        ("smollm3", {"no_rope_layers": [1, 0]}, "a 0 or 1 for each of the 4 layers"),
        ("smollm3", {"tie_word_embeddings": ...}, {"tied_embeddings": True}),
        ("granite", {"logits_scaling": 0}, "logits_scaling must be a number above 0"),
        ("granite", {"logits_scaling": ...}, {"logits_divisor": 1.0, "embedding_factor": 12.0}),
        ("granite", {"layer_types": ["full_attention"] * 4}, "attention sinks"),
        (
            "seed_oss",
            {"attention_bias": False},
            "attention_bias = False is not supported: query, key and value",
        ),
        ("llama", {"is_causal": False}, "is_causal = False is not supported"),
        (
            "llama",
            {"logit_scale": 0.5},
            "logit_scale = 0.5 is not supported: vLLM multiplies logits by it",
        ),
    ],
)
def test_entries_of_single_families(family, changes, found, tmp_path):
    make_tiny_model(tmp_path, family)
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if v is not ...})
    )
    if isinstance(found, str):
        with pytest.raises(InputError, match=found):
            read_model_shape(tmp_path)
    else:
        shape = asdict(read_model_shape(tmp_path))
        assert {name: shape[name] for name in found} == found


def test_a_window_sees_as_many_tokens_as_it_says_the_own_one_among_them(tmp_path):
    """So a sequence of that length is computed without it; transformers' number."""
    make_tiny_model(tmp_path, "mistral", sliding_window=8)
    tokens = torch.arange(2, 11)[None]
    windowed, whole = (
        AutoModelForCausalLM.from_pretrained(tmp_path, sliding_window=window)(tokens).logits
        for window in (8, None)
    )
    assert torch.allclose(windowed[0, :8], whole[0, :8], atol=1e-6)
    assert (windowed[0, 8] - whole[0, 8]).abs().max() > 1e-3


def test_what_a_model_type_lacks_is_said_of_types_that_transformers_knows():
    for model_type, needs in families._NEEDS.items():
        # a class of its own in its checkpoints
        known = model_type in CONFIG_MAPPING_NAMES or model_type == "kimi_k2"
        assert known != (needs == families._NO_CLASS), model_type
        with pytest.raises(
            UnknownModelType, match=re.escape(f"got {model_type!r}: it would need {needs}")
        ):
            family_of(model_type)


def test_an_unknown_model_type_is_refused_with_those_that_are_known(installed):
    known = (
        "granite, llama, mistral, phi3, qwen2, qwen2_moe, qwen3, qwen3_5_moe_text, qwen3_5_text, "
        "qwen3_moe, seed_oss, smollm3, stacked"
    )
    with pytest.raises(
        InputError, match=f"must be one of {known}, got 'mixtral': it would need its experts' names"
    ):
        family_of("mixtral")


def test_a_declaration_names_parameters_that_a_layer_has():
    with pytest.raises(ValueError, match=r"a decoder layer has no \['mlp.linear_fc3.weight'\]"):
        Family(model_type="new", critic_class="", layer={"mlp.linear_fc3.weight": ("w",)})


def test_a_kind_s_parameters_are_split_in_a_way_that_there_is():
    class Former(DenseMLP):
        parameters = {"mlp.linear_fc1.weight": ("gate_up", ("ffn", "ffn"), "hidden")}

    with pytest.raises(ValueError, match="former: parameters are split by .*, not by gate_up"):
        Family(model_type="former", critic_class="", mlp=Former, layer={})
