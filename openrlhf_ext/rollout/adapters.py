"""A LoRA adapter in vLLM: engine arguments, requests that ask for it, what a worker does with one
that arrives.

An update of adapters has tensors that are named as peft names them,
``base_model.model.<module>.lora_A.weight`` (r, in) and ``lora_B.weight`` (out, r), B times alpha /
r already: vLLM's own factor is 1, so that a worker holds bit for bit what was sent, in stacks for
the largest rank whose rest is zeros. The base stays as it was read from the disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.config.lora import MaxLoRARanks
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name

from openrlhf_ext.rollout.sync.base import WeightSyncError
from openrlhf_ext.rollout.sync.plan import BucketPlan, Spec, bit_sum, words

_ID = 1
_ENDS = (".lora_A.weight", ".lora_B.weight")
_LISTED = 5


def with_adapter(engine_args: dict[str, Any], rank: int, targets: Sequence[str]) -> dict[str, Any]:
    """vLLM's engine arguments with room for one adapter of these modules, in the model's data type.
    Raises ValueError.

    Without the modules vLLM adds zeros to the logits of some families (Llama, Qwen3), for 64 bytes
    a token and entry of the vocabulary on CPU, where a prompt's log-probs beside another request
    end the engine (vllm 0.32.0 lora/punica_wrapper/punica_cpu.py:348: as many indices as requests).
    """
    ranks = [allowed for allowed in sorted(get_args(MaxLoRARanks)) if allowed >= rank]
    if not ranks:
        raise ValueError(
            f"vLLM has adapters of rank {max(get_args(MaxLoRARanks))} at most, got {rank}"
        )
    room = {
        "max_loras": 1,
        "max_lora_rank": ranks[0],
        "lora_dtype": "auto",
        "lora_target_modules": list(targets),
    }
    return {**engine_args, "enable_lora": True, **room}


def request_of(version: int) -> LoRARequest:
    """For the adapter of these weights. vLLM's prefix cache tells adapters apart by name and path
    (vllm 0.32.0 v1/core/kv_cache_utils.py:595), workers by the number."""
    return LoRARequest(f"policy-{version}", _ID, "in-memory")


class AdaptedEngine:
    """vLLM's engine whose every request asks for the adapter, by the name of the weights' version
    at that time."""

    def __init__(self, llm: Any, version: Callable[[], int]) -> None:
        self._llm, self._version = llm, version

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self._llm.generate(*args, lora_request=request_of(self._version()), **kwargs)

    def add_request(self, *args: Any, **kwargs: Any) -> Any:
        return self._llm.add_request(*args, lora_request=request_of(self._version()), **kwargs)


def are_adapters(plan: BucketPlan) -> bool:
    return any(name.endswith(_ENDS) for name, _, _ in plan.tensors)


class _Place(NamedTuple):
    """Where a worker holds a tensor: in one of a layer's stacks (slots, 1, rows, columns) of A's or
    of B's."""

    layer: BaseLinearLayerWithLoRA
    part: int
    is_a: bool

    @property
    def stack(self) -> Tensor:
        return (self.layer.lora_a_stacked if self.is_a else self.layer.lora_b_stacked)[self.part]

    @property
    def length(self) -> int:
        """Of the side of the whole tensor that is not the rank."""
        base: Any = self.layer.base_layer
        if self.is_a:
            return base.input_size
        if self.layer.n_slices == 1:
            return base.output_size
        # with fewer heads of keys and values than workers vLLM counts each as often as it is held
        return base.output_sizes[self.part] // (
            getattr(base, "num_kv_head_replicas", 1) if self.part else 1
        )


def with_plain_products(wrapper: PunicaWrapperCPU) -> None:
    """Where every token has the one adapter of the engine: vLLM's own copies its matrices for every
    token (vllm 0.32.0 lora/ops/torch_ops/lora_ops.py:74), 9/10 of a forward pass of a 135M
    model."""
    general = wrapper.add_lora_linear

    def add_lora_linear(
        y_TN: Tensor,
        x_TK: Tensor,
        stacked_a: Sequence[Tensor],
        stacked_b: Sequence[Tensor],
        scale: float,
        widths: Sequence[int],
        **others: Any,
    ) -> None:
        if wrapper.token_lora_indices.any():  # -1: of a request that does not ask for it
            return general(y_TN, x_TK, stacked_a, stacked_b, scale, widths, **others)
        start, x_TK = 0, x_TK.float()
        for a, b, width in zip(stacked_a, stacked_b, widths, strict=True):
            down_TR = F.linear(x_TK, a[0, 0].float()) * scale
            y_TN[:, start : start + width] += F.linear(
                down_TR.to(y_TN.dtype), b[0, 0].to(y_TN.dtype)
            )
            start += width

    wrapper.add_lora_linear = add_lora_linear


