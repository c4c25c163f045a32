from __future__ import annotations

import dataclasses
import logging
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from openrlhf_ext.algorithms import RolloutBatch, get_algorithm, segments
from openrlhf_ext.algorithms.segments import Segments
from openrlhf_ext.config import RunConfig
from openrlhf_ext.driver import gauges
from openrlhf_ext.driver.description import (
    DEFAULT_BAND,
    advantage_gauges,
    conflict_gauges,
    correction_band,
    entropy_metrics,
    expected_of_first_update,
    guide_agreement,
    guide_gauges,
    mismatch_gauges,
    policy_mismatch,
    recounted,
    reward_metrics,
    staleness_metrics,
    text_metrics,
)
from openrlhf_ext.driver.gauges import (
    DraftWatch,
    StepGauges,
    rank_gauges,
    throughput_gauges,
    why_no_gradient,
)
from openrlhf_ext.megatron.model.flops import ForwardFlops
from openrlhf_ext.megatron.model.shape import ModelShape
from openrlhf_ext.ranks.movement import Moved
from openrlhf_ext.ranks.timers import RankReport
from openrlhf_ext.reporting import EventLog, is_documented
from openrlhf_ext.rewards.grading import FAILED_KEY
from tests.driver.simulated import response
from tests.driver.test_experience import GROUP, make_batch
from tests.sequences import masked_batch

# ---- trainer against engines


def completions(*lengths: int) -> Segments:
    return Segments(torch.tensor(lengths, dtype=torch.long))


def test_two_tokens_by_hand():
    policy, rollout = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    got = mismatch_gauges(policy, rollout, completions(2), band=(0.5, 5.0))
    w = [math.exp(0.5), math.exp(-1.0)]
    expected = {
        "kl/rollout": ((w[0] - 1 - 0.5) + (w[1] - 1 + 1.0)) / 2,
        "kl/rollout_reverse": ((1 - w[0] + w[0] * 0.5) + (1 - w[1] - w[1])) / 2,
        "kl/rollout_max_abs": 1.0,
        "mismatch/mean_abs": 0.75,
        "mismatch/exp_mean_abs": math.exp(0.75),
        "mismatch/ess_tokens": sum(w) ** 2 / (2 * (w[0] ** 2 + w[1] ** 2)),
        "mismatch/ess_completions": 1.0,
        "mismatch/outside_band": 0.5,
    }
    assert got == pytest.approx(expected, rel=1e-6)
    assert all(map(is_documented, got))


def test_agreement_gives_the_neutral_values():
    logprobs = -torch.rand(17)
    got = mismatch_gauges(logprobs, logprobs, completions(6, 1, 0, 10))
    ones = {"mismatch/exp_mean_abs", "mismatch/ess_tokens", "mismatch/ess_completions"}
    assert got == pytest.approx({name: float(name in ones) for name in got})


def test_both_kl_estimators_have_the_right_mean_over_the_engines_samples():
    """Exact expectation over a vocabulary of five, sampled from the engine's distribution."""
    generator = torch.Generator().manual_seed(1)
    policy_V, rollout_V = torch.randn(2, 5, generator=generator, dtype=torch.float64).log_softmax(1)
    means = {"kl/rollout": 0.0, "kl/rollout_reverse": 0.0}
    for policy, rollout in zip(policy_V, rollout_V, strict=True):
        one = mismatch_gauges(policy.view(1), rollout.view(1), completions(1))
        means = {name: mean + float(rollout.exp()) * one[name] for name, mean in means.items()}
        assert min(one[name] for name in means) >= 0
    assert means["kl/rollout"] == pytest.approx(
        float((rollout_V.exp() * (rollout_V - policy_V)).sum())
    )
    assert means["kl/rollout_reverse"] == pytest.approx(
        float((policy_V.exp() * (policy_V - rollout_V)).sum())
    )


def test_effective_sample_size_of_long_completions_does_not_overflow():
    policy = torch.zeros(10_000)
    policy[:5000] = 2.0  # exp(10000) is no number; the other completion has no weight beside it
    got = mismatch_gauges(policy, torch.zeros(10_000), completions(5000, 5000))
    assert got["mismatch/ess_completions"] == pytest.approx(0.5)
    assert mismatch_gauges(policy[:0], policy[:0], completions(0, 0)) == {}


