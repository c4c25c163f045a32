"""Do the tensors of a checkpoint and the parameters of a model account for each other? Needs no model to be built.

Every HF tensor must be used exactly once and every parameter filled exactly once. The functions return what is wrong,
kind of problem -> names, so that one error can list everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from torch import Tensor

from openrlhf_ext.megatron.model.hf_files import FLOAT_DTYPES, HFCheckpoint
from openrlhf_ext.megatron.model.shape import ModelShape
from openrlhf_ext.megatron.model.weight_map import Rule, hf_tensors, shard_shape

Problems = dict[str, list[str]]
_LISTED = 40


class WeightMapError(ValueError):
    """The checkpoint and the model do not account for each other's tensors."""


def describe(problems: Mapping[str, Collection[str]]) -> str:
    """One line with the names of everything, or the first of very many."""
    return "; ".join(f"{what}: {_listed(sorted(names))}" for what, names in problems.items())


def _listed(names: list[str]) -> str:
    return f"{names[:_LISTED]}" + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


def new_value_head(shape: ModelShape, checkpoint: HFCheckpoint) -> set[str]:
    """The name of the value head if the model has one and the checkpoint has not."""
    return set() if shape.value_head is None else {f"{shape.value_head}.weight"} - checkpoint.names


def unaccounted_parameters(
    rules: list[Rule], shape: ModelShape, parameters: Mapping[str, Tensor], size: int
) -> Problems:
    """What keeps ``rules`` from filling every parameter of a chunk exactly once; empty if nothing does.

    Args:
        parameters: by name, of one of ``size`` tensor-parallel ranks.
    """
    filled = Counter(rule.parameter for rule in rules)
    wanted = {rule.parameter: shard_shape(rule, shape, size) for rule in rules}
    problems = {
        "parameters that no rule fills": [*(parameters.keys() - filled.keys())],
        "parameters that the model lacks": [*(filled.keys() - parameters.keys())],
        "parameters filled twice": [name for name, count in filled.items() if count > 1],
        "parameters of another shape": [
            f"{name}: {tuple(parameters[name].shape)}, its rule makes {wanted[name]}"
            for name in wanted
            if name in parameters and tuple(parameters[name].shape) != wanted[name]
        ],
    }
    return {what: names for what, names in problems.items() if names}


def unaccounted_tensors(checkpoint: HFCheckpoint, shape: ModelShape) -> Problems:
    """What keeps the checkpoint's tensors from being those of ``config.json``; empty if nothing does.

    A critic's value head may be missing.
    """
    known = {t.name: t.shape for t in hf_tensors(shape)}
    names = checkpoint.names
    # a tied checkpoint may carry a copy of the embedding; old ones carry the rotary table
    ignorable = {n for n in names if n.endswith("rotary_emb.inv_freq")} | (
        {shape.family.output} if shape.tied_embeddings or shape.value_head is not None else set()
    )
    headers = {name: checkpoint.header(name) for name in names & known.keys()}
    problems = {
        "tensors of the checkpoint that no rule uses": [*(names - known.keys() - ignorable)],
        "tensors missing from the checkpoint": [*(known.keys() - names - new_value_head(shape, checkpoint))],
        "tensors of another shape": [
            f"{name}: {found}, config.json says {known[name]}"
            for name, (found, _) in headers.items()
            if found != known[name]
        ],
        f"tensors of another dtype than {'/'.join(FLOAT_DTYPES)}": [
            f"{name}: {dtype}" for name, (_, dtype) in headers.items() if dtype not in FLOAT_DTYPES
        ],
    }
    return {what: names for what, names in problems.items() if names}
