"""The arrangement of a run's ranks. Only this module knows their order: ``place`` returns the
coordinates of a rank, ``ranks`` the ranks at given coordinates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

from openrlhf_ext.options.sections import Megatron

# Tensor parallelism varies fastest. Each replica is tp * cp * pp consecutive ranks, as in
# OpenRLHF's actor group. Megatron accepts that only if experts have the same number of replicas as
# the other layers (megatron-core 0.19.2 parallel_state.py:896).
_REPLICAS_IN_A_ROW, _STAGES_LAST = "tp-cp-ep-pp-dp", "tp-cp-ep-dp-pp"
PIPELINE_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")


class RankPlace(NamedTuple):
    """Coordinates of a rank.

    They are its places in the tensor- and context-parallel groups, its pipeline stage, and its
    replica; then, among the ranks of its stage, its coordinates as a holder of experts: which shard
    of an expert, which experts, which copy of them.
    """

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
    decoder_first_pipeline_num_layers: int | None = None  # None: same as the stages between
    decoder_last_pipeline_num_layers: int | None = None
    expert_parallel_size: int = 1  # ranks of a stage over which the experts of a layer are dealt
    # Ranks that share an expert; None: see ``expert_tensor``.
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
        """The sizes as a run's records store them."""
        return {
            "ranks": self.world_size,
            "tensor": self.tensor_parallel_size,
            "pipeline": self.pipeline_parallel_size,
            "context": self.context_parallel_size,
            "data": self.data_parallel_size,
            "experts": self.expert_parallel_size,
        }

    def problems(self, name: Callable[[str], str] = str) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yields each broken rule: the fields concerned, and the problem. ``name`` maps a field to
        the user's name for it."""
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
        """Returns how many of ``tokens`` tokens a rank holds between tensor-parallel regions."""
        return tokens // self.tensor_parallel_size if self.sequence_parallel else tokens

    @property
    def given_layers(self) -> tuple[int | None, int | None]:
        """Layers of the first and of the last stage, if given; None where they follow from an even
        spread."""
        return self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers

    def stage_layers(self, num_layers: int) -> list[int]:
        """Returns the number of layers of every stage.

        Raises ValueError if a stage would have no layers, or if the remaining layers do not divide
        evenly over the remaining stages.
        """
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
        """Returns the layers, counted from 0, of every (pipeline stage, model chunk), interleaved
        as in Megatron.

        Raises ValueError if they do not divide evenly.
        """
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
        """Ranks that share an expert.

        Without expert options, experts are split like the other layers: even for a dense model,
        Megatron requires as many replicas of its expert groups as of the model.
        """
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
        """Number of consecutive ranks that exchange tokens, because each has some of the
        experts."""
        return (
            self.expert_tensor * self.expert_parallel_size if self.expert_parallel_size > 1 else 1
        )

    @property
    def copy_ranks(self) -> int:
        """Number of ranks of one copy of the model, including its experts."""
        here = self.tensor_parallel_size * self.context_parallel_size
        return self.pipeline_parallel_size * max(here, self.exchanging_ranks)

    @property
    def order(self) -> str:
        """Megatron's order of the axes; OpenRLHF's order if Megatron supports it."""
        in_a_row = self.pipeline_parallel_size == 1 or self.expert_copies == self.data_parallel_size
        return _REPLICAS_IN_A_ROW if in_a_row else _STAGES_LAST

    @cached_property
    def places(self) -> tuple[RankPlace, ...]:
        """The places of all ranks."""
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
        """Returns the global ranks with these coordinates (``RankPlace``), ascending; an axis that
        is not given matches all its ranks."""
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
        """Returns the index of a rank among the ranks that hold the same share, in the order of
        ranks."""
        place = self.place(rank)
        return place.replica * self.context_parallel_size + place.context

    @property
    def near_ranks(self) -> int:
        """Number of consecutive ranks that communicate most."""
        return math.lcm(
            self.tensor_parallel_size * self.context_parallel_size, self.exchanging_ranks
        )