def test_the_gauges_do_not_depend_on_the_block_size(monkeypatch):
    generator = torch.Generator().manual_seed(2)
    policy, rollout = -torch.rand(2, 40, generator=generator)
    lengths = completions(7, 1, 20, 12)
    whole = mismatch_gauges(policy, rollout, lengths)
    monkeypatch.setattr(segments, "BLOCK_TOKENS", 8)
    assert mismatch_gauges(policy, rollout, lengths) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize(
    ("correction", "band"),
    [
        (None, DEFAULT_BAND),
        (SimpleNamespace(level="token", gating="ratio", threshold=(0.0, 2.0)), (0.0, 2.0)),
        (SimpleNamespace(level="seq", gating="ratio", threshold=(0.0, 2.0)), DEFAULT_BAND),
        (SimpleNamespace(level="token", gating="tv", threshold=(0.0, 0.1)), DEFAULT_BAND),
    ],
)
def test_the_band_is_that_of_a_correction_by_token_ratio(correction, band):
    assert correction_band(SimpleNamespace(correction=correction)) == band


# ---- the guide


def test_completions_of_guide_and_policy_are_told_apart():
    made = [response("p", 0, 0, score) for score in (1.0, 0.5, 0.0)]
    got = guide_gauges([made[0], dataclasses.replace(made[2], from_guide=True), made[1]])
    assert got == pytest.approx(
        {
            "guide/fraction": 1 / 3,
            "guide/reward_mean": -1.0,
            "guide/accuracy_mean": 0.0,
            "guide/length_mean": 2.0,
            "policy/reward_mean": 0.5,
            "policy/accuracy_mean": 0.5,
            "policy/length_mean": 2.0,
        }
    )
    assert all(map(is_documented, got))


def test_the_guide_is_compared_with_its_engines_and_the_policy_with_its_own():
    engines_N = torch.tensor([-0.5, -1.0, -7.0, -2.0, -3.0])
    batch = RolloutBatch(
        tokens=torch.ones(5, dtype=torch.long),
        lengths=torch.tensor([2, 1, 2]),
        rewards=torch.zeros(3),
        group_ids=torch.zeros(3, dtype=torch.long),
        rollout_logprobs=engines_N,
        old_logprobs=torch.tensor([-0.5, -2.0, -1.0, -2.0, -3.0]),
        guide_logprobs=torch.tensor([-9.0, -9.0, -7.25, -9.0, -9.0]),
        from_guide=torch.tensor([False, True, False]),
    )
    assert guide_agreement(batch) == {"guide/rollout_max_abs": 0.25} and is_documented(
        "guide/rollout_max_abs"
    )
    assert (
        policy_mismatch(batch)["kl/rollout_max_abs"] == 1.0
        and policy_mismatch(batch)["mismatch/mean_abs"] == 0.25
    )
    without = dataclasses.replace(batch, from_guide=None, guide_logprobs=None)
    assert guide_agreement(without) == {} and policy_mismatch(without)["kl/rollout_max_abs"] == 6.0


def test_ages_are_those_of_the_policys_tokens():
    samples = [response("p", 3, 4), dataclasses.replace(response("p", 0, 0), from_guide=True)]
    assert staleness_metrics(samples, 5) == {
        "staleness/mean": 1.5,
        "staleness/max": 2,
        "staleness/mixed_fraction": 1.0,
    }


def test_reward_logs_are_means_and_failures_a_count():
    # the mean is of those that have the key
    logs = [{"steps": 3.0, FAILED_KEY: 0.0}, {FAILED_KEY: 1.0}]
    samples = [SimpleNamespace(score=1.0 - log[FAILED_KEY] / 4, extra_logs=log) for log in logs]
    assert reward_metrics(samples) == {
        "reward_log/steps": 3.0,
        "reward/failures": 1.0,
        "accuracy/mean": 0.5,
        "score/mean": 0.875,
    }


# ---- speed


