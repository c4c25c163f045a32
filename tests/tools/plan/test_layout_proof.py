from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state

from openrlhf_ext.fp8.recipe import BF16Layers, Recipe
from openrlhf_ext.megatron.layers.fp8 import FP8Layers
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.tools.plan import layout_proof
from openrlhf_ext.tools.plan.layout_proof import (
    LayoutProof,
    LayoutProofError,
    format_proof,
    prove_layout,
)
from tests.models import EXPERTS, EXPERTS_PER_TOKEN, FAMILIES, HYBRIDS, MIXTURES

MODELS = Path(__file__).parents[3] / "configs/models"
QWEN25_32B, QWEN3_30B_A3B = MODELS / "qwen2.5-32b", MODELS / "qwen3-30b-a3b"


def config_folder(path: Path, family: str = "qwen2", **more) -> Path:
    """A folder with a config.json and nothing else."""
    sizes = {
        "vocab_size": 61,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": False,
    }
    if family in MIXTURES:
        own = {
            "moe_intermediate_size": 48,
            "num_experts": EXPERTS,
            "num_experts_per_tok": EXPERTS_PER_TOKEN,
        }
        sizes |= own | MIXTURES[family]
    sizes |= HYBRIDS.get(family, {})
    FAMILIES[family][0](**(sizes | more)).save_pretrained(path)
    return path


def test_qwen25_32b_on_64_ranks():
    proof = prove_layout(
        QWEN25_32B, ParallelLayout(64, 8, 2), torch.bfloat16, distributed_optimizer=True
    )
    assert len(proof.shares) == 16
    assert sorted(rank for share in proof.shares for rank in share.ranks) == list(range(64))
    h, ffn, vocab = 5120, 27648, 152064
    # norms are on every rank
    layer = ((40 + 2 * 8) * 128 * (h + 1) + h * 40 * 128 + 3 * h * ffn) // 8 + 2 * h
    first, last = proof.shares[0], proof.shares[-1]
    assert first.states.parameters == 32 * layer + vocab // 8 * h
    assert last.states.parameters == 32 * layer + vocab // 8 * h + h
    assert (first.layers, last.layers) == ((range(32),), (range(32, 64),))
    assert last.ranks == (15, 31, 47, 63) and (last.tensor, last.pipeline) == (7, 1)
    own = first.states
    assert own.weights == 2 * own.parameters and own.optimizer == 12 * own.parameters // 4
    assert (proof.hf_tensors, proof.hf_parameters) == (771, 32_763_876_352)
    assert "2,048,028,672" in format_proof(proof) and "built 16 of 64 ranks" in format_proof(proof)


def test_an_optimizer_in_host_memory_is_not_on_the_gpu():
    layout = ParallelLayout(8, 8)
    here, there = (
        prove_layout(QWEN25_32B, layout, torch.bfloat16, True, on_host=on_host)
        for on_host in (False, True)
    )
    for one, other in zip(here.shares, there.shares, strict=True):
        assert (other.states.optimizer, other.states.on_host) == (0, one.states.optimizer)
        assert other.states.total == one.states.total - one.states.optimizer > 0
    said, host = format_proof(there), there.shares[0].states.on_host / 2**30
    assert "before activations (weights, fp32 gradients), GiB" in said and f" {host:.3f} " in said
    assert re.search(r"GiB together +optimizer, in host memory +ranks\n", said), said


