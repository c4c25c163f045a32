"""Megatron's process groups for a layout, in the rank order of ``layout``."""

from __future__ import annotations

from megatron.core import parallel_state

from openrlhf_ext.megatron.layout import RANK_ORDER, ParallelLayout


def build_groups(layout: ParallelLayout, timeout_s: float) -> None:
    """Builds Megatron's groups over the default process group; ``timeout_s`` is that of their collectives."""
    virtual = layout.virtual_pipeline_size
    parallel_state.initialize_model_parallel(
        layout.tensor_parallel_size,
        layout.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        context_parallel_size=layout.context_parallel_size,
        # there are no experts, but Megatron wants as many expert replicas as replicas unless "pp" comes last in the
        # order (parallel_state.py:806): the expert groups then span tensor and context parallelism
        expert_tensor_parallel_size=layout.tensor_parallel_size * layout.context_parallel_size,
        order=RANK_ORDER,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=timeout_s / 60,  # declared int, but all Megatron makes of it is a timedelta
    )
