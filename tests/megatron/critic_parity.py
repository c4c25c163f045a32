"""What the ranks of the critic's test run: one critic or reward model per layout, compared with
transformers by the parent."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from openrlhf_ext.driver.scoring import with_end
from openrlhf_ext.inputs import InputError
from openrlhf_ext.megatron.checkpoint import load_checkpoint, take_snapshot
from openrlhf_ext.megatron.critic import MegatronCritic, ValueDecoder, ValueTargets
from openrlhf_ext.megatron.distributed import initialize_distributed
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.settings import ModelSettings
from openrlhf_ext.megatron.step import NonFiniteUpdateError
from openrlhf_ext.megatron.step.batch import SequenceBatch
from openrlhf_ext.megatron.step.dealing import balance_rows
from openrlhf_ext.options.sections import Critic, CriticAdam, Megatron, Rollout
from tests.megatron.parity import micro_batches
from tests.patience import PATIENCE_S

# a large eps: Adam would amplify the rounding of tiny gradients
LR, EPS, STEPS, CLIP = 1e-2, 1e-3, 2, 0.3


def critic_settings(case: dict, world_size: int) -> ModelSettings:
    degrees = {
        "tp": "tensor_parallel",
        "pp": "pipeline_parallel",
        "cp": "context_parallel",
        "vp": "virtual_pipeline",
    }
    layout = ParallelLayout(
        world_size,
        **{f"{name}_size": case.get(short, 1) for short, name in degrees.items()},
        sequence_parallel=case.get("sp", False),
    )
    megatron = Megatron(
        param_dtype=case.get("dtype", "fp32"),
        distributed_optimizer_enable=case.get("distributed_optimizer", False),
    )
    optimizer = Critic(
        adam=CriticAdam(lr=LR, eps=EPS), lr_scheduler="constant", value_clip=case.get("clip", CLIP)
    )
    return ModelSettings(
        case["model"],
        layout,
        megatron,
        Rollout(micro_batch_size=3),
        micro_batches(2, case.get("max_tokens")),
        optimizer=None if "frozen" in case else optimizer,
        updates=4,
        normalize_values=case.get("normalize", False),
    )


def run_cases(cases: list[dict], batch: SequenceBatch, targets: ValueTargets) -> list[dict]:
    """For each case: values, gradients, metrics of some steps and the weights after them, as this
    rank sees them."""
    results = []
    for case in cases:
        settings = critic_settings(
            case, dist.get_world_size() if dist.is_initialized() else case["world_size"]
        )
        initialize_distributed(settings.layout, PATIENCE_S, 1234)
        if "frozen" in case:
            results.append(frozen(settings, batch))
        else:
            results.append(run_case(MegatronCritic(settings), batch, targets, case))
        parallel_state.destroy_model_parallel()
    return results


def own_rows(batch: SequenceBatch) -> list[int]:
    replica, replicas = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    return balance_rows(batch.lengths_B, replicas)[replica]


def frozen(settings: ModelSettings, batch: SequenceBatch) -> dict:
    """A reward model's scores, or why it is none."""
    try:
        model, rows = ValueDecoder(settings), own_rows(batch)
    except InputError as error:
        return {"refused": str(error)}
    return {"rows": rows, "scores": model.values(with_end(batch.select(rows)))}


def run_case(
    critic: MegatronCritic, batch: SequenceBatch, targets: ValueTargets, case: dict
) -> dict:
    rows = own_rows(batch)
    mine, my_targets = batch.select(rows), targets.select(rows)
    if "load" in case:
        load_checkpoint(critic, Path(case["load"]) / "critic")
        return {"steps": [critic.train_step(mine, my_targets)]}
    result = {"rows": rows, "values": critic.values(mine), "scores": critic.values(with_end(mine))}
    result["start"] = {
        name: tensor.clone() for name, tensor in critic.export() if name.startswith("score")
    }
    if not case.get("distributed_optimizer", False):
        critic.accumulate_gradients(mine, my_targets)
        result["grads"] = {
            name: tensor.clone() for name, tensor in critic.export(lambda p: p.main_grad)
        }
    result["steps"] = [critic.train_step(mine, my_targets)]
    if "checkpoint" in case:
        take_snapshot(critic, copy=False).write(Path(case["checkpoint"]), "critic")
        dist.barrier()
    result["steps"] += [critic.train_step(mine, my_targets) for _ in range(STEPS - 1)]
    result["weights"] = {name: tensor.clone() for name, tensor in critic.export()}
    if "checkpoint" in case:
        result["refused"] = refused(critic, mine, my_targets)
    if "save" in case:
        result["saved_values"] = critic.values(mine)
        critic.save_hf(case["save"])
    return result


def refused(critic: MegatronCritic, batch: SequenceBatch, targets: ValueTargets) -> str:
    """What a step from a return that is no number says, and whether it changed anything."""
    before = [p.detach().clone() for model in critic.models for p in model.parameters()]
    try:
        critic.train_step(batch, replace(targets, returns_N=targets.returns_N * math.nan))
    except NonFiniteUpdateError as error:
        now = (p for model in critic.models for p in model.parameters())
        return f"{'nothing' if all(map(torch.equal, now, before)) else 'something'} moved: {error}"
    return "no error"
