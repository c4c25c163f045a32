"""Runtime patches of pinned dependencies, one file each.

`apply()` must run in every process before the patched packages are imported. It only registers
import hooks, so it is cheap, and each patch decides when its dependency is imported whether it is
needed. In Ray workers it is run by `runtime_env={"worker_process_setup_hook":
"openrlhf_ext.patches.apply"}`.
"""

from __future__ import annotations

from openrlhf_ext.patches import (
    megatron_cpu,
    openrlhf_imports,
    transformer_engine_cudnn,
    transformers_imports,
    vllm_drafts,
    vllm_gdn,
    vllm_imports,
    vllm_moe,
    vllm_steps,
    vllm_tied_head,
)
from openrlhf_ext.patches.base import Patch, PatchRefused, PatchStatus

PATCHES: tuple[Patch, ...] = (
    megatron_cpu.PATCH,
    openrlhf_imports.PATCH,
    transformer_engine_cudnn.PATCH,
    transformers_imports.PATCH,
    vllm_drafts.PATCH,
    vllm_gdn.PATCH,
    vllm_imports.PATCH,
    vllm_moe.PATCH,
    vllm_steps.PATCH,
    vllm_tied_head.PATCH,
)

__all__ = ["PATCHES", "Patch", "PatchRefused", "PatchStatus", "apply", "status"]


def apply() -> None:
    """Register every patch in this process. Idempotent.

    Raises:
        PatchRefused: megatron was imported before, on a machine without CUDA.
    """
    for patch in PATCHES:
        patch.apply()


def status() -> list[PatchStatus]:
    """What each patch does in the present environment. Imports torch to look for a CUDA device."""
    return [patch.status() for patch in PATCHES]
