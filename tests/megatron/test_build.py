"""Which layers a model gets on which machine, and what they are told."""

from __future__ import annotations

import logging
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import RowParallelLinear

from openrlhf_ext.megatron.distributed import fake_rank
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.mlps.dense import DenseMLP
from openrlhf_ext.megatron.model import build
from openrlhf_ext.megatron.model.build import packed_sequences, transformer_config
from openrlhf_ext.megatron.model.shape import read_model_shape
from openrlhf_ext.megatron.model.spec import PackedSequences
from openrlhf_ext.megatron.step.batch import PackShape, pack
from openrlhf_ext.options.sections import Megatron
from tests.megatron.test_packing import ragged
from tests.models import make_tiny_model
from tests.sequences import grouped


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path, "qwen2", layers=2)
    return read_model_shape(path)


@pytest.fixture
def with_transformer_engine(monkeypatch):
    """A GPU machine with TransformerEngine, as far as the choice of layers looks at it."""
    monkeypatch.setattr(build, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        gpt_layer_specs, "get_gpt_layer_with_transformer_engine_spec", lambda **options: "TE layers"
    )
    for name in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):
        monkeypatch.setattr(f"megatron.core.models.common.embeddings.rope_utils.{name}", object())
    sorts = ("sort_chunks_by_index", "sort_chunks_by_index_with_probs")
    for name in ("permute", "permute_with_probs", *sorts, "unpermute"):
        monkeypatch.setattr(
            f"megatron.core.transformer.moe.moe_utils.fused_{name}", object(), raising=False
        )


@pytest.mark.parametrize(("dtype", "chosen"), [(torch.bfloat16, True), (torch.float32, False)])
def test_transformer_engine_takes_bf16_only(shape, with_transformer_engine, caplog, dtype, chosen):
    """Its attention over packed sequences has no fp32 kernel: spec, rotary embedding and boundaries
    go together."""
    caplog.set_level(logging.INFO, logger=build.__name__)
    with fake_rank(ParallelLayout(1), 0):
        assert not transformer_config(shape, ParallelLayout(1), dtype, Megatron()).apply_rope_fusion
        config = transformer_config(shape, ParallelLayout(1), dtype, Megatron(rope_fusion=True))
        assert config.apply_rope_fusion == chosen
        assert (build._spec(config, shape, None).layer_specs[0] == "TE layers") == chosen
    part = pack(ragged([(2, 3), (4, 1)]), PackShape())
    sequences = packed_sequences(part, config.apply_rope_fusion)
    assert isinstance(sequences, PackedSequences) and part.boundaries.tolist() == [0, 5, 10]
    assert sequences.cu_seqlens_q is (part.boundaries if chosen else None), (
        "the other one gets the tokens' angles"
    )
    expected = (
        "TransformerEngine's" if chosen else "no attention over packed sequences in torch.float32"
    )
    assert expected in caplog.text


@pytest.mark.parametrize(("dtype", "fixed"), [(torch.bfloat16, True), (torch.float32, False)])
def test_experts_add_up_in_a_fixed_order_on_transformer_engine(
    tmp_path, with_transformer_engine, caplog, dtype, fixed
):
    """Megatron's own permutation is a scatter_add_, in any order on a GPU: with eight experts a
    token two passes of the same weights differed by 0.06 nats on average. Layers that cannot do
    better say so."""
    for chosen in (8, 2):
        make_tiny_model(
            tmp_path / f"{chosen}",
            "qwen3_moe",
            layers=2,
            num_experts=16,
            num_experts_per_tok=chosen,
        )
        mixture = read_model_shape(tmp_path / f"{chosen}")
        caplog.clear()
        with fake_rank(ParallelLayout(1), 0):
            config = transformer_config(mixture, ParallelLayout(1), dtype, Megatron())
            assert config.moe_permute_fusion is fixed
            if not fixed:
                build._spec(config, mixture, None)
                assert ("two passes of the same weights differ" in caplog.text) is (chosen > 2)


def test_a_mlp_that_transformer_engine_s_layers_do_not_have_is_refused(
    shape, with_transformer_engine
):
    class Other(DenseMLP):
        @staticmethod
        def submodules(*linears):
            return DenseMLP.submodules(*linears)

    other = SimpleNamespace(family=SimpleNamespace(mlp=Other), attentions=shape.attentions)
    with fake_rank(ParallelLayout(1), 0):
        config = transformer_config(shape, ParallelLayout(1), torch.bfloat16, Megatron())
        with pytest.raises(
            ValueError, match="have a dense MLP, not Other: megatron.param_dtype fp32"
        ):
            build._spec(config, other, None)
        config = transformer_config(shape, ParallelLayout(1), torch.float32, Megatron())
        assert build._spec(config, other, None).layer_specs[0] != "TE layers"


