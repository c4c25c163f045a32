"""Policies with random weights made on the device, and how two of them are compared. Imported by
``one_rank`` only.

Shape suffixes: B = sequences, N = response tokens of all.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core import parallel_state
from torch import Tensor

from openrlhf_ext.fp8.recipe import Recipe
from openrlhf_ext.megatron.checkpoint import optimizer_ranges
from openrlhf_ext.megatron.distributed import initialize_distributed
from openrlhf_ext.megatron.host_memory import ModelStates
from openrlhf_ext.megatron.layers.fp8 import FP8Layers
from openrlhf_ext.megatron.layers.lora import LoRALayers
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.model import build
from openrlhf_ext.megatron.model.adapter import Adapter
from openrlhf_ext.megatron.policy import MegatronPolicy
from openrlhf_ext.megatron.settings import ModelSettings
from openrlhf_ext.megatron.step import host_optimizer
from openrlhf_ext.megatron.step.batch import SequenceBatch, sequence_batch
from openrlhf_ext.options.sections import Actor, Adam, Megatron, Rollout
from tests.gpu.shapes import Mixture, Model, drawn
from tests.megatron.parity import WeightedLogprob, micro_batches

__all__ = [
    "Actor",
    "Adam",
    "Adapter",
    "Mixture",
    "Model",
    "ModelStates",
    "ParallelLayout",
    "WeightedLogprob",
    "initialize_distributed",
    "parallel_state",
]

RECOMPUTE = {
    "none": {},
    "core_attn": {"recompute": "selective"},
    "mlp": {"recompute": "selective", "recompute_modules": ("mlp",)},
    "core_attn and mlp": {"recompute": "selective", "recompute_modules": ("core_attn", "mlp")},
    "full, block of one layer": {"recompute": "full", "recompute_method": "block"},
    "full, uniform": {"recompute": "full"},
}
OPTIMIZER = Actor(adam=Adam(lr=1e-3), lr_scheduler="constant")


class RandomPolicy(MegatronPolicy):
    """A policy without a checkpoint: weights are drawn on the device by the parameter's name, exact
    in bf16.

    TransformerEngine's layers and ours have the same names, so they get the same weights, in fp32
    too.
    """

    def load_weights(self) -> None:
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters():
                parameter.data.copy_(drawn(name, parameter).bfloat16())

    @property
    def layers(self) -> str:
        """Whose they are."""
        used = any(
            type(module).__module__.startswith("megatron.core.extensions")
            for module in self.chunks[0].modules()
        )
        return "TransformerEngine" if used else "plain"


def random_policy(
    model: Model,
    dtype: str,
    *,
    plain: bool = False,
    recompute: Mapping[str, Any] = RECOMPUTE["none"],
    rope_fusion: bool = False,
    micro_batch_size: int = 1,
    max_tokens: int | None = None,
    optimizer: Actor = OPTIMIZER,
    fp8: Recipe | None = None,
    lora: Adapter | None = None,
    kind: type[RandomPolicy] = RandomPolicy,
    train: Mapping[str, Any] = MappingProxyType({}),
    adam_offload: bool = False,
) -> RandomPolicy:
    """A policy that can be trained.

    Args:
        plain: torch's layers also where there are TransformerEngine's, and no shared prompts.
        max_tokens: of a micro-batch, instead of ``micro_batch_size`` sequences.
        fp8: of the decoder's linear layers.
        lora: adapters, with B off zero, where A would have no gradient.
        kind: its class.
        train: further fields of ``Train``.
        adam_offload: Adam's states wait in host memory.
    """
    with tempfile.TemporaryDirectory() as folder, plain_layers() if plain else nullcontext():
        settings = ModelSettings(
            str(model.write(Path(folder))),
            ParallelLayout(1),
            Megatron(
                param_dtype=dtype,
                rope_fusion=rope_fusion,
                share_prompts_enable=not plain,
                **recompute,
            ),
            Rollout(micro_batch_size=micro_batch_size),
            micro_batches(micro_batch_size, max_tokens).model_copy(update=dict(train)),
            (
                *(() if fp8 is None else (FP8Layers(fp8),)),
                *(() if lora is None else (LoRALayers(lora),)),
            ),
            optimizer=optimizer,
            updates=100,
            adam_offload=adam_offload,
        )
        policy = kind(settings)
    for name, parameter in policy.chunks[0].named_parameters():
        if name.endswith("lora_b"):
            parameter.data.copy_(drawn(name, parameter).mul_(0.1))
    return policy


@contextmanager
def plain_layers() -> Iterator[None]:
    """Policies that are built in the body have torch's layers."""
    with mock.patch.object(build, "uses_transformer_engine", lambda dtype, converters=(): False):
        yield


@contextmanager
def torch_optimizer() -> Iterator[None]:
    """Policies that are built in the body have torch's Adam
    (megatron/core/optimizer/__init__.py:554)."""
    with mock.patch.object(megatron_optimizer, "USING_PYTORCH_OPTIMIZER", True):
        yield


