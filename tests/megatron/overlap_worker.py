"""What the ranks of the overlap test run: the same training with communication beside computation,
or Adam's states in host memory, and without."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from openrlhf_ext.megatron.distributed import initialize_distributed
from openrlhf_ext.megatron.policy import MegatronPolicy
from openrlhf_ext.megatron.step import host_optimizer
from openrlhf_ext.megatron.step.batch import SequenceBatch
from tests.megatron.parity import WeightedLogprob, deal, settings
from tests.patience import PATIENCE_S


def run_cases(
    cases: list[dict], world_size: int, batch: SequenceBatch, weights_N: torch.Tensor
) -> list[dict]:
    """For each case what came of it without and with its ``overlap``.

    Raises:
        AssertionError: two coalesced all-gathers could have been in flight, which corrupts the heap
            once in hundreds of times (patches/megatron_cpu.py); made here to be seen every time.
    """
    dist.ProcessGroup.all_gather_single_coalesced = _must_not_be_called
    host_optimizer._BLOCK = 777
    results = []
    for case in cases:
        # no clipping: the order in which squares of gradients are added up depends on the buckets
        simple = {**case, "overlap": {}, "on_host": False}
        plain, overlapped = (settings(part, world_size, max_norm=0.0) for part in (simple, case))
        initialize_distributed(plain.layout, PATIENCE_S, 1234)
        results.append(
            {
                "plain": train(MegatronPolicy(plain), batch, weights_N, case),
                "overlapped": train(MegatronPolicy(overlapped), batch, weights_N, case),
            }
        )
        parallel_state.destroy_model_parallel()
    return results


def _must_not_be_called(*_: object) -> None:
    raise AssertionError("gloo was asked for a coalesced all-gather")


def train(
    policy: MegatronPolicy, batch: SequenceBatch, weights_N: torch.Tensor, case: dict
) -> dict:
    """Three steps in a row, log-probs, one more step, weights as they are exported and as each rank
    has them."""
    rows = deal(case, batch, policy.shape.attention_length)
    mine, shaped = batch.select(rows), WeightedLogprob(weights_N, batch.responses).select(rows)
    # steps differ in how many micro-batches they have, but Megatron counts gradients by those of
    # the first
    parts = [list(range(len(rows))), list(range(len(rows) // 2)), list(range(len(rows)))]
    steps = [
        policy.train_step(mine.select(part), shaped.select(part), shaped, more=True)
        for part in parts
    ]
    result = {
        "logprobs": policy.logprobs(mine).logprobs_N,
        "steps": [*steps, policy.train_step(mine, shaped, shaped)],
        "buckets": sum(len(model.bucket_groups) for model in policy.models),
    }
    # before any collective of an export could hide that something is still under way
    result["parameters"] = [
        p.detach().clone() for chunk in policy.chunks for p in chunk.parameters()
    ]
    result["weights"] = {name: tensor.clone() for name, tensor in policy.export()}
    return result
