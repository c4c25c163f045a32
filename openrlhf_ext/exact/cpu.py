"""The operations of exact mode on a CPU: vLLM's own kernels, always called with the same shapes.

Shape suffixes as in ``operations``.
"""

from __future__ import annotations

import platform

import torch
import torch.nn.functional as F
from torch import Tensor

from openrlhf_ext.exact import NotExact
from openrlhf_ext.exact.operations import Product

ROWS = 32
"""Rows of a product. oneDNN may choose another kernel, which sums in another order, for fewer rows
or for more. Blocks of 32 take 10 % longer than blocks of 256, and are faster than torch's products
in fp32 (benchmarks/results/exact_cpu.json)."""
PAGE = 128
"""Tokens of a page of keys and values; vLLM's on a CPU (vllm 0.32.0 platforms/cpu.py:293)."""
_PRIMITIVES = 4  # kept for each product; all have the same shape
_MOST_QUERIES = 32  # query heads that a kernel of vLLM's attention takes at a time, at most


def padded(x_MK: Tensor) -> Tensor:
    """The rows, with zeros behind them up to a multiple of ``ROWS``."""
    missing = -len(x_MK) % ROWS
    return x_MK if not missing else torch.cat([x_MK, x_MK.new_zeros(missing, x_MK.shape[1])])


class BlockProduct:
    """See ``operations.Product``: oneDNN's product with a weight in its own layout, 32 rows at a
    time. One rounding, of the sum with the bias."""

    def __init__(self, weight_NK: Tensor) -> None:
        from vllm import _custom_ops

        self._multiply, self._columns = torch.ops._C.onednn_mm, len(weight_NK)
        self._handler = _custom_ops.create_onednn_mm(
            weight_NK.detach().contiguous().t(), _PRIMITIVES
        )

    def __call__(self, x_MK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        x_RK = padded(x_MK)
        out_RN = x_RK.new_empty(len(x_RK), self._columns)
        for block, into in zip(x_RK.split(ROWS), out_RN.split(ROWS), strict=True):
            self._multiply(into, block, bias_N, self._handler.handler_tensor)
        return out_RN[: len(x_MK)]


class CpuOperations:
    """See ``operations.Operations``. Layers pass on sums before they are rounded, because vLLM's
    norm on a CPU reads those."""

    stream: torch.dtype | None = torch.float32

    def __init__(self) -> None:
        """Raises NotExact: this processor was not tried."""
        if (problem := processor_problem()) is not None:
            raise NotExact(problem)
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        from vllm import _custom_ops

        self._kernels = _custom_ops

    def product(self, weight_NK: Tensor) -> Product:
        return BlockProduct(weight_NK)

    def head_product(self, weight_VK: Tensor) -> Product:
        return BlockProduct(weight_VK.detach().float())

    def logits(self, hidden_MK: Tensor, head: Product) -> Tensor:
        return head(hidden_MK.float(), None)

    def add(self, residual: Tensor, branch: Tensor) -> Tensor:
        return residual.to(branch.dtype).float() + branch.float()

    def norm(self, x_MK: Tensor, weight_K: Tensor, eps: float, *, of_sum: bool) -> Tensor:
        x = x_MK.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return x.to(weight_K.dtype) * weight_K

    def silu_times(self, gate_up_MN: Tensor) -> Tensor:
        gate, up = gate_up_MN.chunk(2, -1)
        return F.silu(gate) * up

    def rotate(
        self, positions_T: Tensor, query_TQD: Tensor, key_TGD: Tensor, table: Tensor
    ) -> tuple[Tensor, Tensor]:
        # the kernel would read on behind the table
        if len(positions_T) and (last := int(positions_T.max())) >= len(table):
            raise NotExact(f"position {last} is behind the rotary table of {len(table)} positions")
        query, key = query_TQD.flatten(1).clone(), key_TGD.flatten(1).clone()
        self._kernels.rotary_embedding(positions_T, query, key, query_TQD.shape[-1], table, True)
        return query.view_as(query_TQD), key.view_as(key_TGD)

    def attention(
        self, query_TQD: Tensor, key_TGD: Tensor, value_TGD: Tensor, starts: Tensor, scale: float
    ) -> Tensor:
        """Over pages that hold this pack only."""
        dtype, (heads, size) = query_TQD.dtype, query_TQD.shape[1:]
        groups = key_TGD.shape[1]
        isa = attention_isa(dtype, size)
        lengths_S = starts.diff()
        pages_S = (lengths_S + PAGE - 1) // PAGE
        first_S = F.pad(pages_S.cumsum(0), (1, 0))[:-1]
        table = (first_S[:, None] + torch.arange(int(pages_S.max()))).int()
        each_T = lengths_S.long()
        within_T = torch.arange(len(query_TQD)) - starts[:-1].repeat_interleave(each_T)
        slots_T = first_S.repeat_interleave(each_T) * PAGE + within_T
        cache = torch.zeros(int(pages_S.sum()), groups, 2 * PAGE, size, dtype=dtype)
        keys, values = cache.chunk(2, dim=2)
        self._kernels.cpu_attn_reshape_and_cache(
            key_TGD.contiguous(), value_TGD.contiguous(), keys, values, slots_T.long(), isa
        )
        work = self._kernels.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lengths_S),
            num_heads=heads,
            num_kv_heads=groups,
            head_dim=size,
            seq_lens=lengths_S,
            dtype=dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=False,
        )
        query_TQD = query_TQD.contiguous()
        out_TQD = torch.empty_like(query_TQD)
        self._kernels.cpu_attention_with_kv_cache(
            query=query_TQD,
            key_cache=keys,
            value_cache=values,
            output=out_TQD,
            query_start_loc=starts,
            seq_lens=lengths_S,
            scale=scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=0.0,
            scheduler_metadata=work,
            s_aux=None,
        )
        return out_TQD


def attention_isa(dtype: torch.dtype, head_dim: int) -> str:
    """The kernel of vLLM's attention for a type and a head on x86, by the questions that vLLM asks
    (vllm 0.32.0 v1/attention/backends/cpu_attn.py:520, whose import takes two seconds)."""
    if head_dim % 32 and head_dim % 16 == 0:
        return "vec16"
    if torch.cpu._is_amx_tile_supported() and dtype == torch.bfloat16:
        return "amx"
    return "vec"


def processor_problem() -> str | None:
    """Why exact mode does not run on this processor; None if it does. What was tried: x86-64 with
    AVX-512, with and without AMX."""
    if platform.machine() == "x86_64" and torch.cpu._is_avx512_supported():
        return None
    name = torch.cpu.get_capabilities().get("cpu_name") or platform.processor() or "this processor"
    return f"{name} ({platform.machine()}): exact mode was tried on x86-64 with AVX-512 only"


def longest_sequence(dtype_bytes: int, head_dim: int) -> int:
    """Tokens of the longest sequence whose attention is one tile of keys, on this processor. vLLM's
    kernel cuts longer ones, and not at the same places in a prompt as in a generation. A tile fills
    half of the L2 cache: queries, outputs (4 bytes), keys and values of a token, and its scores (by
    reading of vllm csrc/cpu/cpu_attn_impl.hpp, ``calcu_default_tile_size``)."""
    available = torch.cpu.get_capabilities()["l2_cache_size"] // 2  # at::cpu::L2_cache_size()
    token = head_dim * (4 + 4 + 2 * dtype_bytes) + 4 * _MOST_QUERIES
    return max(available // token // 32 * 32, 32)
