from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.fp8_study import mismatch
from benchmarks.fp8_study.mismatch import (
    RECIPES,
    Completion,
    gauges,
    measure,
    read_completions,
    response_logprobs,
)
from openrlhf_ext.fp8.quantize import E4M3, Grid, quantize
from openrlhf_ext.fp8.recipe import BF16Layers
from tests.models import make_tiny_model, make_tiny_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    make_tiny_policy(path)
    return path


@pytest.fixture(scope="module")
def completions() -> list[Completion]:
    torch.manual_seed(0)
    return [
        Completion(torch.randint(256, (5,)).tolist(), torch.randint(256, (n,)).tolist())
        for n in (20, 31)
    ]


def load_from(path: Path):
    return lambda dtype: AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def test_log_probs_are_of_the_response(policy, completions):
    model = load_from(policy)(torch.float32)
    one = completions[1]
    with torch.no_grad():
        logits = model(torch.tensor([one.prompt_ids + one.response_ids])).logits[0].double()
    expected = [
        logits[4 + i].log_softmax(-1)[token].item() for i, token in enumerate(one.response_ids)
    ]
    assert response_logprobs(model, completions)[20:].tolist() == pytest.approx(expected, abs=1e-6)


def test_gauges_by_hand():
    rollout, d = torch.tensor([-1.0, -2.0]), torch.tensor([0.0, 1.0])
    e = torch.e
    assert gauges(rollout + d, rollout) == pytest.approx(
        {
            "mean_abs": 0.5,
            "max_abs": 1.0,
            "k3_rollout": (e - 2) / 2,
            "k3_trainer": 0.5,
            "token_mult_prob_error": (1 + e) / 2,
            "is_mean": (1 + e) / 2,
            "ess": (1 + e) ** 2 / (1 + e**2) / 2,
            "clipped": 0.5,
        }
    )


