from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from openrlhf_ext.fp8.quantize import E4M3, Grid, quantize
from openrlhf_ext.fp8.recipe import (
    BLOCK,
    BY_COLUMNS,
    DOWN,
    GATE,
    KEY,
    PROJECTION,
    QUERY,
    UP,
    VALUE,
    LayerShape,
    Run,
    differing_tensors,
    engine_shards,
    trainer_shards,
)
from openrlhf_ext.megatron.model.shape import ModelShape
from openrlhf_ext.megatron.model.weight_map import Shard, shard_runs, stage_rules

SAME = {
    "Qwen2.5-7B": LayerShape(28, 4, 128, 18944),
    "Qwen2.5-32B": LayerShape(40, 8, 128, 27648),
    "Qwen3-8B": LayerShape(32, 8, 128, 12288),
    "Qwen3-32B": LayerShape(64, 8, 128, 25600),
    "Llama-3.1-8B": LayerShape(32, 8, 128, 14336),
    "Llama-3.1-70B": LayerShape(64, 8, 128, 28672),
}
# Qwen2.5-0.5B, the tests' policy
SMALL, TOY = LayerShape(14, 2, 64, 4864), LayerShape(4, 2, 32, 256)
QKV = [f"self_attn.{name}_proj" for name in "qkv"]
OUT, MLP = "self_attn.o_proj", [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
WIDTH = 256  # of the axis that nobody cuts, in random weights


def short(names: list[str]) -> list[str]:
    assert all(name.startswith("model.layers.*.") and name.endswith(".weight") for name in names)
    return [name.removeprefix("model.layers.*.").removesuffix(".weight") for name in names]


@pytest.mark.parametrize("trainer_tp", [1, 2, 4, 8])
@pytest.mark.parametrize("engine_tp", [1, 2, 4, 8])
@pytest.mark.parametrize("model", SAME)
def test_models_that_both_cut_alike(model, trainer_tp, engine_tp):
    if SAME[model].num_heads % max(trainer_tp, engine_tp):
        pytest.skip("28 heads are not for 8 ranks")
    assert differing_tensors(SAME[model], trainer_tp, engine_tp) == []


@pytest.mark.parametrize(
    ("shape", "trainer_tp", "engine_tp", "names"),
    [
        # 7 queries of a group are 448 rows: a tile holds the last of them and the key; vLLM's holds
        # queries only
        (SMALL, 1, 1, QKV),
        (SMALL, 2, 1, [*QKV, OUT]),
        # both ranks of either side hold one group, in the same order; their 448 columns of o_proj
        # are no tiles
        (SMALL, 2, 2, []),
        (TOY, 1, 1, QKV),
        (TOY, 2, 1, [*QKV, OUT]),
        # the trainer's tile is a group, and a group is what a rank of the engine holds
        (TOY, 1, 2, [OUT]),
        (TOY, 2, 2, []),
        (TOY, 2, 4, [*QKV, OUT, *MLP]),
        # half of a group and a copy of its key and value, or half of the rows of both
        (TOY, 4, 4, QKV),
        # 27648 / 16 is 13.5 tiles, and 40 heads are for 8 ranks only
        (LayerShape(64, 8, 128, 27648), 16, 8, MLP),
        (LayerShape(64, 8, 128, 27648), 16, 16, []),
    ],
)
def test_what_differs(shape, trainer_tp, engine_tp, names):
    assert short(differing_tensors(shape, trainer_tp, engine_tp)) == names


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", [*SAME.values(), SMALL, TOY], ids=[*SAME, "small", "toy"])
def test_the_trainers_cut_is_that_of_the_weight_map(shape, size):
    """By Megatron's own map, from which it loads."""
    if shape.num_heads % size:
        pytest.skip("heads are not for so many ranks")
    model = ModelShape(
        model_type="qwen3",
        num_layers=1,
        hidden_size=128,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=128,
        max_positions=8,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling_factor=None,
        tied_embeddings=True,
        qkv_bias=False,
        qk_norm=False,
    )
    rules = [
        r for r in stage_rules(model, range(1), False, False) if r.split in ("qkv", "parts", "row")
    ]
    mapped = [
        [
            Run(r.hf_names[run.tensor].removeprefix("model.layers.0."), run.start, run.stop)
            for run in runs
        ]
        for r in rules
        for runs in (shard_runs(r, model, Shard(rank, size)) for rank in range(size))
    ]
    assert len(rules) == 4 and sorted(trainer_shards(shape, size)) == sorted(mapped)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("shape", [LayerShape(4, 2, 32, 256), LayerShape(12, 4, 16, 96)])
def test_the_engines_cut_is_that_of_vllms_own_layers(shape, size):
    """vLLM's layers load weights of which every row, or column, is its number."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear

    heads, ffn, named = (
        shape.num_heads * shape.head_dim,
        shape.ffn_hidden_size,
        {"params_dtype": torch.float32},
    )
    found = []
    for rank in range(size):
        with ExitStack() as patches:
            patches.enter_context(set_current_vllm_config(VllmConfig()))
            for module in (linear, parameter):
                replace = {"rank": rank, "world_size": size}
                for what, value in replace.items():
                    get = mock.patch.object(
                        module, f"get_tensor_model_parallel_{what}", lambda value=value: value
                    )
                    patches.enter_context(get)
            qkv = linear.QKVParallelLinear(
                8, shape.head_dim, shape.num_heads, shape.num_kv_heads, bias=False, **named
            )
            fc1 = linear.MergedColumnParallelLinear(8, [ffn, ffn], bias=False, **named)
            o, down = (
                linear.RowParallelLinear(width, 8, bias=False, **named) for width in (heads, ffn)
            )
            kv = shape.num_kv_heads * shape.head_dim
            found += [
                loaded(qkv, {QUERY: (heads, "q"), KEY: (kv, "k"), VALUE: (kv, "v")}, 0),
                loaded(fc1, {GATE: (ffn, 0), UP: (ffn, 1)}, 0),
                loaded(o, {PROJECTION: (heads,)}, 1),
                loaded(down, {DOWN: (ffn,)}, 1),
            ]
    expected = [
        [(r.tensor, i) for r in shard for i in range(r.start, r.stop)]
        for shard in engine_shards(shape, size)
    ]
    assert sorted(found) == sorted(expected)


def loaded(layer: torch.nn.Module, tensors: dict[str, tuple], axis: int) -> list[tuple[str, int]]:
    """(tensor, row or column) for each of a vLLM layer's, after it has loaded tensors: name ->
    length, vLLM's name."""
    names = list(tensors)
    for number, (length, *part) in enumerate(tensors.values()):
        entries = torch.arange(length, dtype=torch.float32) + 10_000 * number
        whole = entries[:, None].expand(-1, 8) if axis == 0 else entries[None].expand(8, -1)
        layer.weight.weight_loader(layer.weight, whole.contiguous(), *part)
    entries = layer.weight.data.narrow(1 - axis, 0, 1).flatten().int().tolist()
    return [(names[entry // 10_000], entry % 10_000) for entry in entries]


def weights(shape: LayerShape) -> dict[str, Tensor]:
    """Random weights, every row and column of another size: tiles of other entries have another
    scale."""
    heads = shape.num_heads * shape.head_dim
    lengths = dict.fromkeys(["q", "o"], heads) | dict.fromkeys(
        ["k", "v"], shape.num_kv_heads * shape.head_dim
    )
    names = {f"self_attn.{name}_proj.weight": length for name, length in lengths.items()}
    names |= {f"mlp.{name}_proj.weight": shape.ffn_hidden_size for name in ("gate", "up", "down")}
    made = {
        name: torch.randn(length, WIDTH) * torch.rand(length, 1).mul(4).exp()
        for name, length in names.items()
    }
    return {
        name: weight.t().contiguous() if name in BY_COLUMNS else weight
        for name, weight in made.items()
    }


def scales(shards: list[list[Run]], tensors: dict[str, Tensor]) -> dict[str, list[set[float]]]:
    """Tensor -> for each of its rows or columns the scales of its entries on whatever rank holds
    it."""
    found = {
        name: [set() for _ in range(w.shape[name in BY_COLUMNS])] for name, w in tensors.items()
    }
    for shard in shards:
        axis = int(shard[0].tensor in BY_COLUMNS)
        parts = [tensors[run.tensor].narrow(axis, run.start, run.stop - run.start) for run in shard]
        weight = torch.cat(parts, axis)
        scale_inv = quantize(weight, E4M3, Grid.TILES).scale_inv.narrow(1 - axis, 0, 1).flatten()
        entry = scale_inv.repeat_interleave(BLOCK).tolist()
        for run in shard:
            for index in range(run.start, run.stop):
                found[run.tensor][index].add(entry.pop(0))
    return found


@settings(max_examples=60, deadline=None)
@given(
    groups=st.sampled_from([1, 2, 3, 4]),
    queries=st.sampled_from([1, 2, 3]),
    head_dim=st.sampled_from([16, 64, 128]),
    ffn=st.sampled_from([64, 192, 256, 512]),
    trainer_tp=st.sampled_from([1, 2, 4]),
    engine_tp=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 99),
)
def test_random_weights_get_other_scales_exactly_where_tiles_differ(
    groups, queries, head_dim, ffn, trainer_tp, engine_tp, seed
):
    shape = LayerShape(groups * queries, groups, head_dim, ffn)
    try:
        told = short(differing_tensors(shape, trainer_tp, engine_tp))
    except ValueError:
        return
    torch.manual_seed(seed)
    tensors = weights(shape)
    trainer = scales(trainer_shards(shape, trainer_tp), tensors)
    engine = scales(engine_shards(shape, engine_tp), tensors)
    # the reverse does not hold row by row: a tile with one row less may have the same largest entry
    seen = [name.removesuffix(".weight") for name in tensors if trainer[name] != engine[name]]
    assert set(seen) <= set(told)
    assert bool(seen) == bool(told)


@pytest.mark.parametrize(
    ("shape", "sizes", "reason"),
    [
        (SMALL, (4, 1), "the trainer's tensor-parallel size 4 does not divide num_heads 14"),
        (SMALL, (1, 4), "the engine's tensor-parallel size 4 does not divide num_heads 14"),
        (
            LayerShape(4, 2, 32, 254),
            (4, 1),
            "the trainer's tensor-parallel size 4 does not divide ffn_hidden_size 254",
        ),
        (
            LayerShape(12, 3, 32, 256),
            (1, 4),
            "size 4 and num_kv_heads 3: neither divides the other",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused(shape, sizes, reason):
    with pytest.raises(ValueError, match=reason):
        differing_tensors(shape, *sizes)
