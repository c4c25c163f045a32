from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_ext.algorithms import RolloutBatch, get_algorithm
from openrlhf_ext.compat import Experience
from openrlhf_ext.controller.experience import in_group_order, reward_logs
from openrlhf_ext.controller.shards import group_chunks, mini_batch_shards
from openrlhf_ext.megatron.batch import SequenceBatch, sequence_batch

GROUP = 4


def make_batch(groups: int, seed: int = 0) -> tuple[SequenceBatch, RolloutBatch]:
    generator = torch.Generator().manual_seed(seed)
    sequences, masks = [], []
    for length in torch.randint(1, 9, (groups * GROUP,), generator=generator).tolist():
        sequences.append(torch.randint(2, 50, (3 + length,), generator=generator))
        masks.append(torch.tensor([0, 0] + [1] * length))
    batch = sequence_batch(sequences, masks)
    rollout = RolloutBatch(
        tokens=batch.targets_BT,
        mask=batch.mask_BT,
        rewards=torch.randint(0, 2, (len(batch),), generator=generator).double(),
        group_ids=torch.arange(len(batch)) // GROUP,
        old_logprobs=-torch.rand(batch.mask_BT.shape, generator=generator, dtype=torch.float64),
        entropies=torch.rand(batch.mask_BT.shape, generator=generator, dtype=torch.float64),
        group_size=GROUP,
    )
    return batch, rollout


@settings(max_examples=30, deadline=None)
@given(
    groups=st.integers(1, 7), ranks=st.integers(1, 5), per_step=st.integers(1, 4),
    name=st.sampled_from(["grpo", "dapo", "gtpo_entropy"]),
)  # fmt: skip
def test_losses_of_all_shards_add_up_to_the_loss_of_each_mini_batch(groups, ranks, per_step, name):
    options = {"alpha1": 1.0, "alpha2": 0.1} if name == "gtpo_entropy" else {}
    algorithm = get_algorithm(name, **options)
    batch, rollout = make_batch(groups)
    shaped = algorithm.shape(rollout)
    new = rollout.old_logprobs + 0.1 * torch.randn(rollout.old_logprobs.shape, dtype=torch.float64)
    shards = pickle.loads(pickle.dumps(mini_batch_shards(batch, shaped, GROUP, per_step * GROUP, ranks)))
    chunks = list(group_chunks(len(batch), GROUP, per_step * GROUP))
    assert all(len(rank) == len(chunks) for rank in shards), "every rank takes part in every optimizer step"
    for step, rows in enumerate(chunks):
        whole = algorithm.loss(new[rows], shaped.mini_batch(rows)).value
        parts = [rank[step] for rank in shards]
        assert sorted(row for part in parts for row in part.rows) == rows
        total = sum(algorithm.loss(new[p.rows], p.shaped).value for p in parts if p.rows)
        assert torch.allclose(total, whole, atol=1e-12)
        for part in parts:
            assert torch.equal(part.batch.targets_BT, batch.targets_BT[part.rows])


def sample(prompt: str, **info: float) -> Experience:
    return Experience(prompts=[prompt], info={k: torch.tensor([v]) for k, v in info.items()})


def test_groups_are_sorted_by_prompt_and_kept_together():
    samples = [sample(p, i=i) for i, p in enumerate("bbaa")]
    assert [int(s.info["i"]) for s in in_group_order(samples, 2)] == [2, 3, 0, 1]


@pytest.mark.parametrize(("prompts", "message"), [("aab", "not whole groups"), ("abab", "mixes 2 prompts")])
def test_broken_groups_are_refused(prompts, message):
    with pytest.raises(ValueError, match=message):
        in_group_order([sample(p) for p in prompts], 2)


def test_reward_logs_are_means_and_failures_a_count():
    samples = [sample("a", reward=1.0, score=1.0, steps=3.0, reward_failed=f) for f in (0.0, 1.0)]
    assert reward_logs(samples) == {"reward_log/steps": 3.0, "reward/failures": 1.0}
