"""What the patch changes in a step of vLLM's CPU build, beside copies of vLLM's modules that it has
not changed."""

from __future__ import annotations

import importlib.util
import random
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import layernorm
from vllm.platforms import cpu as cpu_platform
from vllm.platforms import current_platform
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_manager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.sample.ops import topk_topp_sampler

current_platform.import_kernels()
SIZE = 16


def unchanged(module: ModuleType) -> ModuleType:
    """A second copy of a module, by a name that no patch looks for."""
    spec = importlib.util.spec_from_file_location(f"unchanged_{module.__name__}", module.__file__)
    assert spec is not None and spec.loader is not None
    copy = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


@pytest.mark.parametrize("seeded", [range(5), range(0, 5, 2), ()], ids=["all", "some", "none"])
def test_the_same_tokens_are_sampled(seeded: Any) -> None:
    def sampled(module: ModuleType) -> list[torch.Tensor]:
        torch.manual_seed(1)
        generators = {row: torch.Generator().manual_seed(row) for row in seeded}
        logits = torch.randn(70, 5, 40, generator=torch.Generator().manual_seed(2))
        sampler = module.TopKTopPSampler("processed_logprobs")
        found = [sampler.forward_cpu(each, generators, None, None) for each in logits]
        return [torch.stack(parts) for parts in zip(*found, strict=True)]

    changed, stock = (sampled(m) for m in (topk_topp_sampler, unchanged(topk_topp_sampler)))
    assert (
        topk_topp_sampler.TopKTopPSampler.forward_cpu.__module__
        == "openrlhf_ext.patches.vllm_steps"
    )
    assert all(map(torch.equal, changed, stock))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [48, 128, 20])
def test_norms_are_those_of_torch(width: int, dtype: torch.dtype) -> None:
    with set_current_vllm_config(VllmConfig()):
        norm = layernorm.RMSNorm(width, dtype=dtype)
    norm.weight.data.uniform_(0.5, 1.5)
    torch.manual_seed(3)
    rows, residual = torch.randn(2, 7, 2 * width, dtype=dtype)
    for x, added in ((rows[:, :width], residual[:, :width]), (rows, residual)):
        x, added = x[:, :width], added[:, :width].contiguous()
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
        torch.testing.assert_close(norm.forward_cpu(x), norm.forward_native(x), **tolerance)
        x = x.contiguous()
        found = norm.forward_cpu(x.clone(), added.clone())
        torch.testing.assert_close(
            found, norm.forward_native(x.clone(), added.clone()), **tolerance
        )


def manager(module: ModuleType, blocks: int) -> Any:
    spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    return module.KVCacheManager(KVCacheConfig(blocks, [], groups), 200, SIZE, SIZE)


def test_the_same_blocks_are_given() -> None:
    """Requests of any lengths that share prefixes, until no block is left, and others after them."""
    init_none_hash(sha256)
    history: list[list[Any]] = []
    for module in (kv_cache_manager, unchanged(kv_cache_manager)):
        rng, held, said = random.Random(4), {}, []
        blocks = manager(module, 40)
        for step in range(600):
            if len(held) < 6:
                prompt = list(range(rng.randrange(1, 60)))
                name = str(step)
                hasher = get_request_block_hasher(SIZE, sha256)
                params = SamplingParams(max_tokens=100)
                held[name] = Request(name, prompt, params, None, block_hasher=hasher)
            for name, request in list(held.items()):
                new = request.num_tokens - request.num_computed_tokens
                given = blocks.allocate_slots(request, new, num_lookahead_tokens=0)
                said.append(given and given.get_block_ids())
                if given is None or request.num_tokens == 199 or rng.random() < 0.01:
                    blocks.free(held.pop(name))
                    continue
                request.num_computed_tokens += new
                request.append_output_token_ids(rng.randrange(5))
            said.append(blocks.block_pool.get_num_free_blocks())
        history.append(said)
    assert history[0] == history[1] and None in history[0]


def test_attention_is_called_directly() -> None:
    assert not cpu_platform.CpuPlatform.opaque_attention_op()