def test_without_transformer_engine_the_log_says_so(
    shape, with_transformer_engine, monkeypatch, caplog
):
    monkeypatch.setattr(build, "has_transformer_engine", lambda: False)
    with fake_rank(ParallelLayout(1), 0):
        config = transformer_config(shape, ParallelLayout(1), torch.bfloat16, Megatron())
        spec = build._spec(config, shape, None)
        assert not config.apply_rope_fusion and spec.layer_specs[0] != "TE layers"
    assert "TransformerEngine is not installed" in caplog.text


def test_layers_that_can_add_weight_gradients_themselves_are_told_to(shape, monkeypatch):
    """As TransformerEngine's can; Megatron's own output layer refuses to be built with the option
    that says so."""
    monkeypatch.setattr(RowParallelLinear, "fuse_wgrad_accumulation", False, raising=False)
    with fake_rank(ParallelLayout(1), 0):
        config = transformer_config(shape, ParallelLayout(1), torch.float32, Megatron())
        modules = list(build.build_model(shape, config).modules())
    able = [module for module in modules if isinstance(module, RowParallelLinear)]
    assert len(able) == 4 and all(module.fuse_wgrad_accumulation for module in able)
    assert not any(
        "fuse_wgrad_accumulation" in vars(module) for module in modules if module not in able
    )
    assert not config.gradient_accumulation_fusion


@pytest.mark.parametrize(
    ("recompute", "expected"),
    [
        ({}, {"granularity": None, "method": None, "num_layers": None}),
        (
            {"recompute": "selective", "recompute_modules": ("mlp",)},
            {"granularity": "selective", "modules": ["mlp"], "method": None},
        ),
        ({"recompute": "full"}, {"granularity": "full", "method": "uniform", "num_layers": 1}),
        (
            {"recompute": "full", "recompute_method": "block", "recompute_num_layers": 2},
            {"granularity": "full", "method": "block", "num_layers": 2},
        ),
    ],
)
def test_recomputation_in_megatrons_words(shape, recompute, expected):
    config = transformer_config(shape, ParallelLayout(1), torch.float32, Megatron(**recompute))
    assert {name: getattr(config, f"recompute_{name}") for name in expected} == expected


def test_attention_gets_the_boundaries_and_the_rotary_embedding_before_it_none(shape) -> None:
    seen = []
    with fake_rank(ParallelLayout(1), 0):
        config = transformer_config(shape, ParallelLayout(1), torch.float32, Megatron())
        decoder = build.build_model(shape, config).decoder
    build.give_whole_sequences(decoder)
    part = pack(ragged([(2, 3), (4, 1)]), PackShape())
    sequences = packed_sequences(part, fused_rope=False)
    for layer in decoder.layers:
        layer.self_attention.core_attention.forward = lambda *_, packed_seq_params: seen.append(
            packed_seq_params
        )
        layer.self_attention.core_attention(packed_seq_params=sequences)
    assert len(seen) == 2 and all(
        each.cu_seqlens_q is each.cu_seqlens_kv is part.boundaries for each in seen
    )
    assert sequences.cu_seqlens_q is None and sequences.slots == part.slots


def test_attention_of_transformer_engine_gets_whole_sequences_and_gives_back_what_is_computed(
    shape,
) -> None:
    with fake_rank(ParallelLayout(1), 0):
        config = transformer_config(shape, ParallelLayout(1), torch.float32, Megatron())
        core = build.build_model(shape, config).decoder.layers[0].self_attention.core_attention
    build.give_whole_sequences(torch.nn.ModuleDict({"core_attention": core}))
    part = pack(grouped([(6, [2, 3, 1])]), PackShape(shares_prompts=True))
    core.forward = lambda query, key, value, mask, packed_seq_params: (query + key + value).flatten(
        1
    )
    inputs = [torch.randn(len(part.packed_L), 2, 4) for _ in range(3)]
    output = core(*inputs, None, packed_seq_params=packed_sequences(part, fused_rope=False))
    assert part.boundaries[-1] == 3 * 6 + 6 > len(part.packed_L) == 6 + 2 + 6
    assert torch.equal(output, sum(inputs).flatten(1))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            "raise ImportError('flash_attn_2_cuda.so: undefined symbol: c10')",
            "ImportError: flash_attn_2_cuda.so: undef",
        ),
        (
            "raise RuntimeError('cudnn shared object not found')",
            "RuntimeError: cudnn shared object not found",
        ),
        ("", "megatron-core 0.19.2 cannot use it"),
    ],
)
def test_an_installed_transformer_engine_that_cannot_be_used_is_an_error(
    tmp_path, monkeypatch, source, says
) -> None:
    """Not slow layers: the run would finish, at a fraction of its speed."""
    package = tmp_path / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(
        build.BrokenLibraryError,
        match=rf"TransformerEngine (is installed|can be)(.|\n)*{re.escape(says)}",
    ):
        build.has_transformer_engine()
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]
