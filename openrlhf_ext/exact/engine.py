"""The engine's half of exact mode: vLLM's worker with the operations of ``operations``.

``rollout.worker_extension`` installs it before a model is loaded, in processes whose environment
has ``OPENRLHF_EXT_EXACT=1``. A reload of weights packs them again by itself, because vLLM then calls
the replaced function for each layer. On GPUs there is nothing to replace: vLLM's batch-invariant
mode (``VLLM_BATCH_INVARIANT=1``) is the table.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from openrlhf_ext.exact import VARIABLE, NotExact
from openrlhf_ext.exact.limits import vllm_problem
from openrlhf_ext.exact.operations import Operations
from openrlhf_ext.exact.table import device_operations

_HEAD = "exact_head_product"


def is_asked() -> bool:
    """Whether this process is to be an exact engine."""
    return os.environ.get(VARIABLE) == "1"


def install() -> None:
    """Replaces what vLLM computes linear layers and logits with. Raises NotExact."""
    if (problem := vllm_problem()) is not None:
        raise NotExact(problem)
    if torch.cuda.is_available():
        if os.environ.get("VLLM_BATCH_INVARIANT") != "1":
            raise NotExact("an exact engine on a GPU needs VLLM_BATCH_INVARIANT=1 in its process")
        return
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    table, packed_by_vllm = device_operations(), utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: nn.Module, remove_weight: bool) -> None:
        if layer.weight.is_meta or layer.weight.ndim != 2:
            packed_by_vllm(layer, remove_weight)
        else:
            _pack(layer, table, remove_weight)

    def apply_head(
        processor: LogitsProcessor, lm_head: Any, hidden_MK: Tensor, bias: Tensor | None
    ) -> Tensor:
        if bias is not None:
            raise NotExact("an output layer with a bias is not supported in exact mode")
        if getattr(lm_head, _HEAD, None) is None:
            setattr(lm_head, _HEAD, table.head_product(lm_head.weight))
        return table.logits(hidden_MK, getattr(lm_head, _HEAD))

    utils.dispatch_cpu_unquantized_gemm = dispatch
    LogitsProcessor._apply_head = apply_head


def _pack(layer: Any, table: Operations, remove_weight: bool) -> None:
    setattr(layer, _HEAD, None)  # of weights before this load
    if not remove_weight:  # an embedding, which may be an output layer too
        layer.cpu_linear = torch.nn.functional.linear  # vllm_tied_head looks for it
        return
    product = table.product(layer.weight)

    def linear(x: Tensor, _weight: Tensor, bias: Tensor | None) -> Tensor:
        return product(x.reshape(-1, x.shape[-1]), bias).view(*x.shape[:-1], -1)

    layer.cpu_linear = linear
    layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)