def test_speed_of_two_ranks_by_hand():
    flops = ForwardFlops(layers=3 * 10**12, attention=10**12, head=0)
    got = throughput_gauges(
        flops, 1000, epochs=2, ranks=2, seconds={"time/train": 6.0, "time/logprob": 2.0}, peak=4.0
    )
    assert got == {
        "throughput/logprob_tokens_per_second": 500.0,
        "throughput/logprob_tflops_per_rank": 1.0,
        "throughput/logprob_mfu": 0.25,
        "throughput/train_tokens_per_second": 1000 * 2 / 6.0,
        "throughput/train_tflops_per_rank": 2.0,
        "throughput/train_mfu": 0.5,
    }
    assert all(map(is_documented, got))
    without = throughput_gauges(
        flops, 1000, 1, 2, {"time/train": 0.0, "time/logprob": 2.0}, peak=None
    )
    assert set(without) == {
        "throughput/logprob_tokens_per_second",
        "throughput/logprob_tflops_per_rank",
    }


# ---- ranks


def report(rank: int, train: float, memory: int = 1, device: str = "cpu") -> RankReport:
    return RankReport(
        rank, f"node{rank}", device, {"logprob": 1.0, "train": train, "sync": 9.0}, memory << 30
    )


def test_the_slowest_and_the_fullest_rank_are_named():
    got = rank_gauges([report(0, 2.0, 3), report(1, 5.0), report(2, 2.0)])
    assert (got["rank/slowest"], got["rank/fullest"], got["memory/rank_max_gib"]) == (1.0, 0.0, 3.0)
    assert got["rank/slowest_over_mean"] == pytest.approx(6 / 4)
    assert (got["rank/1/time_train"], got["rank/2/time_sync"], got["rank/0/memory_gib"]) == (
        5.0,
        9.0,
        3.0,
    )
    assert all(map(is_documented, got)) and "memory/device_max_gib" not in got
    shared = rank_gauges(
        [report(0, 2.0), dataclasses.replace(report(1, 2.0), device_bytes=70 << 30)]
    )
    assert shared["memory/device_max_gib"] == 70.0 and is_documented("memory/device_max_gib")


def test_padding_is_a_share_of_all_that_the_ranks_computed():
    packed = [
        dataclasses.replace(report(rank, 1.0), packed_tokens=96, padding_tokens=16 * rank)
        for rank in (0, 1, 2)
    ]
    assert rank_gauges(packed)["packs/padding_fraction"] == pytest.approx(48 / 288)
    assert (
        is_documented("packs/padding_fraction")
        and rank_gauges(packed)["packs/shared_fraction"] == 0.0
    )
    shared = [dataclasses.replace(each, repeated_tokens=80) for each in packed]
    assert rank_gauges(shared)["packs/shared_fraction"] == pytest.approx(240 / (288 - 48 + 240))
    assert is_documented("packs/shared_fraction")
    assert "packs/padding_fraction" not in rank_gauges([report(0, 1.0)]), "nothing was computed"


def test_a_step_is_measured_and_its_slowest_rank_named_once(monkeypatch, caplog):
    shape = ModelShape(
        model_type="qwen2",
        num_layers=1,
        hidden_size=1,
        ffn_hidden_size=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        vocab_size=10,
        max_positions=8,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling_factor=None,
        tied_embeddings=False,
        qkv_bias=True,
        qk_norm=False,
    )
    h100 = "NVIDIA H100 80GB HBM3"
    monkeypatch.setattr(gauges, "call_ranks", lambda group, who, method, timeout_s: group)
    batch = masked_batch(
        [torch.arange(4), torch.arange(3)], [torch.tensor([0, 1, 1]), torch.tensor([1, 1])]
    )
    step = StepGauges([], shape, RunConfig(), EventLog())
    with caplog.at_level(logging.WARNING, logger=gauges.__name__):
        for slowest in (1, 0, 1):
            step.policy = [
                report(rank, 9.0 if rank == slowest else 1.0, device=h100) for rank in (0, 1)
            ]
            got = step.collect(batch, {"time/train": 2.0, "time/logprob": 1.0})
    forward = 2 * (1 * 3 + 1 + 3) * 7 + 4 * (10 + 6) + 2 * 10 * 4
    assert got["throughput/train_tflops_per_rank"] == pytest.approx(3 * forward / 2.0 / 2 / 1e12)
    assert got["throughput/train_mfu"] == pytest.approx(
        got["throughput/train_tflops_per_rank"] / 989.4
    )
    step.policy = [
        dataclasses.replace(each, packed_tokens=6, repeated_tokens=2) for each in step.policy
    ]
    shared = step.collect(batch, {"time/train": 2.0})["throughput/train_tflops_per_rank"]
    assert shared == pytest.approx(
        3 * (forward - 2 * (1 * 3 + 1 + 3) * 7 / 4) / 2.0 / 2 / 1e12, rel=1e-2
    )
    frozen = [RankReport(0, "node0", "cpu", {"logprob": 1.0}, 1)]
    step.policy = frozen
    got = step.collect(batch, {"time/train": 2.0, "time/logprob": 1.0})
    assert not any("train" in name for name in got), "the policy did not train in this step"
    message, other = caplog.messages
    assert "policy rank 0 on" in other
    assert (
        "policy rank 1 on node1 is the slowest: 10.0 s of its own in this step, 1.7 times the mean"
        in message
    )


