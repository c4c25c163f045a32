"""Hugging Face checkpoint <-> Megatron parameters, by a small declarative map of names and splits.

A rule says which HF tensors make one Megatron parameter and how it is cut over the tensor-parallel ranks. Loading and
exporting are the two directions of the same rule. Every HF tensor must be used exactly once and every parameter filled
exactly once; names, shapes and dtypes that do not fit are listed in one error.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from openrlhf_ext.megatron.hf_config import ModelShape
from openrlhf_ext.megatron.model import HiddenStateGPTModel

logger = logging.getLogger(__name__)

Split = Literal["replicated", "column", "row", "vocab", "qkv", "gate_up"]
_MAX_SHARD_BYTES = 5 << 30


class WeightMapError(ValueError):
    """The checkpoint and the model do not account for each other's tensors."""


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter and the HF tensors it is made of.

    ``split``: 'column' cuts dimension 0, 'row' dimension 1, 'vocab' dimension 0 after padding, 'qkv' interleaves
    query, key and value per group and cuts dimension 0, 'gate_up' cuts gate and up separately and stacks the pieces.
    """

    parameter: str
    hf_names: tuple[str, ...]
    split: Split

    def at_layer(self, local: int, layer: int) -> Rule:
        names = tuple(name.format(layer=layer) for name in self.hf_names)
        return Rule(self.parameter.format(layer=local), names, self.split)


_EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab")
_FINAL_NORM = Rule("decoder.final_layernorm.weight", ("model.norm.weight",), "replicated")
_OUTPUT = Rule("output_layer.weight", ("lm_head.weight",), "vocab")
_LAYER = "model.layers.{layer}."
_ATTENTION, _MLP = "decoder.layers.{layer}.self_attention.", "decoder.layers.{layer}.mlp."


def _attention_names(kind: str) -> tuple[str, ...]:
    return tuple(f"{_LAYER}self_attn.{x}_proj.{kind}" for x in "qkv")


def layer_rules(shape: ModelShape) -> list[Rule]:
    """Rules of one decoder layer; ``{layer}`` stands for its index (local in Megatron's names, global in HF's)."""
    rules = [
        Rule(_ATTENTION + "linear_qkv.layer_norm_weight", (_LAYER + "input_layernorm.weight",), "replicated"),
        Rule(_ATTENTION + "linear_qkv.weight", _attention_names("weight"), "qkv"),
        Rule(_ATTENTION + "linear_proj.weight", (_LAYER + "self_attn.o_proj.weight",), "row"),
        Rule(_MLP + "linear_fc1.layer_norm_weight", (_LAYER + "post_attention_layernorm.weight",), "replicated"),
        Rule(_MLP + "linear_fc1.weight", (_LAYER + "mlp.gate_proj.weight", _LAYER + "mlp.up_proj.weight"), "gate_up"),
        Rule(_MLP + "linear_fc2.weight", (_LAYER + "mlp.down_proj.weight",), "row"),
    ]
    if shape.qkv_bias:
        rules.append(Rule(_ATTENTION + "linear_qkv.bias", _attention_names("bias"), "qkv"))
    if shape.qk_norm:
        rules += [
            Rule(_ATTENTION + f"{x}_layernorm.weight", (f"{_LAYER}self_attn.{x}_norm.weight",), "replicated")
            for x in "qk"
        ]
    return rules


def stage_rules(shape: ModelShape, layers: range, first: bool, last: bool) -> list[Rule]:
    """Rules of one pipeline stage that holds the global ``layers``; parameters named as in that stage's model."""
    rules = [_EMBEDDING] if first else []
    rules += [rule.at_layer(i, layer) for i, layer in enumerate(layers) for rule in layer_rules(shape)]
    if last:
        rules.append(_FINAL_NORM)
        if not shape.tied_embeddings:
            rules.append(_OUTPUT)
        elif not first:  # the last stage keeps its own copy of the shared embedding
            rules.append(Rule(_OUTPUT.parameter, _EMBEDDING.hf_names, "vocab"))
    return rules


# ---- one tensor, both directions --------------------------------------------------------------------------------


