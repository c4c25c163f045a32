"""How the ranks of a run are arranged, tp-cp-ep-pp-dp (tensor parallelism varies fastest), because OpenRLHF's actor
group treats ``tp * cp * pp`` contiguous ranks as one data-parallel rank. No other place knows the order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

from openrlhf_ext.options.sections import Megatron

RANK_ORDER = "tp-cp-ep-pp-dp"
PIPELINE_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")


class RankPlace(NamedTuple):
    """Coordinates of a rank: within its tensor- and context-parallel groups, its pipeline stage, its replica."""

    tensor: int
    context: int
    stage: int
    replica: int


@dataclass(frozen=True)
class ParallelLayout:
    """Degrees of parallelism; ``data_parallel_size`` follows from ``world_size``."""

    world_size: int
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    sequence_parallel: bool = False
    virtual_pipeline_size: int = 1  # model chunks per pipeline stage (interleaved schedule)
    decoder_first_pipeline_num_layers: int | None = None  # None: as many as the stages between
    decoder_last_pipeline_num_layers: int | None = None

    @classmethod
    def of(cls, options: Megatron, ranks: int) -> ParallelLayout:
        return cls(
            ranks, options.tensor_parallel_size, options.pipeline_parallel_size, options.context_parallel_size,
            options.sequence_parallel_enable, options.virtual_pipeline_size,
            options.decoder_first_pipeline_num_layers, options.decoder_last_pipeline_num_layers,
        )  # fmt: skip

    def problems(self, name: Callable[[str], str] = str) -> Iterator[tuple[tuple[str, ...], str]]:
        """The rules that are broken: the fields concerned, and what is wrong. ``name``: what the user calls a field."""
        world, tp, pp, cp, sp, vp, *ends = (name(field.name) for field in fields(self))
        size, world_size = self.model_parallel_size, self.world_size
        if world_size % size:
            below = world_size // size * size
            remedy = " or ".join(str(count) for count in (below, below + size) if count)
            yield (
                (world, tp, pp, cp),
                f"{world} must be a multiple of {tp} * {pp} * {cp}: got {world_size} ranks, "
                f"{self.tensor_parallel_size} * {self.pipeline_parallel_size} * {self.context_parallel_size} = {size}; "
                f"use {remedy} ranks or another layout",
            )
        if self.virtual_pipeline_size > 1 and self.pipeline_parallel_size == 1:
            yield (vp, pp), f"{vp} needs {pp} > 1: got {self.virtual_pipeline_size} and 1; set it to 1"
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            yield (sp, tp), f"{sp} needs {tp} > 1: got 1; switch it off"
        for end, layers in zip(ends, self.given_layers, strict=True):
            if layers is not None and self.pipeline_parallel_size == 1:
                yield (end, pp), f"{end} needs {pp} > 1: got {layers} and 1; leave it out"

    @property
    def model_parallel_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // self.model_parallel_size

    @property
    def given_layers(self) -> tuple[int | None, int | None]:
        """Layers of the first and of the last stage where they are not spread evenly."""
        return self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers

    def stage_layers(self, num_layers: int) -> list[int]:
        """Layers of every stage. Raises ValueError: a stage would have none, or the stages whose layers are not given
        unlike many."""
        stages = self.pipeline_parallel_size
        given = {at: one for at, one in zip((0, stages - 1), self.given_layers, strict=True) if one is not None}
        rest, others = num_layers - sum(given.values()), stages - len(given)
        if rest < others or (rest % others if others else rest):
            raise ValueError(f"{rest} of {num_layers} layers are left for {others} of {stages} stages")
        return [given.get(stage, rest // max(1, others)) for stage in range(stages)]

    def chunk_layers(self, num_layers: int) -> dict[tuple[int, int], range]:
        """Layers, counted from 0, of every (pipeline stage, model chunk), as Megatron spreads them: chunks interleaved.
        Raises ValueError: they cannot be spread so."""
        chunks, stages, start = self.virtual_pipeline_size, self.stage_layers(num_layers), 0
        if any(layers % chunks for layers in stages):
            raise ValueError(f"stages of {stages} layers are not {chunks} equal chunks each")
        places = {}
        for chunk in range(chunks):
            for stage, layers in enumerate(stages):
                places[stage, chunk] = range(start, start + layers // chunks)
                start += layers // chunks
        return places

    def place(self, rank: int) -> RankPlace:
        tp, cp, pp = self.tensor_parallel_size, self.context_parallel_size, self.pipeline_parallel_size
        sizes = {"tp": tp, "cp": cp, "ep": 1, "pp": pp, "dp": self.data_parallel_size}
        rest, at = rank, {}
        for axis in RANK_ORDER.split("-"):
            rest, at[axis] = divmod(rest, sizes[axis])
        return RankPlace(at["tp"], at["cp"], at["pp"], at["dp"])

    def ranks(
        self,
        *,
        tensor: int | None = None,
        context: int | None = None,
        stage: int | None = None,
        replica: int | None = None,
    ) -> tuple[int, ...]:
        """The global ranks with these coordinates, ascending; None takes all of an axis."""
        wanted = (tensor, context, stage, replica)
        places = {rank: zip(wanted, self.place(rank), strict=True) for rank in range(self.world_size)}
        return tuple(rank for rank, pairs in places.items() if all(want in (None, found) for want, found in pairs))

    def answers_for_replica(self, rank: int) -> bool:
        return rank == self.ranks(replica=self.place(rank).replica)[0]

    @property
    def copies(self) -> int:
        """How many ranks hold each share of the model."""
        return self.context_parallel_size * self.data_parallel_size

    def copy(self, rank: int) -> int:
        """Number of a rank among those that hold its share, in the order of ranks."""
        place = self.place(rank)
        return place.replica * self.context_parallel_size + place.context

    @property
    def near_ranks(self) -> int:
        return self.tensor_parallel_size * self.context_parallel_size