def test_drafts_that_do_not_pay_are_one_warning(caplog):
    watch = DraftWatch()
    for step, accepted in enumerate((1.2, 0.3, 0.29, 1.0, 0.1)):
        watch.watch(step, {"rollout/accepted": accepted}, 3)
        watch.watch(step, {}, 3)
    (message,) = caplog.messages
    assert "step 2: drafts cost more than they give: 0.29 of 3 tokens" in message
    assert "they pay from 0.30 on" in message


# ---- as Simoni et al. draw them


def four_completions(rewards: list[float], firsts: list[int]) -> RolloutBatch:
    """Of one prompt, 1 to 4 tokens long; entropies are 0.1 times the length."""
    lengths = torch.tensor([1, 2, 3, 4])
    tokens = [token for count, first in enumerate(firsts) for token in [first] + [9] * count]
    entropies = torch.cat([torch.full((count,), 0.1 * count) for count in lengths.tolist()])
    return RolloutBatch(
        tokens=torch.tensor(tokens),
        lengths=lengths,
        rewards=torch.tensor(rewards).double(),
        group_ids=torch.zeros(4, dtype=torch.long),
        old_logprobs=torch.zeros(10),
        entropies=entropies,
    )


def test_the_mean_of_means_of_entropy_counts_every_completion_the_same():
    metrics = entropy_metrics(four_completions([0, 0, 0, 1], [5] * 4))
    assert metrics["entropy/completion_mean"] == pytest.approx(0.25)
    assert metrics["entropy/mean"] == pytest.approx(0.3), "long ones count more"


def test_a_shared_beginning_is_punished_where_good_completions_are_the_longer_ones():
    nothing = SimpleNamespace(of_tokens={}, of_rows={})
    # the good completion is the longest: A = (-0.5, -0.5, -0.5, 1.5), over 1, 2, 3, 4 tokens
    found = conflict_gauges(four_completions([0, 0, 0, 1], [5] * 4), nothing)
    assert found["conflict/prefix_advantage"] == pytest.approx(-0.5 * (1 + 1 / 2 + 1 / 3) + 1.5 / 4)
    assert found["conflict/prefix_penalized"] == 1.0 and "conflict/mean" not in found
    # two beginnings: 5 with A = (-0.5, 1.5) over 2 and 4 tokens, 6 with bad ones only
    found = conflict_gauges(four_completions([0, 0, 0, 1], [6, 5, 6, 5]), nothing)
    assert found["conflict/prefix_advantage"] == pytest.approx(-0.5 / 2 + 1.5 / 4)
    assert found["conflict/prefix_penalized"] == 0.0 and all(map(is_documented, found))
    assert conflict_gauges(four_completions([1, 1, 1, 1], [5] * 4), nothing) == {}


