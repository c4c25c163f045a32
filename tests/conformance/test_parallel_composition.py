"""What NVIDIA/Megatron-LM issue 7452 (2026-09-17, at its commit 7a9e59de7) found silently wrong
where kinds of parallelism come together, as tests of our layouts. Its programs are for Megatron's
parts; these ask whether our gradients, norms and losses are those of one process in the layouts of
the findings, and whether a fault as in a finding is noticed.

The issue has thirteen findings, most of them of parts that we do not use, and appendices, of which
B (a gather whose backward pass adds up copies) and C (a balance loss divided by the replicas) are
about gradients too.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from openrlhf_ext.config.model_rules import local_shape
from tests.conformance.composition_worker import FAULTS
from tests.launch import launch
from tests.megatron import test_critic, test_exactness, test_moe
from tests.models import make_tiny_model
from tests.sequences import masked_batch, plain_rows

pytestmark = pytest.mark.conformance

ROOT = Path(__file__).parents[2]
WORLD = 4
TOLERANCE = 1e-5
HERE = "tests/conformance/test_parallel_composition.py::"
LAYOUT, FAULT = f"{HERE}test_layouts_equal_one_process", f"{HERE}test_faults_are_noticed"
REFUSED = f"{HERE}test_refused"
EXACT = "tests/megatron/test_exactness.py::test_every_algorithm_in_every_layout"
MOE = "tests/megatron/test_moe.py::test_equals_transformers"
CHECKPOINT = "tests/megatron/test_checkpoint.py::"
CRITIC = "tests/megatron/test_critic.py::test_equals_transformers"


@dataclass(frozen=True)
class Finding:
    wrong: str
    """What goes wrong in Megatron, and where."""
    here: str
    """What we have in its place."""
    tests: tuple[str, ...]


FINDINGS = {
    "1": Finding(
        "cross entropy with label smoothing: with TP > 1 each rank smooths over its own shard "
        "of the vocabulary",
        "not called; our head has one softmax over all ranks' shards",
        (f"{LAYOUT}[tp]", f"{FAULT}[shards_of_other_ranks]", f"{EXACT}[4]"),
    ),
    "2": Finding(
        "logits gathered over TP ranks go into a cross entropy of shards: the loss is log(TP) "
        "too large",
        "not called; models end in hidden states, the head multiplies by the rank's shard",
        (f"{LAYOUT}[tp]", f"{FAULT}[shards_of_other_ranks]", f"{EXACT}[4]"),
    ),
    "3": Finding(
        "multi-token prediction divides by the tokens of the rank: wrong where replicas have "
        "unequal numbers",
        "no such layers; the shares of our losses carry the mini-batch's number of tokens",
        (
            f"{LAYOUT}[uneven]",
            f"{FAULT}[mean_of_local_means]",
            f"{REFUSED}[deepseek_v3]",
            f"{EXACT}[4]",
        ),
    ),
    "4": Finding(
        "recomputed multi-token prediction gathers its input over the global TP group, not over "
        "the model's own",
        "no such layers, no second set of groups, inputs are not distributed; recomputation "
        "equals one process",
        (f"{LAYOUT}[recomputed]", f"{FAULT}[rows_of_another_replica]"),
    ),
    "5": Finding(
        "a mixture's padding mask is cut over the global TP group, not over the model's own",
        "no padding mask; routers are told which of their own rows are tokens",
        (f"{LAYOUT}[mixture-cp]", f"{FAULT}[rows_of_another_replica]"),
    ),
    "6": Finding(
        "the projections of cross attention are cut over the global TP group, not over the "
        "model's own",
        "no cross attention, models with an encoder are refused",
        (f"{LAYOUT}[recomputed]", f"{FAULT}[rows_of_another_replica]", f"{REFUSED}[t5]"),
    ),
    "7": Finding(
        "LLaVA's embeddings are cut over the global TP group, not over the model's own",
        "models of images are refused; our embedding holds the layout's group",
        (f"{LAYOUT}[recomputed]", f"{FAULT}[rows_of_another_replica]", f"{REFUSED}[qwen2_5_vl]"),
    ),
    "8": Finding(
        "learned attention sinks are cut by heads and not marked as cut: the norm counts those "
        "of the first TP rank",
        "models with sinks are refused; every shard is marked as cut and no copy is, biases of "
        "heads among them",
        (
            f"{LAYOUT}[recomputed]",
            f"{FAULT}[shard_not_marked]",
            f"{FAULT}[copy_marked]",
            f"{REFUSED}[gpt_oss]",
        ),
    ),
    "9": Finding(
        "without a loss per token each CP rank divides by its own tokens: ranks with unequal "
        "numbers count the same",
        "shares carry the mini-batch's number of tokens; a rank may have none",
        (
            f"{LAYOUT}[one-token]",
            f"{LAYOUT}[uneven]",
            f"{FAULT}[mean_of_local_means]",
            f"{EXACT}[4]",
            f"{EXACT}[8]",
        ),
    ),
    "10": Finding(
        "with a padding mask under TP and SP the sum over ranks overwrites a router's own "
        "counts: its balance loss is multiplied by the ranks",
        "not called; our balance loss has counts of whole sequences and the rank's own rows, "
        "padding left out",
        (
            f"{LAYOUT}[mixture-cp]",
            f"{LAYOUT}[mixture-dp]",
            f"{FAULT}[balance_of_all_ranks]",
            f"{MOE}[2]",
        ),
    ),
    "11": Finding(
        "gated delta net has one norm for all heads; without SP its gradient is not added up "
        "over TP ranks",
        "the copies of all our parameters get the same gradient, norms of heads and of gated delta "
        "nets among them (tests/megatron/test_hybrid.py); Qwen3-Next is refused",
        (
            f"{LAYOUT}[tp]",
            f"{LAYOUT}[recomputed]",
            f"{FAULT}[copies_not_summed]",
            f"{FAULT}[norms_not_summed]",
            f"{REFUSED}[qwen3_next]",
        ),
    ),
    "12": Finding(
        "a checkpoint of Megatron-FSDP names layers by stage: read with more stages, all get "
        "the layers of the first",
        "no Megatron-FSDP; our checkpoints continue with any stages",
        (
            f"{LAYOUT}[tp]",
            *(
                f"{CHECKPOINT}test_another_layout_on_as_many_ranks[{pair}]"
                for pair in ("0-2", "25-27")
            ),
            f"{CHECKPOINT}test_another_number_of_ranks",
        ),
    ),
    "13": Finding(
        "attention puts the CP group that it was built with in the place of the caller's",
        "one set of groups, which attention holds; context-parallel layouts equal one process",
        (f"{LAYOUT}[tp-cp]", f"{FAULT}[attention_over_other_ranks]"),
    ),
    "B": Finding(
        "a gather of sequence-parallel rows adds up the gradients of ranks that all compute the "
        "whole loss",
        "our gather's backward pass only splits",
        (f"{CRITIC}[{test_critic.LAYOUTS[2]}]", f"{CRITIC}[{test_critic.LAYOUTS[4]}]"),
    ),
    "C": Finding(
        "the balance loss of a whole step is averaged over replicas though each has only a "
        "share of it",
        "shares are added up",
        (f"{LAYOUT}[mixture-dp]", f"{MOE}[2]"),
    ),
}

AUX = 0.5
TP2 = {"tp": 2, "sp": True}
# What is left of the four ranks is data-parallel. qwen3 has norms of heads, qwen2 biases that are
# cut by heads, qwen2_moe a shared expert. Replicas of "tp" and "recomputed" have packs of one
# length, so that a fault that mixes them runs on.
CASES = {
    "tp": {"model": "qwen3", "batch": "equal", "tp": 2},
    "recomputed": {"model": "qwen2", "batch": "equal", **TP2, "recompute": {"recompute": "full"}},
    "tp-cp": {"model": "qwen3", "batch": "ragged", **TP2, "cp": 2},
    "one-token": {"model": "qwen2", "batch": "one-token", "cp": 4},
    "uneven": {"model": "qwen3", "batch": "uneven", "cp": 2, "micro_batch_size": 1},
    "mixture-cp": {
        "model": "qwen2_moe",
        "batch": "odd",
        **TP2,
        "cp": 2,
        "ep": 2,
        "aux": AUX,
        "micro_batch_size": 1,
    },
    "mixture-dp": {
        "model": "qwen2_moe",
        "batch": "odd",
        **TP2,
        "ep": 2,
        "aux": AUX,
        "micro_batch_size": 1,
    },
}
# fault -> the case in which it is made, and what has to show it
FAULTY = {
    "shards_of_other_ranks": ("tp", {"loss", "gradient"}),
    "mean_of_local_means": ("uneven", {"gradient", "norm"}),
    "rows_of_another_replica": ("recomputed", {"groups", "gradient"}),
    "shard_not_marked": ("recomputed", {"copies", "norm"}),
    "copy_marked": ("recomputed", {"shards", "norm"}),
    "balance_of_all_ranks": ("mixture-cp", {"balance", "gradient"}),
    "copies_not_summed": ("tp", {"copies", "gradient"}),
    "norms_not_summed": ("recomputed", {"copies", "gradient"}),
    "attention_over_other_ranks": ("tp-cp", {"groups", "gradient"}),
}
# (prompt, response) tokens
LENGTHS = {
    "ragged": [(4, 9), (3, 1), (6, 14), (2, 5), (9, 3), (5, 7)],
    "equal": [(4, 8)] * 4,
    "one-token": [(10, 1)],
    "uneven": [(3, 29), (5, 1)],
    "odd": [(4, 9), (3, 4), (6, 11), (2, 5), (5, 4), (3, 8)],
}


def make_batch(lengths):
    generator = torch.Generator().manual_seed(11)
    sequences = [torch.randint(2, 61, (p + r,), generator=generator) for p, r in lengths]
    return masked_batch(sequences, [torch.tensor([0] * (p - 1) + [1] * r) for p, r in lengths])


def truth(model, batch, aux: float) -> dict:
    """The mean negative log-prob of the response tokens and its gradients by transformers in fp64,
    one sequence at a time; of a mixture with its balance loss."""
    if hasattr(model.config, "num_experts"):
        weights_N = torch.full(
            (batch.responses.tokens,), 1 / batch.responses.tokens, dtype=torch.float64
        )
        return test_moe.truth(model, batch, weights_N, aux)
    model = copy.deepcopy(model).double()
    loss = torch.zeros((), dtype=torch.float64)
    for tokens, positions in plain_rows(batch):
        log_p = model(tokens[None]).logits[0].div(test_moe.TEMPERATURE).log_softmax(-1)
        loss = loss - log_p[positions, tokens[positions + 1]].sum() / batch.responses.tokens
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
    return {"loss": loss.item(), "grads": grads, "grad_norm": norm.item()}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """(case or fault -> its results on every rank, case -> what transformers makes of it)"""
    batches = {name: make_batch(lengths) for name, lengths in LENGTHS.items()}
    models, paths = {}, {}
    for name in ("qwen2", "qwen3", "qwen2_moe"):
        path = tmp_path_factory.mktemp(name)
        models[name], paths[name] = make_tiny_model(path, name, layers=test_moe.LAYERS), str(path)
    truths = {
        name: truth(models[c["model"]], batches[c["batch"]], c.get("aux", 0.0))
        for name, c in CASES.items()
    }
    common = {"temperature": test_moe.TEMPERATURE, "world_size": WORLD}
    todo = CASES | {fault: CASES[name] | {"fault": fault} for fault, (name, _) in FAULTY.items()}
    cases = [common | case | {"model": paths[case["model"]]} for case in todo.values()]
    ranks = launch(
        "tests.conformance.composition_worker", "run", WORLD, cases=cases, batches=batches
    )
    return {name: [rank[i] for rank in ranks] for i, name in enumerate(todo)}, truths


def complaints(ranks: list[dict], expected: dict) -> dict[str, object]:
    """What of a case is not as on one process."""
    metrics = ranks[0]["metrics"]
    found: dict[str, object] = {}
    if any(rank["metrics"] != metrics for rank in ranks):
        found["agreement"] = [rank["metrics"] for rank in ranks]
    if metrics["loss/policy"] != pytest.approx(expected["loss"], rel=TOLERANCE):
        found["loss"] = metrics["loss/policy"], expected["loss"]
    if "loss/balance" in metrics and metrics["loss/balance"] != pytest.approx(
        expected["balance"], rel=TOLERANCE
    ):
        found["balance"] = metrics["loss/balance"], expected["balance"]
    assert ranks[0]["grads"].keys() == expected["grads"].keys()
    apart = {
        n: test_moe.relative(grad.double(), expected["grads"][n])
        for n, grad in ranks[0]["grads"].items()
    }
    if wrong := {name: by for name, by in apart.items() if not by < TOLERANCE}:
        found["gradient"] = wrong
    groups = (
        sum(value**2 for name, value in metrics.items() if name.startswith("grad_norm/")) ** 0.5
    )
    if not all(
        norm == pytest.approx(expected["grad_norm"], rel=2e-6)
        for norm in (ranks[0]["grad_norm"], groups)
    ):
        found["norm"] = ranks[0]["grad_norm"], groups, expected["grad_norm"]
    for kind in ("groups", "unused"):
        if lines := [line for rank in ranks for line in rank[kind]]:
            found[kind] = lines
    if wrong := {
        name: by for rank in ranks for name, by in rank["copies"].items() if not by < TOLERANCE
    }:
        found["copies"] = wrong
    if same := {name: by for rank in ranks for name, by in rank["shards"].items() if not by > 1e-3}:
        found["shards"] = same
    return found


@pytest.mark.parametrize("name", CASES)
def test_layouts_equal_one_process(outcome, name):
    ranks, truths = outcome
    found = complaints(ranks[name], truths[name])
    if CASES[name].get("tp", 1) == 1:
        assert found.pop("shards"), "there are no shards, so a rank's are its own"
    assert found == {}
    assert any(rank["padded"] for rank in ranks[name]) == ("aux" in CASES[name]), (
        "there is padding to leave out"
    )


@pytest.mark.parametrize("fault", FAULTY)
def test_faults_are_noticed(outcome, fault):
    ranks, truths = outcome
    name, shown = FAULTY[fault]
    assert shown <= complaints(ranks[fault], truths[name]).keys()


def test_every_fault_is_made():
    assert FAULTY.keys() == FAULTS.keys()


@pytest.mark.parametrize(
    ("model_type", "needs"),
    [
        ("gpt_oss", "attention sinks"),
        ("qwen3_next", "gated delta net"),
        ("qwen3_5", "convert --text_only"),
        ("qwen2_5_vl", "a decoder within a model of images and text"),
        ("t5", ""),
        ("deepseek_v3", "multi-head latent attention"),
    ],
    ids=["gpt_oss", "qwen3_next", "qwen3_5", "qwen2_5_vl", "t5", "deepseek_v3"],
)
def test_refused(tmp_path, model_type, needs):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    shape, problems = local_shape("actor.model_name_or_path", str(tmp_path))
    (problem,) = problems
    assert (
        shape is None
        and "model_type must be one of" in problem.message
        and needs in problem.message
    )


def test_every_finding_is_covered(request):
    """The tests that are named exist, and those of other files still have the layouts that the
    findings are about."""
    wanted = {test for finding in FINDINGS.values() for test in finding.tests}
    files = {test.partition("::")[0] for test in wanted}
    modules = {file: pytest.Module.from_parent(request.session, path=ROOT / file) for file in files}
    assert {
        f"{file}::{test.name}" for file, module in modules.items() for test in module.collect()
    } >= wanted
    dense = [layout for _, layout in test_exactness.LAYOUTS[4]]
    assert any(layout.get("tp") == 2 and not layout.get("sp") for layout in dense)
    assert any(layout.get("cp") == 4 for layout in dense)
    assert any(layout.get("cp") == 2 == layout.get("tp") for layout in dense)
    mixtures = test_moe.LAYOUTS[2]
    assert any("aux" in layout and layout.get("sp") for layout in mixtures)
    assert any("aux" in layout and layout.get("lopsided") for layout in mixtures), (
        "replicas' shares are unequal"
    )
    assert all(test_critic.LAYOUTS[i].get("sp") for i in (2, 4))
