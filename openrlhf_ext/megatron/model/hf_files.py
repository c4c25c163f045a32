"""Hugging Face checkpoint folders on disk: reading parts of tensors, writing complete folders; and
whether a checkpoint's tensors and a model's parameters account for each other, each exactly
once."""

from __future__ import annotations

import json
import logging
import math
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from openrlhf_ext.checkpoints.files import fsync_folder, write_durably, write_file
from openrlhf_ext.checkpoints.tensors import safetensors_chunks
from openrlhf_ext.inputs import (
    FILE_NAME,
    INNER_PATH,
    InputError,
    free_name,
    map_of,
    read_json,
    reading,
    shown,
)
from openrlhf_ext.megatron.model.adapter import CONFIG, WEIGHTS
from openrlhf_ext.megatron.model.folder import INDEX, SINGLE, require_tied_head
from openrlhf_ext.megatron.model.shape import ModelShape
from openrlhf_ext.megatron.model.weight_map import HFTensor, Rule, Shard, hf_tensors, shard_shape

if TYPE_CHECKING:
    from transformers import GenerationConfig

logger = logging.getLogger(__name__)

# by safetensors' names
FLOAT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_MAX_SHARD_BYTES = 5 << 30


class HFCheckpoint:
    """Reads (sharded) safetensors in parts: only what is asked for leaves the page cache.
    Constructor and methods raise
    InputError: a file is missing or damaged, or the index does not list what the files hold."""

    def __init__(self, path: str | Path, single: str = SINGLE) -> None:
        """``single``: the file of a checkpoint that is not sharded; that of an adapter never is."""
        self.path = Path(path)
        self._single = single
        self._opened: dict[Path, Any] = {}
        self._file_of = self._index()

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """(shape, safetensors' name of the dtype) of a tensor, without reading it."""
        view = self._view(name)
        return tuple(view.get_shape()), view.get_dtype()

    def read(self, name: str, axis: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        view = self._view(name)
        with reading(self._file_of[name], "as safetensors"):
            return view[start:stop] if axis == 0 else view[:, start:stop]

    def _view(self, name: str) -> Any:
        path = self._file_of[name]
        with reading(path, "as safetensors"):
            return self._open(path).get_slice(name)

    def _open(self, path: Path) -> Any:
        if path not in self._opened:
            self._opened[path] = safe_open(path, framework="pt")
        return self._opened[path]

    def _index(self) -> dict[str, Path]:
        single = self._single
        if single != SINGLE or not (self.path / INDEX).exists():
            absent = f"{single} not found"
            if single == SINGLE:
                absent = f"neither {SINGLE} nor {INDEX} found"
            return dict.fromkeys(self._keys(single, absent), self.path / single)
        index = read_json(self.path / INDEX, {"weight_map": map_of(FILE_NAME)})
        listed: dict[str, str] = index["weight_map"]
        for file in sorted(set(listed.values())):
            named = {name for name, where in listed.items() if where == file}
            held = self._keys(file, f"{INDEX} names {file}, which is not there")
            if named != held:
                raise InputError(
                    f"{self.path / file} does not hold what {INDEX} says: missing "
                    f"{sorted(named - held)}, not listed {sorted(held - named)}"
                )
        return {name: self.path / file for name, file in listed.items()}

    def _keys(self, file: str, if_absent: str) -> set[str]:
        if not (self.path / file).exists():
            raise InputError(f"{self.path}: {if_absent}")
        with reading(self.path / file, "as safetensors"):
            return set(self._open(self.path / file).keys())


# ---- writing a checkpoint directory

_CONFIGS = ("config.json", CONFIG)
_SETTINGS = "tokenizer_config.json"
# as transformers 5.19 reads them
_TEMPLATE = "chat_template.jinja"
_TEMPLATES = "additional_chat_templates"
_OF_MODEL = ("config.json", "generation_config.json")
_OF_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model*",
    "spiece.model",
    "sentencepiece.bpe.model",
    "*.spm",
    "*.tiktoken",
    "tiktoken.model",
    "tekken.json",
    _TEMPLATE,
    f"{_TEMPLATES}/*.jinja",
)
_WEIGHT_FILES = ("model*.safetensors", "model*.safetensors.index.json", WEIGHTS)