def test_the_same_quantizer_and_tiles_leave_nothing_another_recipe_more_than_none(
    tmp_path, completions
):
    """head_dim 128, an MLP of 512: both sides cut alike, with one rank and with two."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=64,
        initializer_range=0.1,
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    precisions = ["fp32", "blockwise", "blockwise_pow2"]
    for sizes in ((1, 1), (2, 1)):
        found = measure(
            load_from(tmp_path),
            completions,
            trainer=precisions,
            rollout=["blockwise"],
            trainer_tp=sizes[0],
            engine_tp=sizes[1],
        )
        plain, same, pow2 = (
            found.cells[precision, "blockwise"]["mean_abs"] for precision in precisions
        )
        assert found.other_tiles == []
        assert same < plain / 20 and plain < pow2 and plain > 1e-3
        # the layouts multiply the same numbers: their log-probs differ by the order of fp32 sums
        # only
        if sizes == (1, 1):
            assert same == 0.0


def test_other_tiles_bring_the_mismatch_back(policy, completions):
    """The toy: its recipe on both sides is not enough."""
    cells = measure(
        load_from(policy),
        completions,
        trainer=["fp32", "blockwise"],
        rollout=["blockwise"],
        trainer_tp=2,
    )
    assert "model.layers.*.self_attn.q_proj.weight" in cells.other_tiles
    plain, same = (cells.cells[p, "blockwise"]["mean_abs"] for p in ("fp32", "blockwise"))
    assert same > plain / 3


def test_plain_precisions(policy, completions):
    found = measure(
        load_from(policy), completions, trainer=["fp32", "bf16"], rollout=["fp32", "bf16"]
    )
    assert found.cells["fp32", "fp32"]["mean_abs"] == found.cells["bf16", "bf16"]["mean_abs"] == 0.0
    assert 0 < found.cells["fp32", "bf16"]["mean_abs"] == found.cells["bf16", "fp32"]["mean_abs"]


def test_delayed_scaling_of_noted_tensors_is_current_scaling_of_all_completions(
    policy, completions
):
    """With one completion the noted largest entries are nearly those of the pass itself."""
    found = measure(
        load_from(policy),
        completions[:1],
        trainer=["delayed", "current"],
        rollout=["current", "fp32"],
    )
    assert (
        found.cells["delayed", "current"]["mean_abs"]
        < found.cells["current", "fp32"]["mean_abs"] * 1.5
    )
    assert 0 < found.cells["delayed", "fp32"]["mean_abs"] < 1


def test_the_model_is_as_it_was_afterwards(policy, completions):
    made = []

    def load(dtype):
        made.append(load_from(policy)(dtype))
        return made[-1]

    measure(
        load, completions, trainer=["blockwise", "delayed"], rollout=["blockwise"], per_layer=True
    )
    (model,) = made
    assert all(type(m) is nn.Linear for n, m in model.named_modules() if n.endswith("_proj"))
    fresh = response_logprobs(load_from(policy)(torch.float32), completions)
    assert torch.equal(response_logprobs(model, completions), fresh)


def test_every_layer_alone(policy, completions):
    found = measure(
        load_from(policy),
        completions,
        trainer=["fp32"],
        rollout=["fp32", "blockwise"],
        per_layer=True,
    )
    assert list(found.layers) == ["blockwise"] and len(found.layers["blockwise"]) == 2
    assert all(
        0 < value < 3 * found.cells["fp32", "blockwise"]["mean_abs"]
        for value in found.layers["blockwise"]
    )


def test_layers_at_the_ends_stay_as_they_are(policy, completions):
    arguments = {"trainer": ["fp32"], "rollout": ["blockwise"]}
    both = measure(load_from(policy), completions, **arguments, per_layer=True)
    only_last = measure(load_from(policy), completions, **arguments, bf16_layers=BF16Layers(1, 0))
    none = measure(load_from(policy), completions, **arguments, bf16_layers=BF16Layers(1, 1))
    assert only_last.cells["fp32", "blockwise"]["mean_abs"] == both.layers["blockwise"][1]
    assert none.cells["fp32", "blockwise"]["mean_abs"] == 0.0


def test_weights_are_rounded_in_the_cut_of_their_side(policy):
    model = load_from(policy)(torch.float32)
    layer, shape = model.model.layers[0], mismatch._layer_shape(model)
    q, k, v = (getattr(layer.self_attn, f"{name}_proj").weight.detach() for name in "qkv")
    engine = mismatch._replacements(layer, RECIPES["blockwise"], mismatch.engine_shards(shape, 1))
    whole = quantize(torch.cat([q, k, v]), E4M3, Grid.TILES).values()
    names = [f"self_attn.{name}_proj.weight" for name in "qkv"]
    assert torch.equal(torch.cat([engine[name]._w_NK for name in names]), whole)
    trainer = mismatch._replacements(layer, RECIPES["blockwise"], mismatch.trainer_shards(shape, 2))
    group = torch.cat([q[64:], k[32:], v[32:]])
    assert torch.equal(
        torch.cat(
            [
                trainer[names[0]]._w_NK[64:],
                trainer[names[1]]._w_NK[32:],
                trainer[names[2]]._w_NK[32:],
            ]
        ),
        quantize(group, E4M3, Grid.TILES).values(),
    )
    assert trainer["self_attn.o_proj.weight"]._parts == [64, 64] and engine[
        "mlp.down_proj.weight"
    ]._parts == [256]


def test_a_decoder_of_other_layers_is_refused(tmp_path, completions):
    model = make_tiny_model(tmp_path)
    model.model.layers[0].mlp.more = nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match=r"a qwen2 decoder has the linear layers .*mlp\.more\.weight"
    ):
        measure(lambda dtype: model, completions, trainer=["fp32"], rollout=["blockwise"])


def test_completions_of_a_file(policy, tmp_path):
    tokenizer, path = AutoTokenizer.from_pretrained(policy), tmp_path / "rollouts.jsonl"
    lines = [
        {"prompt": "1+1=", "token_ids": [5, 6], "reward": 1.0},
        {"prompt": "a", "token_ids": [7]},
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    assert read_completions(path, tokenizer, limit=1) == [
        Completion(tokenizer("1+1=")["input_ids"], [5, 6])
    ]
    assert [c.response_ids for c in read_completions(path, tokenizer)] == [[5, 6], [7]]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 1: not JSON"),
        ('{"prompt": "a"}', "line 1: needs token_ids, has .prompt."),
        (
            '{"prompt": "a", "token_ids": []}',
            "line 1: prompt and token_ids must have at least one token",
        ),
        (
            '{"prompt": "", "token_ids": [1]}',
            "line 1: prompt and token_ids must have at least one token",
        ),
        ('{"prompt": "a", "token_ids": [100000]}', "100000 is none of the tokenizer's"),
        ("\n", "holds no completion"),
    ],
)
def test_bad_lines_are_named(policy, tmp_path, line, reason):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=reason):
        read_completions(path, AutoTokenizer.from_pretrained(policy))
