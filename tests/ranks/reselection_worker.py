"""Ranks that prepare mini-batches again with a policy that has moved, for test_policy.py."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist

from openrlhf_ext.algorithms import LossBatch
from openrlhf_ext.algorithms.segments import Segments
from openrlhf_ext.megatron.distributed import initialize_distributed
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.step.batch import SequenceBatch
from openrlhf_ext.ranks.policy import reselected
from tests.patience import PATIENCE_S

# a replica's part of a mini-batch: rows of the rollout batch, sequences, what was prepared for them
Part = tuple[list[int], SequenceBatch, LossBatch]


class MovedPolicy:
    """Stands for a policy whose log-probs of ``rows`` are now those of ``new_N``; copies differ in
    the last bit."""

    device = torch.device("cpu")

    def __init__(self, layout: ParallelLayout, new_N: torch.Tensor, segments: Segments) -> None:
        self.layout = layout
        self.new_N, self.segments, self.rows, self.calls = new_N, segments, [], 0

    def logprobs(self, batch: SequenceBatch) -> SimpleNamespace:
        self.calls += 1
        assert len(batch) == len(self.rows)
        copy = dist.get_rank() % self.layout.model_parallel_size
        return SimpleNamespace(
            logprobs_N=self.segments.take(self.new_N, self.rows) * (1.0 + copy * 2.0**-52)
        )


def parts_of_updates(
    layout: ParallelLayout,
    by_replica: dict[str, list[list[Part]]],
    new_N: torch.Tensor,
    segments: Segments,
    updates: int,
) -> dict[str, list]:
    """For each method: this rank's (rows, part) of every update, and how often its policy ran
    forward."""
    initialize_distributed(layout, PATIENCE_S, 1234)
    replica = dist.get_rank() // layout.model_parallel_size
    out = {}
    for name, replicas in by_replica.items():
        policy, parts = MovedPolicy(layout, new_N, segments), replicas[replica]
        out[name] = []
        for update in range(updates):
            policy.rows, batch, shaped = parts[update % len(parts)]
            out[name].append((policy.rows, reselected(policy, batch, shaped, 7, update)))
        out[f"{name} forward passes"] = policy.calls
    return out