def read_side_files(source: str | Path, chat_template: str | None = None) -> dict[str, bytes]:
    """Configuration and tokenizer files of a checkpoint by name: what ``save_hf`` puts beside the
    weights.

    Args:
        chat_template: the model is trained through it, in the place of the tokenizer's own.

    Raises:
        InputError: there is no config.json, or a file cannot be read.
    """
    source = Path(source)
    if not (source / "config.json").is_file():
        raise InputError(
            f"{source} holds no config.json, without which nothing can load what is trained from it"
        )
    found = _read(source, (*_OF_MODEL, *_OF_TOKENIZER))
    if chat_template is None:
        return found
    settings = read_json(source / _SETTINGS) if _SETTINGS in found else {}
    settings.pop("chat_template", None)
    found.pop(f"{_TEMPLATES}/default.jinja", None)
    return found | {
        _SETTINGS: json.dumps(settings, indent=2).encode(),
        _TEMPLATE: chat_template.encode(),
    }


def tokenizer_files(source: str | Path) -> dict[str, bytes]:
    """The files of a folder that its tokenizer is read from; empty if it has none."""
    return _read(Path(source), _OF_TOKENIZER)


def _read(source: Path, patterns: Sequence[str]) -> dict[str, bytes]:
    found = {}
    for path in _matching(source, patterns):
        with reading(path):
            found[path.relative_to(source).as_posix()] = path.read_bytes()
    return found


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    found = []
    for pattern in patterns:
        found += sorted(folder.glob(pattern))
    return found


def adapter_side_files(
    side_files: Mapping[str, bytes], config: Mapping[str, Any]
) -> dict[str, bytes]:
    """What is put beside the weights of an adapter: peft's configuration, and the base's
    tokenizer."""
    kept = {
        name: content
        for name, content in side_files.items()
        if name not in (*_CONFIGS, "generation_config.json")
    }
    return kept | {CONFIG: json.dumps(config, indent=2, sort_keys=True).encode()}


_FILES = "files.json"  # in a complete folder: what belongs to the checkpoint


@dataclass(frozen=True)
class HFRows:
    """Consecutive rows of a Hugging Face tensor, or entries of a vector; the memory may be used
    again for the next."""

    name: str
    start: int
    values: Tensor


def save_hf(
    rows: Iterable[HFRows],
    tensors: Sequence[HFTensor],
    dtype: torch.dtype,
    side_files: Mapping[str, bytes],
    target: str | Path,
    max_shard_bytes: int = _MAX_SHARD_BYTES,
    config_changes: Mapping[str, Any] | None = None,
    single: str = SINGLE,
) -> dict[str, int]:
    """Writes an HF checkpoint: safetensors shards plus the configuration and tokenizer files of its
    source. Returns the size in bytes of every file by its name.

    The rows go to the files as they come: none is held. A new ``target`` appears when everything in
    it is on disk. In a folder that exists, whose other files stay, the new files are first written
    beside the old checkpoint; while they take its place there is no ``config.json``, so that a
    loader finds a whole checkpoint or none. :func:`finish_interrupted` sees to what a kill leaves.

    ``side_files``: ``read_side_files`` of the checkpoint that the model began as, read when it was:
    days later the folder may be gone. ``max_shard_bytes``: of a file, unless a tensor alone is
    larger. ``single``: the file's name where there is but one; an adapter's is never sharded.
    Raises CheckpointError: a file cannot be written; ValueError:
    ``rows`` are not all rows of all ``tensors``, in order.
    """
    target = Path(target)
    finish_interrupted(target)
    exists = target.exists()
    temporary = _inside(target) if exists else _beside(target)
    temporary.mkdir(parents=True)
    limit = max_shard_bytes if single == SINGLE else sys.maxsize
    _write_shards(rows, tensors, dtype, temporary, limit, single)
    for name, content in side_files.items():
        write_file(temporary, name, [content])
    if config_changes:
        config = read_json(temporary / "config.json") | dict(config_changes)
        write_file(
            temporary, "config.json", [json.dumps(config, indent=2, sort_keys=True).encode()]
        )
    files = (path for path in sorted(temporary.rglob("*")) if path.is_file())
    sizes = {path.relative_to(temporary).as_posix(): path.stat().st_size for path in files}
    if exists:
        write_file(temporary, _FILES, [json.dumps(sizes).encode()])
        temporary.rename(_complete(target))
        _replace(target)
    else:
        fsync_folder(temporary)
        temporary.rename(target)
        fsync_folder(target.parent)
    logger.info("wrote %s", target)
    return sizes


def finish_interrupted(target: str | Path) -> None:
    """What a killed :func:`save_hf` left: half-written files go, complete ones take the place of
    the old checkpoint."""
    target = Path(target)
    for left in (_inside(target), _beside(target)):
        if left.exists():
            logger.info("removing %s, which a run that was stopped left half-written", left)
            shutil.rmtree(left)
    if _complete(target).exists():
        logger.info(
            "finishing the checkpoint in %s, which was complete when a run was stopped", target
        )
        _replace(target)


