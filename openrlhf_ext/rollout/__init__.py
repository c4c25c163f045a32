"""Rollout: vLLM engines as Ray actors, and how they get the policy's weights.

Names are resolved on first use: vLLM's worker processes import parts of this package and must not import OpenRLHF, nor
must a process that only needs the errors import vLLM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openrlhf_ext.rollout.engine import RolloutEngine
    from openrlhf_ext.rollout.errors import (
        EngineDied,
        EngineStartError,
        GenerationTimeout,
        InvalidWeights,
        RolloutError,
    )
    from openrlhf_ext.rollout.launch import create_rollout_engines, engine_env, wait_until_ready
    from openrlhf_ext.rollout.probe import WeightSyncMismatch, check_sync, probe_tokens

_MODULES = {
    "RolloutEngine": "engine",
    "EngineDied": "errors",
    "EngineStartError": "errors",
    "GenerationTimeout": "errors",
    "InvalidWeights": "errors",
    "RolloutError": "errors",
    "create_rollout_engines": "launch",
    "engine_env": "launch",
    "wait_until_ready": "launch",
    "WeightSyncMismatch": "probe",
    "check_sync": "probe",
    "probe_tokens": "probe",
}

__all__ = [
    "EngineDied", "EngineStartError", "GenerationTimeout", "InvalidWeights", "RolloutEngine", "RolloutError",
    "WeightSyncMismatch", "check_sync", "create_rollout_engines", "engine_env", "probe_tokens", "wait_until_ready",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
