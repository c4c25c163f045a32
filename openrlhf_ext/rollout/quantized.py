"""FP8 linear layers of vLLM's workers, and the check that they are as configured.

On GPUs vLLM's own ``fp8_per_block`` quantizes at the start and at every reload (vllm 0.32.0
model_executor/layers/quantization/online/fp8.py:307): fp32 scales of 128x128 of a weight and of
1x128 of activations. Its only such kernel for CPUs leaves activations in BF16 and needs AMX, so on
CPU our own quantization replaces it; importing this module registers it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config.quantization import resolve_quantization_config
from vllm.model_executor.kernels.linear import (
    FlashInferFp8DeepGEMMDynamicBlockScaledKernel,
    Fp8BlockScaledMMLinearKernel,
)
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerBlockOnlineLinearMethod
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform
from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

from openrlhf_ext.fp8.quantize import BLOCK, E4M3, Grid, Quantized, quantize
from openrlhf_ext.rollout.response import NotFP8

PER_BLOCK, EMULATED = "fp8_per_block", "fp8_per_block_emulated"
_LISTED = 5
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def with_quantized_layers(
    engine_args: dict[str, Any], bf16_layers: Sequence[int]
) -> dict[str, Any]:
    """Returns vLLM's engine arguments with FP8 linear layers in all decoder layers except
    ``bf16_layers``, counted from 0."""
    # vLLM looks up every part of a fused projection by its own name
    # (compressed_tensors/utils.py:61)
    ignore = {"ignore": [rf"re:.*\blayers\.{number}\." for number in bf16_layers]}
    if not current_platform.is_cpu():
        return {**engine_args, "quantization": PER_BLOCK, "quantization_config": ignore}
    overrides = {
        **engine_args.get("hf_overrides", {}),
        "quantization_config_dict_json": json.dumps(ignore),
    }
    return {**engine_args, "quantization": EMULATED, "hf_overrides": overrides}


@register_quantization_config(EMULATED)
class EmulatedConfig(OnlineQuantizationConfig):
    """vLLM's ``fp8_per_block`` with emulated layers."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float32, *super().get_supported_act_dtypes()]

    @classmethod
    def from_config_dict_json(cls, text: str) -> EmulatedConfig:
        """Makes the config from ``{"ignore": [names]}``, the only way past vLLM's own class
        (model_loader/weight_utils.py:301)."""
        args = resolve_quantization_config(PER_BLOCK, json.loads(text))
        assert args is not None, f"vLLM knows {PER_BLOCK}"
        return cls(args)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        method = super().get_quant_method(layer, prefix)
        return EmulatedLinear() if isinstance(method, Fp8PerBlockOnlineLinearMethod) else method


class EmulatedLinear(Fp8PerBlockOnlineLinearMethod):
    """Rounds operands to FP8 and multiplies them in fp32. Weights lie on the meta device until a
    layer's last one has arrived."""

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Skips vLLM's choice of a kernel, which fails without AMX."""
        super(Fp8PerBlockOnlineLinearMethod, self).create_weights(layer, *args, **kwargs)
        layer.weight_block_size = self.weight_block_size

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        weight = quantize(layer.weight, E4M3, Grid.TILES)
        replace_parameter(layer, "weight", weight.codes_RC)
        replace_parameter(layer, "weight_scale_inv", weight.scale_inv)
        layer._already_called_process_weights_after_loading = True

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Maps (..., K) to (..., N), in the data type of x."""
        x_TK = quantize(x.reshape(-1, x.shape[-1]), E4M3, Grid.ROWS).values()
        w_NK = Quantized(layer.weight, layer.weight_scale_inv, Grid.TILES).values()
        y_TN = (x_TK @ w_NK.t()).to(x.dtype)
        return (y_TN if bias is None else y_TN + bias).view(*x.shape[:-1], -1)


def require_fp8(model: nn.Module, bf16_layers: Sequence[int]) -> None:
    """Checks every linear layer of a worker's model; raises NotFP8 with names of modules and
    kernels, and a remedy."""
    linear = {
        name: module for name, module in model.named_modules() if isinstance(module, LinearBase)
    }
    wanted = {
        name
        for name in linear
        if (found := _LAYER.search(name)) and int(found[1]) not in bf16_layers
    }
    problems = [
        f"{name}: {why}"
        for name in linear
        if (why := _problem(linear[name], name in wanted)) is not None
    ]
    if not wanted:
        problems.append(
            f"no linear layer is to be FP8: of {len(linear)}, all are outside of decoder layers "
            "or in BF16"
        )
    if is_deep_gemm_e8m0_used():
        problems.append(
            "DeepGEMM rounds scales to powers of two: set VLLM_USE_DEEP_GEMM_E8M0=0 before "
            "vLLM's import"
        )
    if problems:
        more = f"\n- and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise NotFP8(
            "fp8.rollout_enable: linear layers of the engine are not as asked for:\n- "
            + "\n- ".join(problems[:_LISTED])
            + more
        )


def _problem(module: Any, wanted: bool) -> str | None:
    method, weight = module.quant_method, module.weight
    if not wanted:
        plain = isinstance(method, UnquantizedLinearMethod) and weight.dtype != E4M3
        return (
            None
            if plain
            else f"{type(method).__name__} quantizes it, although it is to stay in BF16"
        )
    if not isinstance(method, Fp8PerBlockOnlineLinearMethod):
        return f"{type(method).__name__} computes it, which is not FP8 with scales of blocks"
    kernel = method if isinstance(method, EmulatedLinear) else method.fp8_linear
    if not _quantizes_activations(kernel):
        return (
            f"kernel {type(kernel).__name__} leaves activations in BF16; take GPUs of compute "
            "capability 9.0 or more, on which vLLM has DeepGEMM and CUTLASS (see "
            "VLLM_DISABLED_KERNELS), or switch fp8.rollout_enable off"
        )
    scales, shape = module.weight_scale_inv, tuple(-(-side // BLOCK) for side in weight.shape)
    if weight.dtype != E4M3 or scales.dtype != torch.float32 or tuple(scales.shape) != shape:
        return (
            f"kernel {type(kernel).__name__} has a weight of {weight.dtype} "
            f"{tuple(weight.shape)} with scales of {scales.dtype} {tuple(scales.shape)}, should "
            f"be {E4M3} with torch.float32 {shape}"
        )
    return None


def _quantizes_activations(kernel: Any) -> bool:
    """Returns False for Marlin, Humming, and vLLM's CPU kernel (``CPUFp8BlockScaledMMKernel``,
    "W8A16")."""
    if isinstance(kernel, EmulatedLinear | FlashInferFp8DeepGEMMDynamicBlockScaledKernel):
        # FlashInfer's kernel takes BF16 and quantizes it inside
        # (kernels/linear/scaled_mm/flashinfer.py:88)
        return True
    return isinstance(kernel, Fp8BlockScaledMMLinearKernel) and kernel.apply_input_quant
