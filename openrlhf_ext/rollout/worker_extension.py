"""What vLLM's workers learn: to join a weight-sync group, to replace their weights from it, and to sum what they hold.
vLLM imports this module inside every worker process (`worker_extension_cls`) and mixes the class into its worker, so
names must not clash with those of `vllm.v1.worker`; imports stay at torch and vLLM."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerBlockOnlineLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

from openrlhf_ext.patches.vllm_tied_head import repack_tied_heads
from openrlhf_ext.rollout.fp8 import require_fp8
from openrlhf_ext.rollout.sync.base import Link, WeightStreamAborted, WeightSyncError
from openrlhf_ext.rollout.sync.plan import BucketPlan, Spec, bit_sum, words
from openrlhf_ext.rollout.sync.stream import WeightReceiver


class _Rows(NamedTuple):
    """Rows [start, stop) of a parameter; None: to its end."""

    module: torch.nn.Module
    parameter: str
    start: int
    stop: int | None

    @property
    def values(self) -> Tensor:
        return getattr(self.module, self.parameter).detach()[self.start : self.stop]


class HeldWeights:
    """Where a worker's model holds the tensors of a plan, to sum their bits after an update.

    vLLM fuses tensors into one parameter (q, k and v; gate and up), cuts parameters into shards, holds keys and
    values several times where there are more workers than heads, and pads vocabularies. What is held in the tensor's
    own data type and in rows is found and summed in place. Weights that vLLM quantizes to FP8 are summed where they
    will be held, once a layer has all of its tensors and before it quantizes them. For the rest it is the sum of
    what arrived.
    """

    def __init__(self, model: torch.nn.Module, plan: BucketPlan, workers: int) -> None:
        self._tensors, self._workers = plan.tensors, workers
        self._modules = dict(model.named_modules())
        self._fused = {
            part: (fused, parts.index(part), len(parts))
            for fused, parts in getattr(model, "packed_modules_mapping", {}).items()
            for part in parts
        }
        places = [(spec, rows) for spec in plan.tensors if (rows := self._place(spec[0])) is not None]
        self._rows = {spec[0]: rows for spec, rows in places if self._can_sum(rows.values, spec)}
        self._quantized = {spec[0]: (rows, spec[1]) for spec, rows in places if self._will_be_quantized(rows, spec)}
        for rows, _ in self._quantized.values():
            self._sum_before_quantizing(rows.module)
        self._before: dict[str, tuple[Tensor, int]] = {}
        self._arrived: dict[str, Tensor] = {}

    def watch(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass an update on; sum those of its tensors that will be held in another form."""
        self._arrived.clear()
        self._before.clear()
        shapes = {name: shape for name, shape, _ in self._tensors}
        for name, tensor in stream:
            if name not in self._rows and name not in self._quantized:
                whole = words(tensor, shapes[name], self._workers)
                assert whole is not None, "whole tensors arrive contiguous"
                self._arrived[name] = bit_sum(whole)
            yield name, tensor

    def sums(self) -> list[tuple[int, int, bool]]:
        """(sum of the bits, number of entries, whether as received) of every tensor, in the plan's order."""
        found = []
        for name, shape, _ in self._tensors:
            if name in self._rows:
                values = self._rows[name].values
                held = words(values, shape, self._workers)
                assert held is not None, f"vLLM moved the values of {name}"
                found.append((bit_sum(held), values.numel(), False))
            elif name in self._quantized:
                nothing = torch.zeros((), dtype=torch.int64, device=self._quantized[name][0].values.device)
                found.append((*self._before.get(name, (nothing, 0)), False))
            else:
                found.append((self._arrived[name], torch.Size(shape).numel(), True))
        sums = torch.stack([total for total, _, _ in found]).tolist()
        return [(total, entries, received) for total, (_, entries, received) in zip(sums, found, strict=True)]

    def _place(self, name: str) -> _Rows | None:
        path, _, parameter = name.rpartition(".")
        return self._direct(path, parameter) or self._part_of_fused(path, parameter)

    def _can_sum(self, values: Tensor, spec: Spec) -> bool:
        _, shape, dtype = spec
        fits = values.dtype == dtype and values.dim() == len(shape) and not values.is_meta and values.numel()
        return bool(fits) and words(values, shape, self._workers) is not None

    def _will_be_quantized(self, rows: _Rows, spec: Spec) -> bool:
        quantized = isinstance(getattr(rows.module, "quant_method", None), Fp8PerBlockOnlineLinearMethod)
        if not quantized or rows.parameter != "weight":
            return False
        return self._can_sum(torch.empty(rows.values.shape, dtype=spec[2]), spec)

    def _sum_before_quantizing(self, module: Any) -> None:
        """Of a layer that a reload leaves out, there will be no sum. (vllm 0.29.0 model_loader/reload/layerwise.py:362
        loads all tensors of a layer, then has it processed.)"""
        method = module.quant_method
        # of the class: there may be an earlier plan's in its place
        process = type(method).process_weights_after_loading

        def sum_and_process(layer: torch.nn.Module) -> None:
            for name, (rows, shape) in self._quantized.items():
                if rows.module is layer:
                    held = words(rows.values, shape, self._workers)
                    assert held is not None, f"vLLM moved the values of {name}"
                    self._before[name] = bit_sum(held), rows.values.numel()
            process(method, layer)

        method.process_weights_after_loading = sum_and_process

    def _direct(self, path: str, parameter: str) -> _Rows | None:
        module: Any = self._modules.get(path)
        if not isinstance(getattr(module, parameter, None), Tensor):
            return None
        if isinstance(module, VocabParallelEmbedding):
            return _Rows(module, parameter, 0, module.shard_indices.num_org_elements)
        if getattr(module, "num_kv_head_replicas", 1) > 1:  # one tensor, of which only some rows are held several times
            return None
        return _Rows(module, parameter, 0, None)

    def _part_of_fused(self, path: str, parameter: str) -> _Rows | None:
        parent, _, leaf = path.rpartition(".")
        fused, number, parts = self._fused.get(leaf, ("", 0, 0))
        module: Any = self._modules.get(f"{parent}.{fused}")
        sizes = getattr(module, "output_partition_sizes", [])
        if len(sizes) != parts or not isinstance(getattr(module, parameter, None), Tensor):
            return None
        start = sum(sizes[:number])
        return _Rows(module, parameter, start, start + sizes[number])


