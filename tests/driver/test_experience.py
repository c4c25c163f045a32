from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_ext.algorithms import RolloutBatch, get_algorithm, kl
from openrlhf_ext.algorithms.kl import KLCoefficient, KLPenalty
from openrlhf_ext.algorithms.methods.grpo import Grpo, GrpoOptions
from openrlhf_ext.checkpoints.files import plain_copy
from openrlhf_ext.driver import scoring
from openrlhf_ext.driver.description import recounted
from openrlhf_ext.driver.experience import Described, ExperienceMaker, training_shards
from openrlhf_ext.driver.rollouts import Group, Prompt
from openrlhf_ext.driver.scoring import Scorer, Scoring, responses_of, rollout_batch
from openrlhf_ext.megatron.step.batch import SequenceBatch, sequence_batch
from openrlhf_ext.megatron.step.dealing import deal, group_chunks
from openrlhf_ext.options.sections import Actor
from openrlhf_ext.ranks.movement import check_gauges
from openrlhf_ext.reporting import is_documented
from tests.driver.simulated import response
from tests.ranks.helpers import LocalGroup, get

GROUP = 4


def make_batch(groups: int, seed: int = 0) -> tuple[SequenceBatch, RolloutBatch]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (groups * GROUP,), generator=generator).tolist()
    sequences = [
        torch.randint(2, 50, (3 + length,), generator=generator).numpy() for length in lengths
    ]
    batch = sequence_batch(sequences, [[(3, 3 + length)] for length in lengths])
    count = batch.responses.tokens
    rollout = RolloutBatch(
        tokens=batch.targets_N,
        lengths=batch.counts_B,
        rewards=torch.randint(0, 2, (len(batch),), generator=generator).double(),
        group_ids=torch.arange(len(batch)) // GROUP,
        old_logprobs=-torch.rand(count, generator=generator, dtype=torch.float64),
        entropies=torch.rand(count, generator=generator, dtype=torch.float64),
        group_size=GROUP,
    )
    return batch, rollout


def test_steps_are_of_whole_groups():
    assert list(group_chunks(20, GROUP, 9)) == [slice(0, 8), slice(8, 16), slice(16, 20)]
    assert list(group_chunks(8, GROUP, 1)) == [slice(0, 4), slice(4, 8)]


@settings(max_examples=30, deadline=None)
@given(
    groups=st.integers(1, 7),
    ranks=st.integers(1, 5),
    per_step=st.integers(1, 4),
    name=st.sampled_from(["grpo", "dapo", "gtpo_entropy"]),
)
def test_losses_of_all_shards_add_up_to_the_loss_of_each_mini_batch(groups, ranks, per_step, name):
    options = {"alpha1": 1.0, "alpha2": 0.1} if name == "gtpo_entropy" else {}
    algorithm = get_algorithm(name, **options)
    batch, rollout = make_batch(groups)
    shaped = algorithm.shape(rollout)
    new = rollout.old_logprobs + 0.1 * torch.randn(rollout.old_logprobs.shape, dtype=torch.float64)
    chunks = list(group_chunks(len(batch), GROUP, per_step * GROUP))
    deals = deal(batch, chunks, ranks)
    shards = pickle.loads(pickle.dumps(training_shards(shaped, chunks, deals)))
    assert all(len(shard.mini_batches) == len(chunks) for shard in shards), (
        "every rank takes part in every step"
    )
    for step, chunk in enumerate(chunks):
        assert sorted(row for own in deals for row in own.steps[step]) == list(
            range(chunk.start, chunk.stop)
        )
        whole = algorithm.loss(batch.responses.take(new, chunk), shaped.mini_batch(chunk)).value
        total = 0.0
        for own, shard in zip(deals, shards, strict=True):
            part = shard.mini_batches[step]
            assert torch.equal(
                part.old_logprobs, batch.responses.take(rollout.old_logprobs, own.steps[step])
            )
            total += (
                algorithm.loss(batch.responses.take(new, own.steps[step]), part).value
                if len(part)
                else 0.0
            )
        assert torch.allclose(total, whole, atol=1e-12)


def group(text: str, count: int) -> SimpleNamespace:
    return SimpleNamespace(
        prompt=SimpleNamespace(text=text), responses=[f"{text}{i}" for i in range(count)]
    )


def ordered(texts: list[str], per_step: int, seed: int = 1, batches: int = 0) -> list[str]:
    scoring = Scoring(None, group_size=2, mini_batch_size=2 * per_step, seed=seed)
    groups = scoring.ordered([group(text, 2) for text in texts], batches)
    return [each.prompt.text for each in groups]


