"""A converter that is written in one file and named nowhere else, and what a rank does with a
policy that has it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec

from openrlhf_ext.megatron.checkpoint import load_checkpoint, take_snapshot
from openrlhf_ext.megatron.distributed import initialize_distributed
from openrlhf_ext.megatron.layers import LayerConverter
from openrlhf_ext.megatron.policy import MegatronPolicy
from tests.megatron.parity import WeightedLogprob, settings
from tests.patience import PATIENCE_S


class ScaledLinear(RowParallelLinear):
    """A row-parallel linear whose output is multiplied by a factor that it remembers."""

    def __init__(self, *args, factor: float, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.factor = torch.full((1,), factor)

    def forward(self, x):
        output, bias = super().forward(x)
        return output * self.factor, bias


@dataclass(frozen=True)
class Scaled(LayerConverter):
    """The attention's output is scaled in every layer but the first."""

    factor: float
    name = "scaled"
    state_title = "the scaling"
    state_options = "the factor"
    own_layers = True

    def convert(self, layer, number, num_layers):
        if number:
            scaled = ModuleSpec(module=ScaledLinear, params={"factor": self.factor})
            layer.submodules.self_attention.submodules.linear_proj = scaled

    def state(self, chunks):
        layers = [layer for chunk in chunks for layer in chunk.decoder.layers]
        linears = {layer.layer_number - 1: layer.self_attention.linear_proj for layer in layers}
        return {
            f"layers.{n}.factor": one.factor
            for n, one in linears.items()
            if isinstance(one, ScaledLinear)
        }


def policy_of(case: dict, factor: float | None) -> MegatronPolicy:
    made = dataclasses.replace(
        settings(case, 2), converters=() if factor is None else (Scaled(factor),)
    )
    initialize_distributed(made.layout, PATIENCE_S, 1234)
    return MegatronPolicy(made)


def run(case: dict, folder: Path, batch, weights_N) -> dict:
    """Log-probs by factor, gradients, what a frozen copy gives, and what factor 1 makes of factor
    2's checkpoint."""
    found = {}
    for factor in (None, 1.0):
        found[factor] = policy_of(case, factor).logprobs(batch).logprobs_N
        parallel_state.destroy_model_parallel()
    policy, shaped = policy_of(case, 2.0), WeightedLogprob(weights_N, batch.responses)
    copy, found[2.0] = policy.host_copy(case["model"]), policy.logprobs(batch).logprobs_N
    policy.train_step(batch, shaped, shaped)
    parameters = [p for chunk in policy.chunks for p in chunk.parameters()]
    found["gradients"] = [parameter.main_grad.norm().item() for parameter in parameters]
    found["trained"] = policy.logprobs(batch).logprobs_N
    take_snapshot(policy, {}, copy=True).write(folder, "policy")
    dist.barrier()
    with copy.swapped_in():
        found["frozen"] = policy.logprobs(batch).logprobs_N
    parallel_state.destroy_model_parallel()
    other = policy_of(case, 1.0)
    load_checkpoint(other, folder / "policy")
    found |= {"loaded": other.logprobs(batch).logprobs_N, "state": list(other.converter_state())}
    parallel_state.destroy_model_parallel()
    return found


def run_cases(cases: list[dict], folder: Path, batch, weights_N) -> list[dict]:
    return [run(case, folder / str(number), batch, weights_N) for number, case in enumerate(cases)]
