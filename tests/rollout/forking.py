"""Workers of an engine that are forked from it: each one that is spawned imports vLLM anew, six
seconds of a core."""

from __future__ import annotations

import os
from typing import Any

import pytest
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from openrlhf_ext.rollout import launch


class ForkingExecutor(MultiprocExecutor):
    """vLLM's own, in the process of an engine, which has no threads yet and no Ray."""

    def _init_executor(self) -> None:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # vLLM's own value, but on CPU
        super()._init_executor()


def fork_workers(patch: pytest.MonkeyPatch) -> None:
    """Engines of several workers that are created from now on fork them."""
    usual = launch.cpu_engine_args

    def engine_args(*options: Any) -> dict[str, Any]:
        arguments = usual(*options)
        if arguments["distributed_executor_backend"] == "mp":
            arguments["distributed_executor_backend"] = ForkingExecutor
        return arguments

    patch.setattr(launch, "cpu_engine_args", engine_args)