def test_groups_are_sorted_by_prompt_where_there_is_one_update():
    assert (
        ordered(["b", "c", "a"], per_step=3)
        == ordered(["c", "b", "a"], per_step=4)
        == ["a", "b", "c"]
    )
    assert responses_of([group("b", 2), group("a", 2)], 2) == ["b0", "b1", "a0", "a1"]


def test_mini_batches_are_random_parts_of_the_batch():
    """The same whichever engine was faster; others in the next batch, and with another seed."""
    texts = [f"{'Code' if i % 2 else 'Maths'} {i:02}" for i in range(32)]
    order = ordered(texts, per_step=8)
    assert sorted(order) == sorted(texts) and ordered(texts[::-1], per_step=8) == order
    assert (
        len({tuple(ordered(texts, 8, seed, batches)) for seed in (1, 2) for batches in (0, 1, 2)})
        == 6
    )
    kinds = [{text.split()[0] for text in order[start : start + 8]} for start in range(0, 32, 8)]
    assert all(found == {"Code", "Maths"} for found in kinds)


def test_broken_groups_are_refused():
    with pytest.raises(
        ValueError, match="a group of 1 completions, rollout.n_samples_per_prompt is 2: 'b'"
    ):
        responses_of([group("a", 2), group("b", 1)], 2)


# ---- from groups to shards


def maker(kl: KLCoefficient, replicas: int = 2) -> ExperienceMaker:
    """On a policy and a reference that read their log-probs off the tokens."""

    def scored(scale: float) -> Callable[[SequenceBatch], np.ndarray]:
        return lambda batch: -scale * batch.targets_N.float().numpy()

    policy = LocalGroup(
        replicas, 1, forward=lambda batch: [scored(0.1)(batch), scored(-0.2)(batch)]
    )
    reference = LocalGroup(1, 1, forward=scored(0.2))
    scoring = Scoring(
        policy, group_size=2, mini_batch_size=2, reference=Scorer(reference, "forward")
    )
    algorithm = get_algorithm("grpo", mask_truncated=True, kl={"coef": 0.5, "place": "loss"})
    return ExperienceMaker(scoring, algorithm, kl=kl)


def described(maker: ExperienceMaker, groups: list[Group], version: int = 4) -> Described:
    """A batch after its step; its completions are shown."""
    return maker.described(maker.make(groups, version, get, shown=0), get)


def graded(number: int, *, truncated: tuple[bool, bool] = (False, False)) -> Group:
    right, wrong = (response(f"{number}" * (number + 1), 3, 3, score) for score in (1.0, 0.0))
    cut = [
        dataclasses.replace(made, truncated=at)
        for made, at in zip((right, wrong), truncated, strict=True)
    ]
    return Group(Prompt(number, f"{number}", "label"), cut)


def test_groups_become_shards_with_rewards_truncation_and_the_coefficient_of_the_step() -> None:
    made = maker(KLCoefficient(0.5, target=0.01, horizon=4))
    made.kl.update(1.0, 4)
    groups = [graded(0, truncated=(False, True)), graded(1)]
    shards = made.make(groups, version=4, get=get).shards
    made.batches = 0
    experience = described(made, groups)
    assert (
        experience.metrics["response/truncated_rate"] == 0.25
        and experience.metrics["staleness/max"] == 1
    )
    assert experience.metrics["accuracy/mean"] == 0.5 and experience.metrics["reward/mean"] == 0.0
    assert experience.metrics["kl/coef"] == pytest.approx(
        0.5 * 1.2
    ) and made.kl.value == pytest.approx(0.5 * 1.44)
    samples = sorted(experience.samples, key=itemgetter("group"))
    assert [sample["truncated"] for sample in samples] == [False, True, False, False]
    carries_loss = [sample["loss_mask"] for sample in samples]
    assert carries_loss == [[1, 1], [0, 0], [1, 1], [1, 1]], "what was cut off teaches nothing"
    losses = [mini for shard in shards for mini in shard.mini_batches if len(mini)]
    assert losses and {mini.algorithm.kl.coef for mini in losses} == {0.5 * 1.2}, (
        "as it was steered to"
    )
    assert [shard.seed for shard in shards] == [1, 1]


