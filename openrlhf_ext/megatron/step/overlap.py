"""Communication of the data-parallel ranks beside computation, for a model whose head is not a module's forward pass.

Megatron's DDP reduces a bucket of gradients when the hooks of all of its parameters have run, and gathers a bucket of
updated parameters in a hook before the module that reads them. The head here (``openrlhf_ext.head``) is called with a
weight: it adds that weight's gradient to ``main_grad`` itself and hands autograd none, and no module's hook waits for
the weight to be gathered. Both are made up for below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel


class TrainedChunk(DistributedDataParallel):
    """Megatron's DDP around a model chunk."""

    def _make_backward_post_hook(self, param: torch.nn.Parameter) -> Callable[..., None]:
        hook = super()._make_backward_post_hook(param)

        def gradient_is_there(*unused: Any) -> None:
            in_main_grad = param.grad is None and getattr(param, "grad_added_to_main_grad", False)
            if self.ddp_config.overlap_grad_reduce and in_main_grad:
                # Megatron's own hook asserts a placeholder of the weight's size in ``grad``
                # (megatron-core 0.16.1 distributed/distributed_data_parallel.py:435)
                self.param_to_bucket_group[param].register_grad_ready(param, self.force_all_reduce)
            else:
                hook(*unused)

        return gradient_is_there

    def await_parameter(self, parameter: torch.Tensor) -> None:
        """Waits until the parameter is gathered; a no-op if nothing was left to the forward pass."""
        if self.ddp_config.overlap_param_gather:
            self.param_to_bucket_group[parameter].finish_param_sync()

    def gather_parameters(self) -> None:
        """Gathers what the last update left to the next forward pass. A collective of the data-parallel ranks."""
        if not self.ddp_config.overlap_param_gather:
            return
        for group in self.bucket_groups + self.expert_parallel_bucket_groups:
            if not group.param_gather_dispatched or group.param_gather_handle is not None:
                group.start_param_sync(force_sync=True)


def no_sync(chunks: Sequence[torch.nn.Module]) -> Any:
    """Megatron's ``no_sync_func``: keeps gradients from being reduced before the last micro-batch.

    Without ``overlap_grad_reduce`` nothing reduces them before, and it is None.
    """
    functions = [
        chunk.no_sync for chunk in chunks if isinstance(chunk, TrainedChunk) and chunk.ddp_config.overlap_grad_reduce
    ]
    return functions[0] if len(functions) == 1 else functions or None
