"""Weights in and out: a Hugging Face checkpoint into this rank's parameters, and the parameters of all ranks out again.

Both directions stream along the declarative map (``weight_map``), one rule after the other: never more than the HF
tensors of one rule (one bucket) above a rank's own shard. Every HF tensor must be used exactly once and every parameter
filled exactly once; names, shapes and dtypes that do not fit are listed in one error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from openrlhf_ext.megatron.accounting import (
    WeightMapError,
    describe,
    new_value_head,
    unaccounted_parameters,
    unaccounted_tensors,
)
from openrlhf_ext.megatron.hf_config import ModelShape
from openrlhf_ext.megatron.hf_files import HFCheckpoint, HFCheckpointError, save_hf
from openrlhf_ext.megatron.model import HiddenStateGPTModel
from openrlhf_ext.megatron.phases import phase
from openrlhf_ext.megatron.turns import Turns
from openrlhf_ext.megatron.weight_map import (
    HFTensor,
    Rule,
    Run,
    fill_shard,
    hf_shapes,
    hf_tensors,
    owned_rules,
    place_shard,
    shard_runs,
    stage_rules,
)

__all__ = [
    "HFCheckpoint",
    "HFCheckpointError",
    "HFTensor",
    "Rule",
    "WeightMapError",
    "export_hf",
    "hf_shapes",
    "hf_tensors",
    "load_hf",
    "model_rules",
    "new_value_head",
    "save_hf",
    "stage_rules",
]
Chunks = HiddenStateGPTModel | Sequence[HiddenStateGPTModel]


def model_rules(model: HiddenStateGPTModel, shape: ModelShape) -> list[Rule]:
    """The rules of the model chunk ``model``."""
    offset = get_transformer_layer_offset(model.config, getattr(model, "vp_stage", None))
    layers = range(offset, offset + len(model.decoder.layers))
    return stage_rules(shape, layers, model.pre_process, model.post_process)


def _chunks(model: Chunks) -> list[HiddenStateGPTModel]:
    return list(model) if isinstance(model, Sequence) else [model]


# ---- loading ----------------------------------------------------------------------------------------------------


def load_hf(model: Chunks, shape: ModelShape, path: str | Path) -> None:
    """Fills this rank's parameters from an HF checkpoint, reading only the rank's own part of every tensor.

    Not a collective. ``model`` is the model or this rank's chunks of it. The checkpoint may be fp32, bf16 or fp16
    whatever the parameters are: values are then rounded. The value head of a critic stays as it is if the checkpoint
    has none (that of a language model).

    Raises:
        WeightMapError: lists HF tensors that no rule uses, tensors or parameters that are missing, shapes that do not
            fit, dtypes that are no plain floating-point type.
        HFCheckpointError: a file is missing or damaged.
    """
    checkpoint = HFCheckpoint(path)
    new_head = new_value_head(shape, checkpoint)
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    problems = unaccounted_tensors(checkpoint, shape)
    targets: list[tuple[Rule, torch.nn.Parameter]] = []
    for chunk in _chunks(model):
        rules, parameters = model_rules(chunk, shape), dict(chunk.named_parameters())
        for what, names in unaccounted_parameters(rules, shape, parameters, size).items():
            problems.setdefault(what, []).extend(names)
        targets += [
            (rule, parameters[rule.parameter])
            for rule in rules
            if rule.parameter in parameters and new_head.isdisjoint(rule.hf_names)
        ]
    if problems:
        raise WeightMapError(f"{path}: {describe(problems)}")
    for rule, parameter in targets:
        _fill(parameter, rule, checkpoint, shard_runs(rule, shape, rank, size))


def _fill(parameter: Tensor, rule: Rule, checkpoint: HFCheckpoint, runs: list[Run]) -> None:
    def read(tensor: int, run: Run) -> Tensor:
        return checkpoint.read(rule.hf_names[tensor], rule.axis, run.start, run.stop)

    fill_shard(parameter.detach(), rule, runs, read)


# ---- exporting --------------------------------------------------------------------------------------------------


def export_hf(
    model: Chunks,
    shape: ModelShape,
    value: Callable[[torch.nn.Parameter], Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yields every (HF name, full tensor) on rank 0, in the order of ``hf_tensors``.

    All ranks have to exhaust the iterator. Only global rank 0 receives tensors, from the ranks of the first
    data-parallel replica (and there of the first context-parallel rank); these wait for rank 0 to ask for the next
    tensor in no collective (``turns``), so rank 0 may do with each what it likes, for as long as it likes.
    A tensor may be the parameter itself: copy what has to outlive the next train step.

    Args:
        model: the model, or this rank's chunks of it.
        value: what to export of a parameter (default: its data; tests export gradients).
        dtype: dtype of what ``value`` returns (default: that of the parameters).
    """
    turns = Turns()
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) != 0:
        return
    chunks = _chunks(model)
    config = chunks[0].config
    value = value or (lambda p: p.detach())
    own = _own_parameters(chunks, shape)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    for owner, rule in owned_rules(shape, stages, config.virtual_pipeline_model_parallel_size or 1):
        with phase("exporting the weights"):
            turns.next()
            tensors = _gather(value(own[rule.hf_names]), rule, shape) if stage == owner else None
            tensors = _to_first_stage(tensors, rule, owner, stage, shape, dtype or config.params_dtype)
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()  # NCCL's calls return before the peer has arrived
        if tensors is not None:
            yield from zip(rule.hf_names, tensors, strict=True)


