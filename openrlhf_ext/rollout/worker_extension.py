"""What vLLM's workers learn: to replace their weights from a weight-sync group, to sum what they
hold, and FP8 layers.

vLLM imports this module inside every worker process (`worker_extension_cls`) and mixes the class
into its worker, so names must not clash with those of `vllm.v1.worker`; imports stay at torch and
vLLM. On GPUs vLLM's own
``fp8_per_block`` quantizes at the start and at every reload (vllm 0.32.0
model_executor/layers/quantization/online/fp8.py:307): fp32 scales of 128x128 of a weight and of
1x128 of activations. Its only such kernel for CPUs leaves activations in BF16 and needs AMX, so
that on CPU a quantization of our own takes its place; importing this module registers it.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.config.quantization import resolve_quantization_config
from vllm.model_executor.kernels.linear import (
    FlashInferFp8DeepGEMMDynamicBlockScaledKernel,
    Fp8BlockScaledMMLinearKernel,
)
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerBlockOnlineLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform
from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

from openrlhf_ext.fp8.quantize import BLOCK, E4M3, Grid, Quantized, quantize
from openrlhf_ext.patches import vllm_moe
from openrlhf_ext.patches.vllm_tied_head import repack_tied_heads
from openrlhf_ext.rollout.adapters import HeldAdapter, are_adapters
from openrlhf_ext.rollout.response import NotFP8
from openrlhf_ext.rollout.sync.base import Link, WeightSyncError
from openrlhf_ext.rollout.sync.plan import BucketPlan, Spec, bit_sum, bit_sums, words
from openrlhf_ext.rollout.sync.stream import WeightReceiver

vllm_moe.PATCH.apply()  # in a worker that vLLM spawned nobody else has applied patches

PER_BLOCK, EMULATED = "fp8_per_block", "fp8_per_block_emulated"
_LISTED = 5
_AT_ONCE = 1 << 24
_AS_LOADED = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)
"""Kernels that take experts as they are loaded (fused_moe/oracle/unquantized.py:416)."""
_OF_PART = {"w1": "w13_weight", "w3": "w13_weight", "w2": "w2_weight"}
_SCORES = "compute_topk_scores"
_EXPERT = re.compile(r"(.+)\.(\d+)\.(\w+)\.weight")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
QUALIFIED_NAME = "openrlhf_ext.rollout.worker_extension.WeightSyncExtension"


def with_quantized_layers(
    engine_args: dict[str, Any], bf16_layers: Sequence[int]
) -> dict[str, Any]:
    """vLLM's engine arguments with FP8 linear layers in all decoder layers but these, counted from
    0."""
    # vLLM asks for every part of a fused projection by its own name
    # (compressed_tensors/utils.py:61)
    ignore = {"ignore": [rf"re:.*\blayers\.{number}\." for number in bf16_layers]}
    if not current_platform.is_cpu():
        return {**engine_args, "quantization": PER_BLOCK, "quantization_config": ignore}
    overrides = {
        **engine_args.get("hf_overrides", {}),
        "quantization_config_dict_json": json.dumps(ignore),
    }
    return {**engine_args, "quantization": EMULATED, "hf_overrides": overrides}


# ---- emulation


@register_quantization_config(EMULATED)
class EmulatedConfig(OnlineQuantizationConfig):
    """vLLM's ``fp8_per_block`` with the emulated layers in the place of its own."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float32, *super().get_supported_act_dtypes()]

    @classmethod
    def from_config_dict_json(cls, text: str) -> EmulatedConfig:
        """From ``{"ignore": [names]}``, the only way past vLLM's own class
        (model_loader/weight_utils.py:301)."""
        args = resolve_quantization_config(PER_BLOCK, json.loads(text))
        assert args is not None, f"vLLM knows {PER_BLOCK}"
        return cls(args)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        method = super().get_quant_method(layer, prefix)
        return EmulatedLinear() if isinstance(method, Fp8PerBlockOnlineLinearMethod) else method


class EmulatedLinear(Fp8PerBlockOnlineLinearMethod):
    """Operands are rounded to FP8 and multiplied in fp32. Weights lie on the meta device until a
    layer's last one has come."""

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Leaves out vLLM's choice of a kernel, which fails without AMX."""
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
        """(..., K) to (..., N), in the data type of x."""
        x_TK = quantize(x.reshape(-1, x.shape[-1]), E4M3, Grid.ROWS).values()
        w_NK = Quantized(layer.weight, layer.weight_scale_inv, Grid.TILES).values()
        y_TN = (x_TK @ w_NK.t()).to(x.dtype)
        return (y_TN if bias is None else y_TN + bias).view(*x.shape[:-1], -1)