QUALIFIED_NAME = "openrlhf_ext.rollout.worker_extension.WeightSyncExtension"


class WeightSyncExtension:
    """Mixed into vLLM's worker, which provides the first four attributes."""

    rank: int
    model_runner: Any
    vllm_config: Any
    reload_weights: Callable[..., None]
    _weight_receiver: WeightReceiver | None = None
    _held: HeldWeights
    _bf16_layers: list[int] | None = None

    def prove_fp8(self, bf16_layers: list[int]) -> None:
        """Look at every linear layer, now and after every update; raises NotFP8 (`require_fp8`)."""
        self._bf16_layers = bf16_layers
        require_fp8(self.model_runner.get_model(), bf16_layers)

    def connect_weight_receiver(self, plan: dict[str, Any], link: dict[str, Any]) -> None:
        """Join the sender's group as this worker's number within its engine says."""
        self.disconnect_weight_receiver()
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(_is_worth_telling)
        agreed = BucketPlan.from_wire(plan)
        self._weight_receiver = WeightReceiver.connect(agreed, Link(**link), self.rank)
        workers = self.vllm_config.parallel_config.tensor_parallel_size
        self._held = HeldWeights(self.model_runner.get_model(), agreed, workers)

    def disconnect_weight_receiver(self) -> None:
        if self._weight_receiver is not None:
            self._weight_receiver.close()
            self._weight_receiver = None

    def replace_weights(self, version: int) -> tuple[float, list[tuple[int, int, bool]]]:
        """Receive and load a whole update: seconds spent loading and summing, and `HeldWeights.sums`. After an error
        the weights are a mixture of two versions: the caller must not sample until an update succeeds
        (`RolloutEngine.receive_weights` sees to that). A sender that gave up can start again; after any other error
        the group has to be connected anew."""
        if self._weight_receiver is None:
            raise WeightSyncError("this engine has not joined a weight-sync group, or has left it after an error")
        start = time.monotonic()
        try:
            self.reload_weights(weights_iterator=self._held.watch(self._weight_receiver.receive(version)))
            repack_tied_heads(self.model_runner.get_model())
            if self._bf16_layers is not None:
                self.prove_fp8(self._bf16_layers)
            sums = self._held.sums()
        except Exception as error:
            if not isinstance(error, WeightStreamAborted):
                self.disconnect_weight_receiver()
            self._recover_from_partial_reload()
            raise
        return time.monotonic() - start - self._weight_receiver.waited_s, sums

    def _recover_from_partial_reload(self) -> None:
        # A layer that has got some of its tensors would take those for part of the next update
        # (vllm reload/layerwise.py: "Skip if the layer has already been initialized").
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.get_model(), self.vllm_config.model_config)


def _is_worth_telling(record: logging.LogRecord) -> bool:
    """Rotary embeddings have buffers and nothing in a checkpoint; vLLM warns about them at every reload."""
    return "RotaryEmbedding: Failed to load weights" not in record.getMessage()
