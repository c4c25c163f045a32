"""A process that is the only rank of its run, on a tiny model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf_ext.megatron.distributed import initialize_distributed
from openrlhf_ext.megatron.model.build import has_transformer_engine
from openrlhf_ext.megatron.policy import MegatronPolicy
from tests.gpu.kit import join_alone
from tests.megatron.parity import settings

_TIMEOUT_S = 60.0


@contextmanager
def tiny_folder() -> Iterator[Path]:
    """For a checkpoint that the check makes."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def build(
    case: dict[str, Any], kind: type[MegatronPolicy] = MegatronPolicy, **optimizer: Any
) -> MegatronPolicy:
    """A policy as ``tests.megatron.parity.settings`` describes it: NCCL on a GPU, gloo on a CPU."""
    join_alone()
    policy_settings = settings({"world_size": 1, **case}, 1, **optimizer)
    if not dist.is_initialized() or not _groups_stand():
        initialize_distributed(policy_settings.layout, _TIMEOUT_S, 1234)
    return kind(policy_settings)


def _groups_stand() -> bool:
    from megatron.core import parallel_state

    return parallel_state.model_parallel_is_initialized()


def facts(policy: MegatronPolicy) -> dict[str, Any]:
    """What a reader of the measurements has to know."""
    # TransformerEngine takes over for bf16 where it is installed: call 1 runs before it is
    plain = policy.dtype != torch.bfloat16 or not has_transformer_engine()
    return {
        "backend": dist.get_backend(),
        "dtype": str(policy.dtype),
        "layers": "plain" if plain else "TransformerEngine",
        "parameters": sum(p.numel() for chunk in policy.chunks for p in chunk.parameters()),
    }


def states_of(policy: MegatronPolicy) -> dict[str, Tensor]:
    """Copies on the CPU of everything that training goes on from, apart from gradients."""
    found = {
        f"{number} {name}": parameter
        for number, chunk in enumerate(policy.chunks)
        for name, parameter in chunk.named_parameters()
    }
    for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        for parameter in (
            parameter for group in part.param_groups for parameter in group["params"]
        ):
            number = len(found)
            found[f"{number} main"] = parameter
            found |= {
                f"{number} {name}": v
                for name, v in part.optimizer.state[parameter].items()
                if torch.is_tensor(v)
            }
    return {name: tensor.detach().cpu().clone() for name, tensor in found.items()}


def different(got: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    """Names of what is not equal to the last bit."""
    names = sorted(got.keys() | want.keys())
    return [
        name
        for name in names
        if name not in got or name not in want or not torch.equal(got[name], want[name])
    ]
