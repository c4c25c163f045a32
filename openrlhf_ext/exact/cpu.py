"""The operations of exact mode on a CPU: vLLM's own kernels, always called with the same shapes.

Shape suffixes as in ``operations``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openrlhf_ext.exact import NotExact
from openrlhf_ext.exact.limits import processor_problem
from openrlhf_ext.exact.operations import Product, page_layout, plain_norm, plain_silu_times

ROWS = 32
"""Rows of a product. oneDNN may choose another kernel, which sums in another order, for fewer rows
or for more. Larger blocks would hardly be faster, because the weight is in oneDNN's layout."""
PAGE = 128
"""Tokens of a page of keys and values; vLLM's on a CPU (vllm 0.32.0 platforms/cpu.py:293)."""
_PRIMITIVES = 4  # kept for each product; all have the same shape


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

    def logprobs(self, logits_MV: Tensor, temperature: float) -> Tensor:
        """By the two calls of the sampler of vLLM's first model runner, which CPUs have: a
        division, then one softmax over each row (vllm 0.32.0 v1/sample/sampler.py)."""
        divisor = logits_MV.new_tensor(temperature)
        return logits_MV.div(divisor).log_softmax(-1, dtype=torch.float32)

    def add(self, residual: Tensor, branch: Tensor) -> Tensor:
        return residual.to(branch.dtype).float() + branch.float()

    def norm(self, x_MK: Tensor, weight_K: Tensor, eps: float, *, of_sum: bool) -> Tensor:
        return plain_norm(x_MK, weight_K, eps)

    def silu_times(self, gate_up_MN: Tensor) -> Tensor:
        return plain_silu_times(gate_up_MN)

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
        pages, table_SP, slots_T = page_layout(starts, len(key_TGD), PAGE)
        cache = torch.zeros(pages, groups, 2 * PAGE, size, dtype=dtype)
        keys, values = cache.chunk(2, dim=2)
        self._kernels.cpu_attn_reshape_and_cache(
            key_TGD.contiguous(), value_TGD.contiguous(), keys, values, slots_T, isa
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
            block_table=table_SP,
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