class HeldAdapter:
    """The adapter of a worker: zeros at first, then that of the latest update."""

    def __init__(self, manager: Any) -> None:
        """``manager``: vLLM's ``WorkerLoRAManager``. An adapter that it does not hold it wants to
        load in the middle of a step, where an error would end the engine; and it may have dropped
        this one (`reload_weights` drops all)."""
        self._manager, self._layers = manager, manager._adapter_manager
        manager._load_adapter = lambda request: self._adapter
        for wrapper in self._layers.punica_wrapper_mapping.values():
            if isinstance(wrapper, PunicaWrapperCPU):
                with_plain_products(wrapper)
        mapper = getattr(self._layers.model, "hf_to_vllm_mapper", None)
        self._mapper = None if mapper is None else mapper.get_rename_mapper()
        self._parts = {
            part: (whole, number)
            for whole, parts in self._layers.packed_modules.items()
            for number, part in enumerate(parts)
        }
        self._put(self._layers.create_dummy_lora(_ID, 1, manager.embedding_modules))

    def expect(self, plan: BucketPlan, workers: int) -> None:
        """Updates of this plan. Raises WeightSyncError with what of it does not fit this model:
        vLLM takes tensors of modules that it does not have in silence, and samples from the
        base."""
        places = {spec[0]: self._place(spec[0]) for spec in plan.tensors}
        problems = [
            problem
            for spec in plan.tensors
            if (problem := self._problem(spec, places[spec[0]])) is not None
        ]
        modules = Counter(
            name.removesuffix(end) for name in places for end in _ENDS if name.endswith(end)
        )
        problems += [
            f"{module}: has one of lora_A and lora_B, not both"
            for module, n in modules.items()
            if n == 1
        ]
        sides = (
            spec[1][:1] if place.is_a else spec[1][1:]
            for spec in plan.tensors
            if (place := places[spec[0]])
        )
        ranks = {rank for side in sides for rank in side}
        if len(ranks) > 1 or max(ranks, default=0) > self._largest:
            problems.append(
                f"tensors are of ranks {sorted(ranks)}, should be of one up to {self._largest}"
            )
        if problems:
            more = f"\n- and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
            listed = "\n- ".join(problems[:_LISTED])
            raise WeightSyncError(
                f"the adapter does not fit this engine, which keeps what it has:\n- {listed}{more}"
            )
        self._tensors, self._workers, self._rank = plan.tensors, workers, ranks.pop()
        self._places = [place for place in places.values() if place is not None]

    def replace(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        """Take an update's tensors, in place of the adapter before once all have come."""
        # vLLM keeps them and may write to them, and those of the stream lie in a frame
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in stream}
        config = PEFTHelper(r=self._rank, lora_alpha=self._rank, target_modules=[])
        self._put(
            LoRAModel.from_lora_tensors(
                _ID, tensors, config, "cpu", self._dtype, weights_mapper=self._mapper
            )
        )

    def sums(self) -> list[tuple[int, int, bool]]:
        """As `HeldWeights.sums`, of what the layers compute with: this worker's rows or columns.
        What pads them to the largest rank is summed too, and zeros count nothing."""
        slot = self._layers.lora_index_to_id.index(_ID)
        totals, entries = [], []
        for place, (name, shape, _) in zip(self._places, self._tensors, strict=True):
            held = place.stack[slot, 0]
            rows = words(held, shape, self._workers)
            assert rows is not None, f"vLLM holds {name} in another form"
            totals.append(bit_sum(rows))
            entries.append(held.numel() // self._largest * self._rank)
        return [
            (total, count, False)
            for total, count in zip(torch.stack(totals).tolist(), entries, strict=True)
        ]

    def _put(self, adapter: LoRAModel) -> None:
        self._adapter = adapter
        self._manager.add_adapter(LoRARequest("update", _ID, "in-memory", load_inplace=True))

    @property
    def _largest(self) -> int:
        return self._manager.lora_config.max_lora_rank

    @property
    def _dtype(self) -> torch.dtype:
        return self._manager.lora_config.lora_dtype

    def _place(self, name: str) -> _Place | None:
        if not name.endswith(_ENDS):
            return None
        path, is_a = parse_fine_tuned_lora_name(name, self._mapper)
        whole, part = self._parts.get(path, (path, 0))
        layer = self._layers.modules.get(whole)
        if not isinstance(layer, BaseLinearLayerWithLoRA) or (whole == path and layer.n_slices > 1):
            return None
        return _Place(layer, part, is_a)

    def _problem(self, spec: Spec, place: _Place | None) -> str | None:
        name, shape, dtype = spec
        if place is None:
            return f"{name}: no linear layer of the engine's model has an adapter of this name"
        if len(shape) != 2 or shape[1 if place.is_a else 0] != place.length:
            return (
                f"{name}: has the shape {shape}, the layer's is {place.length} long where it is "
                "not the rank"
            )
        if dtype != self._dtype:
            return f"{name}: is {dtype}, the engine's adapters are {self._dtype}"
        if (
            place.layer.n_slices == 1
            and getattr(place.layer.base_layer, "num_kv_head_replicas", 1) > 1
        ):
            return (
                f"{name}: workers share heads of one tensor, which cannot be summed; take fewer "
                "workers an engine"
            )
        return None
