"""Megatron's critic and reward model equal a transformers decoder with a linear head on one
process, in any layout."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    GraniteConfig,
    GraniteModel,
    GranitePreTrainedModel,
)

from openrlhf_ext.algorithms.segments import Segments
from openrlhf_ext.algorithms.values import value_clip_fraction, value_loss
from openrlhf_ext.megatron.critic import ValueTargets
from tests.launch import launch
from tests.megatron.critic_parity import CLIP, EPS, LR, STEPS
from tests.megatron.reference import make_batch
from tests.megatron.test_policy import relative
from tests.models import make_reward_model, make_tiny_model
from tests.sequences import plain_rows

LAYOUTS = [
    {"name": "qwen2", "tp": 2},
    {"name": "qwen2-tied", "pp": 2, "save": True},
    {"name": "qwen3", "tp": 2, "pp": 2, "sp": True},
    {
        "name": "qwen2",
        "tp": 2,
        "pp": 2,
        "distributed_optimizer": True,
        "clip": None,
        "checkpoint": True,
    },
]
LAYOUTS += [
    {"name": "qwen3", "cp": 2, "tp": 2, "sp": True, "max_tokens": 40},
    {"name": "qwen2-tied", "pp": 2, "vp": 2, "distributed_optimizer": True, "max_tokens": 30},
    {"name": "llama", "cp": 2, "pp": 2, "normalize": True},
    {"name": "granite", "tp": 2, "cp": 2, "sp": True},
    {"name": "smollm3", "pp": 2, "recompute": {"recompute": "full"}},
]
REWARD = [  # frozen, as reward models are
    {"name": "qwen3", "tp": 2, "pp": 2, "sp": True, "frozen": True},
    {"name": "llama", "cp": 2, "tp": 2, "frozen": True, "normalize": True, "max_tokens": 40},
    {"name": "language-model", "tp": 2, "frozen": True},
]
MEAN, STD = -0.4, 1.7  # of the scores, as config.json of a trained reward model says
# four data-parallel ranks
RESUMED = {"distributed_optimizer": True, "clip": None, "name": "resumed"}
FRESH = [{"name": "language-model", "tp": 2, "pp": 2}, {"name": "language-model"}]
BF16 = {"name": "qwen2", "tp": 2, "dtype": "bf16", "distributed_optimizer": True}


class GraniteClassifier(GranitePreTrainedModel):
    """What transformers has of other families."""

    def __init__(self, config: GraniteConfig) -> None:
        super().__init__(config)
        self.model = GraniteModel(config)
        self.score = torch.nn.Linear(config.hidden_size, 1, bias=False)
        self.post_init()


def make_targets(batch) -> ValueTargets:
    generator = torch.Generator().manual_seed(5)
    old_N, returns_N = (torch.randn(batch.responses.tokens, generator=generator) for _ in range(2))
    return ValueTargets(old_N, returns_N, batch.responses, torch.tensor(len(old_N)))


def make_value_model(path, family: str, tied: bool):
    make_tiny_model(path / "lm", family, tied=tied)
    kind = GraniteClassifier if family == "granite" else AutoModelForSequenceClassification
    return make_reward_model(path / "critic", path / "lm", kind, mean=MEAN, std=STD)


def plain_values(model, batch) -> torch.Tensor:
    by_row = []
    for tokens, positions in plain_rows(batch):
        hidden_SH = model.model(tokens[None]).last_hidden_state[0]
        by_row.append(model.score(hidden_SH[positions]).squeeze(-1))
    return torch.cat(by_row)


def plain_scores(model, batch) -> torch.Tensor:
    """The head at the last token of each sequence; transformers' own pooling leaves out a last
    token that pads."""
    with torch.no_grad():
        states = [
            model.model(tokens[None]).last_hidden_state[0, -1] for tokens, _ in plain_rows(batch)
        ]
        return model.score(torch.stack(states)).squeeze(-1)


def scaled(values: torch.Tensor, normalize: bool) -> torch.Tensor:
    return (values - MEAN) / STD if normalize else values


def reference(model, batch, targets: ValueTargets, clip: float | None, normalize: bool) -> dict:
    """Values, gradients and AdamW steps of transformers, one sequence at a time."""
    parameters = {name: p for name, p in model.named_parameters()}
    start = {name: p.detach().clone() for name, p in parameters.items()}
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0
    )
    result: dict = {"steps": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        values_N = scaled(plain_values(model, batch), normalize)
        arguments = (values_N, targets.old_values_N, targets.returns_N)
        loss = value_loss(*arguments, clip=clip, tokens=targets.tokens)
        loss.backward()
        if step == 0:
            result["values"] = values_N.detach()
            result["grads"] = {name: p.grad.clone() for name, p in parameters.items()}
        metrics = {"loss/value": loss.item()}
        if clip is not None:
            metrics["value/clip_fraction"] = value_clip_fraction(
                *arguments, clip=clip, tokens=targets.tokens
            ).item()
        metrics["value/grad_norm"] = torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0).item()
        optimizer.step()
        result["steps"].append(metrics | {"value/lr": LR})
    result["weights"] = {name: p.detach().clone() for name, p in parameters.items()}
    model.load_state_dict(start)
    return result


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """(cases, what every rank got, references by name and clip, batch) of one launch on four
    ranks."""
    folder = tmp_path_factory.mktemp("critic")
    batch, _ = make_batch(61)
    targets = make_targets(batch)
    families = {"qwen2": ("qwen2", False), "qwen2-tied": ("qwen2", True), "qwen3": ("qwen3", False)}
    families |= {name: (name, False) for name in ("llama", "granite", "smollm3")}
    models = {name: make_value_model(folder / name, *kind) for name, kind in families.items()}
    paths = {name: str(folder / name / "critic") for name in families}
    paths["language-model"] = str(folder / "qwen2-tied" / "lm")
    cases = [
        {**case, "model": paths[case["name"]], "world_size": 4}
        for case in [*LAYOUTS, *FRESH, BF16, *REWARD]
    ]
    for case in cases:
        case |= {key: str(folder / key) for key in ("save", "checkpoint") if key in case}
    cases.append({"model": paths["qwen2"], **RESUMED, "load": str(folder / "checkpoint")})
    expected = {}
    for case in LAYOUTS:
        model, how = models[case["name"]], (case.get("clip", CLIP), case.get("normalize", False))
        expected[case["name"], how[0]] = reference(model, batch, targets, *how)
        expected[case["name"], "scores"] = plain_scores(model, batch)
    ranks = launch(
        "tests.megatron.critic_parity", "run_cases", 4, cases=cases, batch=batch, targets=targets
    )
    return cases, ranks, expected, batch


@pytest.mark.parametrize("index", range(len(LAYOUTS)), ids=[str(case) for case in LAYOUTS])
def test_equals_transformers(outcome, index):
    cases, ranks, expected, batch = outcome
    case = cases[index]
    wanted = expected[case["name"], case.get("clip", CLIP)]
    for rank in ranks:
        got = rank[index]
        assert torch.allclose(
            got["values"], batch.responses.take(wanted["values"], got["rows"]), atol=2e-5, rtol=1e-5
        )
        assert got["steps"] == ranks[0][index]["steps"], "metrics differ between ranks"
        for metrics, plain in zip(got["steps"], wanted["steps"], strict=True):
            assert metrics == pytest.approx(plain, rel=2e-5)
    first = ranks[0][index]
    for name, gradient in first.get("grads", {}).items():
        assert relative(gradient, wanted["grads"][name]) < 1e-5, name
    assert set(first["weights"]) == set(wanted["weights"])
    for name, weight in first["weights"].items():
        assert torch.allclose(weight, wanted["weights"][name], atol=2e-5), name


def test_scores_are_the_head_at_the_last_token(outcome):
    cases, ranks, expected, _ = outcome
    # a new critic's head is random
    scored = [
        (i, case)
        for i, case in enumerate(cases)
        if case["name"] != "language-model" and "scores" in ranks[0][i]
    ]
    assert len(scored) == len(LAYOUTS) + 3
    for index, case in scored:
        exact = (
            {"atol": 1e-5, "rtol": 1e-5}
            if case.get("dtype") != "bf16"
            else {"atol": 0.2, "rtol": 0.1}
        )
        wanted_B = scaled(expected[case["name"], "scores"], case.get("normalize", False))
        for rank in ranks:
            assert torch.allclose(rank[index]["scores"], wanted_B[rank[index]["rows"]], **exact), (
                case
            )


def test_a_reward_model_has_a_head(outcome):
    cases, ranks, _, _ = outcome
    index = next(
        i for i, case in enumerate(cases) if case["name"] == "language-model" and "frozen" in case
    )
    refused = ranks[0][index]["refused"]
    assert (
        "has no value head score.weight, without which a reward model's scores are random"
        in refused
    )


def test_continues_from_a_checkpoint_of_another_layout(outcome):
    cases, ranks, expected, _ = outcome
    index = next(i for i, case in enumerate(cases) if case["name"] == "resumed")
    for rank in ranks:
        assert rank[index]["steps"][0] == pytest.approx(
            expected["qwen2", None]["steps"][1], rel=2e-5
        )


def test_a_return_that_is_no_number_is_refused_before_anything_moves(outcome):
    cases, ranks, _, _ = outcome
    index = next(i for i, case in enumerate(cases) if "checkpoint" in case)
    for rank in ranks:
        assert rank[index]["refused"] == "nothing moved: the critic's train step gave the loss nan"


def test_some_values_are_clipped_and_some_are_not(outcome):
    _, _, expected, _ = outcome
    assert 0 < expected["qwen2", CLIP]["steps"][0]["value/clip_fraction"] < 1


def test_a_saved_critic_is_a_sequence_classifier_of_transformers(outcome):
    cases, ranks, _, batch = outcome
    index = next(i for i, case in enumerate(cases) if "save" in case)
    folder = cases[index]["save"]
    model, info = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.num_labels == 1
    with torch.no_grad():
        values_N = plain_values(model, batch)
    for rank in ranks:
        wanted = batch.responses.take(values_N, rank[index]["rows"])
        assert torch.allclose(rank[index]["saved_values"], wanted, atol=2e-5, rtol=1e-5)
    with open(f"{folder}/config.json") as file:
        assert json.load(file)["value_head_prefix"] == "score"


def test_a_language_model_gets_a_small_value_head_that_every_layout_starts_with(outcome):
    cases, ranks, _, batch = outcome
    layouts = [
        i
        for i, case in enumerate(cases)
        if case["name"] == "language-model" and "frozen" not in case
    ]
    heads = [ranks[0][i]["start"]["score.weight"] for i in layouts]
    assert torch.equal(*heads) and heads[0].std().item() == pytest.approx(1 / 65, rel=0.3)
    values = [torch.zeros(batch.responses.tokens) for _ in layouts]
    for rank in ranks:
        for value_N, i in zip(values, layouts, strict=True):
            batch.responses.put(value_N, rank[i]["values"], rank[i]["rows"])
    assert torch.allclose(*values, atol=1e-6)
    assert 0 < values[0].abs().max() < 1


def test_bf16_is_close_to_fp32(outcome):
    cases, ranks, expected, batch = outcome
    index = next(i for i, case in enumerate(cases) if case.get("dtype") == "bf16")
    wanted = expected["qwen2", CLIP]
    for rank in ranks:
        got = rank[index]
        assert got["values"].dtype == torch.float32
        assert relative(got["values"], batch.responses.take(wanted["values"], got["rows"])) < 0.05
        for metrics, plain in zip(got["steps"], wanted["steps"], strict=True):
            assert metrics["loss/value"] == pytest.approx(plain["loss/value"], rel=0.15)
            assert metrics["value/grad_norm"] == pytest.approx(plain["value/grad_norm"], rel=0.15)


def test_targets_of_selected_rows_keep_the_denominator():
    targets = ValueTargets(
        torch.arange(6.0), torch.ones(6), Segments(torch.tensor([3, 1, 2])), torch.tensor(6)
    )
    part = targets.select([2, 0])
    assert part.old_values_N.tolist() == [4.0, 5.0, 0.0, 1.0, 2.0] and part.tokens == 6
    assert part.segments.lengths_B.tolist() == [2, 3]
