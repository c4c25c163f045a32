"""What the ranks of the checkpoint tests run: train, save, load in other layouts, train on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from openrlhf_ext.checkpoints import CheckpointError
from openrlhf_ext.groups import watchdog
from openrlhf_ext.megatron import checkpoint
from openrlhf_ext.megatron.checkpoint import check_loaded, load_checkpoint, take_snapshot
from openrlhf_ext.megatron.critic import MegatronCritic, ValueTargets
from openrlhf_ext.megatron.distributed import initialize_distributed
from openrlhf_ext.megatron.policy import MegatronPolicy
from openrlhf_ext.megatron.settings import ModelSettings
from openrlhf_ext.megatron.step import host_optimizer
from openrlhf_ext.megatron.step.batch import SequenceBatch
from openrlhf_ext.megatron.step.dealing import balance_rows
from openrlhf_ext.options.sections import Actor, Adam, Critic, CriticAdam, Megatron, Rollout, Train
from tests.megatron.parity import WeightedLogprob, layout_of
from tests.megatron.slow_disk import let_others_wait, monitors
from tests.patience import PATIENCE_S


def build(case: dict) -> MegatronPolicy | MegatronCritic:
    """A policy, or a critic, in the case's layout; fresh process groups."""
    layout = layout_of(case, int(os.environ["WORLD_SIZE"]))
    megatron = Megatron(
        param_dtype=case.get("dtype", "fp32"),
        distributed_optimizer_enable=case.get("distributed", True),
        **case.get("overlap", {}),
    )
    trained, adam = (Critic, CriticAdam) if case.get("critic") else (Actor, Adam)
    steps = Train(micro_batch_size=2, enable_ema=case.get("ema", False), ema_beta=0.5)
    settings = ModelSettings(
        case["model"],
        layout,
        megatron,
        Rollout(micro_batch_size=3),
        steps,
        optimizer=trained(adam=adam(lr=1e-2, eps=1e-3), lr_warmup_ratio=0.3),
        updates=8,
        adam_offload=case.get("on_host", False),
    )
    host_optimizer._BLOCK = 1000  # of some thousand entries
    initialize_distributed(layout, PATIENCE_S, 1234)
    return MegatronCritic(settings) if case.get("critic") else MegatronPolicy(settings)


def train(
    model: MegatronPolicy | MegatronCritic,
    batch: SequenceBatch,
    weights_N: torch.Tensor,
    steps: int,
) -> list:
    """Train steps towards something: a policy with weighted log-probs, a critic with the weights as
    returns."""
    replica, replicas = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    rows = balance_rows(batch.lengths_B, replicas)[replica]
    mine = batch.select(rows)
    if isinstance(model, MegatronCritic):
        tokens = torch.tensor(len(weights_N))
        targets = ValueTargets(
            torch.zeros_like(weights_N), weights_N, batch.responses, tokens
        ).select(rows)
        return [timed(model, model.train_step(mine, targets)) for _ in range(steps)]
    shaped = WeightedLogprob(weights_N, batch.responses).select(rows)
    return [timed(model, model.train_step(mine, shaped, shaped)) for _ in range(steps)]


def timed(model: MegatronPolicy | MegatronCritic, step: dict[str, float]) -> dict[str, float]:
    """The metrics of a step without the seconds in which states passed over the device, where they
    did."""
    name = "value/stream_seconds" if isinstance(model, MegatronCritic) else "update/stream_seconds"
    assert (step.pop(name, 0.0) > 0) == model.settings.adam_offload
    return step


def exported(policy: MegatronPolicy | MegatronCritic) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.export()}


def averages(policy: MegatronPolicy | MegatronCritic) -> dict[str, torch.Tensor] | None:
    average = policy.average
    return (
        None
        if average is None
        else {name: tensor.clone() for name, tensor in policy.export(average.of)}
    )


def save_and_go_on(case: dict, folder: Path, batch: SequenceBatch, weights_N: torch.Tensor) -> dict:
    """Two steps, a checkpoint, and two more steps: what a run does that is never interrupted."""
    policy = build(case)
    every = [exported(policy)]
    for _ in range(2):
        train(policy, batch, weights_N, 1)
        every.append(exported(policy))
    snapshot = take_snapshot(policy, {"version": 2}, copy=True)
    steps = train(policy, batch, weights_N, 1)  # the copy is of before this step
    entries = snapshot.write(folder, "policy")
    dist.barrier()
    steps += train(policy, batch, weights_N, 1)
    result = {"steps": steps, "weights": exported(policy), "entries": entries, "every": every}
    result["averages"] = averages(policy)
    if policy.average is not None:
        policy.save_hf(folder.with_name(f"{folder.name}_hf"))
    parallel_state.destroy_model_parallel()
    return result


def load_and_go_on(case: dict, folder: Path, batch: SequenceBatch, weights_N: torch.Tensor) -> dict:
    """The checkpoint into a fresh policy, and two steps."""
    policy = build(case)
    try:
        with reading_slowly():
            extra = load_checkpoint(policy, folder / "policy")
    except CheckpointError as error:
        parallel_state.destroy_model_parallel()
        return {"error": str(error)}
    check_loaded(policy, folder / "policy")
    noticed = [*losses_noticed(policy, folder / "policy")]
    result = {
        "extra": extra,
        "steps": train(policy, batch, weights_N, 2),
        "weights": exported(policy),
    }
    result |= {"averages": averages(policy), "noticed": noticed}
    parallel_state.destroy_model_parallel()
    return result


def losses_noticed(policy: MegatronPolicy | MegatronCritic, folder: Path) -> Iterator[str]:
    """What is said where the last bit of one entry is not what was saved: of weights, of each state
    of Adam."""
    mine = {
        piece.block.key: tensor
        for piece, tensor in checkpoint._own_pieces(policy)
        if "layers" in piece.block.key
    }
    first = [{key.split(".decoder")[0]: key for key in mine}]  # the last of each kind
    dist.broadcast_object_list(first)
    for key in first[0].values():
        bits = (
            mine[key].view(-1).view(checkpoint._INTEGERS[mine[key].element_size()])
            if dist.get_rank() == 0
            else None
        )
        if bits is not None:
            bits[-1] += 1
        try:
            check_loaded(policy, folder)
        except CheckpointError as error:
            yield f"{key}: {error}"
        else:
            yield f"{key}: nothing"
        if bits is not None:
            bits[-1] -= 1


@contextmanager
def reading_slowly() -> Iterator[None]:
    """Rank 0 is the last to have read."""
    addresses, read = monitors(), checkpoint._restore_random_states

    def read_late(*arguments) -> None:
        let_others_wait(addresses)
        read(*arguments)

    checkpoint._restore_random_states = read_late if dist.get_rank() == 0 else read
    try:
        with watchdog.phase("loading a checkpoint"):
            yield
    finally:
        checkpoint._restore_random_states = read


def run(
    batch: SequenceBatch, weights_N: torch.Tensor, jobs: list[tuple[str, dict, Path]]
) -> list[dict]:
    """``save`` and ``load`` jobs one after the other in one set of processes."""
    functions = {"save": save_and_go_on, "load": load_and_go_on}
    return [functions[kind](case, folder, batch, weights_N) for kind, case, folder in jobs]
