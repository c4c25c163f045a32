"""The policy of one rank: forward pass for log-prob and entropy, train step, weights in and out.

One code path for CPU (gloo) and GPU (NCCL). Every public method is a collective over all ranks of the policy unless it
says otherwise. Shape suffixes as in ``batch``: B = sequences, S = tokens, T = response tokens.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from openrlhf_ext.head import HeadOutput, linear_logprob_entropy
from openrlhf_ext.megatron.batch import SequenceBatch, micro_batches
from openrlhf_ext.megatron.hf_config import read_model_shape
from openrlhf_ext.megatron.layout import RANK_ORDER, ParallelLayout
from openrlhf_ext.megatron.model import HiddenStateGPTModel, build_model, transformer_config
from openrlhf_ext.megatron.optimizer import OptimizerSettings, build_optimizer, build_scheduler
from openrlhf_ext.megatron.weights import export_hf, hf_tensors, load_hf, save_hf

if TYPE_CHECKING:
    from openrlhf_ext.algorithms import ShapedBatch

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class PolicySettings:
    """What a policy rank needs to know; plain values, so that it travels to Ray workers."""

    model_path: str
    layout: ParallelLayout
    param_dtype: str = "bf16"
    temperature: float = 1.0  # of the rollout distribution: log-probs and entropies are taken under it
    micro_batch_size: int = 1  # training
    forward_micro_batch_size: int = 1  # old-log-prob pass
    head_workspace_bytes: int = 256 << 20
    recompute: str = "none"
    seed: int = 42
    collective_timeout_s: float = 600.0
    optimizer: OptimizerSettings | None = None  # None: a policy that is never trained


class LogprobEntropy(NamedTuple):
    """fp32 (B, T) log-probabilities and entropies of the response tokens, 0 elsewhere."""

    logprobs_BT: Tensor
    entropies_BT: Tensor


class NonFiniteUpdateError(FloatingPointError):
    """The loss or the gradient norm of a train step is NaN or infinite."""


def initialize_distributed(layout: ParallelLayout, timeout_s: float, seed: int) -> None:
    """Joins the process group (RANK, WORLD_SIZE, MASTER_* in the environment) and builds Megatron's groups."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=timeout_s))
    if dist.get_world_size() != layout.world_size:
        raise ValueError(f"the layout is for {layout.world_size} ranks, the process group has {dist.get_world_size()}")
    parallel_state.initialize_model_parallel(
        layout.tensor_parallel_size,
        layout.pipeline_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        order=RANK_ORDER,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


class MegatronPolicy:
    """A causal language model on Megatron-core, this rank's share of it."""

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings
        self.shape = read_model_shape(settings.model_path)
        self.dtype = DTYPES[settings.param_dtype]
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )
        self.config = transformer_config(self.shape, settings.layout, self.dtype, settings.recompute)
        self.core: HiddenStateGPTModel = build_model(self.shape, self.config)
        load_hf(self.core, self.shape, settings.model_path)
        self.model = self._wrap()
        self.optimizer = self.scheduler = None
        if settings.optimizer is not None:
            self.optimizer = build_optimizer([self.model], settings.optimizer, self.dtype)
            self.scheduler = build_scheduler(self.optimizer, settings.optimizer)
            self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = _add_up_grads

    def _wrap(self) -> torch.nn.Module:
        module = Float16Module(self.config, self.core) if self.dtype != torch.float32 else self.core
        optimizer = self.settings.optimizer
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=optimizer is not None and optimizer.distributed,
            check_for_nan_in_grad=False,  # checked once per step, on the gradient norm
        )
        return DistributedDataParallel(self.config, ddp, module)

    # ---- forward ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def logprobs(self, batch: SequenceBatch, temperature: float | None = None) -> LogprobEntropy:
        """Log-probs and entropies of this data-parallel rank's sequences, returned on every rank of the replica."""
        temperature = self.settings.temperature if temperature is None else temperature
        out = LogprobEntropy(*(torch.zeros(batch.mask_BT.shape) for _ in range(2)))

        def collect(rows: list[int], part: SequenceBatch, hidden_SBH: Tensor) -> tuple[Tensor, Tensor, dict]:
            head = self._head(part, hidden_SBH, temperature)
            for target, value in zip(out, head, strict=True):
                target[rows] = _scatter(value.float(), part.mask_BT).cpu()
            return hidden_SBH.new_zeros(()), _one(self.device), {}

        self.model.eval()
        self._run(
            batch, micro_batches(batch.lengths_B, self.settings.forward_micro_batch_size), collect, forward_only=True
        )
        self.model.train()
        for tensor in out:
            self._broadcast_from_last_stage(tensor)
        return out

    def _head(self, part: SequenceBatch, hidden_SBH: Tensor, temperature: float) -> HeadOutput:
        """Log-prob and entropy of the response tokens only, in row-major order of ``part.mask_BT``."""
        rows_N, columns_N = torch.nonzero(part.mask_BT, as_tuple=True)
        weight_VH = self.core.output_embedding()
        # Float16Module hands out the last stage's bf16 result as fp32: back, without a loss
        hidden_NH = hidden_SBH[part.predict_BT[rows_N, columns_N], rows_N].to(weight_VH.dtype)
        return linear_logprob_entropy(
            hidden_NH,
            weight_VH,
            part.targets_BT[rows_N, columns_N],
            temperature=temperature,
            vocab_size=self.shape.vocab_size,
            process_group=parallel_state.get_tensor_model_parallel_group(),
            workspace_bytes=self.settings.head_workspace_bytes,
        )

    def _broadcast_from_last_stage(self, tensor: Tensor) -> None:
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            on_device = tensor.to(self.device)
            dist.broadcast(
                on_device,
                src=parallel_state.get_pipeline_model_parallel_last_rank(),
                group=parallel_state.get_pipeline_model_parallel_group(),
            )
            tensor.copy_(on_device)

    def _run(self, batch: SequenceBatch, plan: Sequence[list[int]], loss: Callable, forward_only: bool) -> list[dict]:
        """One pipeline schedule over all micro-batches; ``loss(rows, part, hidden_SBH)`` runs on the last stage."""

        def step(iterator: Iterator[list[int]], model: torch.nn.Module):
            rows = next(iterator)
            part = batch.select(rows)
            part = SequenceBatch(*(t.to(self.device) for t in vars(part).values()))
            tokens_BS = self._pad_for_sequence_parallel(part.tokens_BS)
            positions_BS = torch.arange(tokens_BS.shape[1], device=self.device).expand_as(tokens_BS)
            return model(tokens_BS, positions_BS, None), lambda hidden: loss(rows, part, hidden)

        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(plan),
            model=self.model,
            num_microbatches=len(plan),
            seq_length=batch.tokens_BS.shape[1],  # only an upper bound: stages exchange the shapes of variable lengths
            micro_batch_size=max(len(rows) for rows in plan),
            forward_only=forward_only,
        )

    def _pad_for_sequence_parallel(self, tokens_BS: Tensor) -> Tensor:
        if not self.config.sequence_parallel:
            return tokens_BS
        return torch.nn.functional.pad(tokens_BS, (0, -tokens_BS.shape[1] % self.config.tensor_model_parallel_size))

    # ---- training -----------------------------------------------------------------------------------------------

    def train_step(self, batch: SequenceBatch, shaped: ShapedBatch, algorithm: Any) -> dict[str, float]:
        """One optimizer step on the mini-batch of which this data-parallel rank holds ``batch`` and ``shaped``.

        The shares of all micro-batches and ranks add up to the loss of the whole mini-batch, because ``shaped`` carries
        the whole mini-batch's denominators.

        Returns:
            The metrics of the whole mini-batch, the same on every rank.

        Raises:
            NonFiniteUpdateError: the gradient norm is not finite.
        """
        metrics = self.accumulate_gradients(batch, shaped, algorithm)
        self.scheduler.step(1)
        _, grad_norm, _ = self.optimizer.step()
        metrics |= {"grad_norm": float(grad_norm or 0.0), "lr": self.optimizer.param_groups[0]["lr"]}
        if not all(map(_finite, (metrics["loss/policy"], metrics["grad_norm"]))):
            raise NonFiniteUpdateError(
                f"the train step gave loss {metrics['loss/policy']} and gradient norm {grad_norm}"
            )
        return metrics

    def accumulate_gradients(self, batch: SequenceBatch, shaped: ShapedBatch, algorithm: Any) -> dict[str, float]:
        """Forward and backward over all micro-batches and the gradient reduction, without the optimizer step."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        if len(batch) == 0:
            batch, plan = SequenceBatch.padding_row(batch.mask_BT.shape[1]), [[0]]
        else:
            plan = micro_batches(batch.lengths_B, self.settings.micro_batch_size)

        def share(rows: list[int], part: SequenceBatch, hidden_SBH: Tensor) -> tuple[Tensor, Tensor, dict]:
            if not part.mask_BT.any():
                return hidden_SBH.sum() * 0.0, _one(self.device), {}
            head = self._head(part, hidden_SBH, self.settings.temperature)
            loss = algorithm.loss(_scatter(head.logprob_T, part.mask_BT), shaped.select(rows).to(self.device))
            metrics = {name: value for name, value in loss.metrics.items() if name != "policy_loss"}
            return loss.value, _one(self.device), {"loss/policy": loss.value.detach(), **metrics}

        return self._sum_metrics(self._run(batch, plan, share, forward_only=False))

    def _sum_metrics(self, shares: list[dict[str, Tensor]]) -> dict[str, float]:
        """Adds the shares of all micro-batches and data-parallel ranks; identical on every rank."""
        counted = parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
        totals: dict[str, float] = {}
        for share in shares if counted else []:
            for name, value in share.items():
                totals[name] = totals.get(name, 0.0) + float(value)
        everyone: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, totals)
        names = sorted({name for part in everyone for name in part} | {"loss/policy"})
        return {name: sum(part.get(name, 0.0) for part in everyone) for name in names}

    # ---- weights ------------------------------------------------------------------------------------------------

    def hf_specs(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """(name, shape, dtype) of every tensor that ``export`` yields, in order."""
        return [(t.name, t.shape, self.dtype) for t in hf_tensors(self.shape)]

    def export(self, value: Callable[[torch.nn.Parameter], Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """HF tensors on global rank 0 (see ``weights.export_hf``); all ranks must exhaust the iterator."""
        return export_hf(self.core, self.shape, value)

    def save_hf(self, target: str | Path) -> None:
        """Writes an HF checkpoint that transformers loads; rank 0 writes, all ranks take part."""
        if dist.get_rank() == 0:
            save_hf(self.export(), self.settings.model_path, target)
        else:
            for _ in self.export():
                pass
        dist.barrier()


def _add_up_grads(model: list[torch.nn.Module], num_tokens: Tensor | None = None, **kwargs) -> None:
    """Megatron's gradient reduction without its division by a token count: the shares carry their denominators."""
    finalize_model_grads(model, None, **kwargs)


def _one(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.int, device=device)


def _scatter(values_N: Tensor, mask_BT: Tensor) -> Tensor:
    """(B, T) with ``values_N`` at the true entries of the mask in row-major order, 0 elsewhere; differentiable."""
    return torch.zeros(mask_BT.shape, dtype=values_N.dtype, device=values_N.device).masked_scatter(mask_BT, values_N)


def _finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")
