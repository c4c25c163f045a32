"""`spoiled_loads` in workers that keep linear layers as they are sent."""

from __future__ import annotations

from vllm.model_executor.layers.linear import LinearBase

from tests.rollout import spoiled_loads
from tests.rollout.spoiled_loads import LAYER, LOST, SWAPPED, SpoilingExtension

__all__ = ["LAYER", "LOST", "QUALIFIED_NAME", "SWAPPED", "SpoilingExtension"]

QUALIFIED_NAME = spoiled_loads.QUALIFIED_NAME.replace("spoiled_loads", "spoiling")

LinearBase._cpu_skip_gemm_dispatch = True
"""vLLM's own switch (layers/linear.py:206): a worker on CPU then multiplies by the weights as they
are, as on a GPU."""