def test_a_reward_that_changed_behind_its_receipt_is_seen(monkeypatch, caplog) -> None:
    """One of many rows hardly moves a correlation."""
    made = maker(KLCoefficient(0.5))
    groups = [graded(number) for number in range(8)]
    assert described(made, groups).metrics["mismatch/rewards"] == 0.0

    def spoiled(*arguments: Any) -> RolloutBatch:
        rollout = rollout_batch(*arguments)
        return dataclasses.replace(
            rollout, rewards=torch.cat([rollout.rewards[:-1], rollout.rewards[-1:] + 1e-6])
        )

    monkeypatch.setattr(scoring, "rollout_batch", spoiled)
    found = described(made, groups).metrics
    assert found["mismatch/rewards"] == pytest.approx(1e-6) and is_documented("mismatch/rewards")
    check_gauges(1, found, Actor())
    assert caplog.messages[-1].startswith("step 1: mismatch/rewards is 1e-06: not possible")


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("exchanged", [False, True])
def test_an_estimator_that_driver_and_ranks_have_wrong_alike_is_seen(
    monkeypatch, exchanged, cut
) -> None:
    made = maker(KLCoefficient(0.5), replicas=1)
    made.scoring.mini_batch_size = 4
    if exchanged:
        monkeypatch.setitem(kl.KL_ESTIMATORS, "k3", lambda new_N, ref_N: kl.kl_k3(ref_N, new_N))
    experience = made.make([graded(0, truncated=(False, cut)), graded(1)], 4, get)
    found = made.described(experience, get)
    ((mini,),) = (shard.mini_batches for shard in experience.shards)
    loss = mini.algorithm.loss(mini.old_logprobs, mini)
    first = {"first/loss": float(loss.value), "first/ref_kl": float(loss.metrics["ref_kl"])}
    gauges = recounted(found.metrics | first)
    assert is_documented("mismatch/reference") and gauges["mismatch/loss"] < 1e-6
    assert (gauges["mismatch/reference"] > 1e-3) == exchanged
    assert exchanged or gauges["mismatch/reference"] < 1e-6


@pytest.mark.parametrize("source", ["update", "engine"])
def test_without_a_pass_of_the_policy_the_training_pass_says_the_same_under_the_same_names(
    source: str,
) -> None:
    """What the run is told, and the next KL coefficient, are as with a pass; the loss has no old
    log-probs, or those of the engines."""
    with_pass, without = (maker(KLCoefficient(0.5, target=0.01, horizon=4)) for _ in range(2))
    without.scoring.source = source
    for each in (with_pass, without):
        each.scoring.mini_batch_size = 2 * GROUP  # one update, which sees all
    groups = [graded(0), graded(1)]
    expected = described(with_pass, groups)
    made = without.make(groups, version=4, get=get, shown=0)
    policy = without.scoring.policy
    assert made.scored.old is None
    own = {mini.old_logprobs is not None for shard in made.shards for mini in shard.mini_batches}
    assert own == {source == "engine"} and policy.calls == []
    forward = policy.methods["forward"]
    policy.answers["seen_logprobs"] = [forward(shard.sequences) for shard in made.shards]
    after = without.described(made, get)
    # ratios are to the engines' log-probs: another loss
    times = {"time/logprob", "time/shape", *(["expected/loss"] if source == "engine" else [])}
    found, wanted = (
        {n: v for n, v in it.metrics.items() if n not in times} for it in (after, expected)
    )
    assert found == pytest.approx(wanted) and "entropy/mean" in found
    assert after.samples == expected.samples and torch.equal(
        after.old.logprobs_N, expected.old.logprobs_N
    )
    assert without.kl.value == with_pass.kl.value != 0.5
    assert all("updates" not in sample for sample in after.samples)

    without.scoring.mini_batch_size = 2  # the second group's update computes its log-probs
    made = without.make(groups, version=4, get=get, shown=0)
    policy.answers["seen_logprobs"] = [forward(shard.sequences) for shard in made.shards]
    updates = {
        sample["prompt"]: sample.get("updates") for sample in without.described(made, get).samples
    }
    rows = [group.prompt.text for group in made.scored.groups]
    assert updates == {rows[0]: None, rows[1]: 1}


def test_shown_completions_hold_the_label_and_what_the_environment_wrote() -> None:
    groups = [graded(0), graded(1)]
    first = groups[0].responses[0]
    turns = {
        "tokens_S": np.array([1, 2, 5, 8, 9, 6, 7], np.int32),
        "actions": ((2, 3), (5, 6)),
        "versions": (),
    }
    groups[0].responses[0] = dataclasses.replace(first, **turns)
    groups[1] = dataclasses.replace(groups[1], prompt=Prompt(1, "1", {"answer": ["x", 2]}))
    samples = described(maker(KLCoefficient(0.5)), groups, version=3).samples
    two, plain, *labeled = sorted(samples, key=itemgetter("group"))
    assert two["rollout_logprobs"] == [-0.5, 0, 0, -1.0, 0], "the engine's own"
    assert (
        two["token_ids"] == [5, 8, 9, 6, 7]
        and two["environment"] == [0, 1, 1, 0, 1]
        and two["label"] == "label"
    )
    assert two["logprobs"] == pytest.approx([-0.5, 0, 0, -0.6, 0]) and two["loss_mask"] == [
        1,
        0,
        0,
        1,
        0,
    ]
    assert two["entropies"] == pytest.approx([1.0, 0, 0, 1.2, 0]) and two["advantages"][1:3] == [
        0,
        0,
    ]
    assert "environment" not in plain and labeled[0]["label"] == {"answer": ["x", 2]}