def to_shard(rule: Rule, tensors: list[Tensor], shape: ModelShape, rank: int, size: int) -> Tensor:
    """The piece of the parameter that tensor-parallel rank ``rank`` of ``size`` holds."""
    if rule.split == "replicated":
        return tensors[0]
    if rule.split == "gate_up":
        return torch.cat([t.chunk(size, 0)[rank] for t in tensors])
    if rule.split == "row":
        return tensors[0].chunk(size, 1)[rank].contiguous()
    whole = tensors[0]
    if rule.split == "qkv":
        whole = _interleave_qkv(tensors, shape)
    elif rule.split == "vocab":
        whole = _pad_rows(whole, shape.padded_vocab_size(size))
    return whole.chunk(size, 0)[rank]


def from_shards(rule: Rule, shards: list[Tensor], shape: ModelShape) -> list[Tensor]:
    """The HF tensors of a rule from the pieces of all tensor-parallel ranks (inverse of ``to_shard``)."""
    if rule.split == "replicated":
        return [shards[0]]
    if rule.split == "row":
        return [torch.cat(shards, 1)]
    if rule.split == "gate_up":
        halves = [shard.chunk(2, 0) for shard in shards]
        return [torch.cat([half[i] for half in halves]) for i in (0, 1)]
    whole = torch.cat(shards)
    if rule.split == "qkv":
        return _separate_qkv(whole, shape)
    return [whole[: shape.vocab_size]] if rule.split == "vocab" else [whole]


def _interleave_qkv(tensors: list[Tensor], shape: ModelShape) -> Tensor:
    """HF's q, k, v (rows = heads * head_dim) -> Megatron's rows: per group all its queries, then its key, its value."""
    groups = [t.unflatten(0, (shape.num_kv_heads, -1)) for t in tensors]
    return torch.cat(groups, 1).flatten(0, 1)


def _separate_qkv(whole: Tensor, shape: ModelShape) -> list[Tensor]:
    queries = shape.num_heads // shape.num_kv_heads * shape.head_dim
    grouped = whole.unflatten(0, (shape.num_kv_heads, -1))
    return [t.flatten(0, 1) for t in grouped.split([queries, shape.head_dim, shape.head_dim], 1)]


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    return (
        tensor if len(tensor) == rows else torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])
    )


def hf_shapes(rule: Rule, shape: ModelShape) -> list[tuple[int, ...]]:
    """Shapes of a rule's HF tensors, known from the configuration alone."""
    h, q, kv = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    if rule.split == "vocab":
        return [(shape.vocab_size, h)]
    if rule.split == "gate_up":
        return [(shape.ffn_hidden_size, h)] * 2
    if rule.split == "qkv":
        return [(n, h) if rule.parameter.endswith("weight") else (n,) for n in (q, kv, kv)]
    if rule.split == "row":
        return [(h, q if "linear_proj" in rule.parameter else shape.ffn_hidden_size)]
    return [(shape.head_dim,)] if rule.parameter.endswith(("q_layernorm.weight", "k_layernorm.weight")) else [(h,)]


@dataclass(frozen=True)
class HFTensor:
    """Name and shape of one tensor of the HF checkpoint."""

    name: str
    shape: tuple[int, ...]


def hf_tensors(shape: ModelShape) -> list[HFTensor]:
    """Every tensor of the HF checkpoint, in the order in which ``export_hf`` yields them."""
    rules = stage_rules(shape, range(shape.num_layers), first=True, last=True)
    return [HFTensor(n, s) for rule in rules for n, s in zip(rule.hf_names, hf_shapes(rule, shape), strict=True)]


# ---- loading ----------------------------------------------------------------------------------------------------


