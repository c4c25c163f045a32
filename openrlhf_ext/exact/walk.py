"""Where a policy rank and an engine part: what their modules compute for the same text, module by
module.

Of one rank of each: under tensor parallelism a module has this rank's part. Shape suffixes: T =
tokens of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Meant = Callable[[tuple, Any], Tensor]
"""(T, ...) what of a module's inputs and output is looked at."""
Modules = Iterable[tuple[str, nn.Module, Meant]]
"""In the order of computation; policy and engine have the same names."""
States = dict[str, Tensor]
"""(T, ...) by name, in the order of computation."""


@dataclass(frozen=True)
class Difference:
    """``share`` of the values of a module's states that are other bits, and ``largest`` distance.
    0 and infinity: the shapes differ."""

    name: str
    share: float
    largest: float


def policy_modules(chunk: Any) -> Modules:
    """Of a Megatron model with layers of ours, or of a part of its layers. An exact policy rotates
    inside its attention, so its rotated queries and keys are not to be seen."""
    if (embedding := getattr(chunk, "embedding", None)) is not None:
        yield "embedding", embedding.word_embeddings, _output
    for layer in chunk.decoder.layers:
        number, attention = layer.layer_number - 1, layer.self_attention
        groups, size = attention.num_query_groups_per_partition, attention.config.kv_channels
        yield f"{number} qkv", attention.linear_qkv, partial(_as_vllm, groups, size)
        yield f"{number} attention", attention.core_attention, _heads
        yield f"{number} o_proj", attention.linear_proj, _output
        yield f"{number} gate_up", layer.mlp.linear_fc1, _output
        yield f"{number} activation", layer.mlp.linear_fc2, _input
        yield f"{number} down", layer.mlp.linear_fc2, _output
    if chunk.decoder.final_layernorm is not None:
        yield "norm", chunk.decoder.final_layernorm, _output


def engine_modules(model: Any) -> Modules:
    """Of vLLM's model."""
    yield "embedding", model.model.embed_tokens, _output
    for number, layer in enumerate(model.model.layers):
        yield f"{number} qkv", layer.self_attn.qkv_proj, _output
        yield f"{number} attention", layer.self_attn.attn, _output
        yield f"{number} o_proj", layer.self_attn.o_proj, _output
        yield f"{number} gate_up", layer.mlp.gate_up_proj, _output
        yield f"{number} activation", layer.mlp.act_fn, _output
        yield f"{number} down", layer.mlp.down_proj, _output
    yield "norm", model.model.norm, _output


def _input(inputs: tuple, _: Any) -> Tensor:
    return inputs[0].flatten(0, -2)


def _output(_: tuple, out: Any) -> Tensor:
    """Of a module that gives a tensor, or a tuple that begins with one."""
    tensor = out[0] if isinstance(out, tuple) else out
    return tensor.flatten(0, -2)


def _heads(_: tuple, out: Tensor) -> Tensor:
    return out.flatten(1)


def _as_vllm(groups: int, size: int, _: tuple, out: Any) -> Tensor:
    """Megatron has the heads of a group beside each other, vLLM all queries first."""
    rows = _output((), out).unflatten(-1, (groups, -1, size))
    queries, keys, values = rows[:, :, :-2], rows[:, :, -2], rows[:, :, -1]
    return torch.cat([queries.flatten(1), keys.flatten(1), values.flatten(1)], -1)


@contextmanager
def recorded(modules: Modules) -> Iterator[States]:
    """What the modules compute last in the body, copied to the host. The copies cost time, and CUDA
    graphs are not seen."""
    states: States = {}
    handles = [
        module.register_forward_hook(partial(_keep, states, name, meant))
        for name, module, meant in modules
    ]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def _keep(
    states: States, name: str, meant: Meant, _module: nn.Module, inputs: tuple, out: Any
) -> None:
    # some are overwritten in place
    states[name] = meant(inputs, out).detach().to("cpu", copy=True)


def differences(policy: Mapping[str, Tensor], engine: Mapping[str, Tensor]) -> list[Difference]:
    """Of every module that both have recorded, in the engine's order."""
    return [
        _difference(name, policy[name], state) for name, state in engine.items() if name in policy
    ]


def _difference(name: str, policy: Tensor, engine: Tensor) -> Difference:
    if policy.shape != engine.shape:
        return Difference(name, 0.0, torch.inf)
    if (share := different(policy, engine).double().mean().item()) == 0.0:
        return Difference(name, 0.0, 0.0)
    return Difference(name, share, (policy.double() - engine.double()).abs().max().item())


def different(one: Tensor, other: Tensor) -> Tensor:
    """Booleans: where two tensors of floating-point numbers have other bits. Zeros of both signs
    are one number, and a NaN is another one than itself."""
    return one != other
