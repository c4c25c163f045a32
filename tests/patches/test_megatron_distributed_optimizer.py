"""Megatron's distributed optimizer on two ranks: a run that is saved and resumed continues as if never interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from openrlhf_ext.patches import megatron_distributed_optimizer as patch
from tests.launch import launch

STEPS_BEFORE, STEPS_AFTER = 2, 3


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(__name__, "save_and_resume", 2, folder=str(tmp_path_factory.mktemp("checkpoints")))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_resumed_run_continues_the_uninterrupted_one(ranks: list[dict[str, Any]], dtype: str) -> None:
    for rank in ranks:
        run = rank[dtype]
        assert run["resumed"] == run["uninterrupted"]
        assert run["steps"] == [STEPS_BEFORE + STEPS_AFTER]
        assert run["distinct_step_tensors"] == run["parameters"] > 1


def test_megatron_still_needs_the_patch(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["unpatched"] == {"state_dict": "AssertionError", "distinct_step_tensors": 1}


def test_initial_state_is_the_one_that_adam_makes_itself() -> None:
    torch.manual_seed(0)
    initial = torch.randn(5)
    results = []
    for prepare in (lambda optimizer: None, patch.initialise_adam_state):
        parameter = torch.nn.Parameter(initial.clone())
        optimizer = torch.optim.AdamW([parameter], lr=0.1)
        prepare(optimizer)
        for _ in range(3):
            parameter.grad = parameter.detach() * 2
            optimizer.step()
        results.append(parameter.detach())
    assert torch.equal(*results)


def save_and_resume(folder: str) -> dict[str, Any]:
    """One rank: all cases, so that the processes start once."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    results: dict[str, Any] = {dtype: _interrupt_and_resume(f"{folder}/{dtype}", dtype) for dtype in ("fp32", "bf16")}
    results["unpatched"] = _call_unpatched()
    dist.barrier()
    dist.destroy_process_group()
    return results


def _interrupt_and_resume(folder: str, dtype: str) -> dict[str, Any]:
    """Trains, saves after STEPS_BEFORE steps, goes on; then a fresh model loads that and goes on."""
    if torch.distributed.get_rank() == 0:
        Path(folder).mkdir()
    torch.distributed.barrier()
    run = _Run(dtype, seed=0)
    for step in range(STEPS_BEFORE):
        run.train(step)
    run.save(folder)
    uninterrupted = [run.train(STEPS_BEFORE + step) for step in range(STEPS_AFTER)]

    resumed = _Run(dtype, seed=1)
    resumed.load(folder)
    return {
        "uninterrupted": uninterrupted,
        "resumed": [resumed.train(STEPS_BEFORE + step) for step in range(STEPS_AFTER)],
        **resumed.step_tensors(),
    }


def _call_unpatched() -> dict[str, Any]:
    """What Megatron's own two methods do."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    run = _Run("fp32", seed=0)
    (optimizer,) = run.optimizer.chained_optimizers
    try:
        DistributedOptimizer.state_dict.__wrapped__(optimizer)
        outcome = "returned"
    except AssertionError as error:
        outcome = type(error).__name__
    run.train(0)
    DistributedOptimizer.load_state_dict.__wrapped__(optimizer, optimizer.state_dict())
    return {"state_dict": outcome, "distinct_step_tensors": run.step_tensors()["distinct_step_tensors"]}


class _Run:
    """A small network under Megatron's DDP and distributed optimizer."""

    def __init__(self, dtype: str, seed: int) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import MegatronModule
        from megatron.core.transformer.transformer_config import TransformerConfig

        class Layers(MegatronModule):
            def __init__(self, config: TransformerConfig) -> None:
                super().__init__(config)
                self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(6))

            def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
                for layer in self.layers:
                    x_BD = x_BD + torch.tanh(layer(x_BD))
                return x_BD

        bf16 = dtype == "bf16"
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        torch.manual_seed(seed)
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, bf16=bf16)
        self.model = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
            Layers(config).to(self.dtype),
        )
        self.model.broadcast_params()
        optimizer_config = OptimizerConfig(
            optimizer="adam", lr=1e-2, bf16=bf16, params_dtype=self.dtype, use_distributed_optimizer=True, clip_grad=1.0
        )
        self.optimizer = get_megatron_optimizer(optimizer_config, [self.model], use_gloo_process_groups=False)

    def train(self, step: int) -> tuple[float, float]:
        """One step on the data of this step and rank; loss and gradient norm."""
        generator = torch.Generator().manual_seed(100 * step + torch.distributed.get_rank())
        x_BD = torch.randn(4, 8, generator=generator).to(self.dtype)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = (self.model(x_BD) - x_BD.flip(1)).float().square().mean()
        loss.backward()
        self.model.finish_grad_sync()
        _, grad_norm, _ = self.optimizer.step()
        return loss.item(), float(grad_norm)

    def save(self, folder: str) -> None:
        from megatron.core import dist_checkpointing

        dist_checkpointing.save(self._sharded_state(is_loading=False), folder)

    def load(self, folder: str) -> None:
        from megatron.core import dist_checkpointing

        state = dist_checkpointing.load(self._sharded_state(is_loading=True), folder)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def step_tensors(self) -> dict[str, Any]:
        states = [s for o in self.optimizer.chained_optimizers for s in o.optimizer.state.values()]
        return {
            "parameters": len(states),
            "steps": sorted({int(state["step"]) for state in states}),
            "distinct_step_tensors": len({id(state["step"]) for state in states}),
        }

    def _sharded_state(self, is_loading: bool) -> dict[str, Any]:
        from megatron.core import parallel_state

        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        state: dict[str, Any] = {"model": self.model.module.sharded_state_dict(metadata=metadata)}
        state["optimizer"] = self.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
        return state
