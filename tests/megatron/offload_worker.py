"""What the ranks of the offload test run: train with and without a swap before every step."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from openrlhf_ext.megatron.distributed import initialize_distributed
from openrlhf_ext.megatron.host_memory import KINDS, ModelStates
from openrlhf_ext.megatron.policy import MegatronPolicy
from openrlhf_ext.megatron.step import host_optimizer
from openrlhf_ext.megatron.step.batch import SequenceBatch
from openrlhf_ext.megatron.step.dealing import balance_rows
from tests.megatron.parity import WeightedLogprob, settings
from tests.patience import PATIENCE_S


def run_cases(cases: list[dict], batch: SequenceBatch, weights_N: torch.Tensor) -> list[dict]:
    """For each case what was seen without and with swaps."""
    results = []
    for case in cases:
        policy_settings = settings(
            case, dist.get_world_size() if dist.is_initialized() else case["world_size"]
        )
        initialize_distributed(policy_settings.layout, PATIENCE_S, 1234)
        plain = train(MegatronPolicy(policy_settings), batch, weights_N, swaps=False)
        host_optimizer._BLOCK = 1000
        on_host = dataclasses.replace(
            policy_settings, adam_offload=case.get("on_host_with_swaps", False)
        )
        swapped = train(MegatronPolicy(on_host), batch, weights_N, swaps=True)
        results.append({"plain": plain, "swapped": swapped})
        parallel_state.destroy_model_parallel()
    return results


def train(
    policy: MegatronPolicy, batch: SequenceBatch, weights_N: torch.Tensor, swaps: bool
) -> dict:
    """Three steps; with ``swaps`` the states leave and come back in the order of a colocated
    run."""
    replica, replicas = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    rows = balance_rows(batch.lengths_B, replicas)[replica]
    mine, shaped = batch.select(rows), WeightedLogprob(weights_N, batch.responses).select(rows)
    states = ModelStates(policy.models, policy.optimizer, policy.device)
    result: dict = {"logprobs": [], "steps": [], "swaps": []}
    for _ in range(3):
        if swaps:
            result["swaps"].append(swap_out_and_in(policy, states))
        result["logprobs"].append(policy.logprobs(mine).logprobs_N)  # needs the parameters only
        states.reload()
        result["steps"].append(policy.train_step(mine, shaped, shaped))
        assert (
            result["steps"][-1].pop("update/stream_seconds", 0.0) > 0
        ) == policy.settings.adam_offload
        if swaps:
            states.offload("gradients", "optimizer")
    result["weights"] = {name: tensor.clone() for name, tensor in policy.export()}
    return result


def swap_out_and_in(policy: MegatronPolicy, states: ModelStates) -> dict:
    """Everything away, then the parameters back."""
    had = {kind: states.nbytes(kind) for kind in KINDS}
    total = allocated(policy)
    resident = states.resident
    out = states.offload()
    left = allocated(policy)
    again = states.offload()
    back = states.reload("parameters")
    return {
        "had": had,
        "resident": resident,
        "total": total,
        "left": left,
        "out": out,
        "again": again,
        "back": back,
        "main_grads_are_views": all(
            p.main_grad.untyped_storage().data_ptr()
            in {b.grad_data.untyped_storage().data_ptr() for m in policy.models for b in m.buffers}
            for m in policy.models
            for p in m.parameters()
        ),
    }


def allocated(policy: MegatronPolicy) -> int:
    """Bytes of every storage that model, gradients and optimizer reference, counted independently
    of ModelStates."""
    tensors = [p.data for model in policy.models for p in model.parameters()]
    tensors += [p.main_grad for model in policy.models for p in model.parameters()]
    for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        tensors += [p.data for group in part.param_groups for p in group["params"]]
        tensors += [
            p.grad for group in part.param_groups for p in group["params"] if p.grad is not None
        ]
        if not policy.settings.adam_offload:  # else they are no part of the device's memory
            tensors += [
                v for state in part.optimizer.state.values() for v in state.values() if v.dim() > 0
            ]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
