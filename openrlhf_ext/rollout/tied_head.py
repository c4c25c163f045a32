"""A tied output layer on vLLM's CPU build computes from its own repacked copy of the embedding.

vLLM 0.29.0 packs weights for oneDNN after loading (model_executor/layers/utils.py, ``dispatch_cpu_unquantized_gemm``).
A layer-by-layer reload repeats that for every layer that received tensors. With tied embeddings only the embedding
receives one; ``lm_head`` shares its weight, but goes on computing from the packed copy of the old values. The
weight-sync probe sees it (0.025 nats after one small step).
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding


def repack_tied_heads(model: torch.nn.Module) -> int:
    """Packs again every output layer that shares its weight with an embedding; returns how many. A no-op on GPUs."""
    repacked = 0
    shared = {id(m.weight) for m in model.modules() if _is_embedding(m)}
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear") and id(module.weight) in shared:
            module.quant_method.process_weights_after_loading(module)
            repacked += 1
    return repacked


def _is_embedding(module: torch.nn.Module) -> bool:
    return isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
