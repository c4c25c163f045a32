"""The engine's half of exact mode: vLLM's worker with the operations of ``operations``.

``rollout.worker_extension`` installs it before a model is loaded, in processes whose environment
has ``OPENRLHF_EXT_EXACT=1``. A reload of weights packs them again by itself, because vLLM then calls
the replaced function for each layer. On GPUs vLLM's batch-invariant mode (``VLLM_BATCH_INVARIANT=1``)
is the table but for two things, which ``_install_on_gpu`` replaces (by reading; no GPU has run it).
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from openrlhf_ext.exact import LEAST_QUERIES, VARIABLE, NotExact
from openrlhf_ext.exact.limits import vllm_problem
from openrlhf_ext.exact.operations import Operations
from openrlhf_ext.exact.table import device_operations

_HEAD = "exact_head_product"
_ON_GPU = {
    "VLLM_BATCH_INVARIANT": "no result depends on the rest of a batch",
    "VLLM_USE_V2_MODEL_RUNNER": "the runner whose log-probs the policy computes",
    "VLLM_USE_BREAKABLE_CUDAGRAPH": "CUDA graphs of vLLM's own kernels, where torch.compile fuses",
}
"""Variables that are 1, and what for."""


def is_asked() -> bool:
    """Whether this process is to be an exact engine."""
    return os.environ.get(VARIABLE) == "1"


def install() -> None:
    """Replaces what vLLM computes otherwise than the policy. Raises NotExact."""
    if (problem := vllm_problem()) is not None:
        raise NotExact(problem)
    if torch.cuda.is_available():
        _install_on_gpu()
    else:
        _install_on_cpu()


def _install_on_gpu() -> None:
    """The rotary table is made on the host, as the policy's is, because cosines of a GPU may differ
    in their last bit; and flash attention takes the tiles of a prompt for a generated token."""
    missing = [f"{name}=1 ({why})" for name, why in _ON_GPU.items() if os.environ.get(name) != "1"]
    if missing:
        raise NotExact(f"the process of an exact engine on a GPU needs {', '.join(missing)}")
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    build = FlashAttentionMetadataBuilder.build
    cosines_and_sines = RotaryEmbeddingBase._compute_cos_sin_cache

    def build_for_prompts(builder: Any, *args: Any, **kwargs: Any) -> Any:
        batch = build(builder, *args, **kwargs)
        batch.max_query_len = max(batch.max_query_len, LEAST_QUERIES)
        return batch

    def on_the_host(embedding: Any) -> Tensor:
        device = torch.get_default_device()  # the model is built on it
        with torch.device("cpu"):
            return cosines_and_sines(embedding).to(device)

    FlashAttentionMetadataBuilder.build = build_for_prompts
    RotaryEmbeddingBase._compute_cos_sin_cache = on_the_host


def _install_on_cpu() -> None:
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
