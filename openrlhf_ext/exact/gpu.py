"""The operations of exact mode on a GPU: the functions that vLLM computes with in its
batch-invariant mode (``VLLM_BATCH_INVARIANT=1``).

This module was written by reading vLLM 0.32.0; no GPU has run it. Stand-ins prove which functions
it calls with what (tests/exact/test_gpu.py), and call 6 of tests/gpu compares bits.

Shape suffixes as in ``operations``; P = pages of a sequence.
"""

from __future__ import annotations

import os
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from openrlhf_ext.exact import LEAST_QUERIES, NotExact
from openrlhf_ext.exact.limits import vllm_problem
from openrlhf_ext.exact.operations import (
    PlainBackward,
    Product,
    page_layout,
    plain_norm,
    plain_silu_times,
)

PAGE = 16
"""Tokens of a page of keys and values; vLLM's on a GPU (vllm 0.32.0 config/cache.py:72)."""
_VOCABULARY_UNIT = 64  # vLLM pads vocabularies to a multiple of it, and with them rows of logits
_ALIGNED = 16  # Triton compiles another kernel where a stride is not a multiple of it
_INVARIANT = {
    "VLLM_BATCH_INVARIANT": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "CUBLASLT_WORKSPACE_SIZE": "1",
}
"""The mode, and what it sets for cuBLAS, which reads it at the first product of a process."""
_FORMATS = (torch.bfloat16, torch.float16)


