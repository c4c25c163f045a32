"""What the ranks of the FP8 tests run: emulated policies in layouts, and single layers cut over
ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from openrlhf_ext.checkpoints import CheckpointError
from openrlhf_ext.fp8.quantize import Products
from openrlhf_ext.fp8.recipe import Recipe
from openrlhf_ext.megatron.checkpoint import load_checkpoint, take_snapshot
from openrlhf_ext.megatron.distributed import initialize_distributed
from openrlhf_ext.megatron.layers.emulated import (
    EmulatedNormColumnParallelLinear,
    EmulatedRowParallelLinear,
)
from openrlhf_ext.megatron.layers.fp8 import FP8Layers
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.model.build import transformer_config
from openrlhf_ext.megatron.model.shape import read_model_shape
from openrlhf_ext.megatron.model.spec import rms_norm
from openrlhf_ext.megatron.policy import MegatronPolicy
from openrlhf_ext.megatron.settings import ModelSettings
from openrlhf_ext.megatron.step.dealing import balance_rows
from openrlhf_ext.options.sections import Megatron, Rollout
from tests.megatron.parity import WeightedLogprob, settings
from tests.patience import PATIENCE_S


def fp8_layers(recipe: Recipe | None) -> tuple[FP8Layers, ...]:
    return () if recipe is None else (FP8Layers(recipe),)


def build(case: dict) -> MegatronPolicy:
    # no clipping: the norm is added up stage by stage, in another order in every layout
    plain = settings(case, int(os.environ["WORLD_SIZE"]), max_norm=0.0)
    # an even number of micro-batches in every pass, so that virtual stages have the same ones
    made: ModelSettings = dataclasses.replace(
        plain, converters=fp8_layers(case["fp8"]), rollout=Rollout(micro_batch_size=2)
    )
    initialize_distributed(made.layout, PATIENCE_S, 1234)
    return MegatronPolicy(made)


@contextlib.contextmanager
def built(case: dict):
    yield build(case)
    parallel_state.destroy_model_parallel()


def train(policy: MegatronPolicy, batch, weights_N, steps: int) -> list[dict]:
    rows = balance_rows(batch.lengths_B, parallel_state.get_data_parallel_world_size())
    mine = rows[parallel_state.get_data_parallel_rank()]
    shaped = WeightedLogprob(weights_N, batch.responses).select(mine)
    return [policy.train_step(batch.select(mine), shaped, shaped) for _ in range(steps)]


def state_of(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.converter_state().items()}


def exported(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.export()}


def run_policies(cases: list[dict], batch, weights_N) -> list[dict]:
    """Of each case the log-probs before and after two steps, the steps' metrics, the weights and
    scales at the end."""
    results = []
    for case in cases:
        with built(case) as policy:
            rows = balance_rows(batch.lengths_B, parallel_state.get_data_parallel_world_size())
            mine = batch.select(rows[parallel_state.get_data_parallel_rank()])
            at_start = state_of(policy)
            policy.warm_up()
            before, again = policy.logprobs(mine).logprobs_N, policy.logprobs(mine).logprobs_N
            unmoved = all(
                torch.equal(a, b)
                for a, b in zip(at_start.values(), state_of(policy).values(), strict=True)
            )
            steps = train(policy, batch, weights_N, 2)
            results.append(
                {
                    "before": before,
                    "again": again,
                    "unmoved": unmoved,
                    "at_start": at_start,
                    "steps": steps,
                    "after": policy.logprobs(mine).logprobs_N,
                    "state": state_of(policy),
                    "weights": exported(policy),
                }
            )
    return results


def save_and_go_on(case: dict, folder: Path, batch, weights_N) -> dict:
    with built(case) as policy:
        train(policy, batch, weights_N, 2)
        snapshot = take_snapshot(policy, {}, copy=True)
        snapshot.write(folder, "policy")
        state = state_of(policy)
        dist.barrier()
        return {
            "state": state,
            "steps": train(policy, batch, weights_N, 2),
            "weights": exported(policy),
        }


def load_and_go_on(case: dict, folder: Path, batch, weights_N) -> dict:
    with built(case) as policy:
        policy.warm_up()  # as every run does, before and after it is resumed
        try:
            load_checkpoint(policy, folder / "policy")
        except CheckpointError as error:
            return {"error": str(error)}
        state = state_of(policy)
        return {
            "state": state,
            "steps": train(policy, batch, weights_N, 2),
            "weights": exported(policy),
        }


def resume(saved: dict, loaded: list[dict], folder: Path, batch, weights_N) -> list[dict]:
    first = save_and_go_on(saved, folder, batch, weights_N)
    return [first, *(load_and_go_on(case, folder, batch, weights_N) for case in loaded)]


def swap(case: dict, guide: str, batch, weights_N) -> dict:
    """A reference and a guide that score between train steps."""
    with built(case) as policy:
        start, before = policy.logprobs(batch).logprobs_N, state_of(policy)
        reference, other = policy.host_copy(case["model"]), policy.host_copy(guide)
        untouched = all(
            torch.equal(a, b)
            for a, b in zip(before.values(), state_of(policy).values(), strict=True)
        )
        train(policy, batch, weights_N, 2)
        trained, moved = policy.logprobs(batch).logprobs_N, state_of(policy)
        with reference.swapped_in():
            inside = policy.logprobs(batch).logprobs_N
        with other.swapped_in():
            guided, of_guide = policy.logprobs(batch).logprobs_N, state_of(policy)
        kept = all(
            torch.equal(a, b)
            for a, b in zip(moved.values(), state_of(policy).values(), strict=True)
        )
        result = {
            "start": start,
            "trained": trained,
            "inside": inside,
            "guided": guided,
            "of_guide": of_guide,
            "untouched": untouched,
            "kept": kept,
        }
    with built({**case, "model": guide}) as policy:
        return result | {
            "alone": policy.logprobs(batch).logprobs_N,
            "alone_state": state_of(policy),
        }


def cut_layers(model: str, recipes: list) -> list[dict]:
    """Largest differences between single layers cut over these ranks and the products of their
    shards in one piece."""
    size, rank = (
        dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"]),
        None,
    )
    found = []
    for recipe in recipes:
        for sequence_parallel in (False, True):
            layout = ParallelLayout(size, size, sequence_parallel=sequence_parallel)
            initialize_distributed(layout, PATIENCE_S, 1234)
            rank = dist.get_rank()
            config = transformer_config(read_model_shape(model), layout, torch.float32, Megatron())
            found.append(
                _column(config, recipe, sequence_parallel, rank, size)
                | _row(config, recipe, rank, size)
            )
            parallel_state.destroy_model_parallel()
    return found


def _values(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _mine(whole: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    return whole.chunk(size, dim)[rank].contiguous()


def _sum(value: torch.Tensor) -> torch.Tensor:
    total = value.clone()
    dist.all_reduce(total)
    return total


def _arguments(config) -> dict:
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
    return {
        "config": config,
        "init_method": config.init_method,
        "bias": False,
        "skip_bias_add": False,
        "is_expert": False,
        "tp_group": groups.tp,
    }


def _column(config, recipe, sequence_parallel: bool, rank: int, size: int) -> dict:
    tokens, inputs, outputs = 256, 256, 384
    layer = EmulatedNormColumnParallelLinear(
        inputs, outputs, gather_output=False, recipe=recipe, **_arguments(config)
    )
    weight = _values(outputs, inputs, seed=1)
    layer.weight.data = _mine(weight, 0, rank, size)
    x, dy = _values(tokens, inputs, seed=2), _mine(_values(tokens, outputs, seed=3), 1, rank, size)
    given = (_mine(x, 0, rank, size) if sequence_parallel else x.clone())[:, None].requires_grad_()
    out, _ = layer(given)
    out.backward(dy[:, None])
    normed = rms_norm(x, layer.layer_norm_weight.detach(), layer.eps).requires_grad_()
    products, w = Products(recipe), layer.weight.detach()
    dx = _sum(products.input_gradient(dy, w, {}))
    want_x = torch.autograd.grad(
        rms_norm(leaf := x.clone().requires_grad_(), layer.layer_norm_weight.detach(), layer.eps),
        leaf,
        dx,
    )[0]
    if sequence_parallel:
        want_x = _mine(want_x, 0, rank, size)
    return {
        "column y": _worst(out[:, 0], products.output(normed.detach(), w, {})),
        "column dw": _worst(layer.weight.grad, products.weight_gradient(dy, normed.detach(), {})),
        "column dx": _worst(given.grad[:, 0], want_x),
    }


def _row(config, recipe, rank: int, size: int) -> dict:
    tokens, inputs, outputs = 256, 384, 256
    layer = EmulatedRowParallelLinear(
        inputs, outputs, input_is_parallel=True, recipe=recipe, **_arguments(config)
    )
    layer.weight.data = _mine(_values(outputs, inputs, seed=4), 1, rank, size)
    x, dy = _mine(_values(tokens, inputs, seed=5), 1, rank, size), _values(tokens, outputs, seed=6)
    given = x.clone()[:, None].requires_grad_()
    out, _ = layer(given)
    pieces = _mine(dy, 0, rank, size) if config.sequence_parallel else dy
    out.backward(pieces[:, None])
    products, w = Products(recipe), layer.weight.detach()
    want = _sum(products.output(x, w, {}))
    if config.sequence_parallel:
        want = _mine(want, 0, rank, size)
    return {
        "row y": _worst(out[:, 0], want),
        "row dx": _worst(given.grad[:, 0], products.input_gradient(dy, w, {})),
        "row dw": _worst(layer.weight.grad, products.weight_gradient(dy, x, {})),
    }


def _worst(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())