def test_mean_conflict_is_the_number_of_tokens_in_either_span():
    batch = four_completions([0, 0, 1, 1], [5, 5, 5, 5])
    found = conflict_gauges(batch, get_algorithm("gtpo_conflict").shape(batch))
    # from the front 5, 59, 59, 59 are shared by good and bad ones; from the back nothing, 9, 9, 9
    assert found["conflict/mean"] == (1 + 2 + 3 + 3) / 4


# ---- what was shaped against what is trained


PUBLISHED = {"alpha1": 1.0, "alpha2": 0.1}


def shaped_groups(method: str = "grpo"):
    """A batch of five groups, and how the method shapes it."""
    _, rollout = make_batch(5, seed=3)
    return rollout, get_algorithm(method, **(PUBLISHED if method == "gtpo_entropy" else {})).shape(
        rollout
    )


def test_advantages_are_compared_with_the_rewards_that_completions_were_graded_with():
    groups, shaped = shaped_groups()
    rewards = groups.rewards.tolist()
    got = advantage_gauges(shaped, GROUP, rewards)
    assert got["advantage/group_rms"] == pytest.approx(math.sqrt((GROUP - 1) / GROUP), rel=1e-4)
    assert (
        got["advantage/group_mean_abs"] < 1e-7
        and 0.9 < got["advantage/reward_correlation"] <= 1 + 1e-9
    )
    other = advantage_gauges(shaped, GROUP, [*rewards[1:], rewards[0]])
    assert other["advantage/reward_correlation"] < 0.5, "rewards of other completions"
    moved = dataclasses.replace(shaped, advantages=shaped.advantages + 0.5)
    assert advantage_gauges(moved, GROUP, rewards)["advantage/group_mean_abs"] == pytest.approx(
        0.5, rel=1e-5
    )
    assert "advantage/reward_correlation" not in advantage_gauges(
        shaped, GROUP, [1.0] * len(rewards)
    )
    assert all(map(is_documented, got))


@pytest.mark.parametrize("method", ["grpo", "dapo", "gspo", "gtpo_entropy"])
def test_the_first_update_is_what_the_driver_expects_and_nothing_else(method, monkeypatch):
    monkeypatch.setattr(segments, "BLOCK_TOKENS", 7)  # several blocks
    groups, shaped = shaped_groups(method)
    old_N = groups.old_logprobs
    expected = expected_of_first_update(shaped, old_N)
    whole = shaped.algorithm.loss(old_N.double(), shaped)
    assert expected["expected/loss"] == pytest.approx(float(whole.value), abs=1e-9)

    def gauges_of(other, new_N=old_N):
        loss = other.algorithm.loss(new_N, other)
        first = {
            "first/loss": float(loss.value),
            "first/alignment": float(loss.metrics["alignment"]),
        }
        return recounted({"grad_norm": 1.0, **expected, **first})

    right = gauges_of(shaped)
    assert set(right) == {"grad_norm", "mismatch/loss", "mismatch/trained"} and all(
        map(is_documented, right)
    )
    assert max(right["mismatch/loss"], right["mismatch/trained"]) < 1e-6
    rolled = dataclasses.replace(shaped, advantages=shaped.advantages.roll(3))
    if shaped.seq_advantages is not None:
        rolled = dataclasses.replace(rolled, seq_advantages=shaped.seq_advantages.roll(1))
    assert gauges_of(rolled)["mismatch/trained"] > 1e-3, "advantages of other tokens"
    halved = dataclasses.replace(shaped, weights=shaped.weights * 0.5)
    assert (
        method == "gspo"
        or gauges_of(halved)["mismatch/loss"] > 1e-6
        or abs(float(whole.value)) < 1e-6
    )
    assert gauges_of(shaped, old_N.roll(1))["mismatch/trained"] > 1e-3, "log-probs of other tokens"
    assert recounted({"first/loss": 1.0, "lr": 2.0}) == {"lr": 2.0}, "nothing was expected"