def test_a_reward_model_grades_completions_that_have_no_grade() -> None:
    """The grade is of the whole sequence, and everything that reads a reward gets it; the group's
    does not change."""
    made = maker(KLCoefficient(0.5))
    # one token was added
    ends = LocalGroup(2, 1, forward=lambda batch: batch.lengths_B.float().numpy() - 4)
    made.scoring.reward = Scorer(ends, "forward")
    groups = [
        Group(
            group.prompt,
            [dataclasses.replace(one, reward=None, score=None) for one in group.responses],
        )
        for group in (graded(1), graded(0))
    ]
    longer = groups[0].responses[1]
    groups[0].responses[1] = dataclasses.replace(
        longer, tokens_S=np.append(longer.tokens_S, np.int32(7)), versions=()
    )
    experience = described(made, groups)
    lengths = [[len(one.tokens_S) for one in group.responses] for group in experience.groups]
    assert [[one.reward for one in group.responses] for group in experience.groups] == [
        [length - 3.0 for length in group] for group in lengths
    ]
    assert [group.prompt.number for group in experience.groups] == [0, 1]
    rewards = [one.reward for group in experience.groups for one in group.responses]
    assert [sample["reward"] for sample in experience.samples] == [
        sample["score"] for sample in experience.samples
    ]
    assert (
        sorted(sample["reward"] for sample in experience.samples) == sorted(rewards)
        and len(set(rewards)) > 1
    )
    assert (
        experience.metrics["reward/mean"]
        == experience.metrics["score/mean"]
        == pytest.approx(np.mean(rewards))
    )
    assert groups[0].responses[0].reward is None
    with pytest.raises(ValueError, match="a completion is not graded"):
        maker(KLCoefficient(0.5)).make(groups, version=4, get=get)


def test_a_resumed_run_goes_on_with_its_count_of_batches_and_its_coefficient() -> None:
    before, resumed = (maker(KLCoefficient(0.5, target=0.01, horizon=4)) for _ in range(2))
    described(before, [graded(0), graded(1)], version=3)
    resumed.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert resumed.state_dict() == before.state_dict() != maker(KLCoefficient(0.5)).state_dict()
    makers, groups = (before, resumed), [graded(2), graded(3)]
    one, other = (it.make(groups, version=4, get=get) for it in makers)
    assert one.shards[0].seed == other.shards[0].seed == 2
    found = [it.described(made, get) for it, made in zip(makers, (one, other), strict=True)]
    assert [each.metrics["kl/coef"] for each in found] == [pytest.approx(0.6)] * 2


class RunningMean(Grpo):
    """REINFORCE with a running mean as its baseline."""

    mean_1: torch.Tensor = torch.zeros(1, dtype=torch.float64)

    def advantages(self, inputs):
        rewards_B = inputs.batch.rewards
        self.mean_1 = 0.7 * self.mean_1 + 0.3 * (rewards_B + inputs.groups.lengths_B).mean()
        return {
            "advantages": inputs.segments.spread(
                (rewards_B - self.mean_1).to(inputs.batch.float_dtype)
            )
        }

    def state_dict(self):
        return {"mean": self.mean_1}

    def load_state_dict(self, state):
        self.mean_1 = state["mean"]


@pytest.mark.parametrize("target", [None, 0.01])
def test_what_a_method_keeps_lasts_over_batches_and_a_resume(target, caplog) -> None:
    """With a coefficient of the KL penalty of its own for every batch, and without."""

    def with_mean() -> ExperienceMaker:
        made = maker(KLCoefficient(0.5, target=target, horizon=4))
        made.algorithm = RunningMean(GrpoOptions(), kl=KLPenalty(coef=0.5, place="loss"))
        return made

    before, resumed = with_mean(), with_mean()
    before.make([graded(0), graded(1)], version=3, get=get)
    before.make([graded(2), graded(3)], version=3, get=get)
    resumed.load_state_dict(plain_copy(before.state_dict()))
    assert before.algorithm.mean_1.item() == pytest.approx(0.7 * 0.6 + 0.6) and not caplog.records
    one, other, anew = (
        it.make([graded(4), graded(5)], 4, get) for it in (before, resumed, with_mean())
    )
    advantages = [made.shards[0].mini_batches[0].advantages for made in (one, other, anew)]
    assert torch.equal(*advantages[:2]) and not torch.equal(*advantages[1:])
    state = before.state_dict()
    del state["algorithm"]
    with_mean().load_state_dict(state)
    assert "the checkpoint holds no state of grpo, which begins anew" in caplog.text
