"""How the ranks of a run are arranged. No other place knows their order: ``place`` tells where a
rank is, ``ranks`` which ranks are at a place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

from openrlhf_ext.options.sections import Megatron

# tensor parallelism varies fastest. Each replica is tp * cp * pp ranks in a row, as in OpenRLHF's
# actor group; Megatron takes that only where an expert has as many replicas as all else
# (megatron-core 0.19.2 parallel_state.py:896)
_REPLICAS_IN_A_ROW, _STAGES_LAST = "tp-cp-ep-pp-dp", "tp-cp-ep-dp-pp"
PIPELINE_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")


class RankPlace(NamedTuple):
    """Coordinates of a rank: within its tensor- and context-parallel groups, its pipeline stage,
    its replica; and among the ranks of its stage once more as a holder of experts: which shard of
    them, which experts, which copy of these."""

    tensor: int
    context: int
    stage: int
    replica: int
    expert_tensor: int
    expert: int
    expert_replica: int


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
    expert_parallel_size: int = 1  # ranks of a stage that the experts of a layer are dealt over
    # ranks that share an expert; None: see ``expert_tensor``
    expert_tensor_parallel_size: int | None = None

    @classmethod
    def of(cls, options: Megatron, ranks: int) -> ParallelLayout:
        return cls(
            ranks,
            options.tensor_parallel_size,
            options.pipeline_parallel_size,
            options.context_parallel_size,
            options.sequence_parallel_enable,
            options.virtual_pipeline_size,
            options.decoder_first_pipeline_num_layers,
            options.decoder_last_pipeline_num_layers,
            options.expert_parallel_size,
            options.expert_tensor_parallel_size,
        )

    @property
    def sizes(self) -> dict[str, int]:
        """As the records of a run have them."""
        return {
            "ranks": self.world_size,
            "tensor": self.tensor_parallel_size,
            "pipeline": self.pipeline_parallel_size,
            "context": self.context_parallel_size,
            "data": self.data_parallel_size,
            "experts": self.expert_parallel_size,
        }

    def problems(self, name: Callable[[str], str] = str) -> Iterator[tuple[tuple[str, ...], str]]:
        """The rules that are broken: the fields concerned, and what is wrong. ``name``: what the
        user calls a field."""
        world, tp, pp, cp, sp, vp, *ends, ep, etp = (name(field.name) for field in fields(self))
        size, world_size = self.model_parallel_size, self.world_size
        if world_size % size:
            below = world_size // size * size
            remedy = " or ".join(str(count) for count in (below, below + size) if count)
            yield (
                (world, tp, pp, cp),
                f"{world} must be a multiple of {tp} * {pp} * {cp}: got {world_size} ranks, "
                f"{self.tensor_parallel_size} * {self.pipeline_parallel_size} * "
                f"{self.context_parallel_size} = {size}; use {remedy} ranks or another layout",
            )
        if self.virtual_pipeline_size > 1 and self.pipeline_parallel_size == 1:
            yield (
                (vp, pp),
                f"{vp} needs {pp} > 1: got {self.virtual_pipeline_size} and 1; set it to 1",
            )
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            yield (sp, tp), f"{sp} needs {tp} > 1: got 1; switch it off"
        for end, layers in zip(ends, self.given_layers, strict=True):
            if layers is not None and self.pipeline_parallel_size == 1:
                yield (end, pp), f"{end} needs {pp} > 1: got {layers} and 1; leave it out"
        ranks, shares = self._stage_ranks, self.expert_tensor * self.expert_parallel_size
        if not world_size % size and ranks % shares:
            yield (
                (ep, etp, world, pp),
                f"{etp} * {ep} must divide the ranks of a pipeline stage: got "
                f"{self.expert_tensor} * {self.expert_parallel_size} = {shares} and {ranks} "
                f"ranks; use a smaller {ep}",
            )

    @property
    def model_parallel_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // self.model_parallel_size

    def rows(self, tokens: int) -> int:
        """Of so many tokens, those that a rank has between tensor-parallel regions."""
        return tokens // self.tensor_parallel_size if self.sequence_parallel else tokens

    @property
    def given_layers(self) -> tuple[int | None, int | None]:
        """Layers of the first and of the last stage where they are not spread evenly."""
        return self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers

    def stage_layers(self, num_layers: int) -> list[int]:
        """Layers of every stage. Raises ValueError: a stage would have none, or the stages whose
        layers are not given unlike many."""
        stages = self.pipeline_parallel_size
        given = {
            at: one
            for at, one in zip((0, stages - 1), self.given_layers, strict=True)
            if one is not None
        }
        rest, others = num_layers - sum(given.values()), stages - len(given)
        if rest < others or (rest % others if others else rest):
            raise ValueError(
                f"{rest} of {num_layers} layers are left for {others} of {stages} stages"
            )
        return [given.get(stage, rest // max(1, others)) for stage in range(stages)]

    def chunk_layers(self, num_layers: int) -> dict[tuple[int, int], range]:
        """Layers, counted from 0, of every (pipeline stage, model chunk), as Megatron spreads them:
        chunks interleaved. Raises ValueError: they cannot be spread so."""
        chunks, stages, start = self.virtual_pipeline_size, self.stage_layers(num_layers), 0
        if any(layers % chunks for layers in stages):
            raise ValueError(f"stages of {stages} layers are not {chunks} equal chunks each")
        places = {}
        for chunk in range(chunks):
            for stage, layers in enumerate(stages):
                places[stage, chunk] = range(start, start + layers // chunks)
                start += layers // chunks
        return places

    # ---- ranks

    @property
    def _stage_ranks(self) -> int:
        return self.world_size // self.pipeline_parallel_size

    @property
    def expert_tensor(self) -> int:
        """Ranks that share an expert. Where nothing is said of experts they are cut as all else;
        Megatron wants its expert groups of a dense model, which uses none, to have as many replicas
        as there are."""
        if self.expert_tensor_parallel_size is not None:
            return self.expert_tensor_parallel_size
        if self.expert_parallel_size > 1:
            return 1
        return self.tensor_parallel_size * (
            self.context_parallel_size if self.pipeline_parallel_size > 1 else 1
        )

    @property
    def expert_copies(self) -> int:
        """How many ranks hold each share of the experts."""
        return self._stage_ranks // (self.expert_tensor * self.expert_parallel_size)

    @property
    def exchanging_ranks(self) -> int:
        """Ranks in a row that exchange tokens, because each has some of the experts."""
        return (
            self.expert_tensor * self.expert_parallel_size if self.expert_parallel_size > 1 else 1
        )

    @property
    def copy_ranks(self) -> int:
        """Ranks that one copy of the model is on, its experts included."""
        here = self.tensor_parallel_size * self.context_parallel_size
        return self.pipeline_parallel_size * max(here, self.exchanging_ranks)

    @property
    def order(self) -> str:
        """Megatron's, of the axes; the one of OpenRLHF wherever Megatron has it."""
        in_a_row = self.pipeline_parallel_size == 1 or self.expert_copies == self.data_parallel_size
        return _REPLICAS_IN_A_ROW if in_a_row else _STAGES_LAST

    @cached_property
    def places(self) -> tuple[RankPlace, ...]:
        """Of all ranks."""
        dense = {
            "tp": self.tensor_parallel_size,
            "cp": self.context_parallel_size,
            "dp": self.data_parallel_size,
        }
        experts = {
            "tp": self.expert_tensor,
            "ep": self.expert_parallel_size,
            "dp": self.expert_copies,
        }
        return tuple(self._place(rank, dense, experts) for rank in range(self.world_size))

    def _place(self, rank: int, dense: dict[str, int], experts: dict[str, int]) -> RankPlace:
        of_all, of_experts = self._coordinates(rank, dense), self._coordinates(rank, experts)
        return RankPlace(
            of_all["tp"],
            of_all["cp"],
            of_all["pp"],
            of_all["dp"],
            of_experts["tp"],
            of_experts["ep"],
            of_experts["dp"],
        )

    def _coordinates(self, rank: int, sizes: dict[str, int]) -> dict[str, int]:
        rest, at = rank, {}
        for axis in self.order.split("-"):
            size = self.pipeline_parallel_size if axis == "pp" else sizes.get(axis, 1)
            rest, at[axis] = divmod(rest, size)
        return at

    def place(self, rank: int) -> RankPlace:
        return self.places[rank]

    def ranks(self, **coordinates: int) -> tuple[int, ...]:
        """The global ranks with these coordinates (``RankPlace``), ascending; all of an axis that
        is not given."""
        wanted = coordinates.items()
        return tuple(
            rank
            for rank, place in enumerate(self.places)
            if all(getattr(place, axis) == at for axis, at in wanted)
        )

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
        """Ranks in a row that have the most to say to each other."""
        return math.lcm(
            self.tensor_parallel_size * self.context_parallel_size, self.exchanging_ranks
        )
