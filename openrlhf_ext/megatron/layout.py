"""How the ranks of a run are arranged.

Ranks are ordered tp-cp-ep-pp-dp (tensor parallelism varies fastest, data parallelism slowest), because OpenRLHF's actor
group treats ``tp * cp * pp`` contiguous ranks as one data-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass

RANK_ORDER = "tp-cp-ep-pp-dp"


@dataclass(frozen=True)
class ParallelLayout:
    """Degrees of parallelism; ``data_parallel_size`` follows from ``world_size``."""

    world_size: int
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    sequence_parallel: bool = False
    virtual_pipeline_size: int = 1  # model chunks per pipeline stage (interleaved schedule)

    def __post_init__(self) -> None:
        if self.virtual_pipeline_size > 1 and self.pipeline_parallel_size == 1:
            raise ValueError(
                f"virtual_pipeline_size needs pipeline_parallel_size > 1: got {self.virtual_pipeline_size} and 1"
            )
        if self.world_size % self.model_parallel_size:
            raise ValueError(
                "tensor_parallel_size * pipeline_parallel_size * context_parallel_size must divide the ranks: "
                f"{self.tensor_parallel_size} * {self.pipeline_parallel_size} * {self.context_parallel_size} = "
                f"{self.model_parallel_size}, ranks = {self.world_size}"
            )

    @property
    def model_parallel_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // self.model_parallel_size
