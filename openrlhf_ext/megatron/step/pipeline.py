"""Messages between pipeline stages.

Every stage knows every micro-batch, hence the shape of everything it will receive: shapes are never sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class StageCommunicator(P2PCommunicator):
    """Exchanges activations and gradients of micro-batches of different lengths with the neighboring stages.

    Megatron-core 0.16.1 sends the shapes first (a message and a wait for the device each time) and posts its operations
    in the order (send to previous, receive from previous, send to next, receive from next). With two stages both
    neighbors are the same rank, and messages between two ranks match in the order in which they are posted: under the
    interleaved schedule a gradient then arrives where an activation is awaited, silently if both have the same shape
    (pipeline_parallel/p2p_communication.py:17, 192; Megatron-LM's argument parser refuses that layout, mcore does not).
    Here every rank posts its receives in the order in which its neighbor posts the matching sends.

    Args:
        lengths: tokens of each micro-batch in a message (those of one rank), in the order of the schedule.
        chunks: model chunks per stage.
    """

    def __init__(
        self, pp_group: dist.ProcessGroup, config: TransformerConfig, lengths: Sequence[int], chunks: int
    ) -> None:
        super().__init__(pp_group, config)
        rank, last = pp_group.rank(), pp_group.size() - 1
        order = schedule_order(len(lengths), chunks, pp_group.size())
        # activations enter the first chunk of the first stage from nowhere, as gradients do the last of the last
        self._from_prev = self._shapes(lengths, order, skip_first_chunk=rank == 0)
        self._from_next = self._shapes(lengths, order, skip_first_chunk=rank == last)

    def _shapes(
        self, lengths: Sequence[int], order: Sequence[tuple[int, int]], skip_first_chunk: bool
    ) -> Iterator[tuple[int, int, int]]:
        for micro_batch, chunk in order:
            if not (skip_first_chunk and chunk == 0):
                yield lengths[micro_batch], 1, self.config.hidden_size

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        **_,
    ) -> tuple[Tensor | None, Tensor | None, None]:
        """(received from previous, received from next, nothing to wait for); Megatron's one shape is not used."""
        from_prev = self._empty(self._from_prev) if recv_prev else None
        from_next = self._empty(self._from_next) if recv_next else None
        operations = [
            dist.P2POp(operation, tensor, peer, self.pp_group)
            for operation, tensor, peer in (
                (dist.isend, tensor_send_prev, self.prev_rank),
                (dist.irecv, from_next, self.next_rank),
                (dist.isend, tensor_send_next, self.next_rank),
                (dist.irecv, from_prev, self.prev_rank),
            )
            if tensor is not None
        ]
        for request in dist.batch_isend_irecv(operations) if operations else []:
            request.wait()
        return from_prev, from_next, None

    def _empty(self, shapes: Iterator[tuple[int, int, int]]) -> Tensor:
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        return torch.empty(next(shapes), device=device, dtype=self.config.pipeline_dtype, requires_grad=True)


def schedule_order(micro_batches: int, chunks: int, stages: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) in the order in which a stage computes them forward; backward, chunks count from the end."""
    if chunks == 1:
        return [(micro_batch, 0) for micro_batch in range(micro_batches)]
    return get_schedule_table(micro_batches, chunks, stages)


def pipeline_arguments(config: TransformerConfig, lengths: Sequence[int], chunks: int) -> dict[str, Any]:
    """What makes Megatron's pipeline schedules use ``StageCommunicator``, all groups spelled out; {} without PP."""
    stages = parallel_state.get_pipeline_model_parallel_group()
    if stages.size() == 1:
        return {}
    groups = ProcessGroupCollection(
        pp=stages,
        tp=parallel_state.get_tensor_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
        embd=parallel_state.get_embedding_group(check_initialized=False),
        pos_embd=parallel_state.get_position_embedding_group(check_initialized=False),
    )
    return {"p2p_communicator": StageCommunicator(stages, config, lengths, chunks), "pg_collection": groups}
