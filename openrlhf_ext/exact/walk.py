"""Where a policy rank and an engine part: what their modules compute for the same text, module by
module.

Of one rank of each: under tensor parallelism a module has this rank's part. Shape suffixes: T =
tokens of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Meant = Callable[[tuple, Any], Tensor]
"""(T, ...) what of a module's inputs and output is looked at."""
Modules = Iterable[tuple[str, nn.Module, Meant]]
"""In the order of computation; policy and engine have the same names."""
States = dict[str, Tensor]
"""(T, ...) by name, in the order of computation."""


Digests = dict[str, np.ndarray]
"""(T,) int64 by name: what a module computed for each token, as one number, which travels."""
_INTEGERS = {2: torch.int16, 4: torch.int32}
_SPREAD = 0x9E3779B1  # odd, so that no bit of a value is lost


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


def digests(states: Mapping[str, Tensor], tokens: int) -> Digests:
    """Of the first ``tokens`` rows of (T, ...) states. Equal bits give equal numbers."""
    return {name: _digest(state[:tokens]) for name, state in states.items()}


def _digest(state: Tensor) -> np.ndarray:
    rows_TF = state.flatten(1).contiguous()
    bits_TF = rows_TF.view(_INTEGERS[rows_TF.element_size()]).long()
    places_F = torch.arange(1, bits_TF.shape[1] + 1) * _SPREAD
    return (bits_TF * places_F).sum(1).numpy()


def first_difference(policy: Mapping[str, np.ndarray], engine: Digests) -> tuple[str, int] | None:
    """The first module, in the engine's order, that computed other bits, and the first token of
    which it did. None if those that both have recorded agree."""
    for name, engine_T in engine.items():
        if name in policy:
            differs_T = policy[name] != engine_T
            if differs_T.any():
                return name, int(differs_T.argmax())
    return None
