"""The three products of a linear layer as FP8 hardware rounds them, in torch: operands on FP8's grid, sums in fp32.

Shape suffixes: T = tokens, K = input features, N = output features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openrlhf_ext.fp8.quantize import E4M3, E5M2, FP8_MAX, Grid, Quantized, amax_of, quantize
from openrlhf_ext.fp8.recipe import Recipe

_FP32_MAX = torch.finfo(torch.float32).max


class DelayedScale:
    """The scale of one tensor under delayed scaling, which earlier micro-batches have set.

    Attributes:
        scale: () fp32, what the next micro-batch is multiplied by; 1 before any has been seen.
        history_A: (amax_history_len,) fp32 largest absolute entries; the first collects those of the present
            micro-batch.
    """

    def __init__(self, dtype: torch.dtype, recipe: Recipe, device: torch.device | str = "cpu") -> None:
        self.dtype, self._recipe = dtype, recipe
        self.scale = torch.ones((), device=device)
        self.history_A = torch.zeros(recipe.amax_history_len, device=device)

    def record(self, x: Tensor) -> None:
        """Note a tensor of the present micro-batch. One with NaN does not count, as TransformerEngine takes fmaxf."""
        self.history_A[0] = torch.fmax(self.history_A[0], amax_of(x))

    def update(self, amax: Tensor) -> None:
        """The end of a micro-batch: the next scale (TransformerEngine 2.11 common/recipe/delayed_scaling.cu).

        Args:
            amax: () the largest entry that any rank has noted; 0: nothing was, everything stays.
        """
        if amax == 0:
            return
        largest = amax if self._recipe.amax_compute_algo == "most_recent" else torch.maximum(self.history_A.max(), amax)
        self.history_A[0] = amax
        self.history_A.copy_(self.history_A.roll(-1))
        self.history_A[0] = 0.0
        if torch.isfinite(largest):
            self.scale.copy_((FP8_MAX[self.dtype] * 2.0**-self._recipe.margin / largest).clamp(max=_FP32_MAX))


class Products:
    """The products of one linear layer, y = x w', dx = dy w, dw = dy' x.

    Each copy of an operand is rounded from the original, so that a matrix and its transpose differ under 'blockwise'.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._dtypes = {"x": E4M3, "w": E4M3, "dy": E5M2 if recipe.format == "hybrid" else E4M3}

    def scales(self, device: torch.device | str = "cpu") -> dict[str, DelayedScale]:
        """Scales of the operands before the first micro-batch; none unless the recipe is 'delayed'."""
        if not self._recipe.delayed:
            return {}
        return {operand: DelayedScale(dtype, self._recipe, device) for operand, dtype in self._dtypes.items()}

    def codes(self, operand: str, x_RC: Tensor, *, transposed: bool = False, scale: Tensor | None = None) -> Quantized:
        """An operand in FP8.

        Args:
            operand: 'x', 'w' or 'dy'.
            transposed: for a product that sums over its rows.
            scale: 'delayed': what it is multiplied by.
        """
        grid = Grid.TENSOR
        if self._recipe.blockwise:
            grid = Grid.TILES if operand == "w" else Grid.COLUMNS if transposed else Grid.ROWS
        return quantize(x_RC, self._dtypes[operand], grid, pow2=self._recipe.pow2, scale=scale)

    def output(self, x_TK: Tensor, w_NK: Tensor, scales: dict[str, Tensor]) -> Tensor:
        """(T, N) in the dtype of x."""
        x, w = self.codes("x", x_TK, scale=scales.get("x")), self.codes("w", w_NK, scale=scales.get("w"))
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
