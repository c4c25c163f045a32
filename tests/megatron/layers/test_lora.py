"""Adapters compute and learn what peft's do, in every layout."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from openrlhf_ext.megatron.layers.adapted import adapted
from openrlhf_ext.megatron.layers.emulated import (
    EmulatedNormColumnParallelLinear,
    EmulatedRowParallelLinear,
)
from tests.launch import launch
from tests.megatron.layers.lora_ranks import truth
from tests.megatron.reference import make_batch
from tests.models import make_tiny_model

SOME = ["q_proj", "v_proj", "up_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]  # all that a mixture of experts has
FULL = {"recompute": "full"}
EXACT = 1e-5

CASES = {
    1: [
        {"micro_batch_size": 3},
        {"max_tokens": 30, "recompute": FULL, "write": "written"},
        {"targets": SOME, "truth": "some"},
        {"dtype": "bf16", "loose": True},
        {"dtype": "bf16", "distributed_optimizer": True, "loose": True},
    ],
    2: [
        {"tp": 2},
        {"tp": 2, "sp": True, "max_tokens": 30},
        {"pp": 2},
        {"pp": 2, "vp": 2},
        {"cp": 2, "max_tokens": 30},
        {"micro_batch_size": 1},
        {"lopsided": True},
        {"distributed_optimizer": True},
        {"tp": 2, "sp": True, "recompute": FULL},
        {"pp": 2, "truth": "tied"},
        {"tp": 2, "truth": "one_kv"},
        {"tp": 2, "sp": True, "truth": "one_kv"},
        {"tp": 2, "sp": True, "targets": SOME, "truth": "some"},
        {"tp": 2, "sp": True, "save": "checkpoint"},
        {"distributed_optimizer": True, "save": "distributed"},
        {"pp": 2, "vp": 2, "load": "checkpoint", "steps": 1},
        {"tp": 2, "load": "distributed", "steps": 1},
        {"distributed_optimizer": True, "load": "checkpoint", "steps": 1},
        {"tp": 2, "sp": True, "load": "checkpoint", "steps": 1, "same": 13},
        {"ep": 2, "targets": ATTENTION, "truth": "mixture"},
        {
            "tp": 2,
            "sp": True,
            "ep": 2,
            "targets": ATTENTION,
            "truth": "mixture",
            "distributed_optimizer": True,
        },
        {"tp": 2, "sp": True, "truth": "granite"},
        {"pp": 2, "recompute": FULL, "truth": "smollm3"},
        {"tp": 2, "sp": True, "truth": "phi3"},
    ],
    4: [
        {"tp": 2, "pp": 2, "sp": True, "recompute": FULL},
        {"tp": 2, "cp": 2, "sp": True},
        {"tp": 2, "sp": True, "distributed_optimizer": True},
        {"tp": 2, "pp": 2, "vp": 2, "sp": True},
        {"tp": 4, "truth": "one_kv"},
    ],
}


def one_kv_model(path):
    """Fewer key-value heads than ranks: Megatron then gathers the projections."""
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.1,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(path)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def truths(root):
    make_tiny_model(root / "untied")
    make_tiny_model(root / "tied", tied=True)
    one_kv_model(root / "one_kv")
    make_tiny_model(root / "mixture", "qwen3_moe")
    make_tiny_model(root / "granite", "granite")
    make_tiny_model(root / "smollm3", "smollm3", tied=True)
    make_tiny_model(root / "phi3", "phi3")
    batch, weights_N = make_batch(61)
    made = {}
    for name, model, targets in [
        ("untied", "untied", "all-linear"),
        ("tied", "tied", "all-linear"),
        ("one_kv", "one_kv", "all-linear"),
        ("some", "untied", SOME),
        ("mixture", "mixture", ATTENTION),
        ("granite", "granite", "all-linear"),
        ("smollm3", "smollm3", "all-linear"),
        ("phi3", "phi3", "all-linear"),
    ]:
        made[name] = truth(root / model, root / f"{name}_adapter", batch, weights_N, targets) | {
            "model": root / model
        }
    return made


@pytest.fixture(scope="module")
def outcomes(root, truths):
    """Of a number of ranks: the outcomes of its cases on every rank."""
    batch, weights_N = make_batch(61)

    @functools.cache
    def run(world_size: int) -> list:
        cases = [
            {
                "temperature": 0.8,
                "model": str(truths[name]["model"]),
                "adapter": str(root / f"{name}_adapter"),
                **case,
            }
            for case in CASES[world_size]
            for name in [case.get("truth", "untied")]
        ]
        return launch(
            "tests.megatron.layers.lora_ranks",
            "run_cases",
            world_size,
            cases=cases,
            batch=batch,
            weights_N=weights_N,
            root=root,
        )

    return run


OTHERS = [
    {"tp": 2, "seed": 5, "engines": "bf16"},
    {"pp": 2, "seed": 5},
    {"seed": 5, "distributed_optimizer": True},
    {"seed": 6},
    {"tp": 2, "dropout": 0.3},
    {"tp": 2, "dropout": 0.3, "recompute": FULL, "warm_up": True},
    {"tp": 2, "sp": True, "dropout": 0.3},
    {"tp": 2, "sp": True, "dropout": 0.3, "recompute": FULL},
    {"tp": 2, "sp": True, "dropout": 0.3, "save": "dropped"},
    {"tp": 2, "sp": True, "dropout": 0.3, "load": "dropped"},
    {"pp": 2, "rank": 8, "load": "checkpoint"},
    {"pp": 2, "targets": SOME, "load": "checkpoint"},
    {"pp": 2, "truth": "tied", "load": "checkpoint"},
    {"pp": 2, "truth": "other", "load": "checkpoint"},
]


@pytest.fixture(scope="module")
def others(root, truths, outcomes):
    batch, weights_N = make_batch(61)
    outcomes(2)  # writes the checkpoint
    make_tiny_model(root / "untied again", seed=1)
    models = {name: truths[name]["model"] for name in ("untied", "tied")} | {
        "other": root / "untied again"
    }
    cases = [
        {"temperature": 0.8, "model": str(models[case.get("truth", "untied")]), **case}
        for case in OTHERS
    ]
    return launch(
        "tests.megatron.layers.lora_ranks",
        "run_others",
        2,
        cases=cases,
        batch=batch,
        weights_N=weights_N,
        root=root,
    )


def test_new_adapters_are_the_same_in_every_layout_and_pefts(others):
    tensor, stages, sharded, other = (others[0][number]["started"] for number in range(4))
    for name, values in tensor.items():
        assert torch.equal(values, stages[name]) and torch.equal(values, sharded[name]), name
        if "lora_A" in name:
            assert not torch.equal(values, other[name])
            # of kaiming_uniform_(a=sqrt(5)): peft 0.21.2 tuners/lora/layer.py:332
            bound = values.shape[1] ** -0.5
            assert 0.8 * bound < values.abs().max() <= bound and abs(values.mean()) < 0.2 * bound, (
                name
            )
        else:
            assert not values.any(), name
    first = [values.flatten()[:8] for name, values in tensor.items() if "lora_A" in name]
    assert len(torch.stack(first).unique(dim=0)) == len(first) > 1, (
        "no two modules have the same start"
    )
    assert len({others[0][number]["fingerprint"] for number in range(9)}) == 1, (
        "of the base, in every layout"
    )


def test_engines_get_adapters_in_their_own_dtype_times_alpha_over_r(others):
    """Of an fp32 policy with engines in bf16 (vllm.dtype), which refuse another; the probe computes
    with the same."""
    sent, held = others[0][0]["sent"], others[0][0]["held"]
    assert sent.keys() == held.keys() and any(
        tensor.any() for name, tensor in sent.items() if "lora_B" in name
    )
    for name, tensor in held.items():
        scale = 1.5 if "lora_B" in name else 1.0
        assert torch.equal(sent[name], (tensor * scale).bfloat16()), name
        torch.testing.assert_close(
            others[0][0]["rounded"][name] * scale, sent[name].float(), rtol=1e-6, atol=0.0
        )


def test_a_layer_derived_from_ours_gets_no_adapter():
    """Its own forward pass would be passed over: an emulated FP8 layer would silently compute in
    bf16."""
    for layer in (EmulatedNormColumnParallelLinear, EmulatedRowParallelLinear):
        with pytest.raises(ValueError, match=f"adapters of a {layer.__name__} are not built"):
            adapted(layer)


@pytest.mark.parametrize(("kept", "recomputed"), [(4, 5), (6, 7)])
def test_dropout_is_drawn_again_as_it_was(others, kept, recomputed):
    one, two = others[0][kept], others[0][recomputed]
    assert one["steps"] == two["steps"] and all(
        torch.equal(t, two["adapter"][n]) for n, t in one["adapter"].items()
    )
    for first, second in zip(others[0][kept]["copies"], others[1][kept]["copies"], strict=True):
        assert torch.equal(first, second), "copies of tensor-parallel ranks"
    assert one["steps"] != others[0][0].get("steps"), "there is dropout"


def test_dropout_goes_on_after_a_checkpoint_as_without(others):
    whole, resumed = others[0][8], others[0][9]
    assert resumed["steps"] == whole["steps"][2:]
    assert all(
        torch.equal(tensor, resumed["adapter"][name]) for name, tensor in whole["adapter"].items()
    )


def test_dropout_differs_between_data_and_shards(truths):
    masks = launch(
        "tests.megatron.layers.lora_ranks",
        "dropout_masks",
        2,
        model=str(truths["untied"]["model"]),
        seed=0,
    )
    for mine, theirs in zip(*masks, strict=True):
        assert not torch.equal(mine, theirs), "two data-parallel ranks draw the same mask"
        assert mine[mine != 0].unique().tolist() == [2.0], "what is left is scaled"


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (10, "ds.lora.rank 4, here 8"),
        (
            11,
            "ds.lora.target_modules ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', "
            "'up_proj', 'down_proj'], ",
        ),
        (12, "of another model: tied_embeddings False"),
        (13, "weights of the base"),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused(others, number, says):
    for rank in others:
        assert says in rank[number]["refused"], rank[number]["refused"]


def worst(found, wanted) -> float:
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())[:6]
    return max(
        float((found[n].double() - wanted[n].double()).norm() / wanted[n].double().norm())
        for n in wanted
    )


@pytest.mark.parametrize("world_size", CASES)
def test_adapters_are_pefts_in_every_layout(truths, outcomes, world_size):
    batch, _ = make_batch(61)
    wrong = []
    for number, case in enumerate(CASES[world_size]):
        wanted, ranks = (
            truths[case.get("truth", "untied")],
            [rank[number] for rank in outcomes(world_size)],
        )
        errors = {
            "adapter": worst(ranks[0]["adapter"], wanted["adapter"]),
            "merged": worst(ranks[0]["merged"], wanted["merged"]),
        }
        if "grads" in ranks[0]:
            errors["grads"] = worst(ranks[0]["grads"], wanted["grads"])
        if "load" not in case:
            errors["norms"] = max(
                abs(step["grad_norm"] - norm) / norm
                for step, norm in zip(ranks[0]["steps"], wanted["norms"], strict=True)
            )
        for what in ("logprobs", "base") if "load" not in case else ("base",):
            errors[what] = max(
                float(
                    (rank[what].double() - batch.responses.take(wanted[what], rank["rows"]))
                    .abs()
                    .max()
                )
                for rank in ranks
                if rank["rows"]
            )
        limit = 0.2 if case.get("loose") else EXACT
        wrong += [
            f"{case}: {what} is off by {error:.1e}"
            for what, error in errors.items()
            if not error < limit
        ]
        wrong += [
            f"{case}: {problem}"
            for rank in ranks
            for problem in _kept_too_much(rank, case, world_size)
        ]
    assert not wrong, "\n".join(wrong)


def _kept_too_much(rank, case, world_size):
    if not rank["again"]:
        yield "adapters off and on again give other log-probs"
    if rank["base_with_gradients"] or rank["moved"]:
        yield f"the base has {rank['base_with_gradients']} gradients, and moved: {rank['moved']}"
    if rank["dtypes"] != ["torch.float32"]:
        yield f"adapters and states are {rank['dtypes']}"
    if not case.get("distributed_optimizer"):
        if (
            rank["gradient_entries"] != rank["adapter_entries"]
            or rank["state_entries"] != 2 * rank["adapter_entries"]
        ):
            yield (
                f"{rank['gradient_entries']} gradients, {rank['state_entries']} states of "
                f"{rank['adapter_entries']}"
            )