class HFCheckpoint:
    """Reads the tensors of a (sharded) safetensors checkpoint one at a time."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file_of = self._index()

    def _index(self) -> dict[str, Path]:
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            return {k: self.path / v for k, v in json.loads(index.read_text())["weight_map"].items()}
        single = self.path / "model.safetensors"
        if not single.exists():
            raise WeightMapError(f"{self.path}: neither model.safetensors nor model.safetensors.index.json found")
        with safe_open(single, framework="pt") as f:
            return dict.fromkeys(f.keys(), single)

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def tensors(self, rules: Iterable[Rule]) -> Iterator[tuple[Rule, list[Tensor]]]:
        """Yields each rule with its HF tensors; files stay memory-mapped, so only what is copied takes memory."""
        with ExitStack() as stack:
            opened: dict[Path, object] = {}
            for rule in rules:
                for path in (self._file_of[name] for name in rule.hf_names):
                    if path not in opened:
                        opened[path] = stack.enter_context(safe_open(path, framework="pt"))
                yield rule, [opened[self._file_of[name]].get_tensor(name) for name in rule.hf_names]


def model_rules(model: HiddenStateGPTModel, shape: ModelShape) -> list[Rule]:
    """The rules of the stage that ``model`` holds."""
    offset = get_transformer_layer_offset(model.config)
    layers = range(offset, offset + len(model.decoder.layers))
    return stage_rules(shape, layers, model.pre_process, model.post_process)


def load_hf(model: HiddenStateGPTModel, shape: ModelShape, path: str | Path) -> None:
    """Fills this rank's parameters from an HF checkpoint, streaming tensor by tensor.

    Raises:
        WeightMapError: HF tensors that no rule uses, tensors or parameters that are missing, shapes that do not fit.
    """
    checkpoint = HFCheckpoint(path)
    rules = model_rules(model, shape)
    parameters = {n: p for n, p in model.named_parameters()}
    _check_accounted(checkpoint.names, shape, rules, set(parameters))
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    for rule, tensors in checkpoint.tensors(rules):
        wanted = hf_shapes(rule, shape)
        if [tuple(t.shape) for t in tensors] != wanted:
            raise WeightMapError(
                f"{rule.hf_names}: shapes {[tuple(t.shape) for t in tensors]}, config.json says {wanted}"
            )
        with torch.no_grad():
            parameters[rule.parameter].copy_(to_shard(rule, tensors, shape, rank, size))


def _check_accounted(hf_names: set[str], shape: ModelShape, rules: list[Rule], parameters: set[str]) -> None:
    known = {t.name for t in hf_tensors(shape)}
    # a tied checkpoint may carry a copy of the embedding; old ones carry the rotary table
    ignorable = {n for n in hf_names if n.endswith("rotary_emb.inv_freq")} | (
        {"lm_head.weight"} if shape.tied_embeddings else set()
    )
    filled = [rule.parameter for rule in rules]
    problems = {
        "tensors of the checkpoint that no rule uses": hf_names - known - ignorable,
        "tensors missing from the checkpoint": known - hf_names,
        "parameters that no rule fills": parameters - set(filled),
        "parameters that the model lacks": set(filled) - parameters,
        "parameters filled twice": {p for p in filled if filled.count(p) > 1},
    }
    if found := {k: sorted(v) for k, v in problems.items() if v}:
        raise WeightMapError("; ".join(f"{k}: {v}" for k, v in found.items()))


# ---- exporting --------------------------------------------------------------------------------------------------


def export_hf(
    model: HiddenStateGPTModel, shape: ModelShape, value: Callable[[torch.nn.Parameter], Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields every (HF name, full tensor) on rank 0, in the order of ``hf_tensors``.

    A collective of the first data-parallel replica: its ranks all have to exhaust the iterator, and only global rank 0
    receives tensors. Ranks of other replicas yield nothing and take no part.

    Args:
        value: what to export of a parameter (default: its data; tests export gradients).
    """
    if parallel_state.get_data_parallel_rank(with_context_parallel=False) != 0:
        return
    value = value or (lambda p: p.detach())
    parameters = dict(model.named_parameters())
    mine = {rule.hf_names: rule for rule in model_rules(model, shape)}
    for owner, rule in _owners(shape):
        shards = None
        if parallel_state.get_pipeline_model_parallel_rank() == owner:
            shards = _gather_shards(value(parameters[mine[rule.hf_names].parameter]), rule)
        tensors = _to_first_rank(shards, rule, owner, shape, model.config.params_dtype)
        if tensors is not None:
            yield from zip(rule.hf_names, tensors, strict=True)


