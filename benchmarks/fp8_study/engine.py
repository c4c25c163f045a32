"""TransformerEngine's linear layer and recipes, and proof that it took what it was told. Imports it
inside functions:
on a CPU there is none."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch

from openrlhf_ext.fp8.recipe import Recipe


def transformer_engine() -> ModuleType:
    """``transformer_engine.pytorch``.

    Raises:
        RuntimeError: it cannot be imported; its own errors are not all ImportErrors.
    """
    try:
        import transformer_engine.pytorch as te
    except (ImportError, RuntimeError, OSError) as error:
        raise RuntimeError(
            f"TransformerEngine cannot be imported ({type(error).__name__}: {error}): give "
            "--bundle, a folder that bash tests/gpu/bundle.sh made, from which it is built "
            "here, and which needs nvcc and g++"
        ) from error
    return te


def autocast(recipe: Recipe | None) -> AbstractContextManager:
    """In its body TransformerEngine's layers multiply by this recipe; None: as they are."""
    if recipe is None:
        return nullcontext()
    return transformer_engine().fp8_autocast(enabled=True, fp8_recipe=theirs(recipe))


def theirs(recipe: Recipe) -> Any:
    """TransformerEngine's recipe of the same meaning.

    Raises:
        RuntimeError: it was imported under another scale format.
    """
    from transformer_engine.common.recipe import (
        DelayedScaling,
        Float8BlockScaling,
        Float8CurrentScaling,
        Format,
    )

    form = {"e4m3": Format.E4M3, "hybrid": Format.HYBRID}[recipe.format]
    if recipe.delayed:
        return DelayedScaling(
            fp8_format=form,
            margin=recipe.margin,
            amax_history_len=recipe.amax_history_len,
            amax_compute_algo=recipe.amax_compute_algo,
        )
    found = (Float8BlockScaling if recipe.blockwise else Float8CurrentScaling)(fp8_format=form)
    took = found.fp8_quant_fwd_inp.power_2_scale
    if took != recipe.pow2:
        raise RuntimeError(
            f"{recipe.label}: TransformerEngine was imported with power_2_scale {took}, "
            "which NVTE_FP8_*_SCALES must say before its first import"
        )
    return found


def linear(inputs: int, outputs: int) -> torch.nn.Module:
    """te.Linear without bias, bf16, on the GPU."""
    return transformer_engine().Linear(
        inputs, outputs, bias=False, params_dtype=torch.bfloat16, device="cuda"
    )
