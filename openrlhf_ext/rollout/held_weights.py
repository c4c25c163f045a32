"""Sums the bits of the weights that a vLLM worker holds, and loads experts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerBlockOnlineLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from openrlhf_ext.rollout.sync.plan import BucketPlan, Spec, bit_sum, bit_sums, words

_AS_LOADED = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)
"""Kernels that take experts as loaded (fused_moe/oracle/unquantized.py:416)."""
_OF_PART = {"w1": "w13_weight", "w3": "w13_weight", "w2": "w2_weight"}
_PARTITIONS = {"in_proj_qkv": 3}
"""Partitions of a fused parameter that a tensor fills (vllm 0.32.0 models/qwen3_5.py:225), if
several."""
_UNPACKED = "_cpu_unpacked_conv_weight"
"""What vLLM has packed for a CPU's kernel (layers/utils.py:525)."""
_EXPERT = re.compile(r"(.+)\.(\d+)\.(\w+)\.weight")


class _Place(NamedTuple):
    """A part of a parameter; ``shape`` is its shape after vLLM has loaded it and before vLLM
    processes it (packs, quantizes)."""

    module: torch.nn.Module
    parameter: str
    part: tuple[int | slice | None, ...]
    shape: tuple[int, ...]

    @property
    def whole(self) -> Tensor:
        return getattr(self.module, self.parameter).detach()

    @property
    def values(self) -> Tensor:
        """The part's values, without a copy unless they are a padded expert's or a convolution's."""
        values = self.whole[self.part]
        return values.contiguous() if len(self.part) > 1 else values


class HeldWeights:
    """Finds where a worker's model holds the tensors of a plan, to sum their bits after an update
    and to load the experts of a layer together.

    vLLM fuses tensors into one parameter (q, k, and v; gate and up; all experts of a layer), cuts
    parameters into shards, holds keys and values several times if there are more workers than
    heads, and pads vocabularies. Tensors held in their own data type and in rows are summed in
    place. Weights that vLLM quantizes, and experts that it packs or shuffles for a kernel, are
    summed where they will be held, once a layer has all of its tensors and before vLLM processes
    them. For the rest, the sum covers what arrived.
    """

    def __init__(self, model: torch.nn.Module, plan: BucketPlan, workers: int) -> None:
        self._tensors, self._workers = plan.tensors, workers
        # keep duplicates: a mixture's kernel also holds its router
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._fused: dict[str, tuple[str, int, list[int]]] = {}
        for fused, parts in getattr(model, "packed_modules_mapping", {}).items():
            counts = [_PARTITIONS.get(part, 1) for part in parts]
            self._fused |= {part: (fused, parts.index(part), counts) for part in parts}
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
        """Passes an update on; sums those of its tensors that will be held in another form."""
        self._arrived.clear()
        self._before.clear()
        shapes = {name: shape for name, shape, _ in self._tensors}
        for name, tensor in stream:
            if name not in self._held and name not in self._processed:
                whole = words(tensor, shapes[name], self._workers)
                assert whole is not None, "whole tensors arrive contiguous"
                self._arrived[name] = bit_sum(whole)
            yield name, tensor

    def before_reload(self) -> None:
        """Prepares for vLLM's reload, which puts other tensors into the modules; call it before.
        Where a kernel takes experts as loaded, `together` then loads them into the tensors that it
        reads. Padding is set to 0."""
        self._kept.clear()
        for layer in dict.fromkeys(layer for layer, _, _ in self._experts.values()):
            if getattr(layer.quant_method, "unquantized_backend", None) not in _AS_LOADED:
                continue
            self._kept[layer] = {name: getattr(layer, name) for name in {*_OF_PART.values()}}
            config = layer.moe_config
            unpadded = config.hidden_dim_unpadded, config.intermediate_size_per_partition_unpadded
            if tuple(layer.w2_weight.shape[1:]) != unpadded:  # a sleep may have freed it
                for parameter in self._kept[layer].values():
                    parameter.data.zero_()

    def together(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Loads experts, and passes the rest of an update on.

        An arriving expert goes to where the kernel reads it: nothing is held twice, and vLLM, which
        finds no tensor of the layer in the update, leaves the layer as it is. If a kernel needs
        another form, the experts of a layer are loaded together, all gates at once, all ups, and
        all downs. One by one, each of 18,432 would be looked up among 384 names and counted on the
        meta device before it is copied.
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
        for found in waiting.values():  # incomplete layers: vLLM takes the experts that arrived
            yield from found.values()

    def sums(self) -> list[tuple[int, int, bool]]:
        """Returns (sum of the bits, number of entries, whether as received) of every tensor, in the
        plan's order."""
        held = {
            name: _as_sent(self._held[name].values, dtype)
            for name, _, dtype in self._tensors
            if name in self._held
        }
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
            values.dtype in (dtype, torch.float32)
            and values.dim() == len(shape)
            and not values.is_meta
            and values.numel()
        )
        return bool(fits) and words(_as_sent(values, dtype), shape, self._workers) is not None

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
        """Sums a layer's tensors before vLLM processes them; a layer that a reload leaves out gets
        no sum. (vllm 0.32.0 model_loader/reload/layerwise.py:373 loads all tensors of a layer, then
        has it processed.)"""
        method, shapes = module.quant_method, {name: shape for name, shape, _ in self._tensors}
        # take the class's method: the instance may hold an earlier plan's replacement
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
        if hasattr(module, _UNPACKED):
            rows = slice(None)
            return _Place(module, _UNPACKED, (rows, None), tuple(getattr(module, _UNPACKED).shape))
        # only some rows of this tensor are held several times
        if getattr(module, "num_kv_head_replicas", 1) > 1:
            return None
        return _rows(module, parameter, 0, None)

    def _part_of_fused(self, path: str, parameter: str) -> _Place | None:
        parent, _, leaf = path.rpartition(".")
        fused, number, counts = self._fused.get(leaf, ("", 0, [0]))
        module: Any = self._modules.get(f"{parent}.{fused}")
        sizes = getattr(module, "output_partition_sizes", [])
        if len(sizes) != sum(counts) or not isinstance(getattr(module, parameter, None), Tensor):
            return None
        first = sum(counts[:number])
        start, stop = sum(sizes[:first]), sum(sizes[: first + counts[number]])
        return _rows(module, parameter, start, stop)

    def _of_expert(self, name: str) -> _Place | None:
        """Returns an expert's part of its layer's parameters. ``w13_weight`` is (experts, 2 widths,
        hidden), gate's rows first; ``w2_weight`` is (experts, hidden, width); both are padded if
        vLLM uses more than a model has (fused_moe/routed_experts.py: _load_w13, _load_w2)."""
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
        """Returns the layer, the expert's number, and vLLM's name of the part, if the worker has
        all experts of the layer."""
        found = _EXPERT.fullmatch(name)
        layer: Any = self._modules.get(f"{found[1]}.routed_experts") if found else None
        if found is None or not isinstance(layer, RoutedExperts):
            return None
        # with several workers each may have some; a quantization may use other names
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
    """Loads with vLLM's own loader of experts, which cuts out the worker's shard: of the expert
    ``number``, or of all experts of the layer as one tensor (vllm 0.32.0
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
    """Returns these rows of a parameter; ``stop`` None: to its end."""
    rows = slice(start, stop)
    return _Place(module, parameter, (rows,), tuple(getattr(module, parameter)[rows].shape))


def _as_sent(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns what a wider parameter holds of a tensor of this type; not a number where it holds
    more than the type does."""
    if values.dtype == dtype:
        return values
    sent = values.to(dtype)
    return torch.where(sent == values, sent, torch.nan)