def set_aside_hf(target: str | Path) -> Path | None:
    """Moves weights, configuration, tokenizer and card of a folder into one inside of it; returns
    where to, if any."""
    target = Path(target)
    weights = _matching(target, _WEIGHT_FILES)
    if not weights:
        return None

    aside = free_name(target / "superseded")
    aside.mkdir()
    # the configuration first: a loader finds a whole checkpoint or none
    patterns = (CONFIG, *_OF_MODEL, *_OF_TOKENIZER[:-1], _TEMPLATES, "README.md")
    for path in [*_matching(target, patterns), *weights]:
        path.rename(aside / path.name)
    return aside


def _beside(target: Path) -> Path:
    return Path(f"{target}.incomplete")


def _inside(target: Path) -> Path:
    """Not beside a folder that exists: it may be a file system of its own, between which nothing
    can be renamed."""
    return target / ".incomplete"


def _complete(target: Path) -> Path:
    return target / ".complete"


def _replace(target: Path) -> None:
    """Puts the files of the complete folder in ``target`` in the place of those of the checkpoint
    there. Every step can be repeated: what is in the complete folder still has to be moved,
    ``config.json`` last."""
    complete = _complete(target)
    names = read_json(complete / _FILES)
    if outside := [name for name in names if not INNER_PATH.holds(name)]:
        raise InputError(
            f"{complete / _FILES}: {shown(outside[0])} must be {INNER_PATH.words}: no program of "
            f"this package wrote it; remove {complete}"
        )
    fsync_folder(target)
    for config in _CONFIGS:
        if any((complete / name).exists() for name in _CONFIGS):
            (target / config).unlink(missing_ok=True)
    for stale in _matching(target, _WEIGHT_FILES):
        if stale.name not in names:
            stale.unlink()
    for name in sorted(names, key=lambda name: name in _CONFIGS):
        if (complete / name).exists():
            (target / name).parent.mkdir(exist_ok=True)
            (complete / name).replace(target / name)
    fsync_folder(target)
    complete.rename(_inside(target))
    shutil.rmtree(_inside(target))


def _write_shards(
    rows: Iterable[HFRows],
    tensors: Sequence[HFTensor],
    dtype: torch.dtype,
    folder: Path,
    limit: int,
    single: str,
) -> None:
    remaining = iter(rows)
    files = list(_split(tensors, dtype, limit))
    weight_map: dict[str, str] = {}
    for number, held in enumerate(files, start=1):
        name = single if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        weight_map |= {tensor.name: name for tensor in held}
        entries = [(tensor.name, dtype, tensor.shape) for tensor in held]
        write_durably(folder / name, safetensors_chunks(entries, _checked(remaining, held, dtype)))
    if (extra := next(remaining, None)) is not None:
        raise ValueError(f"{folder}: rows of {extra.name} come after the last tensor")
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(_bytes(t, dtype) for t in tensors)},
            "weight_map": weight_map,
        }
        write_file(folder, INDEX, [json.dumps(index, indent=2, sort_keys=True).encode()])


def _split(tensors: Sequence[HFTensor], dtype: torch.dtype, limit: int) -> Iterator[list[HFTensor]]:
    held: list[HFTensor] = []
    for tensor in tensors:
        if held and sum(_bytes(t, dtype) for t in [*held, tensor]) > limit:
            yield held
            held = []
        held.append(tensor)
    yield held


def _bytes(tensor: HFTensor, dtype: torch.dtype) -> int:
    return math.prod(tensor.shape) * dtype.itemsize


def _checked(
    rows: Iterator[HFRows], tensors: Sequence[HFTensor], dtype: torch.dtype
) -> Iterator[Tensor]:
    """The values of the next rows, which must be those of the tensors, in order."""
    for tensor in tensors:
        name = tensor.name
        shape = tensor.shape
        expected = 0
        while expected < shape[0]:
            part = next(rows, None)
            if part is None:
                raise ValueError(
                    f"no rows come after row {expected} of {name}, which has {shape[0]}"
                )
            values = part.values
            if (part.name, part.start, *values.shape[1:]) != (name, expected, *shape[1:]):
                raise ValueError(
                    f"row {expected} of {name} {shape} was expected, row {part.start} "
                    f"of {part.name} came, of shape {tuple(values.shape)}"
                )
            if values.dtype != dtype or expected + len(values) > shape[0]:
                raise ValueError(
                    f"{name} {shape} {dtype}: {len(values)} rows of {values.dtype} came"
                )
            expected += len(values)
            yield values


Problems = dict[str, list[str]]
_LISTED = 40