class GpuOperations:
    """See ``operations.Operations``. Layers pass on rounded sums, as vLLM's norm on a GPU does."""

    stream: torch.dtype | None = None

    def __init__(self) -> None:
        """Puts vLLM's kernels for softmax, means, and batched products in the place of torch's on
        this process's GPU. Raises NotExact: this process cannot compute what an engine computes.
        """
        if (problem := process_problem()) is not None:
            raise NotExact(problem)
        _be_batch_invariant()
        from vllm import _custom_ops
        from vllm.model_executor.determinism import batch_invariant
        from vllm.v1.attention.backends import fa_utils
        from vllm.v1.worker.gpu.sample import gumbel, logprob

        self._kernels, self._invariant, self._attention = _custom_ops, batch_invariant, fa_utils
        self._temper, self._logprobs = gumbel.apply_temperature, logprob.compute_token_logprobs
        self._version = cache(self._flash_version)

    def product(self, weight_NK: Tensor) -> Product:
        """Holds the weight itself (vllm 0.32.0 model_executor/layers/linear.py:235)."""
        weight_NK = weight_NK.detach()

        def multiply(x_MK: Tensor, bias_N: Tensor | None) -> Tensor:
            return self._invariant.linear_batch_invariant(x_MK, weight_NK, bias_N)

        return multiply

    def head_product(self, weight_VK: Tensor) -> Product:
        """Sums and results in fp32 (vllm 0.32.0 model_executor/layers/logits_processor.py:146).
        cuBLASLt does not cut sums into parts for want of a workspace (``_be_batch_invariant``), and
        gets as many columns as in an engine: a vocabulary that vLLM pads is copied with padding."""
        if weight_VK.dtype == torch.float32:  # engines then have no ``head_dtype`` of its own
            return self.product(weight_VK)
        size, weight_VK = len(weight_VK), weight_VK.detach()
        if missing := -size % _VOCABULARY_UNIT:
            weight_VK = F.pad(weight_VK, (0, 0, 0, missing))

        def multiply(x_MK: Tensor, bias_V: Tensor | None) -> Tensor:
            if bias_V is not None:
                raise NotExact("an output layer with a bias is not supported in exact mode")
            return torch.mm(x_MK, weight_VK.t(), out_dtype=torch.float32)[:, :size]

        return multiply

    def logits(self, hidden_MK: Tensor, head: Product) -> Tensor:
        return head(hidden_MK, None)

    def logprobs(self, logits_MV: Tensor, temperature: float) -> Tensor:
        """By the two kernels of vLLM's second model runner (vllm 0.32.0
        v1/worker/gpu/sample/gumbel.py:19 and logprob.py:15). The first divides less exactly than
        torch; the second subtracts the largest logit, then the logarithm of a sum of its own."""
        rows, size = logits_MV.shape
        if temperature == 1.0:  # the engine takes the rows of its padded vocabulary as they are
            logits_MV = _aligned(logits_MV)
        else:  # it copies them, without padding
            logits_MV = logits_MV.clone(memory_format=torch.contiguous_format)
            first_M = torch.zeros(rows, dtype=torch.int32, device=logits_MV.device)
            self._temper(logits_MV, first_M, logits_MV.new_full((1,), temperature))
        every_MV = torch.arange(size, device=logits_MV.device).expand(rows, size)
        return self._logprobs(logits_MV, every_MV)

    def add(self, residual: Tensor, branch: Tensor) -> Tensor:
        """Rounded once, as by the kernel of ``norm``."""
        return residual + branch

    def norm(self, x_MK: Tensor, weight_K: Tensor, eps: float, *, of_sum: bool) -> Tensor:
        """Of embeddings and heads by a Triton kernel, of sums by a C kernel that adds too (vllm
        0.32.0 model_executor/layers/layernorm.py:101 and determinism/batch_invariant.py:1069).

        The C kernel gets the sum and zeros here, in the engine a branch and the stream. It rounds
        their sum to the model's type before it reads it (by reading of vllm
        csrc/layernorm_kernels.cu), and s + 0 is s: -0.0 becomes 0.0, which norms the same. Whether
        0.32.0 has another block size for 256 rows was not in the wheel (vllm-project/vllm#48391).
        """

        def exact(x: Tensor, weight: Tensor) -> Tensor:
            if not of_sum:
                return self._invariant.rms_norm_batch_invariant(x, weight, eps)
            normed = x.reshape(-1, x.shape[-1]).clone()  # the kernel writes into both
            self._kernels.fused_add_rms_norm(normed, torch.zeros_like(normed), weight, eps)
            return normed.view(x.shape)

        def plain(x: Tensor, weight: Tensor) -> Tensor:
            return plain_norm(x, weight, eps)

        return PlainBackward.apply(exact, plain, x_MK, weight_K)

    def silu_times(self, gate_up_MN: Tensor) -> Tensor:
        return PlainBackward.apply(_silu_times, plain_silu_times, gate_up_MN)

    def rotate(
        self, positions_T: Tensor, query_TQD: Tensor, key_TGD: Tensor, table: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Positions are not compared with the table, for which the host would wait in each layer:
        the table has ``data.max_len`` rows, which no sequence exceeds, nor does a warm-up."""
        query, key = query_TQD.flatten(1).clone(), key_TGD.flatten(1).clone()  # written in place
        self._kernels.rotary_embedding(positions_T, query, key, query_TQD.shape[-1], table, True)
        return query.view_as(query_TQD), key.view_as(key_TGD)

    def attention(
        self, query_TQD: Tensor, key_TGD: Tensor, value_TGD: Tensor, starts: Tensor, scale: float
    ) -> Tensor:
        """As an engine computes prompts: over pages, which hold this pack only. Packed keys are
        other tiles (flash attention 3: of 144 keys instead of 128 at a head size of 96;
        vllm-project/flash-attention hopper/tile_size.h), and in flash attention 2 another kernel.
        """
        if query_TQD.dtype not in _FORMATS:
            raise NotExact(
                f"flash attention computes in bf16, this model is {query_TQD.dtype}: exact mode on "
                "GPUs takes megatron.param_dtype bf16"
            )
        # a bound: reading the longest from the device would make the host wait in each layer
        longest = max(len(query_TQD), LEAST_QUERIES)
        pages = fill_pages(key_TGD, value_TGD, starts)
        return self.over_pages(query_TQD, pages, starts, starts.diff(), longest, scale)

    def over_pages(
        self,
        query_TQD: Tensor,
        pages: tuple[Tensor, Tensor, Tensor],
        starts: Tensor,
        lengths_S: Tensor,
        longest: int,
        scale: float,
    ) -> Tensor:
        """Flash attention with an engine's arguments (vllm 0.32.0
        v1/attention/backends/flash_attn.py:1390, :862).

        Args:
            pages: what ``fill_pages`` returned.
            starts: (S + 1,) int32, where the queries of the sequences begin and end.
            lengths_S: int32, keys of each sequence; the last query is at the last key.
            longest: bound of a sequence's queries.
        """
        keys, values, table_SP = pages
        return self._attention.flash_attn_varlen_func(
            q=query_TQD.contiguous(),
            k=keys,
            v=values,
            out=torch.empty_like(query_TQD, memory_format=torch.contiguous_format),
            cu_seqlens_q=starts,
            max_seqlen_q=longest,
            seqused_k=lengths_S,
            max_seqlen_k=len(keys) * PAGE,  # a bound, too
            softmax_scale=scale,
            causal=True,
            alibi_slopes=None,
            window_size=[-1, -1],
            block_table=table_SP,
            softcap=0,
            scheduler_metadata=None,
            fa_version=self._version(query_TQD.shape[-1]),
            num_splits=1,
        )

    def _flash_version(self, head_size: int) -> int:
        version = self._attention.get_flash_attn_version(
            head_size=head_size, supports_fa4_hd256=True
        )
        if version is None:
            raise NotExact("this vLLM has no flash attention for this GPU")
        return version


def fill_pages(key_TGD: Tensor, value_TGD: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (pages, PAGE, G, D) keys and values, zeros where nothing is, and (S, P) int32 the
    pages of each sequence (``page_layout``)."""
    pages, table_SP, slots_T = page_layout(starts, len(key_TGD), PAGE)
    filled = key_TGD.new_zeros(2, pages * PAGE, *key_TGD.shape[1:])
    filled[0, slots_T], filled[1, slots_T] = key_TGD, value_TGD
    keys, values = filled.unflatten(1, (pages, PAGE))
    return keys, values, table_SP