def _owners(shape: ModelShape) -> Iterator[tuple[int, Rule]]:
    """(pipeline stage, rule) for the whole model, in HF order; layers are spread evenly over the stages."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    per_stage = shape.num_layers // stages
    yield 0, _EMBEDDING
    for layer in range(shape.num_layers):
        for rule in layer_rules(shape):
            yield layer // per_stage, rule.at_layer(layer % per_stage, layer)
    yield stages - 1, _FINAL_NORM
    if not shape.tied_embeddings:
        yield stages - 1, _OUTPUT


def _gather_shards(tensor: Tensor, rule: Rule) -> list[Tensor]:
    size = parallel_state.get_tensor_model_parallel_world_size()
    if size == 1 or rule.split == "replicated":
        return [tensor]
    shards = [torch.empty_like(tensor) for _ in range(size)]
    # gloo scatters and gathers wrong data from non-contiguous inputs without an error (torch 2.13)
    dist.all_gather(shards, tensor.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return shards


def _to_first_rank(
    shards: list[Tensor] | None, rule: Rule, owner: int, shape: ModelShape, dtype: torch.dtype
) -> list[Tensor] | None:
    """Hands the rule's HF tensors from the owning stage to global rank 0; None on every other rank."""
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return None
    stage = parallel_state.get_pipeline_model_parallel_rank()
    tensors = from_shards(rule, shards, shape) if shards is not None else None
    if owner == 0:
        return tensors if stage == 0 else None
    if stage == owner:
        for tensor in tensors:
            dist.send(tensor.contiguous(), dst=0)
        return None
    if stage != 0:
        return None
    source = parallel_state.get_pipeline_model_parallel_group()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    received = [torch.empty(s, dtype=dtype, device=device) for s in hf_shapes(rule, shape)]
    for tensor in received:
        dist.recv(tensor, src=dist.get_global_rank(source, owner))
    return received


# ---- writing a checkpoint directory -----------------------------------------------------------------------------

_SIDE_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja",
)  # fmt: skip


def save_hf(
    tensors: Iterable[tuple[str, Tensor]],
    source: str | Path,
    target: str | Path,
    max_shard_bytes: int = _MAX_SHARD_BYTES,
) -> None:
    """Writes an HF checkpoint: safetensors shards plus the configuration and tokenizer files of ``source``.

    The files are written under a temporary name and moved when complete, so that ``target`` is never half-written.
    Other files in ``target`` stay.
    """
    target, temporary = Path(target), Path(f"{target}.incomplete")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    files = list(_write_shards(tensors, temporary, max_shard_bytes))
    _finish_names(files, temporary)
    for name in _SIDE_FILES:
        if (Path(source) / name).exists():
            shutil.copy2(Path(source) / name, temporary / name)
    for path in temporary.iterdir():
        _fsync(path)
    _replace_directory(temporary, target)
    logger.info("wrote %s", target)


def _write_shards(
    tensors: Iterable[tuple[str, Tensor]], folder: Path, limit: int
) -> Iterator[tuple[Path, list[str], int]]:
    shard: dict[str, Tensor] = {}
    size = number = 0
    for name, tensor in tensors:
        tensor_bytes = tensor.numel() * tensor.element_size()
        if shard and size + tensor_bytes > limit:
            yield _write_shard(shard, folder, number), list(shard), size
            shard, size, number = {}, 0, number + 1
        shard[name] = tensor.to("cpu", copy=True).contiguous()
        size += tensor_bytes
    yield _write_shard(shard, folder, number), list(shard), size


def _write_shard(shard: dict[str, Tensor], folder: Path, number: int) -> Path:
    path = folder / f"shard-{number:05d}.safetensors"
    save_file(shard, path, metadata={"format": "pt"})
    return path


def _finish_names(files: list[tuple[Path, list[str], int]], folder: Path) -> None:
    if len(files) == 1:
        files[0][0].rename(folder / "model.safetensors")
        return
    weight_map = {}
    for i, (path, names, _) in enumerate(files):
        final = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        path.rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": sum(size for *_, size in files)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))


def _fsync(path: Path) -> None:
    with open(path, "rb") as f:
        os.fsync(f.fileno())


def _replace_directory(temporary: Path, target: Path) -> None:
    """Puts the finished files of ``temporary`` into ``target`` without touching other files there (metrics, figures).

    ``config.json`` leaves first and arrives last: a loader in between finds no checkpoint, never a mixed one.
    """
    if not target.exists():
        temporary.rename(target)
        return
    (target / "config.json").unlink(missing_ok=True)
    for stale in [*target.glob("model*.safetensors"), *target.glob("model*.safetensors.index.json")]:
        stale.unlink()
    for path in sorted(temporary.iterdir(), key=lambda p: p.name == "config.json"):
        path.replace(target / path.name)
    temporary.rmdir()