class WeightMapError(ValueError):
    """The checkpoint and the model do not account for each other's tensors."""


def describe(problems: Mapping[str, Collection[str]]) -> str:
    return "; ".join(f"{what}: {_listed(sorted(names))}" for what, names in problems.items())


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{names[:_LISTED]}{more}"


def new_value_head(shape: ModelShape, checkpoint: HFCheckpoint) -> set[str]:
    """The value head that a critic gets and the checkpoint lacks."""
    return set() if shape.value_head is None else {f"{shape.value_head}.weight"} - checkpoint.names


def require_value_head(shape: ModelShape, checkpoint: HFCheckpoint) -> None:
    """Raises InputError: the checkpoint of a reward model has no value head, and its scores would
    be random."""
    if not new_value_head(shape, checkpoint):
        return
    heads = [
        name
        for name in sorted(checkpoint.names)
        if checkpoint.header(name)[0] == (1, shape.hidden_size)
    ]
    others = "".join(
        f", or set ds.value_head_prefix {name.removesuffix('.weight')}" for name in heads
    )
    raise InputError(
        f"{checkpoint.path} has no value head {shape.value_head}.weight, without which a reward "
        "model's scores are random; give a trained reward model (a sequence classifier with one "
        f"label){others}"
    )


def unaccounted_parameters(
    rules: list[Rule],
    shape: ModelShape,
    parameters: Mapping[str, Tensor],
    held: Callable[[Rule], Shard],
) -> Problems:
    """What keeps ``rules`` from filling every parameter of a chunk exactly once: kind of problem ->
    names. ``held``:
    the shard that the rank holds of a rule's parameter."""
    filled = Counter(rule.parameter for rule in rules)
    wanted = {rule.parameter: shard_shape(rule, shape, held(rule).tp_size) for rule in rules}
    other_shapes = []
    for name, made in wanted.items():
        if name in parameters and (own := tuple(parameters[name].shape)) != made:
            other_shapes.append(f"{name}: {own}, its rule makes {made}")

    problems = {
        "parameters that no rule fills": [*(parameters.keys() - filled.keys())],
        "parameters that the model lacks": [*(filled.keys() - parameters.keys())],
        "parameters filled twice": [name for name, count in filled.items() if count > 1],
        "parameters of another shape": other_shapes,
    }
    return {what: names for what, names in problems.items() if names}


def unaccounted_tensors(checkpoint: HFCheckpoint, shape: ModelShape) -> Problems:
    """What keeps the checkpoint's tensors from being those of ``config.json``: kind of problem ->
    names. A critic's value head may be missing. Raises InputError: tied embeddings beside another
    head."""
    known = {tensor.name: tensor.shape for tensor in hf_tensors(shape)}
    names = checkpoint.names
    output = shape.family.output
    if shape.tied_embeddings and output in names:
        require_tied_head(checkpoint.path)

    # a tied checkpoint may carry a copy of the embedding; old ones carry the rotary table
    ignorable = {name for name in names if name.endswith("rotary_emb.inv_freq")}
    if shape.tied_embeddings or shape.value_head is not None:
        ignorable.add(output)

    other_shapes = []
    other_dtypes = []
    for name in names & known.keys():
        found, dtype = checkpoint.header(name)
        if found != known[name]:
            other_shapes.append(f"{name}: {found}, config.json says {known[name]}")
        if dtype not in FLOAT_DTYPES:
            other_dtypes.append(f"{name}: {dtype}")

    missing = known.keys() - names - new_value_head(shape, checkpoint)
    problems = {
        "tensors of the checkpoint that no rule uses": [*(names - known.keys() - ignorable)],
        "tensors missing from the checkpoint": [*missing],
        "tensors of another shape": other_shapes,
        f"tensors of another dtype than {'/'.join(FLOAT_DTYPES)}": other_dtypes,
    }
    return {what: names for what, names in problems.items() if names}


# ---- what ends a completion


def saved_generation_config(folder: Path) -> GenerationConfig | None:
    """That of the folder. Where it has none, config.json says what ends a completion, as for vLLM
    and transformers."""
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(folder)
    ends = read_json(folder / "config.json").get("eos_token_id")
    return None if ends is None else GenerationConfig(eos_token_id=ends)


def end_tokens(saved: GenerationConfig | None, tokenizer: Any) -> list[int]:
    """All end-of-sequence tokens that stop a rollout: the tokenizer's, and those of the generation
    config."""
    configured = saved.eos_token_id if saved is not None else None
    several = configured if isinstance(configured, list) else [configured]
    return list(
        dict.fromkeys(token for token in [tokenizer.eos_token_id, *several] if token is not None)
    )
