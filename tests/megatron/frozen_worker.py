"""What the ranks of the reference test run: training with and without frozen weights that are
swapped in between."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from openrlhf_ext.megatron.distributed import initialize_distributed
from openrlhf_ext.megatron.frozen import FrozenCopy
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.policy import MegatronPolicy
from openrlhf_ext.megatron.settings import ModelSettings
from openrlhf_ext.megatron.step.dealing import balance_rows
from openrlhf_ext.options.sections import Actor, Adam, Megatron
from tests.megatron.parity import WeightedLogprob
from tests.megatron.reference import TEMPERATURE
from tests.patience import PATIENCE_S


def run_cases(cases: list[dict], batch, weights_N) -> list[dict]:
    results = []
    for case in cases:
        layout = ParallelLayout(case["world_size"], case.get("tp", 1), case.get("pp", 1))
        megatron = Megatron(
            param_dtype=case["dtype"], distributed_optimizer_enable=case["distributed"]
        )
        optimizer = Actor(adam=Adam(lr=1e-2), lr_scheduler="constant")
        settings = ModelSettings(case["model"], layout, megatron, optimizer=optimizer, updates=8)
        initialize_distributed(layout, PATIENCE_S, 1234)
        plain = MegatronPolicy(settings)
        result = {"plain": train(plain, batch, weights_N, 4)}
        policy = MegatronPolicy(settings)
        result |= train_with_reference(policy, batch, weights_N)
        result |= score_with_guide(policy, batch, case["guide"])
        results.append(result)
        parallel_state.destroy_model_parallel()
    return results


def train(policy: MegatronPolicy, batch, weights_N, steps: int) -> list[dict]:
    rows = balance_rows(batch.lengths_B, parallel_state.get_data_parallel_world_size())
    mine = rows[parallel_state.get_data_parallel_rank()]
    shaped = WeightedLogprob(weights_N, batch.responses).select(mine)
    return [policy.train_step(batch.select(mine), shaped, shaped) for _ in range(steps)]


def train_with_reference(policy: MegatronPolicy, batch, weights_N) -> dict:
    parameters = [p for chunk in policy.chunks for p in chunk.parameters()]
    start = policy.logprobs(batch).logprobs_N
    reference = FrozenCopy(policy.chunks)
    steps = train(policy, batch, weights_N, 2)
    before = [p.detach().clone() for p in parameters]
    with reference.swapped_in():
        inside = policy.logprobs(batch).logprobs_N
    with contextlib.suppress(InterruptedError), reference.swapped_in():
        raise InterruptedError
    exact = all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    trained = policy.logprobs(batch).logprobs_N
    steps += train(policy, batch, weights_N, 2)
    with reference.swapped_in():
        later = policy.logprobs(batch).logprobs_N
    return {
        "start": start,
        "inside": inside,
        "later": later,
        "trained": trained,
        "exact": exact,
        "steps": steps,
        "bytes": (reference.nbytes, sum(p.nbytes for p in parameters)),
        "rank": dist.get_rank(),
    }


def score_with_guide(policy: MegatronPolicy, batch, path: str) -> dict:
    parameters = [p for chunk in policy.chunks for p in chunk.parameters()]
    before = [p.detach().clone() for p in parameters]
    guide = policy.host_copy(path)
    untouched = all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    with guide.swapped_in():
        scores = policy.logprobs(batch, TEMPERATURE).logprobs_N
    exact = all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    return {"guide": scores, "guide_exact": untouched and exact, "guide_bytes": guide.nbytes}
