"""What the ranks of the parity test run: one policy per layout, compared with plain transformers by
the parent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from openrlhf_ext.algorithms.segments import Segments
from openrlhf_ext.megatron.distributed import initialize_distributed
from openrlhf_ext.megatron.layers import LayerConverter
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.policy import MegatronPolicy
from openrlhf_ext.megatron.settings import ModelSettings
from openrlhf_ext.megatron.step.batch import SequenceBatch
from openrlhf_ext.megatron.step.dealing import balance_rows
from openrlhf_ext.options.sections import Actor, Adam, Megatron, Rollout, Train
from tests.patience import PATIENCE_S


@dataclass
class WeightedLogprob:
    """A stand-in for an algorithm: loss = -sum(weights * logprobs), whose gradients are easy to get
    elsewhere."""

    weights_N: torch.Tensor
    segments: Segments

    def select(self, rows) -> WeightedLogprob:
        return WeightedLogprob(self.segments.take(self.weights_N, rows), self.segments.select(rows))

    def to(self, device) -> WeightedLogprob:
        return WeightedLogprob(self.weights_N.to(device), self.segments)

    def entropy_slope(self, shaped):
        return None

    def token_loss(self, shaped):
        return lambda logprob_N, index_N: -logprob_N * shaped.weights_N[index_N]

    def loss(self, logprobs_N, shaped):
        @dataclass
        class Loss:
            value: torch.Tensor
            metrics: dict

        return Loss(
            -(logprobs_N * shaped.weights_N).sum(), {"tokens": (shaped.weights_N != 0).sum()}
        )


@dataclass(frozen=True)
class PieceUnit(LayerConverter):
    """Packs are padded, nothing else."""

    unit: int
    name = "piece_unit"

    def piece_unit(self, pieces: int) -> int:
        return self.unit


def settings(case: dict, world_size: int, **optimizer) -> ModelSettings:
    """What a case says, on top of one process without parallelism.

    Keys: model; tp, pp, vp, cp, sp, ep, etp; ends (layers of the first and last stage, None: as
    many as the others); dtype, temperature, recompute (fields of ``Megatron``), head,
    distributed_optimizer, overlap (fields of ``Megatron``); micro_batch_size or max_tokens (of
    training), forward_max_tokens; lopsided (one data-parallel rank gets all sequences, see
    ``deal``); piece_unit (of packs); converters (of layers); record (experts of the forward pass,
    for training); aux (weight of the loss that balances experts); max_len (tokens of the longest
    sequence); on_host (Adam's states).
    """
    tokens = case.get("max_tokens")
    return ModelSettings(
        case["model"],
        layout_of(case, world_size),
        Megatron(
            param_dtype=case.get("dtype", "fp32"),
            head=case.get("head", "fused"),
            distributed_optimizer_enable=case.get("distributed_optimizer", False),
            **case.get("recompute", {}),
            **case.get("overlap", {}),
        ),
        Rollout(
            temperature=case.get("temperature", 1.0),
            micro_batch_size=3,
            max_tokens_per_gpu=case.get("forward_max_tokens"),
        ),
        micro_batches(case.get("micro_batch_size", 2), tokens),
        (PieceUnit(case.get("piece_unit", 1)), *case.get("converters", ())),
        optimizer=Actor(adam=Adam(lr=1e-2, eps=1e-3), lr_scheduler="constant", **optimizer),
        max_len=case.get("max_len"),
        aux_loss_coef=case.get("aux", 0.0),
        adam_offload=case.get("on_host", False),
        updates=4,
    )


def layout_of(case: dict, world_size: int) -> ParallelLayout:
    return ParallelLayout(
        world_size,
        case.get("tp", 1),
        case.get("pp", 1),
        case.get("cp", 1),
        case.get("sp", False),
        case.get("vp", 1),
        *case.get("ends", (None, None)),
        case.get("ep", 1),
        case.get("etp"),
    )


def micro_batches(samples: int, tokens: int | None) -> Train:
    """Of so many samples, or of so many tokens."""
    return Train(
        micro_batch_size=samples,
        dynamic_batch_enable=tokens is not None,
        max_tokens_per_gpu=tokens or 1,
    )


def run_cases(cases: list[dict], batch: SequenceBatch, weights_N: torch.Tensor) -> list[dict]:
    """For each case: log-probs, entropies, all gradients and the weights after some steps, as this
    rank sees them."""
    results = []
    for case in cases:
        world_size = dist.get_world_size() if dist.is_initialized() else int(case["world_size"])
        policy_settings = settings(case, world_size)
        initialize_distributed(policy_settings.layout, PATIENCE_S, 1234)
        policy = MegatronPolicy(policy_settings)
        policy.warm_up()  # leaves nothing, in any layout
        results.append(run_case(policy, batch, weights_N, case))
        parallel_state.destroy_model_parallel()
    return results


def deal(case: dict, batch: SequenceBatch, attention_length: float) -> list[int]:
    """This data-parallel rank's rows."""
    replica, replicas = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    if case.get("lopsided"):
        return list(range(len(batch))) if replica == replicas - 1 else []
    return balance_rows(batch.lengths_B, replicas, attention_length)[replica]


def run_case(
    policy: MegatronPolicy, batch: SequenceBatch, weights_N: torch.Tensor, case: dict
) -> dict:
    rows = deal(case, batch, policy.shape.attention_length)
    mine, shaped = batch.select(rows), WeightedLogprob(weights_N, batch.responses).select(rows)
    routed: list[SequenceBatch] | None = [] if case.get("record") else None
    out = policy.logprobs(mine, routed=routed)
    result = {"rows": rows, "logprobs": out.logprobs_N, "entropies": out.entropies_N}
    for mine in routed or ():
        result["experts"] = mine.experts_MYK
    plans = [
        policy.schedule.plan(mine, forward_only=forward_only) for forward_only in (True, False)
    ]
    result["micro_batches"] = [[mine.lengths_B[rows].tolist() for rows in plan] for plan in plans]
    if not case.get("distributed_optimizer", False):
        result["metrics"] = policy.accumulate_gradients(mine, shaped, shaped)
        result["grads"] = {n: t.clone() for n, t in policy.export(lambda p: p.main_grad)}
    result["steps"] = [policy.train_step(mine, shaped, shaped) for _ in range(case.get("steps", 2))]
    result["counted"] = policy.schedule.take_count()
    result["weights"] = {n: t.clone() for n, t in policy.export()}
    return result
