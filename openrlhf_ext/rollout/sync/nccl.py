"""Weight sync over NCCL: buckets stay on the GPUs. NCCL takes one rank per GPU, so colocated
engines need cuda_ipc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from openrlhf_ext.rollout.sync.base import (
    BroadcastTransport,
    WeightSyncError,
    WeightTransferFailed,
    wait_until,
)

_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Nccl(BroadcastTransport):
    needs_gpu = True

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def open_group(
        self, store: dist.Store, address: str, rank: int, world_size: int, timeout_s: float
    ) -> Any:
        """The group's watchdog would end the whole process when a peer is lost or a transfer takes
        too long, which is ordinary here: an engine may die and be restarted. So it is told not to
        (`driver.settings.worker_env` has the rest), and transfers are polled with our own
        deadline."""
        if not torch.cuda.is_available() or not dist.is_nccl_available():
            raise WeightSyncError(
                "vllm.sync_backend nccl needs a GPU and a torch with NCCL in every policy rank "
                "and engine worker; use gloo (through host memory)"
            )
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=2 * timeout_s)
        with _variable(_HANDLING, "0"):
            group: Any = dist.ProcessGroupNCCL(store, rank, world_size, options)
        # the communicator is built by the first collective: here, with everybody present, and not
        # within an update
        first = group.allreduce([torch.zeros(1, device=self.device)], dist.AllreduceOptions())
        late = (
            f"the first collective of {world_size} ranks over NCCL was not through after "
            f"{timeout_s:g} s"
        )
        try:
            wait_until(first.is_completed, None, timeout_s, lambda: late)
            if (failure := self.failure(first)) is not None:
                raise WeightTransferFailed(failure)
        except WeightTransferFailed:
            group.abort()
            raise
        return group

    def failure(self, work: dist.Work) -> str | None:
        """NCCL's asynchronous error, which counts as completion."""
        error = work.exception()
        return None if error is None else str(error)

    def abort(self, group: Any) -> None:
        group.abort()


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


TRANSPORT = Nccl()