class Letters:
    """A tokenizer of one token for each letter, without an end of text."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [len(letter) for letter in text]}


def test_prompts_are_compared_with_their_tokens():
    made = [response("ab", 1, 1) for _ in range(4)]
    made = [dataclasses.replace(r, tokens_S=np.array([1, 1, 9, 4], np.int32)) for r in made]
    assert text_metrics(["ab", "cd"], made, Letters(), {4}) == {
        "prompts/length_mean": 2.0,
        "prompts/changed": 0.0,
        "response/ended": 1.0,
        "response/distinct": 0.5,
    }
    made[2] = dataclasses.replace(made[2], tokens_S=np.array([1, 7, 9, 5], np.int32))
    got = text_metrics(["ab", "cd"], made, Letters(), {4})
    assert (got["prompts/changed"], got["response/ended"], got["response/distinct"]) == (
        0.5,
        0.75,
        0.75,
    )
    cut = [dataclasses.replace(each, truncated=True) for each in made]
    assert "response/ended" not in text_metrics(["ab", "cd"], cut, Letters(), {4})


def test_movement_of_all_ranks_is_one_number():
    more = {"gradient_square": 2.0, "adam": (0.9, 0.95, 1e-8, 0.0)}
    moved = [
        Moved(float(rank), 4.0, entries=2, parameters=4, still=rank, adam_steps=5, **more)
        for rank in (1, 3)
    ]
    reports = [
        RankReport(rank, "node", "cpu", {}, 1, moved=each) for rank, each in enumerate(moved)
    ]
    got = rank_gauges(reports)
    assert got["update/rms"] == 1.0 and got["update/second_moment"] == pytest.approx(math.sqrt(2.0))
    assert (got["update/still"], got["update/adam_steps"], got["update/grad_norm"]) == (
        0.5,
        5.0,
        2.0,
    )
    assert "update/rms" not in rank_gauges([RankReport(0, "node", "cpu", {}, 1)])


def test_entropies_are_compared_with_the_tokens_they_are_of(monkeypatch):
    monkeypatch.setattr(segments, "BLOCK_TOKENS", 5)
    _, rollout = make_batch(5, seed=3)
    entropies_N = -rollout.old_logprobs + torch.rand_like(rollout.old_logprobs)
    name = "entropy/surprise_correlation"
    own = entropy_metrics(dataclasses.replace(rollout, entropies=entropies_N))[name]
    pair = torch.stack([entropies_N, -rollout.old_logprobs])
    assert own == pytest.approx(float(torch.corrcoef(pair)[0, 1]), abs=1e-6)
    other = entropy_metrics(dataclasses.replace(rollout, entropies=entropies_N.roll(1)))[
        "entropy/surprise_correlation"
    ]
    assert own > 0.3 > abs(other)
    flat = entropy_metrics(dataclasses.replace(rollout, entropies=torch.ones_like(entropies_N)))
    assert flat["entropy/surprise_correlation"] == 0.0


def test_numbers_of_the_first_update_are_those_of_its_rows():
    _, rollout = make_batch(5, seed=3)
    entropies_N = torch.rand(len(rollout.tokens))
    whole = dataclasses.replace(rollout, entropies=entropies_N)
    last = rollout.segments.span(slice(GROUP, None))
    moved = entropies_N.clone()
    moved[last] += 5.0  # of later updates
    part = dataclasses.replace(rollout, entropies=moved).rows(slice(0, GROUP))
    assert entropy_metrics(part) == entropy_metrics(whole.rows(slice(0, GROUP)))
    assert part.lengths.tolist() == rollout.lengths[:GROUP].tolist()
    assert torch.equal(part.tokens, rollout.tokens[: last.start])


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        (((0.0, 0.4), (0.4, 0.4)), "(0 to 0.4), but a completion is a success only above algo."),
        (((0.6, 0.9), (0.0, 0.0)), "(0.6 to 0.9), but a completion is a success only above algo."),
        (((0.0, 0.0), (0.4, 0.4)), "no completion of a group is better than another"),
        (((0.0, 0.9), (0.4, 0.4)), "no completion of a group is better than another"),
    ],
)
def test_a_threshold_that_leaves_no_group_with_both_classes_is_named(rewards, said):
    groups = [
        [dataclasses.replace(response("text", 0, 0), reward=reward) for reward in group]
        for group in rewards
    ]
    why = why_no_gradient(groups, get_algorithm("entropy_advantage"), "entropy_advantage")
    assert said in why and ("entropy_advantage.success_threshold 0.5" in why) == ("success" in said)
