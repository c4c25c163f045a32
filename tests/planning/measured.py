"""What ranks really hold: states as they were allocated, and what autograd saved at the most in a
training pass."""

from __future__ import annotations

import dataclasses
from collections import Counter

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from openrlhf_ext import delta_rule
from openrlhf_ext.megatron.distributed import initialize_distributed
from openrlhf_ext.megatron.host_memory import KINDS, ModelStates
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.model.shape import ModelShape
from openrlhf_ext.megatron.policy import MegatronPolicy
from openrlhf_ext.megatron.settings import ModelSettings
from openrlhf_ext.megatron.step.batch import SequenceBatch
from openrlhf_ext.options.sections import Actor, Adam, Megatron
from tests.patience import PATIENCE_S
from tests.sequences import masked_batch


class SavedStorages:
    """Bytes of the different storages that are saved for backward passes, now and at the most."""

    def __init__(self, excluded: set[int]) -> None:
        self.excluded, self.users = excluded, Counter()
        self.now = self.peak = 0

    def pack(self, tensor: Tensor) -> _Saved | Tensor:
        return (
            tensor
            if tensor.untyped_storage()._cdata in self.excluded
            else _Saved(self, tensor.detach())
        )

    def unpack(self, saved: _Saved | Tensor) -> Tensor:
        return saved.tensor if isinstance(saved, _Saved) else saved

    def add(self, storage: torch.UntypedStorage, sign: int) -> None:
        key = storage._cdata
        before = self.users[key]
        self.users[key] += sign
        if before == 0 or self.users[key] == 0:
            self.now += sign * storage.nbytes()
        self.peak = max(self.peak, self.now)


class _Saved:
    def __init__(self, owner: SavedStorages, tensor: Tensor) -> None:
        self.owner, self.tensor = owner, tensor
        owner.add(tensor.untyped_storage(), 1)

    def __del__(self) -> None:
        self.owner.add(self.tensor.untyped_storage(), -1)


def run_cases(cases: list[dict], lengths: list[int]) -> list[dict]:
    """For each case bytes of every kind of state, and of what was saved at the most over all
    micro-batches."""
    results = []
    for case in cases:
        layout = ParallelLayout(**case["layout"])
        megatron = Megatron(
            param_dtype=case["dtype"],
            distributed_optimizer_enable=case["distributed"],
            **case.get("recompute", {}),
            **case.get("overlap", {}),
        )
        optimizer = Actor(adam=Adam(lr=1e-3), lr_scheduler="constant")
        initialize_distributed(layout, PATIENCE_S, 1234)
        on_host = case.get("on_host", False)
        policy = MegatronPolicy(
            ModelSettings(
                case["model"], layout, megatron, optimizer=optimizer, adam_offload=on_host
            )
        )
        sequences = [torch.randint(2, 60, (length,)) for length in lengths]
        batch = masked_batch(
            sequences, [torch.ones(len(s) - 1, dtype=torch.long) for s in sequences]
        )
        saved = saved_by(policy, spread(policy.shape, batch))
        policy.optimizer_step()  # Adam makes its moments at the first step
        states = ModelStates(policy.models, policy.optimizer, policy.device)
        held = [
            state for part in parts_of(policy.optimizer) for state in part.optimizer.state.values()
        ]
        counters = 0 if on_host else sum(state["step"].nbytes for state in held)
        here = sum(tensor.nbytes for state in held for tensor in state.values()) if on_host else 0
        results.append(
            {kind: states.nbytes(kind) for kind in KINDS}
            | {"counters": counters, "saved": saved, "on_host": here}
        )
        parallel_state.destroy_model_parallel()
    return results


def spread(shape: ModelShape, batch: SequenceBatch) -> SequenceBatch:
    """A mixture is told the experts of every token, so that each has as many tokens as the
    others."""
    if not shape.num_experts:
        return batch
    first_M = torch.arange(len(batch.tokens_M)) * shape.experts_per_token
    experts_MK = (first_M[:, None] + torch.arange(shape.experts_per_token)) % shape.num_experts
    experts_MYK = experts_MK[:, None].expand(-1, shape.num_layers, -1).to(torch.uint8)
    return dataclasses.replace(batch, experts_MYK=experts_MYK.contiguous())


def parts_of(optimizer) -> list:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def saved_by(policy: MegatronPolicy, batch) -> int:
    weights = {
        p.data.untyped_storage()._cdata for model in policy.models for p in model.parameters()
    }
    saved = SavedStorages(weights)
    policy.zero_grad()
    plan = [[row] for row in range(len(batch))]  # every sequence a micro-batch

    def loss(part, hidden_NH):
        return hidden_NH.float().sum(), torch.ones((), dtype=torch.int), {}

    rule = delta_rule._outputs

    def uncounted(*inputs):
        """What the plain rule keeps for a while, where a backward pass computes it again; a GPU's
        kernels do not."""
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return rule(*inputs)

    delta_rule._outputs = uncounted
    with saved_tensors_hooks(saved.pack, saved.unpack):
        policy.schedule.run(batch, plan, loss, forward_only=False)
    delta_rule._outputs = rule
    return saved.peak