@contextmanager
def blocks_of(entries: int) -> Iterator[None]:
    """States in host memory pass over the device in blocks of so many."""
    with mock.patch.object(host_optimizer, "_BLOCK", entries):
        yield


def optimizer_states(policy: RandomPolicy) -> dict[str, Tensor]:
    """Copies on the CPU of the weights, their masters and Adam's moments."""
    ranges = optimizer_ranges(policy.optimizer)
    found = {}
    for name, parameter in policy.chunks[0].named_parameters():
        found[name] = parameter
        found |= {
            f"{kind} of {name}": tensor for kind, tensor in ranges[id(parameter)].tensors.items()
        }
    return {name: tensor.detach().cpu().clone() for name, tensor in found.items()}


def random_batch(
    lengths: Sequence[tuple[int, int]], vocab_size: int
) -> tuple[SequenceBatch, WeightedLogprob]:
    """Sequences of random tokens, and a loss that weights the log-prob of every response token
    differently.

    Args:
        lengths: tokens of prompt and response, 1 or more; prompts of one length are the same.
    """
    generator = torch.Generator().manual_seed(len(lengths))
    totals = [prompt + response for prompt, response in lengths]
    tokens = [
        torch.randint(vocab_size, (n,), generator=generator, dtype=torch.int32).numpy()
        for n in totals
    ]
    first = {prompt: row for row, (prompt, _) in reversed(list(enumerate(lengths)))}
    for row, (prompt, _) in enumerate(lengths):
        tokens[row][:prompt] = tokens[first[prompt]][:prompt]
    spans = [[(prompt, n)] for (prompt, _), n in zip(lengths, totals, strict=True)]
    batch = sequence_batch(tokens, spans)
    weights_N = torch.randn(batch.responses.tokens, generator=generator)
    return batch, WeightedLogprob(weights_N, batch.responses)


# ---- comparing


@dataclass(frozen=True)
class Outcome:
    """What a policy computes from a batch, in host memory.

    Attributes:
        logprobs_N: fp32.
        gradients: of every HF tensor, fp32.
    """

    logprobs_N: Tensor
    gradients: dict[str, Tensor]


def outcome(policy: RandomPolicy, batch: SequenceBatch, loss: WeightedLogprob) -> Outcome:
    """Forward pass, then forward and backward of all micro-batches."""
    logprobs_N = policy.logprobs(batch).logprobs_N
    policy.accumulate_gradients(batch, loss, loss)
    gradients = policy.trained.exporter(lambda parameter: parameter.main_grad)
    return Outcome(
        logprobs_N, {name: gradient.float().cpu().clone() for name, gradient in gradients}
    )


def differences(found: Outcome, reference: Outcome) -> dict[str, float | str]:
    """How far an outcome is from another one.

    Returns:
        Log-probs in nats; gradients relative to the reference's norm, of all tensors together and
        of the worst one.
    """
    gaps_N = (found.logprobs_N.double() - reference.logprobs_N.double()).abs()
    squares = {
        name: (gradient - reference.gradients[name]).double().square().sum().item()
        for name, gradient in found.gradients.items()
    }
    norms = {
        name: gradient.double().square().sum().item()
        for name, gradient in reference.gradients.items()
    }
    each = {name: (square / max(norms[name], 1e-30)) ** 0.5 for name, square in squares.items()}
    # a NaN is the worst
    worst = max(each, key=lambda name: each[name] if each[name] == each[name] else float("inf"))
    return {
        "logprob_mean_abs_nats": gaps_N.mean().item(),
        "logprob_max_abs_nats": gaps_N.max().item(),
        "gradient_relative": (sum(squares.values()) / sum(norms.values())) ** 0.5,
        "gradient_relative_worst": each[worst],
        "worst_gradient": worst,
    }


def require(found: Mapping[str, float | str], most: Mapping[str, float], where: str) -> None:
    """
    Raises:
        AssertionError: naming every difference above what is allowed; a NaN is.
    """
    wrong = [
        f"{name} is {found[name]}, at most {most[name]:.3g}"
        for name in most
        if not found[name] <= most[name]
    ]
    if wrong:
        raise AssertionError(
            f"{where}: " + "; ".join(wrong) + f" (worst gradient: {found['worst_gradient']})"
        )


EXACT = {"logprob_max_abs_nats": 5e-5, "gradient_relative": 2e-5, "gradient_relative_worst": 2e-4}
"""What fp32 may differ by that adds up in another order."""


def as_good_as(plain: Mapping[str, float | str]) -> dict[str, float]:
    """What layers in bf16 may be away from fp32, given how far plain layers in bf16 are.

    The factors were set before any of this had run on a GPU: rounding at other places may cost up
    to half as much again on average, a wrong scale, mask or position costs many times as much.
    """
    factors = {
        "logprob_mean_abs_nats": (1.5, 1e-4),
        "logprob_max_abs_nats": (2.0, 1e-3),
        "gradient_relative": (1.5, 1e-4),
        "gradient_relative_worst": (2.0, 1e-3),
    }
    return {name: factor * float(plain[name]) + floor for name, (factor, floor) in factors.items()}


def empty_device() -> None:
    """Gives back what policies that are gone had."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
