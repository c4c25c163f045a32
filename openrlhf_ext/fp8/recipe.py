"""What of a model is computed in FP8, and by which recipe: plain values, which travel to Ray
workers; and which weights trainer and rollout engine cut into different 128x128 tiles, so that
their codes differ.

A tile begins where a rank's parameter begins, whatever Hugging Face tensors that is made of.
Megatron interleaves query, key and value by group and stacks gate and up of every rank; vLLM stacks
whole projections. Every weight is cut along one axis only, the columns of o_proj and down_proj, the
rows of the others; along the other both begin at 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

RECIPES = ("blockwise", "current", "delayed")
FORMATS = ("e4m3", "hybrid")
SCALES = ("fp32", "pow2")
AMAX_ALGORITHMS = ("max", "most_recent")
MODULES = ("all", "mlp")
BLOCK = 128  # entries along a side of a block, 'blockwise'
WEIGHT_COPY_BYTES = 2
"""Hopper's FP8 products read both operands row by row, so TransformerEngine keeps a weight and its
transpose."""


@dataclass(frozen=True)
class BF16Layers:
    """Decoder layers at both ends of a model that stay in the model's own precision."""

    start: int = 0
    end: int = 0

    def has(self, number: int, layers: int) -> bool:
        """Whether layer ``number`` of a model of ``layers``, counted from 0, is one of them."""
        return number < self.start or number >= layers - self.end

    def numbers(self, layers: int) -> list[int]:
        return [number for number in range(layers) if self.has(number, layers)]


@dataclass(frozen=True)
class Recipe:
    """How the linear layers of a decoder (q, k, v, output of attention, MLP) multiply in FP8, with
    sums in fp32.

    ``name``: 'blockwise': a scale for 1x128 entries of activations and gradients and for 128x128 of
    a weight (DeepSeek-V3, arXiv 2412.19437 section 3.3); 'current': one for a tensor, from the
    tensor itself; 'delayed': one for a tensor, from the largest entries of earlier micro-batches.
    """

    name: str = "blockwise"
    format: str = "e4m3"  # everywhere; or 'hybrid': E5M2 for the gradients of outputs
    scales: str = "fp32"  # or 'pow2': rounded down to powers of two
    margin: int = 0  # delayed: scales are 2^margin smaller than would fit
    amax_history_len: int = 1024  # delayed: micro-batches that are remembered
    amax_compute_algo: str = "max"  # delayed: the largest of them, or the 'most_recent'
    bf16_layers: BF16Layers = BF16Layers()  # decoder layers that are left out
    # of the other layers; or 'mlp': q, k, v and output of attention are left out
    modules: str = "all"
    emulate: bool = False  # in plain torch on any machine; else TransformerEngine

    def __post_init__(self) -> None:
        for field, choices in (
            ("name", RECIPES),
            ("format", FORMATS),
            ("scales", SCALES),
            ("amax_compute_algo", AMAX_ALGORITHMS),
            ("modules", MODULES),
        ):
            if getattr(self, field) not in choices:
                raise ValueError(
                    f"{field} must be one of {', '.join(choices)}, got {getattr(self, field)!r}"
                )

    @property
    def blockwise(self) -> bool:
        """Whether scales belong to blocks, so that a token's result does not depend on the others
        of its pack."""
        return self.name == "blockwise"

    @property
    def delayed(self) -> bool:
        return self.name == "delayed"

    @property
    def pow2(self) -> bool:
        return self.scales == "pow2"

    @property
    def environment(self) -> dict[str, str]:
        """Variables that TransformerEngine reads when it is imported, once, into class attributes:
        what its constructors take changes nothing (TransformerEngine 2.11.0
        common/recipe/__init__.py:235, 332)."""
        return {
            "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": str(int(not self.pow2)),
            "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": str(int(self.pow2)),
        }

    @property
    def label(self) -> str:
        """For progress lines and records: 'blockwise e4m3 fp32, EMULATED'."""
        only, emulated = (
            ", MLPs only" if self.modules == "mlp" else "",
            ", EMULATED" if self.emulate else "",
        )
        return f"{self.name} {self.format} {self.scales}{only}{emulated}"