@pytest.mark.parametrize(("ranks", "gib"), [(8, 67.26), (16, 45.93), (32, 35.26), (128, 27.26)])
def test_qwen3_30b_a3b_with_its_experts_over_eight_ranks(ranks, gib):
    layout = ParallelLayout(ranks, 2, sequence_parallel=True, expert_parallel_size=8)
    proof = prove_layout(QWEN3_30B_A3B, layout, torch.bfloat16, distributed_optimizer=True)
    assert (proof.hf_tensors, proof.hf_parameters) == (18_867, 30_532_122_624)
    assert [(share.tensor, share.expert) for share in proof.shares] == [
        (rank % 2, rank) for rank in range(8)
    ]
    experts, both = 48 * 128 // 8 * 3 * 2048 * 768, 48 * (2 * 2048 + 2 * 128 + 128 * 2048) + 2048
    dense = both + (48 * (2 * 32 + 2 * 4) * 128 * 2048 + 2 * 151936 * 2048) // 2
    for share in proof.shares:
        own = share.states
        assert own.parameters == dense + experts and own.weights == 2 * own.parameters
        assert own.optimizer == -(-12 * dense // (ranks // 2)) + -(-12 * experts // (ranks // 8))
        assert share.ranks == tuple(range(share.expert, ranks, 8))
        assert own.total / 2**30 == pytest.approx(gib, abs=0.005)
    title, header, row, *_ = format_proof(proof).splitlines()
    assert header.split()[:3] == ["tp", "ep", "pp"] and row.split()[:3] == ["0-1", "0-7", "0"]
    assert proof.seconds < 60  # 2 s of a core that nobody else uses


def test_fp8_copies_of_the_weights_are_counted(tmp_path):
    """31.2e9 entries of a 32B model's weights, half on each stage: a byte for each and one in the
    transpose."""
    layer = 5120 * (40 + 2 * 8) * 128 + 5120 * 40 * 128 + 3 * 5120 * 27648

    def proof(*recipes: Recipe) -> LayoutProof:
        layers = [FP8Layers(recipe) for recipe in recipes]
        return prove_layout(
            QWEN25_32B, ParallelLayout(2, 1, 2), torch.bfloat16, True, converters=layers
        )

    plain, fp8, kept = proof(), proof(Recipe()), proof(Recipe(bf16_layers=BF16Layers(start=2)))
    assert {share.states.copies for share in plain.shares} == {0} and "FP8" not in format_proof(
        plain
    )
    assert [share.states.copies for share in fp8.shares] == [2 * 32 * layer] * 2
    assert [share.states.copies for share in kept.shares] == [2 * 30 * layer, 2 * 32 * layer]
    assert fp8.shares[0].states.total == plain.shares[0].states.total + fp8.shares[0].states.copies
    title, header, row, *_ = format_proof(fp8).splitlines()
    assert (
        "optimizer, FP8 copies of weights), GiB" in title and "FP8 copies  GiB together" in header
    )
    assert row.split()[-3:] == ["29.062", f"{fp8.shares[0].states.total / 2**30:.3f}", "0"]
    layers = [FP8Layers(Recipe(emulate=True))]
    emulated = prove_layout(
        config_folder(tmp_path), ParallelLayout(1), torch.float32, True, converters=layers
    )
    assert emulated.shares[0].states.copies == 0


@pytest.mark.parametrize(
    ("family", "more", "layout"),
    [
        ("qwen2", {"tie_word_embeddings": True}, ParallelLayout(8, 2, 2, 2)),
        ("qwen3", {}, ParallelLayout(4, 4)),  # fewer key-value heads than ranks
        ("llama", {"num_hidden_layers": 8}, ParallelLayout(16, 2, 2, 2, True, 2)),
        ("qwen3_5_text", {}, ParallelLayout(8, 2, 2, 1, True)),
        ("qwen3_5_text", {"tie_word_embeddings": True}, ParallelLayout(2, 1, 2, 1, False, 2)),
        ("qwen3_5_text", {"layer_types": ["linear_attention"] * 4}, ParallelLayout(2, 2)),
        # fewer key-value heads than ranks
        ("qwen3_5_text", {"linear_num_key_heads": 4}, ParallelLayout(4, 4)),
    ],
)
def test_every_kind_of_layout(tmp_path, family, more, layout):
    proof = prove_layout(
        config_folder(tmp_path, family, **more), layout, torch.float32, distributed_optimizer=False
    )
    assert len(proof.shares) == layout.tensor_parallel_size * layout.pipeline_parallel_size
    assert sorted(rank for share in proof.shares for rank in share.ranks) == list(
        range(layout.world_size)
    )
    layers = sorted(
        layer for s in proof.shares if s.tensor == 0 for chunk in s.layers for layer in chunk
    )
    assert layers == list(range(more.get("num_hidden_layers", 4)))
    for share in proof.shares:
        assert len(share.layers) == layout.virtual_pipeline_size
        assert share.states.total == 16 * share.states.parameters, (
            "fp32: weight, gradient, two moments"
        )


@pytest.mark.parametrize(
    ("family", "layout", "built"),
    [
        ("qwen3_moe", {"world_size": 4}, 1),
        # an expert is cut as all else
        ("qwen3_moe", {"world_size": 8, "tensor_parallel_size": 2}, 2),
        ("qwen2_moe", {"world_size": 8, "expert_parallel_size": 8}, 8),
        ("qwen2_moe", {"world_size": 8, "tensor_parallel_size": 4, "expert_parallel_size": 2}, 4),
        (
            "qwen3_moe",
            {"world_size": 16, "expert_parallel_size": 4, "expert_tensor_parallel_size": 2},
            8,
        ),
        (
            "qwen3_5_moe_text",
            {
                "world_size": 8,
                "tensor_parallel_size": 2,
                "pipeline_parallel_size": 2,
                "expert_parallel_size": 2,
            },
            4,
        ),
        (
            "qwen2_moe",
            {
                "world_size": 16,
                "tensor_parallel_size": 2,
                "context_parallel_size": 2,
                "pipeline_parallel_size": 2,
                "virtual_pipeline_size": 2,
                "expert_parallel_size": 2,
                "expert_tensor_parallel_size": 2,
            },
            8,
        ),
    ],
)
def test_every_kind_of_layout_of_a_mixture(tmp_path, family, layout, built):
    layout = ParallelLayout(**layout, sequence_parallel=layout.get("tensor_parallel_size", 1) > 1)
    proof = prove_layout(
        config_folder(tmp_path, family), layout, torch.float32, distributed_optimizer=False
    )
    assert len(proof.shares) == built
    assert sorted(rank for share in proof.shares for rank in share.ranks) == list(
        range(layout.world_size)
    )


def held_wrongly(monkeypatch, change) -> None:
    """Rules of experts become ``change(rule, share, experts of a share)`` on every rank of four;
    None: no rule."""

    def wrong(chunk, shape):
        share, each = parallel_state.get_expert_model_parallel_rank(), shape.num_experts // 4
        return [
            changed
            for rule in all_rules(chunk, shape)
            if (changed := rule if rule.expert is None else change(rule, share, each)) is not None
        ]

    all_rules = layout_proof.model_rules
    monkeypatch.setattr(layout_proof, "model_rules", wrong)


def renamed(rule, expert: int):
    names = tuple(
        name.replace(f"experts.{rule.expert}.", f"experts.{expert}.") for name in rule.hf_names
    )
    return replace(rule, hf_names=names, expert=expert)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (  # the second share of the experts is that of the first
            lambda rule, share, each: renamed(rule, rule.expert - each) if share == 1 else rule,
            [
                "experts.0.up_proj.weight: stage 0 has it on the ranks [0, 1], right is [0]",
                "experts.3.down_proj.weight is held by the pipeline stages [], one is right",
            ],
        ),
        (  # a rank has one of its experts twice and lacks the other
            lambda rule, share, each: renamed(rule, 6) if rule.expert == 7 else rule,
            [
                "experts.6.gate_proj.weight is held twice by rank 3 of stage 0",
                "experts.7.gate_proj.weight is held by the pipeline stages [], one is right",
            ],
        ),
        (  # nobody has one
            lambda rule, share, each: None if rule.expert == 5 else rule,
            [
                "rank 2: parameters that no rule fills: "
                "['decoder.layers.0.mlp.experts.linear_fc1.weight1'",
                "experts.5.down_proj.weight is held by the pipeline stages [], one is right",
            ],
        ),
    ],
    ids=["a share twice", "an expert twice", "an expert missing"],
)
def test_an_expert_with_no_place_or_two_is_refused(tmp_path, monkeypatch, change, said):
    held_wrongly(monkeypatch, change)
    with pytest.raises(LayoutProofError) as error:
        prove_layout(
            config_folder(tmp_path, "qwen3_moe"),
            ParallelLayout(4, expert_parallel_size=4),
            torch.float32,
            True,
        )
    for words in said:
        assert words in str(error.value)


