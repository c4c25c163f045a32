"""Token choices of later updates follow the current policy, over all ranks' completions of the mini-batch."""

from __future__ import annotations

import pytest
import torch

from openrlhf_ext.algorithms import get_algorithm
from openrlhf_ext.controller.shards import mini_batch_shards
from openrlhf_ext.megatron.layout import ParallelLayout
from tests.controller.test_shards import GROUP, make_batch
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
    batch, rollout_batch, new_BT = rollout
    parts = {}
    for name, options in OPTIONS.items():
        shaped = get_algorithm(name, **options).shape(rollout_batch)
        replicas = mini_batch_shards(batch, shaped, GROUP, 3 * GROUP, LAYOUT.data_parallel_size, seed=7)
        parts[name] = [[(m.rows, m.batch, m.shaped, m.preparation) for m in minis] for minis in replicas]
    return launch(
        "tests.controller.preparation_worker", "shares", LAYOUT.world_size,
        layout=LAYOUT, by_replica=parts, new_BT=new_BT, updates=UPDATES,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_all_ranks_choose_as_one_process_would(ranks, rollout, name) -> None:
    batch, rollout_batch, new_BT = rollout
    algorithm = get_algorithm(name, **OPTIONS[name])
    shaped = algorithm.shape(rollout_batch)
    chosen = []
    for update in range(UPDATES):
        parts = [rank[name][update] for rank in ranks]
        rows = sorted({row for part_rows, _ in parts for row in part_rows})
        current_BT = rollout_batch.old_logprobs if update == 0 else new_BT
        whole = algorithm.prepare(
            current_BT[rows], shaped.mini_batch(rows), seed=7 if update == 0 else (7 << 20) + update
        )
        chosen.append(whole.selection)
        for part_rows, share in parts:
            assert torch.equal(share.selection, whole.selection[[rows.index(row) for row in part_rows]])
        losses = [
            algorithm.loss(new_BT[part_rows], share).value for part_rows, share in parts[:: LAYOUT.tensor_parallel_size]
        ]
        assert torch.allclose(sum(losses), algorithm.loss(new_BT[rows], whole).value, atol=1e-12)
    # the second pass over the first mini-batch: by then the policy has moved
    assert not torch.equal(chosen[0], chosen[2])
    assert all(selection.any() for selection in chosen)


def test_other_methods_and_the_first_update_need_no_forward_pass(ranks) -> None:
    assert {rank["grpo forward passes"] for rank in ranks} == {0}
    assert {rank["clip_cov forward passes"] for rank in ranks} == {UPDATES - 1}


def test_random_choices_differ_from_update_to_update(ranks) -> None:
    """Updates 1 and 3 see the same mini-batch and policy: only the seed can make the difference."""
    assert any(not torch.equal(rank["clip_cov"][1][1].selection, rank["clip_cov"][3][1].selection) for rank in ranks)
    assert all(torch.equal(rank["kl_cov"][1][1].selection, rank["kl_cov"][3][1].selection) for rank in ranks)
