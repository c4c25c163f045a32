"""Rules of checkpoints: that something is written, that it fits on the disk, and what a resume depends on."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf_ext.config.errors import Violation

if TYPE_CHECKING:
    from openrlhf_ext.config.schema import RunConfig

EVALUATION_METRICS = ("eval/accuracy", "eval/reward_mean", "eval/response_length_mean")
# bytes per parameter: the weights, and Adam's two moments in fp32; fp32 master weights beside bf16 ones
_WEIGHT_BYTES = {"fp32": 4, "bf16": 2}
_RESUMABLE_BYTES = {"fp32": 4 + 8, "bf16": 2 + 4 + 8}
_SCALARS = ("F64", "F32", "F16", "BF16")
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def checkpoint_violations(
    *, save_steps: int, save_hf: bool, resumable: bool, best_metric: str, evaluates: bool
) -> Iterator[Violation]:
    """Checkpoints that are asked for are of some form, and the best one can be told."""
    if not resumable and not save_hf and save_steps != -1:
        yield Violation(
            ("ckpt.save_steps", "ckpt.disable_ds", "ckpt.save_hf"),
            f"ckpt.save_steps {save_steps} writes nothing: ckpt.disable_ds switches resumable checkpoints off and "
            "ckpt.save_hf is off; drop ckpt.disable_ds or add --ckpt.save_hf",
        )
    if not best_metric:
        return
    if best_metric not in EVALUATION_METRICS:
        yield Violation(
            ("ckpt.best_metric_key",),
            f"ckpt.best_metric_key must be one of {', '.join(EVALUATION_METRICS)}: got {best_metric}",
        )
    if not evaluates:
        yield Violation(
            ("ckpt.best_metric_key", "eval.steps", "eval.dataset"),
            f"ckpt.best_metric_key {best_metric} needs evaluations during training: set eval.dataset and eval.steps",
        )


def checkpoint_warnings(config: RunConfig) -> Iterator[str]:
    """Options of checkpoints that do nothing beside the others."""
    ckpt, restarts = config.ckpt, config.train.max_restarts
    saves = (ckpt.save_steps != -1 or ckpt.best_metric_key) and not ckpt.disable_ds
    if restarts and not saves:
        yield f"train.max_restarts {restarts}: without ckpt.save_steps a restart begins from the first step"
    if ckpt.fallback_enable and not ckpt.load_enable and not restarts:
        yield "ckpt.fallback_enable has no effect: neither ckpt.load_enable nor train.max_restarts is set"
    if ckpt.save_steps == -1 and not ckpt.best_metric_key:
        for name, is_asked in (("save_hf", ckpt.save_hf), ("max_num", ckpt.max_num != type(ckpt)().max_num)):
            if is_asked:
                yield f"ckpt.{name} has no effect: neither ckpt.save_steps nor ckpt.best_metric_key is set"
    if ckpt.async_enable and not saves:
        yield "ckpt.async_enable has no effect: no resumable checkpoints are written"


def space_violations(config: RunConfig) -> Iterator[Violation]:
    """There is room for a checkpoint; further ones replace older ones."""
    if config.ckpt.save_steps == -1 and not config.ckpt.best_metric_key:
        return
    size = checkpoint_bytes(config)
    place = _existing(Path(config.ckpt.path))
    if size is None or not place.is_dir():
        return
    free = shutil.disk_usage(place).free
    if size > free:
        yield Violation(
            ("ckpt.path", "ckpt.save_steps"),
            f"a checkpoint takes about {_readable(size)}, the disk of ckpt.path {config.ckpt.path} has "
            f"{_readable(free)} free; use another ckpt.path or make room (ckpt.max_num + 1 of them are there at a "
            "time)",
        )


def checkpoint_bytes(config: RunConfig) -> int | None:
    """Bytes of one checkpoint, about; None where the model's files are not here to be counted."""
    count = parameter_count(config.actor.model_name_or_path)
    if count is None:
        return None
    kind = config.megatron.param_dtype
    forms = (0 if config.ckpt.disable_ds else _RESUMABLE_BYTES[kind]) + (
        _WEIGHT_BYTES[kind] if config.ckpt.save_hf else 0
    )
    critic = 0
    if config.has_critic and not config.ckpt.disable_ds:
        critic_count = parameter_count(config.critic.model_name_or_path or config.actor.model_name_or_path)
        critic = (critic_count or count) * _RESUMABLE_BYTES[kind]
    return count * forms + critic


def parameter_count(folder: str | None) -> int | None:
    """Parameters in a folder's safetensors files, from their headers; None if there is none or it is no such file."""
    files = sorted(Path(folder).glob("*.safetensors")) if folder is not None else []
    try:
        return sum(map(_elements, files)) or None
    except (OSError, ValueError, KeyError, AttributeError):
        return None  # whether the model can be loaded is checked, and reported, elsewhere


def _elements(path: Path) -> int:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length)) if length < path.stat().st_size else {}
    tensors = [t for name, t in header.items() if name != "__metadata__" and t["dtype"] in _SCALARS]
    return sum(math.prod(tensor["shape"]) for tensor in tensors)


def _existing(folder: Path) -> Path:
    return next((f for f in (folder, *folder.parents) if f.exists()), Path("/"))


def _readable(size: int) -> str:
    unit, name = next(((unit, name) for unit, name in _UNITS if size >= unit), _UNITS[-1])
    return f"{size / unit:.1f} {name}"