QUERY, KEY, VALUE, PROJECTION = (f"self_attn.{name}_proj.weight" for name in "qkvo")
GATE, UP, DOWN = (f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
BY_COLUMNS = (PROJECTION, DOWN)


@dataclass(frozen=True)
class LayerShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int


class Run(NamedTuple):
    """Rows (columns of ``BY_COLUMNS``) [start, stop) of a Hugging Face tensor, named within its
    layer."""

    tensor: str
    start: int
    stop: int


def differing_tensors(shape: LayerShape, trainer_tp: int, engine_tp: int) -> list[str]:
    """Weights of which a tile of the trainer has other entries than the engine's:
    'model.layers.*.mlp.up_proj.weight'. None does where head_dim and the MLP's width per rank are
    multiples of 128 on both sides. Raises ValueError: a tensor-parallel size does not divide heads
    or MLP."""
    trainer, engine = (
        _tiles(trainer_shards(shape, trainer_tp)),
        _tiles(engine_shards(shape, engine_tp)),
    )
    return [f"model.layers.*.{name}" for name in trainer if trainer[name] != engine[name]]


def trainer_shards(shape: LayerShape, size: int) -> list[list[Run]]:
    """The linear weights of a layer on Megatron's tensor-parallel ranks: one list for a rank's
    parameter."""
    _check(shape, size, "trainer")
    queries, width = shape.num_heads // shape.num_kv_heads * shape.head_dim, shape.head_dim
    interleaved = [
        Run(tensor, group * rows, (group + 1) * rows)
        for group in range(shape.num_kv_heads)
        for tensor, rows in ((QUERY, queries), (KEY, width), (VALUE, width))
    ]
    # with fewer groups than ranks Megatron cuts within a group
    per_rank = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim // size
    attention = [
        list(_cut(interleaved, rank * per_rank, (rank + 1) * per_rank)) for rank in range(size)
    ]
    return [*attention, *_others(shape, size)]


def engine_shards(shape: LayerShape, size: int) -> list[list[Run]]:
    """The same on the ranks of a vLLM engine (model_executor/layers/linear.py,
    ``QKVParallelLinear``). With fewer key-value heads than ranks several hold the same one."""
    _check(shape, size, "engine")
    queries, replicas = shape.num_heads // size, max(1, size // shape.num_kv_heads)
    keys = max(1, shape.num_kv_heads // size)
    attention = [
        [
            _part(QUERY, rank, queries * shape.head_dim),
            *(_part(tensor, rank // replicas, keys * shape.head_dim) for tensor in (KEY, VALUE)),
        ]
        for rank in range(size)
    ]
    return [*attention, *_others(shape, size)]


def _others(shape: LayerShape, size: int) -> Iterator[list[Run]]:
    heads, ffn = shape.num_heads * shape.head_dim // size, shape.ffn_hidden_size // size
    for rank in range(size):
        yield [_part(PROJECTION, rank, heads)]
        yield [_part(GATE, rank, ffn), _part(UP, rank, ffn)]
        yield [_part(DOWN, rank, ffn)]


def _part(tensor: str, number: int, length: int) -> Run:
    return Run(tensor, number * length, (number + 1) * length)


def _check(shape: LayerShape, size: int, side: str) -> None:
    for name in ("num_heads", "ffn_hidden_size"):
        if getattr(shape, name) % size:
            raise ValueError(
                f"the {side}'s tensor-parallel size {size} does not divide {name} "
                f"{getattr(shape, name)}"
            )
    groups = shape.num_kv_heads
    if groups % size and size % groups:
        raise ValueError(
            f"the {side}'s tensor-parallel size {size} and num_kv_heads {groups}: neither "
            "divides the other"
        )


def _cut(runs: Iterable[Run], start: int, stop: int) -> Iterator[Run]:
    """Entries [start, stop) of the runs laid end to end."""
    position = 0
    for run in runs:
        length = run.stop - run.start
        low, high = max(start - position, 0), min(stop - position, length)
        if low < high:
            yield Run(run.tensor, run.start + low, run.start + high)
        position += length


def _tiles(shards: list[list[Run]]) -> dict[str, set[frozenset[Run]]]:
    """Tensor -> the tiles that hold some of it, each as the entries that share it."""
    found: dict[str, set[frozenset[Run]]] = {}
    for shard in shards:
        for start in range(0, sum(run.stop - run.start for run in shard), BLOCK):
            tile = frozenset(_merged(_cut(shard, start, start + BLOCK)))
            for name in {run.tensor for run in tile}:
                found.setdefault(name, set()).add(tile)
    return {name: found[name] for name in (QUERY, KEY, VALUE, PROJECTION, GATE, UP, DOWN)}


def _merged(runs: Iterable[Run]) -> Iterator[Run]:
    last: Run | None = None
    for run in sorted(runs):
        if last and last.tensor == run.tensor and last.stop == run.start:
            last = last._replace(stop=run.stop)
            continue
        if last:
            yield last
        last = run
    if last:
        yield last