def test_an_expert_that_only_some_of_its_ranks_hold_is_refused(tmp_path, monkeypatch):
    """Two ranks share every expert, and one of them forgets one."""

    def forgetful(chunk, shape):
        rank = torch.distributed.get_rank()
        return [rule for rule in all_rules(chunk, shape) if (rank, rule.expert) != (1, 3)]

    all_rules = layout_proof.model_rules
    monkeypatch.setattr(layout_proof, "model_rules", forgetful)
    layout = ParallelLayout(
        4, 2, sequence_parallel=True, expert_parallel_size=2, expert_tensor_parallel_size=2
    )
    with pytest.raises(LayoutProofError) as error:
        prove_layout(config_folder(tmp_path, "qwen3_moe"), layout, torch.float32, True)
    assert "experts.3.up_proj.weight: stage 0 has it on the ranks [0], right is [0, 1]" in str(
        error.value
    )
    assert "experts.3.up_proj.weight: stage 0 has shards [0] of 2" in str(error.value)


def test_a_critic_has_a_value_head_in_the_place_of_the_projection(tmp_path):
    folder, layout = config_folder(tmp_path, tie_word_embeddings=True), ParallelLayout(4, 2, 2)
    critic = prove_layout(
        folder, layout, torch.float32, distributed_optimizer=True, value_head="score"
    )
    policy = prove_layout(folder, layout, torch.float32, distributed_optimizer=True)
    assert (
        critic.hf_parameters == policy.hf_parameters + 64
        and critic.hf_tensors == policy.hf_tensors + 1
    )
    # the policy's last stage holds a copy of half of the padded, tied embedding
    assert policy.shares[-1].states.parameters - critic.shares[-1].states.parameters == 31 * 64 - 64