def _own_parameters(
    chunks: Sequence[HiddenStateGPTModel], shape: ModelShape
) -> dict[tuple[str, ...], torch.nn.Parameter]:
    """This rank's parameters by the HF tensors they are made of."""
    own: dict[tuple[str, ...], torch.nn.Parameter] = {}
    for chunk in chunks:
        parameters = dict(chunk.named_parameters())
        own |= {rule.hf_names: parameters[rule.parameter] for rule in model_rules(chunk, shape)}
    return own


def _gather(shard: Tensor, rule: Rule, shape: ModelShape) -> list[Tensor] | None:
    """The rule's HF tensors on tensor-parallel rank 0, None on the others; one foreign shard in memory at a time."""
    group = parallel_state.get_tensor_model_parallel_group()
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    if rank != 0:
        if rule.split != "replicated":
            dist.send(shard.contiguous(), dst=dist.get_global_rank(group, 0), group=group)
        return None
    whole = hf_shapes(rule, shape)
    if rule.split == "replicated" or (size == 1 and len(whole) == 1):
        return [shard]
    tensors = [shard.new_empty(s) for s in whole]
    place_shard(shard, rule, shard_runs(rule, shape, 0, size), tensors)
    received = torch.empty_like(shard, memory_format=torch.contiguous_format) if size > 1 else None
    for other in range(1, size):
        dist.recv(received, src=dist.get_global_rank(group, other), group=group)
        place_shard(received, rule, shard_runs(rule, shape, other, size), tensors)
    return tensors


def _to_first_stage(
    tensors: list[Tensor] | None, rule: Rule, owner: int, stage: int, shape: ModelShape, dtype: torch.dtype
) -> list[Tensor] | None:
    """Hands the HF tensors from the owning stage's first rank to global rank 0; None on every other rank."""
    if owner == 0 or parallel_state.get_tensor_model_parallel_rank() != 0:
        return tensors
    group = parallel_state.get_pipeline_model_parallel_group()
    if stage == owner:
        for tensor in tensors:
            dist.send(tensor.contiguous(), dst=dist.get_global_rank(group, 0), group=group)
    if stage != 0:
        return None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    received = [torch.empty(s, dtype=dtype, device=device) for s in hf_shapes(rule, shape)]
    for tensor in received:
        dist.recv(tensor, src=dist.get_global_rank(group, owner), group=group)
    return received
