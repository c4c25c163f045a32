from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_policy
import toy_task
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.study.decoding import decode
from benchmarks.study.settings import Evaluation, resolve
from benchmarks.study.training import StudyRun

EXAMPLES = Path(toy_policy.__file__).parent
TINY = replace(
    toy_policy.family_settings("tags"),
    hidden_size=64,
    intermediate_size=64,
    layers=2,
    heads=2,
    kv_heads=1,
    knowledge_steps=60,
    careless_steps=20,
    slip_rate=0.345,
)
OPTIONS = {
    "actor.lr_scheduler": "constant_with_warmup",
    "actor.lr_warmup_steps": 4,
    "actor.adam.lr": 1e-3,
    "data.input_key": "question",
    "data.label_key": "answer",
    "rollout.max_new_tokens": 24,
    "rollout.batch_size": 6,
    "rollout.n_samples_per_prompt": 4,
    "rollout.micro_batch_size": 24,
    "train.batch_size": 8,
    "train.micro_batch_size": 8,
    "reward.remote_url": str(EXAMPLES / "reward_tagged_maths.py"),
}
EVALUATION = Evaluation(every=1, problems=4, last_problems=6, samples=4)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    toy_policy.build_policy(folder / "policy", TINY)
    torch.set_num_threads(threads)
    toy_task.write_task(folder / "data", train_size=40, heldout_size=8)
    return folder


def run_of(made: Path, options: dict[str, Any], *, steps: int = 2, seed: int = 1) -> StudyRun:
    return StudyRun(
        resolve({**OPTIONS, **options}, seed),
        policy=str(made / "policy"),
        train=str(made / "data" / "train.jsonl"),
        heldout=str(made / "data" / "heldout.jsonl"),
        steps=steps,
        evaluation=EVALUATION,
        short_tokens=8,
    )


def weights(run: StudyRun) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in run.model.state_dict().items()}


# ---- sampling