def test_a_layout_that_megatron_refuses_is_an_error_with_its_reason(tmp_path):
    with pytest.raises(
        LayoutProofError, match=r"rank 0 cannot be built: num_attention_heads \(4\) must be"
    ):
        prove_layout(
            config_folder(tmp_path),
            ParallelLayout(3, 3),
            torch.float32,
            distributed_optimizer=False,
        )
    assert not torch.distributed.is_initialized(), "the fake group must be gone"


def test_a_map_that_forgets_or_repeats_rows_is_refused(tmp_path, monkeypatch):
    """The proof has to see a wrong map: here the last rank starts one row early."""

    def wrong(rule, shape, shard):
        runs = layout_runs(rule, shape, shard)
        if rule.split == "vocab" and shard.tp == shard.tp_size - 1:
            return [type(run)(run.tensor, run.start - (run.tensor == 0), run.stop) for run in runs]
        return runs

    layout_runs = layout_proof.shard_runs
    monkeypatch.setattr(layout_proof, "shard_runs", wrong)
    with pytest.raises(
        LayoutProofError, match=r"model.embed_tokens.weight: entries \[30, 31\] along axis 0"
    ):
        prove_layout(
            config_folder(tmp_path),
            ParallelLayout(2, 2),
            torch.float32,
            distributed_optimizer=False,
        )


def test_a_parameter_without_a_rule_is_refused(tmp_path, monkeypatch):
    def forgetful(chunk, shape):
        return [
            rule
            for rule in all_rules(chunk, shape)
            if not rule.parameter.endswith("linear_qkv.bias")
        ]

    all_rules = layout_proof.model_rules
    monkeypatch.setattr(layout_proof, "model_rules", forgetful)
    with pytest.raises(LayoutProofError) as error:
        prove_layout(
            config_folder(tmp_path), ParallelLayout(1), torch.float32, distributed_optimizer=False
        )
    assert (
        "parameters that no rule fills: ['decoder.layers.0.self_attention.linear_qkv.bias'"
        in str(error.value)
    )
    assert "model.layers.3.self_attn.q_proj.bias is held by the pipeline stages []" in str(
        error.value
    )


def test_names_are_compared_with_transformers(tmp_path):
    """A checkpoint whose class has other tensors than the map expects: Llama weights under Qwen3's
    name."""
    folder = config_folder(tmp_path, "qwen3")
    config = json.loads((folder / "config.json").read_text())
    shape = layout_proof.read_model_shape(folder)
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    differences = list(layout_proof._transformers_differences(folder, shape))
    assert (
        "model.layers.0.self_attn.q_norm.weight: transformers has None, the weight map (16,)"
        in differences
    )