# ---- proof


def require_fp8(model: nn.Module, bf16_layers: Sequence[int]) -> None:
    """Looks at every linear layer of a worker's model; raises NotFP8 with names of modules,
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
    """Not Marlin, Humming, nor vLLM's kernel for CPUs (``CPUFp8BlockScaledMMKernel``, "W8A16")."""
    if isinstance(kernel, EmulatedLinear | FlashInferFp8DeepGEMMDynamicBlockScaledKernel):
        # FlashInfer's takes BF16 and quantizes it inside
        # (kernels/linear/scaled_mm/flashinfer.py:88)
        return True
    return isinstance(kernel, Fp8BlockScaledMMLinearKernel) and kernel.apply_input_quant


class _Place(NamedTuple):
    """A part of a parameter, of this shape when vLLM has loaded it, and before it processes it
    (packs, quantizes)."""

    module: torch.nn.Module
    parameter: str
    part: tuple[int | slice, ...]
    shape: tuple[int, ...]

    @property
    def whole(self) -> Tensor:
        return getattr(self.module, self.parameter).detach()

    @property
    def values(self) -> Tensor:
        """Without a copy, but of an expert that is padded."""
        values = self.whole[self.part]
        return values.contiguous() if len(self.part) > 1 else values


class HeldWeights:
    """Where a worker's model holds the tensors of a plan, to sum their bits after an update, and to
    load the experts of a layer together.

    vLLM fuses tensors into one parameter (q, k and v; gate and up; all experts of a layer), cuts
    parameters into shards, holds keys and values several times where there are more workers than
    heads, and pads vocabularies. What is held in the tensor's own data type and in rows is summed
    in place; weights that vLLM quantizes, and experts that it packs or shuffles for a kernel, where
    they will be held, once a layer has all of its tensors and before it processes them. For the
    rest it is the sum of what arrived.
    """

    def __init__(self, model: torch.nn.Module, plan: BucketPlan, workers: int) -> None:
        self._tensors, self._workers = plan.tensors, workers
        # a mixture's kernel has its router, too
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._fused = {
            part: (fused, parts.index(part), len(parts))
            for fused, parts in getattr(model, "packed_modules_mapping", {}).items()
            for part in parts
        }
        found = {name: self._expert(name) for name, _, _ in plan.tensors}
        self._experts = {name: expert for name, expert in found.items() if expert is not None}
        self._held: dict[str, _Place] = {}
        self._processed: dict[str, _Place] = {}
        for spec in plan.tensors:
            place = self._place(spec[0])
            if place is not None and self._will_be_processed(place, spec):
                self._processed[spec[0]] = place
            elif place is not None and self._can_sum(place.values, spec):
                self._held[spec[0]] = place
        self._names: dict[torch.nn.Module, list[str]] = {}
        for name, place in self._processed.items():
            self._names.setdefault(place.module, []).append(name)
        for module in self._names:
            self._sum_before_processing(module)
        self._before: dict[str, tuple[Tensor, int]] = {}
        self._arrived: dict[str, Tensor] = {}
        self._kept: dict[RoutedExperts, dict[str, Any]] = {}

    def watch(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass an update on; sum those of its tensors that will be held in another form."""
        self._arrived.clear()
        self._before.clear()
        shapes = {name: shape for name, shape, _ in self._tensors}
        for name, tensor in stream:
            if name not in self._held and name not in self._processed:
                whole = words(tensor, shapes[name], self._workers)
                assert whole is not None, "whole tensors arrive contiguous"
                self._arrived[name] = bit_sum(whole)
            yield name, tensor

    def keep_experts(self) -> None:
        """To be called before vLLM's reload, which puts other tensors into the modules: from now on
        `together` loads experts into those that the kernel reads, where it takes them as they are
        loaded. What pads them is 0."""
        self._kept.clear()
        for layer in dict.fromkeys(layer for layer, _, _ in self._experts.values()):
            if getattr(layer.quant_method, "unquantized_backend", None) not in _AS_LOADED:
                continue
            self._kept[layer] = {name: getattr(layer, name) for name in {*_OF_PART.values()}}
            config = layer.moe_config
            unpadded = config.hidden_dim_unpadded, config.intermediate_size_per_partition_unpadded
            if tuple(layer.w2_weight.shape[1:]) != unpadded:  # a sleep may have given it up
                for parameter in self._kept[layer].values():
                    parameter.data.zero_()

    def together(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Loads experts, and passes the rest of an update on.

        An expert goes to where the kernel reads it when it comes: nothing is held twice, and vLLM,
        which finds no tensor of the layer in the update, leaves the layer as it is. Where a kernel
        wants them in another form, those of a layer are loaded together, all gates at once, all ups
        and all downs. One by one, each of 18,432 would be looked up among 384 names and counted on
        the meta device before it is copied.
        """
        waiting: dict[tuple[RoutedExperts, str], dict[int, tuple[str, Tensor]]] = {}
        for name, tensor in stream:
            if name not in self._experts:
                yield name, tensor
                continue
            layer, number, part = self._experts[name]
            if layer in self._kept:
                _load_experts(layer, layer.weight_loader, self._kept[layer], part, tensor, number)
                continue
            found = waiting.setdefault((layer, part), {})
            found[number] = name, tensor
            if len(found) == layer.local_num_experts:
                del waiting[layer, part]
                weights = torch.stack([found[each][1] for each in range(len(found))])
                new = {name: getattr(layer, name) for name in {*_OF_PART.values()}}
                _load_experts(layer, new[_OF_PART[part]].weight_loader, new, part, weights, 0)
        for found in waiting.values():  # some of a layer's were left out: vLLM takes the others
            yield from found.values()

    def sums(self) -> list[tuple[int, int, bool]]:
        """(sum of the bits, number of entries, whether as received) of every tensor, in the plan's
        order."""
        held = {name: self._held[name].values for name, _, _ in self._tensors if name in self._held}
        shapes = {name: shape for name, shape, _ in self._tensors}
        parts = [self._words(name, values, shapes[name]) for name, values in held.items()]
        sums = dict(zip(held, bit_sums(parts).unbind() if parts else (), strict=True))
        found = []
        for name, shape, _ in self._tensors:
            if name in held:
                found.append((sums[name], held[name].numel(), False))
            elif name in self._processed:
                nothing = torch.zeros(
                    (), dtype=torch.int64, device=self._processed[name].whole.device
                )
                found.append((*self._before.get(name, (nothing, 0)), False))
            else:
                found.append((self._arrived[name], torch.Size(shape).numel(), True))
        totals = torch.stack([total for total, _, _ in found]).tolist()
        return [
            (total, entries, received)
            for total, (_, entries, received) in zip(totals, found, strict=True)
        ]

    def _words(self, name: str, values: Tensor, shape: Sequence[int]) -> Tensor:
        found = words(values, shape, self._workers)
        assert found is not None, f"vLLM moved the values of {name}"
        return found

    def _place(self, name: str) -> _Place | None:
        path, _, parameter = name.rpartition(".")
        return (
            self._direct(path, parameter)
            or self._part_of_fused(path, parameter)
            or self._of_expert(name)
        )

    def _can_sum(self, values: Tensor, spec: Spec) -> bool:
        _, shape, dtype = spec
        fits = (
            values.dtype == dtype
            and values.dim() == len(shape)
            and not values.is_meta
            and values.numel()
        )
        return bool(fits) and words(values, shape, self._workers) is not None

    def _will_be_processed(self, place: _Place, spec: Spec) -> bool:
        module: Any = place.module
        method, dtype = getattr(module, "quant_method", None), spec[2]
        if isinstance(method, UnquantizedFusedMoEMethod):
            changes, dtype = method.unquantized_backend not in _AS_LOADED, module.params_dtype
        else:
            changes = (
                isinstance(method, Fp8PerBlockOnlineLinearMethod) and place.parameter == "weight"
            )
        return changes and self._can_sum(torch.empty(place.shape, dtype=dtype), spec)

    def _sum_before_processing(self, module: Any) -> None:
        """Of a layer that a reload leaves out, there will be no sum. (vllm 0.32.0
        model_loader/reload/layerwise.py:373 loads all tensors of a layer, then has it
        processed.)"""
        method, shapes = module.quant_method, {name: shape for name, shape, _ in self._tensors}
        # of the class: there may be an earlier plan's in its place
        process = type(method).process_weights_after_loading

        def sum_and_process(layer: torch.nn.Module) -> None:
            for name in self._names.get(layer, ()):
                values = self._processed[name].values
                self._before[name] = (
                    bit_sum(self._words(name, values, shapes[name])),
                    values.numel(),
                )
            process(method, layer)

        method.process_weights_after_loading = sum_and_process

    def _direct(self, path: str, parameter: str) -> _Place | None:
        module: Any = self._modules.get(path)
        if not isinstance(getattr(module, parameter, None), Tensor):
            return None
        if isinstance(module, VocabParallelEmbedding):
            return _rows(module, parameter, 0, module.shard_indices.num_org_elements)
        # one tensor, of which only some rows are held several times
        if getattr(module, "num_kv_head_replicas", 1) > 1:
            return None
        return _rows(module, parameter, 0, None)

    def _part_of_fused(self, path: str, parameter: str) -> _Place | None:
        parent, _, leaf = path.rpartition(".")
        fused, number, parts = self._fused.get(leaf, ("", 0, 0))
        module: Any = self._modules.get(f"{parent}.{fused}")
        sizes = getattr(module, "output_partition_sizes", [])
        if len(sizes) != parts or not isinstance(getattr(module, parameter, None), Tensor):
            return None
        start = sum(sizes[:number])
        return _rows(module, parameter, start, start + sizes[number])

    def _of_expert(self, name: str) -> _Place | None:
        """``w13_weight`` is (experts, 2 widths, hidden), gate's rows first, ``w2_weight`` (experts,
        hidden, width), both padded where vLLM takes more than a model has
        (fused_moe/routed_experts.py: _load_w13, _load_w2)."""
        if name not in self._experts:
            return None
        layer, number, part = self._experts[name]
        half, config = layer.intermediate_size_per_partition, layer.moe_config
        width, hidden = config.intermediate_size_per_partition_unpadded, config.hidden_dim_unpadded
        if part == "w2":
            return _Place(
                layer, "w2_weight", (number, slice(hidden), slice(width)), (hidden, width)
            )
        start = half if part == "w3" else 0
        return _Place(
            layer,
            "w13_weight",
            (number, slice(start, start + width), slice(hidden)),
            (width, hidden),
        )

    def _expert(self, name: str) -> tuple[RoutedExperts, int, str] | None:
        """The layer, the expert's number and vLLM's word for the part, if the worker has all
        experts of the layer."""
        found = _EXPERT.fullmatch(name)
        layer: Any = self._modules.get(f"{found[1]}.routed_experts") if found else None
        if found is None or not isinstance(layer, RoutedExperts):
            return None
        # of several workers each may have some; a quantization may have other names
        if layer.local_num_experts != layer.global_num_experts or not hasattr(layer, "w13_weight"):
            return None
        parts = {
            layer.ckpt_gate_proj_name: "w1",
            layer.ckpt_up_proj_name: "w3",
            layer.ckpt_down_proj_name: "w2",
        }
        return (layer, int(found[2]), parts[found[3]]) if found[3] in parts else None


def _load_experts(
    layer: RoutedExperts,
    loader: Callable[..., Any],
    parameters: Mapping[str, Any],
    part: str,
    weights: Tensor,
    number: int,
) -> None:
    """By vLLM's own loader of experts, which cuts out the worker's shard: of the expert of this
    number, or of all experts of the layer as one tensor (vllm 0.32.0
    fused_moe/routed_experts.py:778, ``full_load``)."""
    name = _OF_PART[part]
    taken = loader(
        param=parameters[name],
        loaded_weight=weights,
        weight_name=f"{layer.layer_name}.{name}",
        shard_id=part,
        expert_id=number,
        return_success=True,
    )
    assert taken, f"vLLM takes {part} of {layer.layer_name}"


def _rows(module: torch.nn.Module, parameter: str, start: int, stop: int | None) -> _Place:
    """None: to its end."""
    rows = slice(start, stop)
    return _Place(module, parameter, (rows,), tuple(getattr(module, parameter)[rows].shape))


def _with_entropies(gather: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's function of (n, V) logits or log-probs, and more, whose ``selected_token_ranks`` are
    fp32 entropies."""

    def gathered(scores_nV: Tensor, *args: Any, **kwargs: Any) -> Any:
        tensors = gather(scores_nV, *args, **kwargs)
        return (
            tensors
            if tensors is None
            else tensors._replace(selected_token_ranks=entropies(scores_nV))
        )

    return gathered


def entropies(scores_nV: Tensor) -> Tensor:
    """(n,) fp32 entropies in nats of the distributions with these logits, or log-probs, -inf among
    them."""
    # else a batch of 256 takes three times 150 MiB
    rows = max(1, _AT_ONCE // max(1, scores_nV.shape[1]))
    parts = [
        torch.special.entr(part.softmax(-1, torch.float32)).sum(-1)
        for part in scores_nV.split(rows)
    ]
    return torch.cat([scores_nV.new_zeros(0, dtype=torch.float32), *parts])


class WeightSyncExtension:
    """Mixed into vLLM's worker, which provides the first four attributes."""

    rank: int
    model_runner: Any
    vllm_config: Any
    reload_weights: Callable[..., None]
    _weight_receiver: WeightReceiver | None = None
    _held: HeldWeights | HeldAdapter
    _adapter: HeldAdapter | None = None
    _bf16_layers: list[int] | None = None

    def hold_adapter(self) -> None:
        """From now on requests ask for an adapter, and updates bring adapters."""
        self._adapter = HeldAdapter(self.model_runner.lora_manager)

    def prove_quantized(self, bf16_layers: list[int]) -> None:
        """Look at every linear layer, now and after every update; raises NotFP8 (`require_fp8`)."""
        self._bf16_layers = bf16_layers
        require_fp8(self.model_runner.get_model(), bf16_layers)

    def tell_entropies(self) -> None:
        """From now on the sampler says each token's entropy where vLLM says its rank, which nothing
        here reads."""
        sampler = self.model_runner.sampler
        if hasattr(sampler, "gather_logprobs"):
            # beside a request with `logprob_token_ids`, the probe, vLLM takes the second
            # (v1/sample/sampler.py:142)
            for name in ("gather_logprobs", "gather_specific_token_logprobs"):
                setattr(sampler, name, _with_entropies(getattr(sampler, name)))
        else:  # vLLM's second model runner (v1/worker/gpu/sample/sampler.py:183)
            module = sys.modules[type(sampler).__module__]
            setattr(module, _SCORES, _with_entropies(getattr(module, _SCORES)))

    def connect_weight_receiver(self, plan: dict[str, Any], link: dict[str, Any]) -> None:
        """Join the sender's group as this worker's number within its engine says."""
        self.disconnect_weight_receiver()
        agreed = BucketPlan.from_wire(plan)
        if are_adapters(agreed) != (self._adapter is not None):
            brings, takes = (
                ("all weights", "adapters")
                if self._adapter is not None
                else ("adapters", "all weights")
            )
            raise WeightSyncError(
                f"the update brings {brings}, the engine was started for {takes} (adapter)"
            )
        for name in (
            "vllm.model_executor.model_loader.reload.layerwise",
            "vllm.v1.worker.gpu_model_runner",
        ):
            logging.getLogger(name).addFilter(_is_worth_telling)
        workers = self.vllm_config.parallel_config.tensor_parallel_size
        if self._adapter is not None:
            self._adapter.expect(agreed, workers)
        self._weight_receiver = WeightReceiver.connect(agreed, Link(**link), self.rank)
        self._held = self._adapter or HeldWeights(self.model_runner.get_model(), agreed, workers)

    def disconnect_weight_receiver(self) -> None:
        if self._weight_receiver is not None:
            self._weight_receiver.close()
            self._weight_receiver = None

    def replace_weights(self, version: int) -> tuple[float, list[tuple[int, int, bool]]]:
        """Receive and load an update (`WeightReceiver.receive`): seconds spent loading and summing,
        and `HeldWeights.sums`. After an error the weights are a mixture of two versions (an adapter
        is the one before): the caller must not sample until an update succeeds
        (`RolloutEngine.receive_weights` sees to that), and the senders have to be connected
        anew."""
        if self._weight_receiver is None:
            raise WeightSyncError(
                "this engine has not joined a weight-sync group, or has left it after an error"
            )
        start = time.monotonic()
        try:
            self._load(self._weight_receiver.receive(version))
            if self._bf16_layers is not None:
                self.prove_quantized(self._bf16_layers)
            sums = self._held.sums()
        except Exception:
            self.disconnect_weight_receiver()
            if self._adapter is None:
                self._recover_from_partial_reload()
            raise
        return time.monotonic() - start - self._weight_receiver.waited_s, sums

    def _load(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        if isinstance(self._held, HeldAdapter):
            self._held.replace(stream)
            return
        self._held.keep_experts()
        self.reload_weights(weights_iterator=self._held.together(self._held.watch(stream)))
        repack_tied_heads(self.model_runner.get_model())

    def _recover_from_partial_reload(self) -> None:
        # A layer that has got some of its tensors would take those for part of the next update
        # (vllm reload/layerwise.py: "Skip if the layer has already been initialized").
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.get_model(), self.vllm_config.model_config)


def _is_worth_telling(record: logging.LogRecord) -> bool:
    """vLLM warns at every reload about rotary embeddings, which have buffers and nothing in a
    checkpoint, and about experts, which it loads under another name than it then looks for
    (v1/worker/gpu_model_runner.py:4736), or does not load (`HeldWeights.together`)."""
    text = record.getMessage()
    if text.startswith("Following weights were not loaded from checkpoint"):
        return not all(".routed_experts." in name for name in re.findall(r"'([^']+)'", text))
    return not re.search("(RotaryEmbedding|RoutedExperts): Failed to load weights", text)