def process_problem() -> str | None:
    """Why this process cannot be exact on its GPU; None if it can."""
    if (problem := vllm_problem()) is not None:
        return problem
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return f"the installed vLLM is built for {current_platform.device_name}, not for CUDA"
    if (found := torch.cuda.get_device_capability()) < (9, 0):
        return (
            f"{torch.cuda.get_device_name()} has compute capability {found[0]}.{found[1]}: exact "
            "mode needs 9.0 or newer, where vLLM's products can be batch-invariant"
        )
    return None


def _be_batch_invariant() -> None:
    """vLLM's mode in this process, apart from NCCL's settings.

    It sets NCCL's one channel with one thread, too, for sums of many ranks. These stay as they were:
    ranks reduce gradients by NCCL, and a sum of two ranks, the most that exact mode takes, has one
    order. A rank calls this before its first product (``ExactLayers.require``).
    """
    from vllm.model_executor.determinism.batch_invariant import init_batch_invariance

    os.environ.update(_INVARIANT)
    before = _nccl_settings()
    init_batch_invariance()
    for name in _nccl_settings().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _nccl_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}


def _silu_times(gate_up: Tensor) -> Tensor:
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    torch.ops._C.silu_and_mul(out, gate_up.contiguous())
    return out


def _aligned(logits_MV: Tensor) -> Tensor:
    """Rows as far apart as an engine's; sums over them then are in the engine's order."""
    if logits_MV.stride(0) % _ALIGNED == 0 and logits_MV.stride(1) == 1:
        return logits_MV
    size = logits_MV.shape[1]
    return F.pad(logits_MV, (0, -size % _VOCABULARY_UNIT))[:, :size]
