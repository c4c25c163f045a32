"""A Hugging Face checkpoint into this rank's parameters; ``export`` is the way back.

Loading streams along the declarative map (``weight_map``), some rows after the others from the mapped files. Every HF
tensor must be used exactly once and every parameter filled exactly once; names, shapes and dtypes that do not fit are
listed in one error.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from openrlhf_ext.megatron.model.accounting import (
    WeightMapError,
    describe,
    new_value_head,
    unaccounted_parameters,
    unaccounted_tensors,
)
from openrlhf_ext.megatron.model.build import HiddenStateGPTModel
from openrlhf_ext.megatron.model.hf_files import HFCheckpoint
from openrlhf_ext.megatron.model.shape import ModelShape
from openrlhf_ext.megatron.model.weight_map import Rule, Run, Shard, fill_shard, shard_runs, stage_rules

BUCKET_BYTES = 256 << 20
"""What a rank may hold above its shard while weights are loaded or exported."""


def model_rules(model: HiddenStateGPTModel, shape: ModelShape) -> list[Rule]:
    """The rules of the model chunk ``model``."""
    offset = get_transformer_layer_offset(model.config, getattr(model, "vp_stage", None))
    layers = range(offset, offset + len(model.decoder.layers))
    return stage_rules(shape, layers, model.pre_process, model.post_process)


def load_hf(chunks: Sequence[HiddenStateGPTModel], shape: ModelShape, path: str | Path) -> None:
    """Fills this rank's parameters from an HF checkpoint, reading only the rank's own part of every tensor.

    Not a collective. ``chunks`` are this rank's of the model. The checkpoint may be fp32, bf16 or fp16
    whatever the parameters are: values are then rounded. The value head of a critic stays as it is if the checkpoint
    has none (that of a language model).

    Raises:
        WeightMapError: lists HF tensors that no rule uses, tensors or parameters that are missing, shapes that do not
            fit, dtypes that are no plain floating-point type.
        InputError: a file is missing or damaged.
    """
    checkpoint = HFCheckpoint(path)
    new_head = new_value_head(shape, checkpoint)
    shard = Shard(
        parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    )
    problems = unaccounted_tensors(checkpoint, shape)
    targets: list[tuple[Rule, torch.nn.Parameter]] = []
    for chunk in chunks:
        rules, parameters = model_rules(chunk, shape), dict(chunk.named_parameters())
        for what, names in unaccounted_parameters(rules, shape, parameters, shard.tp_size).items():
            problems.setdefault(what, []).extend(names)
        targets += [
            (rule, parameters[rule.parameter])
            for rule in rules
            if rule.parameter in parameters and new_head.isdisjoint(rule.hf_names)
        ]
    if problems:
        raise WeightMapError(f"{path}: {describe(problems)}")
    for rule, parameter in targets:
        _fill(parameter, rule, checkpoint, shard_runs(rule, shape, shard))


def _fill(parameter: Tensor, rule: Rule, checkpoint: HFCheckpoint, runs: list[Run]) -> None:
    def read(tensor: int, run: Run) -> Tensor:
        return checkpoint.read(rule.hf_names[tensor], rule.axis, run.start, run.stop)

    most = max(1, BUCKET_BYTES * parameter.shape[rule.axis] // (4 * parameter.numel()))  # files hold at most fp32
    fill_shard(parameter.detach(), rule, [part for run in runs for part in run.split(most)], read)
