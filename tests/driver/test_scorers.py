"""Rows that were dealt to replicas come back in their places."""

from __future__ import annotations

import pytest
import torch

from openrlhf_ext.driver.scorers import Scorer
from tests.megatron.test_policy import make_batch
from tests.ranks.helpers import LocalGroup, get


@pytest.mark.parametrize(("replicas", "ranks"), [(1, 1), (2, 3), (9, 1)])
def test_scores_are_those_of_their_rows(replicas, ranks):
    batch, _ = make_batch(61)  # seven rows: with nine replicas two have none

    def token_ids(batch):
        return batch.targets_N.float().numpy()

    group = LocalGroup(replicas, ranks, forward=token_ids)
    scores_N = Scorer(group, "forward", replicas).start(batch).result(get)
    assert torch.equal(scores_N, batch.targets_N.float())
    assert scores_N.dtype == torch.float32 and batch.targets_N.any()
