"""What ranks of ``test_gradients`` run: exact policies in layouts, and faults in one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from openrlhf_ext.exact.cpu import CpuOperations
from openrlhf_ext.megatron.distributed import initialize_distributed
from openrlhf_ext.megatron.layers.exact import ExactLayers
from openrlhf_ext.megatron.policy import MegatronPolicy
from openrlhf_ext.megatron.step.batch import LogprobEntropy, SequenceBatch
from tests.megatron.parity import WeightedLogprob, deal, settings
from tests.patience import PATIENCE_S

POSITIONS = 512


def policy_of(case: dict[str, Any], world_size: int) -> MegatronPolicy:
    """``case``: keys of ``parity.settings``, and ``plain``."""
    own = replace(settings(case, world_size), max_len=POSITIONS)
    exact = () if case.get("plain") else (ExactLayers(POSITIONS),)
    return MegatronPolicy(replace(own, converters=exact))


@contextmanager
def joined(case: dict[str, Any], world_size: int) -> Iterator[MegatronPolicy]:
    initialize_distributed(settings(case, world_size).layout, PATIENCE_S, 1234)
    yield policy_of(case, world_size)
    parallel_state.destroy_model_parallel()


def run_cases(
    cases: list[dict[str, Any]],
    world_size: int,
    batch: SequenceBatch,
    weights_N: Tensor,
    folder: Path,
) -> list[dict[str, Any]]:
    """For each case what this rank sees: {row: its log-probs} of both kinds of forward pass, all
    gradients, and, after two updates, the log-probs of this policy and of a fresh one with its
    exported weights."""
    results = []
    for number, case in enumerate(cases):
        with joined(case, world_size) as policy:
            rows = deal(case, batch, policy.shape.attention_length)
            mine = batch.select(rows)
            shaped = WeightedLogprob(weights_N, batch.responses).select(rows)
            seen: list[LogprobEntropy] = []
            forward_N = policy.logprobs(mine).logprobs_N
            policy.accumulate_gradients(mine, shaped, shaped, seen)
            grads = {name: grad.clone() for name, grad in policy.export(lambda p: p.main_grad)}
            found = {"forward": forward_N, "training": seen[0].logprobs_N}
            if case.get("trained"):
                for _ in range(2):
                    policy.train_step(mine, shaped, shaped)
                found["live"] = policy.logprobs(mine).logprobs_N
                policy.write_hf(folder / str(number))
                dist.barrier()  # rank 0 writes
                fresh = policy_of(case | {"model": str(folder / str(number))}, world_size)
                found["fresh"] = fresh.logprobs(mine).logprobs_N
            counts = mine.counts_B.tolist()
            results.append(
                {
                    name: dict(zip(rows, values_N.float().split(counts), strict=True))
                    for name, values_N in found.items()
                }
                | {"grads": grads}
            )
    dist.barrier()
    return results


def run_faults(case: dict[str, Any], batch: SequenceBatch, weights_N: Tensor) -> dict[str, Any]:
    """Log-probs of a policy that is as it should be, by (fault, when)."""
    shaped, found = WeightedLogprob(weights_N, batch.responses), {}
    with joined(case, 1) as policy:

        def logprobs() -> Tensor:
            return policy.logprobs(batch).logprobs_N.float()

        found["again"] = logprobs(), logprobs()

        # of one entry, by one unit in the last place: of the norm before a product, because fp32
        # sums of 256 terms round away what one more bit of one term adds
        weight = policy.chunks[0].decoder.layers[1].mlp.linear_fc1.layer_norm_weight.data
        before, kept = logprobs(), weight[0].clone()
        weight.view({2: torch.int16, 4: torch.int32}[weight.element_size()])[0] += 1
        found["weight"] = before, logprobs()
        weight[0] = kept

        rotate = CpuOperations.rotate
        CpuOperations.rotate = lambda self, positions, *more: rotate(self, positions + 1, *more)
        found["position"] = before, logprobs()
        CpuOperations.rotate = rotate

        begin = ExactLayers.begin_schedule
        ExactLayers.begin_schedule = lambda self, chunks: None
        logprobs()  # makes products
        policy.train_step(batch, shaped, shaped)
        stale = logprobs()
        ExactLayers.begin_schedule = begin
        found["stale products"] = stale, logprobs()
    return found