def test_the_most_likely_tokens_are_those_of_generate(made):
    model, tokenizer = (
        kind.from_pretrained(made / "policy") for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    prompts = tokenizer(["3+4=?", "(3+4)*2-5=?", "9*2=?"])["input_ids"]
    sampled = decode(
        model,
        prompts,
        samples=2,
        max_new_tokens=12,
        temperature=0.0,
        eos=tokenizer.eos_token_id,
        seed=0,
    )
    assert sampled.rows[::2] == sampled.rows[1::2], "no chance is left"
    for ids, row in zip(prompts, sampled.rows[::2], strict=True):
        expected = model.generate(
            torch.tensor([ids]),
            max_new_tokens=12,
            do_sample=False,
            top_k=None,
            top_p=None,
            temperature=None,
        )
        assert row == expected[0, len(ids) :].tolist()


def test_samples_have_the_entropies_and_the_frequencies_of_the_policy(made):
    model, tokenizer = (
        kind.from_pretrained(made / "policy") for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    eos, temperature = tokenizer.eos_token_id, 0.7
    prompts = tokenizer(["3+4=?", "(3+4)*2-5=?"])["input_ids"]
    sampled = decode(
        model, prompts, samples=400, max_new_tokens=10, temperature=temperature, eos=eos, seed=3
    )
    assert sampled.truncated_B.tolist() == [row[-1] != eos for row in sampled.rows]
    assert {len(row) for row in sampled.rows} != {10}, (
        "some ended, and the others went on without them"
    )
    assert all(eos not in row[:-1] for row in sampled.rows)
    entropies = iter(sampled.entropies_N.split(sampled.segments.lengths_B.tolist()))
    for number, row in enumerate(sampled.rows):
        ids = prompts[number // 400]
        entropies_T = next(entropies)
        if number % 100 == 0:
            with torch.no_grad():
                logits = model(torch.tensor([ids + row])).logits[0, len(ids) - 1 : -1] / temperature
            expected = torch.distributions.Categorical(logits=logits).entropy()
            torch.testing.assert_close(entropies_T, expected, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        chances = (model(torch.tensor([prompts[0]])).logits[0, -1] / temperature).softmax(-1)
    firsts = torch.tensor([row[0] for row in sampled.rows[:400]])
    likely = int(chances.argmax())
    assert float((firsts == likely).float().mean()) == pytest.approx(
        float(chances[likely]), abs=0.1
    )


def test_the_seed_decides(made):
    model, tokenizer = (
        kind.from_pretrained(made / "policy") for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    prompts = tokenizer(["3+4=?"])["input_ids"]
    settings = {
        "samples": 8,
        "max_new_tokens": 12,
        "temperature": 1.0,
        "eos": tokenizer.eos_token_id,
    }
    rows = [decode(model, prompts, seed=seed, **settings).rows for seed in (1, 1, 2)]
    assert rows[0] == rows[1] != rows[2]


# ---- training


def test_conflict_without_masks_filter_and_gamma_is_grpo_in_every_bit(made):
    off = {"gamma": 0.0, "filter": "off", "use_conflict": False}
    runs = [
        run_of(
            made,
            {
                "algo.advantage.estimator": "grpo",
                "algo.grpo.success_threshold": 10.5,
                "train.batch_size": 24,
            },
        ),
        run_of(
            made,
            {
                "algo.advantage.estimator": "gtpo_conflict",
                "algo.gtpo_conflict": off,
                "train.batch_size": 24,
            },
        ),
        run_of(
            made,
            {
                "algo.advantage.estimator": "gtpo_conflict",
                "algo.gtpo_conflict": {**off, "use_conflict": True},
                "train.batch_size": 24,
            },
        ),
    ]
    grpo, plain, masked = (
        [run.step(1)["grad_norm"], run.step(2)["grad_norm"], weights(run)] for run in runs
    )
    assert grpo[:2] == plain[:2] and all(
        torch.equal(grpo[2][name], plain[2][name]) for name in grpo[2]
    )
    assert grpo[0] != masked[0], "and masks change something here"


@pytest.mark.parametrize(
    "estimator", ["dapo", "gtpo_entropy", "grpo_s", "gtpo_conflict", "clip_cov"]
)
def test_micro_batches_do_not_change_the_step(made, estimator):
    """Each step's three updates, the later ones with ratios other than 1. Complete tags (10 points)
    are a success."""
    options = {"algo.advantage.estimator": estimator, f"algo.{estimator}.success_threshold": 5.0}
    first, second = (
        run_of(made, {**options, "train.micro_batch_size": size, "rollout.micro_batch_size": size})
        for size in (8, 2)
    )
    before = weights(first)
    assert first.step(1)["grad_norm"] == pytest.approx(second.step(1)["grad_norm"], rel=1e-3)
    moved = max(
        float((tensor - before[name]).abs().max()) for name, tensor in weights(first).items()
    )
    apart = max(
        float((tensor - weights(second)[name]).abs().max())
        for name, tensor in weights(first).items()
    )
    assert moved > 1e-4 and apart < 0.05 * moved


def test_the_rate_warms_up_over_the_updates(made):
    run = run_of(made, {"algo.advantage.estimator": "grpo"}, steps=2)
    run.step(1)
    rates = {group["lr"] for group in run.optimizer.param_groups}
    assert run.updates == 3 and rates == {1e-3 * (3 / 4)}
    run.step(2)
    assert {group["lr"] for group in run.optimizer.param_groups} == {1e-3}


def test_a_run_learns_what_is_rewarded(made, tmp_path):
    """Completions that end early, with a reward that is their shortness."""
    reward = tmp_path / "short.py"
    reward.write_text(
        "def reward_func(queries, prompts, labels, completions):\n"
        "    assert queries[0].removesuffix('<|im_end|>') == prompts[0] + completions[0]\n"
        "    return {'rewards': -len(queries[0]), 'scores': 0.5}\n"
    )
    options = {
        "algo.advantage.estimator": "dapo",
        "algo.dapo.degenerate_by": "reward",
        "reward.remote_url": str(reward),
    }
    found = run_of(made, {**options, "actor.adam.lr": 3e-3}, steps=6).run()
    lengths = found["steps"]["length"]
    assert lengths[-1] < 0.7 * lengths[0]
    assert [evaluation["step"] for evaluation in found["evaluations"]] == [0, 1, 2, 3, 4, 5, 6]
    json.dumps(found, allow_nan=False)


def test_a_run_is_repeated_in_every_number(made):
    first, second = (
        run_of(made, {"algo.advantage.estimator": "gtpo_conflict"}).run() for _ in range(2)
    )
    for found in (first, second):
        for evaluation in found["evaluations"]:
            del evaluation["seconds"]
        for name in ("step_s", "sampling_s", "shaping_s"):
            del found["steps"][name]
    assert first == second


def test_what_is_measured(made):
    run = run_of(made, {"algo.advantage.estimator": "gtpo_conflict"})
    found = run.run()
    start, last = found["evaluations"][0], found["evaluations"][-1]
    assert (start["problems"], last["problems"]) == (4, 6)
    assert {
        "accuracy",
        "greedy_accuracy",
        "pass@1",
        "pass@4",
        "tags",
        "format",
        "ended",
        "short",
        "entropy",
    } <= start.keys()
    assert (
        start["pass@1"] == pytest.approx(start["accuracy"], abs=1e-4)
        and start["pass@1"] <= start["pass@4"]
    )
    assert 0 < start["ended"] < 1 and 0 < start["tags"] < 1
    assert {"filtered_completions", "conflict_forward", "shaping_s", "clip_fraction"} <= found[
        "steps"
    ].keys()


def test_a_placebo_has_the_same_entropies_at_other_tokens(made):
    """It changes gtpo_entropy; without a weight of the entropy it is the same in every bit."""
    for weight, same in ((0.1, False), (0.0, True)):
        own = {"success_threshold": 5.0, "alpha1": 1.0, "alpha2": weight}
        placebo = {
            "algo.advantage.estimator": "custom",
            "algo.module_path": "benchmarks/study/methods/exchanged_entropies.py",
            "algo.custom": own,
        }
        real = {"algo.advantage.estimator": "gtpo_entropy", "algo.gtpo_entropy": own}
        found = [run_of(made, options).step(1) for options in (real, placebo, placebo)]
        assert found[0]["entropy"] == found[1]["entropy"], "what is measured is not exchanged"
        assert (found[0]["grad_norm"] == found[1]["grad_norm"]) is same
        assert found[1]["grad_norm"] == found[2]["grad_norm"]


def test_prompts_are_drawn_in_another_order_for_another_seed(made):
    orders = [
        [
            p.prompt
            for p in run_of(made, {"algo.advantage.estimator": "grpo"}, seed=seed).train_problems
        ]
        for seed in (1, 2)
    ]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])


def test_a_reference_holds_the_policy_back(made):
    options = {
        "algo.advantage.estimator": "grpo",
        "algo.grpo.success_threshold": 10.5,
        "actor.adam.lr": 3e-3,
    }
    free = run_of(made, options)
    held = run_of(
        made,
        {**options, "algo.kl.init_coef": 10.0, "algo.kl.use_loss": True, "algo.kl.estimator": "k3"},
    )
    before = weights(free)
    for run in (free, held):
        run.step(1)
    distances = [
        sum(float((t - before[n]).square().sum()) for n, t in weights(run).items())
        for run in (free, held)
    ]
    assert distances[1] < distances[0]
