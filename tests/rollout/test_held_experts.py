"""Where experts lie in layers that tests/rollout/test_mixture.py has no machine for: those of GPUs,
and padded on all sides."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend as Backend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from openrlhf_ext.rollout.held_weights import HeldWeights
from openrlhf_ext.rollout.sync import plan as plan_module
from openrlhf_ext.rollout.sync.plan import (
    WeightSyncMismatch,
    bit_sum,
    check_receipts,
    together,
    words,
)
from tests.rollout.updates import plan_of

EXPERTS, WIDTH, HIDDEN = 3, 128, 192
AT = "model.layers.0.mlp.experts"


class Method(UnquantizedFusedMoEMethod):
    """Swaps the halves, as FlashInfer's kernels want them, where weights do not stay as they are
    loaded."""

    def __init__(self, backend: Backend) -> None:
        nn.Module.__init__(self)
        self.unquantized_backend = backend

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.unquantized_backend is not Backend.TRITON:
            layer.w13_weight.data = torch.cat(layer.w13_weight.chunk(2, 1)[::-1], 1)


class Layer(RoutedExperts):
    """A worker's shards. ``more``: widths above those of the model, which hold whatever the memory
    held."""

    def __init__(
        self,
        backend: Backend,
        workers: int,
        more: tuple[int, int],
        local: int = EXPERTS,
        worker: int = 0,
    ) -> None:
        nn.Module.__init__(self)
        width, hidden = WIDTH // workers + more[0], HIDDEN + more[1]
        self.moe_config = SimpleNamespace(
            intermediate_size_per_partition_unpadded=WIDTH // workers,
            hidden_dim_unpadded=HIDDEN,
            is_act_and_mul=True,
            tp_rank=worker,
            moe_parallel_config=SimpleNamespace(tp_size=workers),
            tp_shard_with_padding=False,
        )
        self.layer_name, self.quant_config, self._fused_shared_expert_quantizer = (
            "experts",
            None,
            None,
        )
        self.expert_map_manager = SimpleNamespace(map_global_to_local=lambda number: number)
        self.ckpt_gate_proj_name, self.ckpt_up_proj_name, self.ckpt_down_proj_name = (
            "gate_proj",
            "up_proj",
            "down_proj",
        )
        self.intermediate_size_per_partition, self.params_dtype = width, torch.bfloat16
        self.global_num_experts, self.local_num_experts = EXPERTS, local
        self.quant_method = Method(backend)
        self.w13_weight = nn.Parameter(
            torch.randn(EXPERTS, 2 * width, hidden).bfloat16(), requires_grad=False
        )
        self.w2_weight = nn.Parameter(
            torch.randn(EXPERTS, hidden, width).bfloat16(), requires_grad=False
        )

    def load(self, tensors: dict[str, Tensor], worker: int, workers: int) -> None:
        own, start = WIDTH // workers, self.intermediate_size_per_partition
        for name, tensor in tensors.items():
            number, part = int(name.split(".")[5]), name.split(".")[6]
            if part == "down_proj":
                self.w2_weight[number, :HIDDEN, :own] = tensor.chunk(workers, 1)[worker]
            else:
                first = 0 if part == "gate_proj" else start
                self.w13_weight[number, first : first + own, :HIDDEN] = tensor.chunk(workers, 0)[
                    worker
                ]
        self.quant_method.process_weights_after_loading(self)


def weights() -> dict[str, Tensor]:
    shapes = {
        "gate_proj": (WIDTH, HIDDEN),
        "up_proj": (WIDTH, HIDDEN),
        "down_proj": (HIDDEN, WIDTH),
    }
    return {
        f"{AT}.{number}.{part}.weight": torch.randn(shape).bfloat16()
        for number in range(EXPERTS)
        for part, shape in shapes.items()
    }


def model_of(experts: Layer) -> nn.Module:
    model = nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList([nn.Module()])})})
    model["model"]["layers"][0].mlp = nn.Module()
    model["model"]["layers"][0].mlp.experts = nn.ModuleDict({"routed_experts": experts})
    return model


def update(workers: int, loaded: dict[str, Tensor], sent: dict[str, Tensor], **layer: Any) -> Any:
    """What the workers of an engine sum; raises WeightSyncMismatch."""
    plan, told = plan_of(sent, 1 << 20), []
    for worker in range(workers):
        experts = Layer(workers=workers, **layer)
        held = HeldWeights(model_of(experts), plan, workers)
        list(held.watch(iter(sent.items())))
        experts.load(loaded, worker, workers)
        told.append(held.sums())
    receipt = together([0.0], told)
    sums = [words(tensor, tensor.shape, workers) for tensor in sent.values()]
    check_receipts(plan, [int(bit_sum(each)) for each in sums if each is not None], [receipt], 1)
    return receipt


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("more", [(0, 0), (32, 0), (0, 64), (32, 64)], ids=str)
@pytest.mark.parametrize("backend", [Backend.TRITON, Backend.FLASHINFER_CUTLASS, Backend.CPU])
def test_every_expert_is_summed_where_it_is_held(
    backend: Backend, more: tuple[int, int], workers: int
) -> None:
    sent = weights()
    assert update(workers, sent, sent, backend=backend, more=more).as_received == 0


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("backend", [Backend.TRITON, Backend.FLASHINFER_CUTLASS])
@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
def test_an_expert_that_is_another_s_is_named(backend: Backend, part: str, workers: int) -> None:
    sent = weights()
    one, other = (f"{AT}.{number}.{part}.weight" for number in (0, 2))
    with pytest.raises(WeightSyncMismatch, match=f"engine 0: 2 of 9: {one}, {other}$"):
        update(
            workers,
            {**sent, one: sent[other], other: sent[one]},
            sent,
            backend=backend,
            more=(0, 0),
        )


def test_experts_that_are_dealt_to_workers_count_as_received() -> None:
    sent = weights()
    assert update(1, sent, sent, backend=Backend.CPU, more=(0, 0), local=1).as_received == len(sent)


def passes_of(held: HeldWeights) -> int:
    """Over the memory, to sum all that the worker holds."""
    with pytest.MonkeyPatch.context() as patch:
        count, mixed = [], plan_module._mixed
        patch.setattr(plan_module, "_mixed", lambda words: count.append(1) or mixed(words))
        held.sums()
    return len(count)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("more", [(0, 0), (32, 64)], ids=str)
def test_an_expert_goes_to_its_rows_when_it_comes_and_is_let_go(
    more: tuple[int, int], workers: int
) -> None:
    """While vLLM reloads, the modules have other tensors than the kernel; it gets no tensor of the
    layer."""
    sent, told, most = weights(), [], 0
    plan = plan_of(sent, 1 << 20)
    for worker in range(workers):
        experts, alive = Layer(Backend.TRITON, workers, more, worker=worker), weakref.WeakSet()

        def frames(alive: weakref.WeakSet = alive) -> Iterator[tuple[str, Tensor]]:
            nonlocal most
            for name, tensor in sent.items():
                frame = tensor.clone()
                alive.add(frame)
                most = max(most, len(alive))
                yield name, frame

        held = HeldWeights(model_of(experts), plan, workers)
        held.before_reload()
        kernel = {name: getattr(experts, name) for name in ("w13_weight", "w2_weight")}
        for name, parameter in kernel.items():
            setattr(
                experts,
                name,
                nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False),
            )
        assert list(held.together(held.watch(frames()))) == [], "vLLM has nothing to load"
        for name, parameter in kernel.items():
            setattr(experts, name, parameter)
        told.append(held.sums())
        width = WIDTH // workers
        assert not experts.w2_weight[:, HIDDEN:].any() and not experts.w2_weight[:, :, width:].any()
        assert torch.equal(
            experts.w2_weight[1, :HIDDEN, :width],
            sent[f"{AT}.1.down_proj.weight"].chunk(workers, 1)[worker],
        )
        if (more, workers) == ((0, 0), 1):  # no padding in between, and rows of whole blocks
            assert passes_of(held) == 2, "one for each stacked parameter"
    assert most <= 2, "of nine tensors the one that comes, and the one before it"
    sums = [words(tensor, tensor.shape, workers) for tensor in sent.values()]
    check_receipts(
        plan, [int(bit_sum(each)) for each in sums if each is not None], [together([0.0], told)], 1
    )
