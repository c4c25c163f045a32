"""What plan says of memory is what real ranks allocate and what autograd really saves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import gpu, record
from openrlhf_ext.fp8.recipe import BF16Layers, Recipe
from openrlhf_ext.megatron.attentions import Attention
from openrlhf_ext.megatron.attentions.delta_net import DeltaNet
from openrlhf_ext.megatron.attentions.full import GatedAttention
from openrlhf_ext.megatron.layers.fp8 import FP8Layers
from openrlhf_ext.megatron.layers.lora import LoRALayers
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.mlps import moe
from openrlhf_ext.megatron.model.adapter import ALL_LINEAR, Adapter, resolved_targets
from openrlhf_ext.megatron.model.shape import ModelShape, read_model_shape
from openrlhf_ext.options.sections import Megatron
from openrlhf_ext.planning import memory
from openrlhf_ext.planning.memory import (
    LayerActivations,
    Pass,
    StateOptions,
    activations,
    rank_states,
)
from openrlhf_ext.tools.plan.layout_proof import prove_layout
from tests.launch import launch
from tests.models import HYBRIDS, MIXTURES, make_tiny_model
from tests.tools.plan.test_layout_proof import config_folder

LENGTH, SEQUENCES = 256, 4
TP, PP, CP, VP, LAST = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "virtual_pipeline_size",
    "decoder_last_pipeline_num_layers",
)
EP, ETP, SP = "expert_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"
MIXTURE_LAYOUTS = [
    ParallelLayout(world_size, **sizes)
    for world_size, sizes in (
        (1, {}),
        (4, {TP: 2, SP: True}),
        (8, {EP: 8}),
        (8, {TP: 2, SP: True, EP: 4}),
        (8, {TP: 4, SP: True, EP: 2}),
        (16, {EP: 4, ETP: 2}),
        (16, {PP: 2, EP: 4}),
        (16, {TP: 2, SP: True, PP: 2, VP: 2, EP: 2, CP: 2}),
        (16, {TP: 2, SP: True, PP: 2, EP: 2, ETP: 2, LAST: 3}),
        (6, {PP: 3, LAST: 2, EP: 2}),
    )
]
RECOMPUTED = {
    "none": {},
    "core_attn": {"recompute": "selective"},
    "mlp": {"recompute": "selective", "recompute_modules": ("mlp",)},
    "moe": {"recompute": "selective", "recompute_modules": ("moe",)},
    "both": {"recompute": "selective", "recompute_modules": ("core_attn", "mlp")},
    "full": {"recompute": "full"},
    "two by two": {"recompute": "full", "recompute_num_layers": 2},
    "block": {"recompute": "full", "recompute_method": "block"},
}


@pytest.mark.parametrize(
    ("family", "tied"), [("qwen2", False), ("qwen3", True), ("llama", False), ("llama", True)]
)
def test_parameters_are_those_of_models_built_in_many_layouts(tmp_path, family, tied):
    folder = config_folder(tmp_path, family, tie_word_embeddings=tied)
    shape = read_model_shape(folder)
    for layout in (
        ParallelLayout(1),
        ParallelLayout(8, 2, 1, 2, True),
        ParallelLayout(16, 4, 2),
        ParallelLayout(8, 2, 4, 1, True),
        ParallelLayout(4, 1, 2, 1, False, 2),
        ParallelLayout(3, 1, 3, 1, False, 1, None, 2),
        ParallelLayout(4, 2, 2, 1, True, 1, 3),
    ):
        shares = prove_layout(folder, layout, torch.bfloat16, distributed_optimizer=True).shares
        for share in shares:
            assert (
                rank_states(shape, layout, share.pipeline, StateOptions()).parameters
                == share.states.parameters
            )


def test_fp8_copies_are_those_of_built_models(tmp_path):
    folder, layout = (
        config_folder(tmp_path, num_hidden_layers=8),
        ParallelLayout(8, 2, 2, 1, False, 2),
    )
    shape = read_model_shape(folder)
    for recipe in (
        Recipe(),
        Recipe(bf16_layers=BF16Layers(1, 3)),
        Recipe(modules="mlp"),
        Recipe(emulate=True),
    ):
        fp8 = (FP8Layers(recipe),)
        options = StateOptions(converters=fp8)
        for share in prove_layout(folder, layout, torch.bfloat16, True, converters=fp8).shares:
            assert rank_states(shape, layout, share.pipeline, options).copies == share.states.copies


@pytest.mark.parametrize("family", MIXTURES)
def test_states_of_a_mixture_are_those_of_the_proof(tmp_path, family):
    """But for the gaps of buffers and what shares of the optimizer differ by; exactly: see real
    ranks below."""
    folder = config_folder(tmp_path, family, num_hidden_layers=8)
    shape = read_model_shape(folder)
    for layout in MIXTURE_LAYOUTS:
        for share in prove_layout(
            folder, layout, torch.bfloat16, distributed_optimizer=True
        ).shares:
            found, proved = rank_states(shape, layout, share.pipeline, StateOptions()), share.states
            assert found.parameters == proved.parameters
            gaps = 64 * 8 * shape.num_experts * 2  # one before every parameter at most
            assert proved.gradients <= found.gradients <= proved.gradients + 4 * gaps
            assert proved.optimizer <= found.optimizer <= proved.optimizer * 1.1 + 12 * 64


@pytest.mark.parametrize("family", HYBRIDS)
def test_states_of_unlike_stages_are_those_of_the_proof(tmp_path, family):
    """Three gated delta nets, then gated attention; without the gaps of buffers, as above."""
    folder = config_folder(tmp_path, family, linear_num_key_heads=4)
    shape = read_model_shape(folder)
    experts = {EP: 2} if shape.num_experts else {}
    for sizes in (
        {},
        {TP: 4, SP: True},
        {TP: 2, SP: True, PP: 2},
        {PP: 2, LAST: 1},
        {PP: 2, VP: 2},
    ):
        layout = ParallelLayout(8, **sizes, **experts)
        for share in prove_layout(folder, layout, torch.bfloat16, True).shares:
            found, proved = rank_states(shape, layout, share.pipeline, StateOptions()), share.states
            assert found.parameters == proved.parameters, layout
            gaps = 64 * 2 * 30 * (1 + shape.num_experts)
            assert proved.gradients <= found.gradients <= proved.gradients + 4 * gaps


def test_what_an_engine_keeps_for_a_token_and_for_a_request_of_a_hybrid():
    models = Path(__file__).parents[2] / "configs/models"
    for name, token, request in (("27b", 64 << 10, 153.9e6), ("35b-a3b", 20 << 10, 64.4e6)):
        shape = read_model_shape(models / f"qwen3.5-{name}-text")
        assert shape.of_layers(lambda kind: kind.token_bytes(1, 2)) == token
        # states of 128 x 128 in fp32, and three tokens of queries, keys and values in bf16
        assert shape.of_layers(lambda kind: kind.request_bytes(1, 2)) == pytest.approx(
            request, rel=1e-3
        )
        assert shape.of_layers(lambda kind: kind.request_bytes(4, 2)) == pytest.approx(
            request / 4, rel=1e-3
        )


@pytest.mark.parametrize("targets", [ALL_LINEAR, ("q_proj", "down_proj")])
def test_adapters_states_are_those_of_built_models(tmp_path, targets):
    """That a real rank keeps no gradient or state of the base:
    tests/megatron/layers/test_lora.py."""
    folder, layout = (
        config_folder(tmp_path, num_hidden_layers=4),
        ParallelLayout(16, 2, 2, 1, True, 2),
    )
    shape = read_model_shape(folder)
    lora = (LoRALayers(Adapter(8, 16, 0.0, resolved_targets(targets, shape.family))),)
    options = StateOptions(distributed=True, converters=lora)
    for share in prove_layout(folder, layout, torch.bfloat16, True, converters=lora).shares:
        found = rank_states(shape, layout, share.pipeline, options)
        assert (found.parameters, found.weights) == (share.states.parameters, share.states.weights)
        assert (found.gradients, found.optimizer) == (
            share.states.gradients,
            share.states.optimizer,
        )
        assert found.gradients < 0.5 * found.weights


def layer_on_a_cpu(
    shape: ModelShape, layout: ParallelLayout, work: Pass, kind: Attention
) -> LayerActivations:
    """Of ``megatron.model.spec``'s own layers, which compute what TransformerEngine's do with a
    GPU's kernels."""
    tokens, tp, cp, e = (
        work.tokens,
        layout.tensor_parallel_size,
        layout.context_parallel_size,
        work.param_bytes,
    )
    rows = tokens // tp if layout.sequence_parallel else tokens
    query, heads = tokens * shape.num_heads * shape.head_dim // tp, tokens * shape.num_heads // tp
    key = tokens * max(1, shape.num_kv_heads // tp) * shape.head_dim
    wide, rope = rows * shape.hidden_size, tokens * 4 * e * shape.rotary_width
    # their input in fp32, normalized (in fp32 too, if the weight is a difference from 1), scaled
    normalized = 4 if shape.family.zero_centered else e
    norm = wide * (4 + normalized + e) + 4 * rows
    qk_norm = ((query + key) * (4 + normalized) + 8 * heads) if shape.qk_norm else 0
    # values are a view of all that the projection made; context-parallel ranks gather keys and
    # values
    is_gated = isinstance(kind, GatedAttention)
    operands = e * (2 * query + 3 * key) + is_gated * e * query
    kept, attention, core = (
        operands + e * query,
        # a gate's sigmoid, and the product with it, of which the projection is
        norm + qk_norm + rope + is_gated * (4 + e) * query,
        operands + e * query + 4 * heads,
    )
    if isinstance(kind, DeltaNet):
        kept, attention, core = 0, norm + delta_net_on_a_cpu(kind, tokens, tp, e), 0
    if cp > 1:
        chunk = LENGTH // (2 * cp)  # the rank that has most masks of its second and later chunks
        masks = tokens * cp // LENGTH * chunk * chunk * (2 * cp + 1) * e
        # the projection's input are the results of both chunks, put together
        kept, attention, core = (
            operands,
            attention + e * query,
            e * (2 * query + cp * 2 * key) + masks + 4 * heads,
        )
    of_mlp, mlp_kept = 5 * e * tokens * shape.ffn_hidden_size // tp, None
    # which keeps three more than the fused activation: SiLU's result, up again, their product
    if shape.num_experts:
        computed = rows * shape.experts_per_token * layout.expert_tensor
        of_mlp = shape.mlp.activation_bytes(tokens, layout, e, e)
        of_mlp += 3 * e * computed * shape.ffn_hidden_size // layout.expert_tensor
        of_mlp += 2 * e * tokens * shape.shared_ffn_hidden_size // tp
        mlp_kept = norm
    mlp, final = norm + of_mlp, wide * (e + 4) + 4 * rows
    return LayerActivations(wide * e, attention, core, kept, mlp, final, e == 4, mlp_kept)


def delta_net_on_a_cpu(kind: DeltaNet, tokens: int, tp: int, e: int) -> int:
    channels, heads = kind.channels // tp, kind.delta_value_heads // tp
    values = heads * kind.delta_value_dim
    # all that the projection made
    projected = e * (channels + values + 2 * heads)
    # of it what the convolution reads, what it makes, and SiLU of it: the rule's queries, keys,
    # values; and places of tokens
    read = 3 * e * channels + 8
    # outputs in fp32, gates, where they are not, SiLU of them, normalized, scaled, times the gates
    normed = values * (4 + (0 if e == 4 else 4) + 4 + 3 * e)
    # decay before and after softplus, its log, beta, and the outputs' root mean square
    return tokens * (projected + read + normed + 5 * 4 * heads)


def case(
    folder: Path,
    layout: dict,
    recompute: str = "none",
    dtype: str = "bf16",
    distributed: bool = True,
    **more,
):
    return {
        "model": str(folder),
        "layout": layout,
        "dtype": dtype,
        "recompute": RECOMPUTED[recompute],
        "distributed": distributed,
        **more,
    }


def check(cases: list[dict], ranks: int) -> None:
    results = launch(
        "tests.planning.measured", "run_cases", ranks, cases=cases, lengths=[LENGTH] * SEQUENCES
    )
    for i, one in enumerate(cases):
        layout = ParallelLayout(**one["layout"])
        for stage in range(layout.pipeline_parallel_size):
            compare(one, layout, stage, [results[rank][i] for rank in layout.ranks(stage=stage)])


def compare(one: dict, layout: ParallelLayout, stage: int, ranks: list[dict]) -> None:
    """The stage's ranks: states exact, that of the fullest rank; activations within 5 %, at the
    most of any rank."""
    shape: ModelShape = read_model_shape(one["model"])
    size = 2 if one["dtype"] == "bf16" else 4
    buckets = one.get("overlap", {}).get("ddp_bucket_size")
    options = StateOptions(size, one["distributed"], buckets, on_host=one.get("on_host", False))
    states = rank_states(shape, layout, stage, options)
    for name, planned in (("parameters", states.weights), ("gradients", states.gradients)):
        assert {rank[name] for rank in ranks} == {planned}, one
    assert max(rank["optimizer"] - rank["counters"] for rank in ranks) == states.optimizer, one
    assert max(rank["on_host"] for rank in ranks) == states.on_host, one
    work = Pass(LENGTH // layout.context_parallel_size, size, megatron=Megatron(**one["recompute"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "FULLEST_RANK", 1.0)  # every expert is given as many tokens
        patch.setattr(memory, "layer_activations", layer_on_a_cpu)
        planned = activations(shape, layout, stage, work, SEQUENCES)
    assert planned == pytest.approx(max(rank["saved"] for rank in ranks), rel=0.05), one


def test_one_rank_in_every_recompute_mode(tmp_path):
    make_tiny_model(tmp_path / "qwen2", "qwen2")
    make_tiny_model(tmp_path / "qwen3", "qwen3", tied=True)
    cases = [
        case(tmp_path / family, {"world_size": 1}, recompute, dtype)
        for family in ("qwen2", "qwen3")
        for dtype in ("bf16", "fp32")
        for recompute in RECOMPUTED
        if recompute != "moe"
    ]
    check(cases, 1)


def test_two_ranks_in_every_kind_of_layout(tmp_path):
    make_tiny_model(tmp_path / "qwen2", "qwen2")
    make_tiny_model(tmp_path / "qwen3", "qwen3", tied=True)
    layouts = (
        {TP: 2, "sequence_parallel": True},
        {TP: 2},
        {CP: 2},
        {PP: 2},
        {PP: 2, LAST: 1},
        {PP: 2, VP: 2},
        {},
    )
    cases = [
        case(tmp_path / family, {"world_size": 2, **layout}, recompute)
        for layout in layouts
        for family, recompute in (
            ("qwen2", "none"),
            ("qwen3", "core_attn"),
            ("qwen3", "mlp"),
            ("qwen2", "full"),
        )
    ]
    cases += [
        case(tmp_path / "qwen3", {"world_size": 2, **layout}, distributed=False)
        for layout in ({PP: 2}, {})
    ]
    overlap = {"overlap_grad_reduce": True, "ddp_bucket_size": 20000}
    cases += [
        case(tmp_path / "qwen2", {"world_size": 2, **layout}, overlap=overlap)
        for layout in ({PP: 2}, {})
    ]
    cases += [
        case(tmp_path / "qwen2", {"world_size": 2, **layout}, on_host=True)
        for layout in ({PP: 2}, {})
    ]
    check(cases, 2)


def test_mixtures_on_one_rank_in_every_recompute_mode(tmp_path):
    for family in MIXTURES:
        make_tiny_model(tmp_path / family, family)
    cases = [
        case(tmp_path / family, {"world_size": 1}, recompute, dtype)
        for family in MIXTURES
        for dtype in ("bf16", "fp32")
        for recompute in ("none", "moe", "full", "core_attn")
    ]
    check(cases, 1)


def test_mixtures_on_two_and_four_ranks(tmp_path):
    """Experts have buffers and an optimizer of their own, unless they are on all ranks."""
    for family in MIXTURES:
        make_tiny_model(tmp_path / family, family)
    two = ({EP: 2}, {TP: 2, SP: True, EP: 2}, {TP: 2, SP: True}, {CP: 2, EP: 2}, {PP: 2})
    cases = [
        case(tmp_path / family, {"world_size": 2, **layout}, recompute, on_host=EP in layout)
        for layout in two
        for family, recompute in (
            ("qwen3_moe", "none"),
            ("qwen3_moe", "moe"),
            ("qwen2_moe", "none"),
        )
    ]
    check(cases, 2)
    four = (
        {EP: 2},
        {EP: 4, TP: 2, SP: True},
        {EP: 2, ETP: 2, TP: 2, SP: True},
        {EP: 2, PP: 2},
        {EP: 2, PP: 2, VP: 2},
        {EP: 2, PP: 2, TP: 2, SP: True},
    )
    buckets = {"overlap": {"overlap_grad_reduce": True, "ddp_bucket_size": 20000}}
    kinds = (("qwen2_moe", {}), ("qwen3_moe", {"distributed": False}), ("qwen3_moe", buckets))
    cases = [
        case(tmp_path / family, {"world_size": 4, **layout}, **more)
        for layout in four
        for family, more in kinds
    ]
    check(cases, 4)


def test_hybrids_on_one_and_two_ranks(tmp_path):
    """Stages hold unlike layers: three gated delta nets before one gated attention. Keys are narrow,
    of which the rule's plain form may keep copies."""
    for family in HYBRIDS:
        make_tiny_model(tmp_path / family, family, linear_key_head_dim=4)
    modes = ("none", "core_attn", "mlp", "full", "two by two", "block")
    cases = [case(tmp_path / "qwen3_5_text", {"world_size": 1}, mode) for mode in modes]
    cases.append(case(tmp_path / "qwen3_5_text", {"world_size": 1}, dtype="fp32"))
    check([*cases, case(tmp_path / "qwen3_5_moe_text", {"world_size": 1}, "moe")], 1)
    layouts = ({TP: 2, SP: True}, {PP: 2}, {PP: 2, LAST: 1}, {})
    cases = [case(tmp_path / "qwen3_5_text", {"world_size": 2, **layout}) for layout in layouts]
    check([*cases, case(tmp_path / "qwen3_5_moe_text", {"world_size": 2, EP: 2})], 2)


def test_a_rank_on_a_gpu_kept_what_plan_says_in_every_recompute_mode():
    """An H200's peaks (docs/scaling.md) beside states, activations and head; 5 % of what is above
    the states."""
    found = record.load(gpu.NAME)["runs"]["second"]["checks"]["size:memory_and_mfu"]["measured"]
    states = sum(kind["bytes"] for kind in found["states"].values())
    for mode, megatron in gpu.modes():
        for tokens in (16384, 32768):
            peak = found[f"{tokens} tokens, recompute {mode}"]["peak_allocated_bytes"]
            assert gpu.planned(tokens, megatron, found["states"]) == pytest.approx(
                peak, abs=0.05 * (peak - states)
            )
