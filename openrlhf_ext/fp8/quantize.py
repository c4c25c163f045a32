"""FP8 arithmetic as TransformerEngine and vLLM have it: scales from the largest entries, rounding
to FP8's grid, and the three products of a linear layer, in torch with sums in fp32.

Sources: TransformerEngine 2.11 common/recipe/recipe_common.cuh (``compute_scale_from_amax``),
delayed_scaling.cu; vllm 0.32.0 utils/deep_gemm.py:984 (``per_block_cast_to_fp8``).

Shape suffixes: R = rows, C = columns, T = tokens, K = input features, N = output features.
"""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from openrlhf_ext.fp8.recipe import BLOCK, Recipe

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8_MAX = {E4M3: 448.0, E5M2: 57344.0}
_FP32_MAX = torch.finfo(torch.float32).max


class Grid(Enum):
    TENSOR = "all"
    ROWS = "1x128: a row's"
    COLUMNS = "128x1: a column's"
    TILES = "128x128"


class Quantized(NamedTuple):
    """A matrix in FP8. ``scale_inv``: fp32, what each of its values is to be multiplied by: () for
    a tensor, (R, ceil(C / 128)), (ceil(R / 128), C) or (ceil(R / 128), ceil(C / 128)), as ``grid``
    says."""

    codes_RC: Tensor
    scale_inv: Tensor
    grid: Grid

    def values(self) -> Tensor:
        """(R, C) fp32 what the codes stand for."""
        values_RC = _decoded(self.codes_RC)
        blocks = _blocks(values_RC, self.grid).mul_(_per_block(self.scale_inv))
        return _matrix(blocks, values_RC.shape)


def saturating_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """To FP8; what is too large, infinity too, becomes the largest value, NaN stays. A plain cast
    would not do: from
    |x| = 464 on torch 2.11 makes NaN of it for E4M3, and for E5M2 torch makes infinity from 61440 on."""
    return x.clamp(-FP8_MAX[dtype], FP8_MAX[dtype]).to(dtype)


def scale_from_amax(
    amax: Tensor, dtype: torch.dtype, *, pow2: bool = False, limit: float = _FP32_MAX
) -> Tensor:
    """FP8's largest value / amax (fp32), ``limit`` where that is beyond fp32; 1 where amax is 0,
    infinite or NaN."""
    scale = FP8_MAX[dtype] / amax
    scale = torch.where(torch.isinf(scale), limit, scale)
    if pow2:
        # without its mantissa
        scale = (scale.contiguous().view(torch.int32) & -0x800000).view(torch.float32)
    return torch.where(torch.isfinite(amax) & (amax > 0), scale, 1.0)


def quantize(
    x_RC: Tensor, dtype: torch.dtype, grid: Grid, *, pow2: bool = False, scale: Tensor | None = None
) -> Quantized:
    """A matrix (fp32, bf16 or fp16) in FP8; at the edges of the grid blocks are smaller. ``scale``:
    () of Grid.TENSOR, known beforehand (delayed scaling); None: from the entries."""
    x_RC = x_RC.detach()
    blocks = _blocks(x_RC, grid)
    if scale is None:
        # TransformerEngine's limit within blocks is the largest value of the input's type
        limit = _FP32_MAX if grid is Grid.TENSOR else float(torch.finfo(x_RC.dtype).max)
        amax = amax_of(x_RC) if grid is Grid.TENSOR else blocks.abs().amax((1, 3)).float()
        scale = scale_from_amax(amax, dtype, pow2=pow2, limit=limit)
    codes = saturating_cast(blocks.float() * _per_block(scale), dtype)
    return Quantized(_matrix(codes, x_RC.shape), 1.0 / scale, grid)


def amax_of(x: Tensor) -> Tensor:
    """() fp32 largest absolute entry; 0 of none."""
    return x.detach().abs().amax().float() if x.numel() else torch.zeros((), device=x.device)


