"""Token choices of later updates follow the current policy, over all ranks' completions of the
mini-batch."""

from __future__ import annotations

import pytest
import torch

from openrlhf_ext.algorithms import get_algorithm
from openrlhf_ext.driver.experience import training_shards
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.step.dealing import deal, group_chunks
from tests.driver.test_experience import GROUP, make_batch
from tests.launch import launch

LAYOUT = ParallelLayout(4, tensor_parallel_size=2)
OPTIONS = {
    "clip_cov": {"cov_lb": -10.0, "cov_ub": 10.0, "cov_ratio": 0.2},
    "kl_cov": {"cov_ratio": 0.2},
    "grpo": {},
}
UPDATES = 4  # two mini-batches, twice


@pytest.fixture(scope="module")
def rollout():
    batch, rollout = make_batch(5, seed=3)
    generator = torch.Generator().manual_seed(9)
    noise = torch.randn(rollout.old_logprobs.shape, generator=generator, dtype=torch.float64)
    return batch, rollout, rollout.old_logprobs + 0.3 * noise


@pytest.fixture(scope="module")
def ranks(rollout) -> list[dict]:
    batch, rollout_batch, new_N = rollout
    chunks = list(group_chunks(len(batch), GROUP, 3 * GROUP))
    deals, parts = deal(batch, chunks, LAYOUT.data_parallel_size), {}
    for name, options in OPTIONS.items():
        shaped = get_algorithm(name, **options).shape(rollout_batch)
        shards = training_shards(shaped, chunks, deals, seed=7)
        parts[name] = [
            [
                (rows, batch.select(rows), part)
                for rows, part in zip(own.steps, shard.mini_batches, strict=True)
            ]
            for own, shard in zip(deals, shards, strict=True)
        ]
    return launch(
        "tests.ranks.reselection_worker",
        "parts_of_updates",
        LAYOUT.world_size,
        layout=LAYOUT,
        by_replica=parts,
        new_N=new_N,
        segments=batch.responses,
        updates=UPDATES,
    )


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_all_ranks_choose_as_one_process_would(ranks, rollout, name) -> None:
    batch, rollout_batch, new_N = rollout
    algorithm = get_algorithm(name, **OPTIONS[name])
    shaped = algorithm.shape(rollout_batch)
    chosen = []
    for update in range(UPDATES):
        parts = [rank[name][update] for rank in ranks]
        rows = sorted({row for part_rows, _ in parts for row in part_rows})
        current_N = batch.responses.take(rollout_batch.old_logprobs if update == 0 else new_N, rows)
        whole = algorithm.prepare(
            current_N, shaped.mini_batch(rows), seed=7 if update == 0 else (7 << 20) + update
        )
        chosen.append(whole.selection)
        for part_rows, part in parts:
            own = whole.segments.take(whole.selection, [rows.index(row) for row in part_rows])
            assert torch.equal(part.selection, own)
        losses = [
            algorithm.loss(batch.responses.take(new_N, part_rows), part).value
            for part_rows, part in parts[:: LAYOUT.tensor_parallel_size]
        ]
        wanted = algorithm.loss(batch.responses.take(new_N, rows), whole).value
        assert torch.allclose(sum(losses), wanted, atol=1e-12)
    # the second pass over the first mini-batch: by then the policy has moved
    assert not torch.equal(chosen[0], chosen[2])
    assert all(selection.any() for selection in chosen)


def test_other_methods_and_the_first_update_need_no_forward_pass(ranks) -> None:
    assert {rank["grpo forward passes"] for rank in ranks} == {0}
    assert {rank["clip_cov forward passes"] for rank in ranks} == {UPDATES - 1}


def test_random_choices_differ_from_update_to_update(ranks) -> None:
    """Updates 1 and 3 see the same mini-batch and policy: only the seed can make the difference."""
    assert any(
        not torch.equal(rank["clip_cov"][1][1].selection, rank["clip_cov"][3][1].selection)
        for rank in ranks
    )
    assert all(
        torch.equal(rank["kl_cov"][1][1].selection, rank["kl_cov"][3][1].selection)
        for rank in ranks
    )