def _blocks(x_RC: Tensor, grid: Grid) -> Tensor:
    """(block rows, rows of one, block columns, columns of one): a view, or a copy that fills blocks
    with zeros."""
    rows, columns = x_RC.shape
    if grid is Grid.TENSOR:
        return x_RC[None, :, None]
    height, width = 1 if grid is Grid.ROWS else BLOCK, 1 if grid is Grid.COLUMNS else BLOCK
    if rows % height or columns % width:
        x_RC = F.pad(x_RC, (0, -columns % width, 0, -rows % height))
    return x_RC.reshape(-(-rows // height), height, -(-columns // width), width)


def _per_block(scale: Tensor) -> Tensor:
    return scale[:, None, :, None] if scale.ndim else scale


def _matrix(blocks: Tensor, shape: torch.Size) -> Tensor:
    down, height, across, width = blocks.shape
    return blocks.view(down * height, across * width)[: shape[0], : shape[1]]


def _decoded(codes: Tensor) -> Tensor:
    if not codes.is_cpu:
        return codes.float()
    # torch 2.13's own cast takes 13 ms for 2M entries on one core, which is half of their matrix
    # product; this 4 ms
    return (
        _table(codes.dtype)
        .index_select(0, codes.view(torch.uint8).int().flatten())
        .view(codes.shape)
    )


@cache
def _table(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float()


class DelayedScale:
    """The () fp32 scale of one tensor under delayed scaling: what the next micro-batch is
    multiplied by, 1 before any.
    ``history_A``: fp32 largest absolute entries, the first of the present micro-batch."""

    def __init__(
        self, dtype: torch.dtype, recipe: Recipe, device: torch.device | str = "cpu"
    ) -> None:
        self.dtype, self._recipe = dtype, recipe
        self.scale = torch.ones((), device=device)
        self.history_A = torch.zeros(recipe.amax_history_len, device=device)

    def record(self, x: Tensor) -> None:
        """Notes a tensor of the present micro-batch. One with NaN does not count, as
        TransformerEngine takes fmaxf."""
        self.history_A[0] = torch.fmax(self.history_A[0], amax_of(x))

    def update(self, amax: Tensor) -> None:
        """The end of a micro-batch: the next scale (TransformerEngine 2.11
        common/recipe/delayed_scaling.cu). ``amax``:
        () the largest entry that any rank has noted; 0: nothing was, everything stays."""
        if amax == 0:
            return
        largest = (
            amax
            if self._recipe.amax_compute_algo == "most_recent"
            else torch.maximum(self.history_A.max(), amax)
        )
        self.history_A[0] = amax
        self.history_A.copy_(self.history_A.roll(-1))
        self.history_A[0] = 0.0
        if torch.isfinite(largest):
            self.scale.copy_(
                (FP8_MAX[self.dtype] * 2.0**-self._recipe.margin / largest).clamp(max=_FP32_MAX)
            )


class Products:
    """The products of one linear layer, y = x w', dx = dy w, dw = dy' x. Each copy of an operand is
    rounded from the original, so that a matrix and its transpose differ under 'blockwise'."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._dtypes = {"x": E4M3, "w": E4M3, "dy": E5M2 if recipe.format == "hybrid" else E4M3}

    def scales(self, device: torch.device | str = "cpu") -> dict[str, DelayedScale]:
        if not self._recipe.delayed:
            return {}
        return {
            operand: DelayedScale(dtype, self._recipe, device)
            for operand, dtype in self._dtypes.items()
        }

    def codes(
        self, operand: str, x_RC: Tensor, *, transposed: bool = False, scale: Tensor | None = None
    ) -> Quantized:
        """An operand ('x', 'w' or 'dy') in FP8; ``transposed``: for a product that sums over its
        rows."""
        grid = Grid.TENSOR
        if self._recipe.blockwise:
            grid = Grid.TILES if operand == "w" else Grid.COLUMNS if transposed else Grid.ROWS
        return quantize(x_RC, self._dtypes[operand], grid, pow2=self._recipe.pow2, scale=scale)

    def output(self, x_TK: Tensor, w_NK: Tensor, scales: dict[str, Tensor]) -> Tensor:
        """(T, N) in the dtype of x."""
        x, w = (
            self.codes("x", x_TK, scale=scales.get("x")),
            self.codes("w", w_NK, scale=scales.get("w")),
        )
        return (x.values() @ w.values().t()).to(x_TK.dtype)

    def input_gradient(self, dy_TN: Tensor, w_NK: Tensor, scales: dict[str, Tensor]) -> Tensor:
        """(T, K) in the dtype of dy."""
        dy = self.codes("dy", dy_TN, scale=scales.get("dy"))
        w = self.codes("w", w_NK, transposed=True, scale=scales.get("w"))
        return (dy.values() @ w.values()).to(dy_TN.dtype)

    def weight_gradient(self, dy_TN: Tensor, x_TK: Tensor, scales: dict[str, Tensor]) -> Tensor:
        """(N, K) fp32."""
        dy = self.codes("dy", dy_TN, transposed=True, scale=scales.get("dy"))
        x = self.codes("x", x_TK, transposed=True, scale=scales.get("x"))
        return dy.values().t() @ x.values()
