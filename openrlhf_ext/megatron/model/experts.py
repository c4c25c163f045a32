"""Mixtures of experts as modules of a Megatron ``ModuleSpec``: a router that takes the experts of a
micro-batch where these are given, and counts; experts in plain torch for machines without
TransformerEngine, under its parameter names.

Which experts a token goes to is given with the micro-batch that a layer is called with
(``Routing``), never left somewhere for the next call: under pipeline parallelism and recomputation
the next call is another micro-batch's, and megatron-core's own ``RouterReplay``, a queue of the
class, then gives gradients that are wrong without any error.

Shape suffixes: L = tokens of the pack on this rank, E = experts, K = experts of a token, Y = layers
of the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from openrlhf_ext.megatron.step.batch import PackedBatch, Routing, SequenceBatch

_SUMS = ("entropy", "tokens", "given", "changed", "balance")


class _Choice:
    """What Megatron's router asks for the experts (megatron-core 0.19.2
    transformer/moe/moe_utils.py,
    ``topk_routing_with_score_function``). The weights of given experts are the scores that the
    router gives them now, through which its gradient flows."""

    def __init__(self) -> None:
        self.taken_LK: Tensor | None = None
        # (L, K) experts, and (L,) of which tokens they are
        self.given: tuple[Tensor, Tensor] | None = None
        self.changed_L: Tensor | None = None

    def get_replay_topk(
        self,
        scores_LE: Tensor,
        topk: int,
        num_groups: Any,
        group_topk: Any,
        compute_topk: Callable[..., Any],
    ) -> tuple[Tensor, Tensor]:
        self.changed_L = None
        if self.given is None:
            scores_LK, self.taken_LK = compute_topk(
                scores_LE, topk, num_groups=num_groups, group_topk=group_topk
            )
            return scores_LK, self.taken_LK
        own_LK = scores_LE.detach().topk(topk, -1).indices
        experts_LK, told_L = self.given
        self.taken_LK = torch.where(told_L[:, None], experts_LK, own_LK)
        self.changed_L = (own_LK.sort(-1).values != self.taken_LK.sort(-1).values).any(-1)
        return scores_LE.gather(1, self.taken_LK), self.taken_LK


class _WithLoss(torch.autograd.Function):
    """A tensor as it is, with which a loss is differentiated. (Megatron's own expects a division by
    the number of tokens that the shares of a loss here already carry.)"""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones_like(ctx.like)


def balance_loss(
    logits_LE: Tensor, chosen_LE: Tensor, told: Routing, topk: int, group: dist.ProcessGroup
) -> Tensor:
    """This rank's share of the loss that balances a layer's load, 1 times its weight for tokens
    that are spread evenly.

    DeepSeek-V3 (arXiv 2412.19437), eq. 17 to 20: of a sequence of T tokens the sum over experts of
    the part of its choices that fell on the expert, times the mean of its routers' probabilities
    for it, times the number of experts. Sequences are weighted by their tokens, so that it is a
    mean over the tokens of the mini-batch, the same in every layout. ``group``: the ranks that
    share the sequences.
    """
    assert told.weight_B is not None, "there is such a loss"
    experts = logits_LE.shape[-1]
    counts_BE = logits_LE.new_zeros(len(told.weight_B), experts, dtype=torch.float64)
    counts_BE.index_add_(0, told.row_H, chosen_LE[told.seen_H].double())
    dist.all_reduce(counts_BE, group=group)
    weights_BE = counts_BE * told.weight_B[:, None] * (experts / topk)
    weights_LE = torch.zeros_like(logits_LE, dtype=torch.float64)
    weights_LE.index_add_(0, told.seen_H, weights_BE[told.row_H])
    return (weights_LE.float() * logits_LE.softmax(-1, torch.float32)).sum()


class Router(TopKRouter):
    """Chooses experts, or takes those that it is told, and adds up what metrics are made of."""

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        **more: Any,
    ) -> None:
        super().__init__(config, pg_collection, **more)
        self.told: Routing | None = None
        self._sums: Tensor | None = None  # (E + sums,) fp64
        self.router_replay = _Choice()

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        choice, told = self.router_replay, self.told
        choice.given = None
        if told is not None and told.experts_LYK is not None:
            assert told.told_L is not None, "it comes with experts"
            choice.given = told.experts_LYK[:, self.layer_number - 1].long(), told.told_L
        probs_LE, chosen_LE = super().routing(logits, padding_mask)
        # once for every pass that trains: where activations are recomputed, the first time is
        # without gradients
        if told is not None and self.training and torch.is_grad_enabled():
            logits_LE, balance = logits.flatten(0, -2), logits.new_zeros(())
            if told.weight_B is not None:
                balance = balance_loss(logits_LE, chosen_LE, told, self.topk, self.tp_cp_group)
                probs_LE = _WithLoss.apply(probs_LE, balance)
            self._count(logits_LE.detach(), chosen_LE, told, choice.changed_L, balance.detach())
        return probs_LE, chosen_LE

    @torch.no_grad()
    def _count(
        self,
        logits_LE: Tensor,
        chosen_LE: Tensor,
        told: Routing,
        changed_L: Tensor | None,
        balance: Tensor,
    ) -> None:
        """A prompt that is computed once for several sequences counts in each: how they are dealt
        changes nothing."""
        times_L = told.times_L.double()
        entropy_L = torch.special.entr(logits_LE.softmax(-1, torch.float32)).sum(-1)
        given = changed = torch.zeros_like(balance, dtype=torch.float64)
        if told.told_L is not None and changed_L is not None:
            given, changed = times_L @ told.told_L.double(), times_L @ changed_L.double()
        others = torch.stack(
            [times_L @ entropy_L.double(), times_L.sum(), given, changed, balance.double()]
        )
        sums = torch.cat([times_L @ chosen_LE.double(), others])
        self._sums = sums if self._sums is None else self._sums + sums

    @property
    def taken_LK(self) -> Tensor:
        """Experts of the last call."""
        taken_LK = self.router_replay.taken_LK
        assert taken_LK is not None, "it was called"
        return taken_LK

    def take_sums(self) -> Tensor | None:
        sums, self._sums = self._sums, None
        return sums


class Mixture(MoELayer):
    """Megatron's mixture, whose recomputation keeps what the router was told."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._is_recomputed = config.recompute_granularity == "selective" and "moe" in (
            config.recompute_modules or ()
        )
        self.moe_layer_recompute = False

    def forward(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if not (self._is_recomputed and self.training):
            return super().forward(hidden_states, *args, **kwargs)
        told = self.router.told

        def compute(hidden: Tensor) -> Tensor:
            self.router.told = told
            return super(Mixture, self).forward(hidden)[0]

        return checkpoint(compute, False, hidden_states), None


class RoutedLayer(TransformerLayer):
    """Tells its router what the micro-batch says of experts; also when it is recomputed as a
    whole."""

    def forward(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        self.mlp.router.told = packed_seq_params.routing
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


# ---- experts in plain torch


class GroupedLinear(torch.nn.Module):
    """One linear for each of this rank's experts, whose tokens come one expert after the other;
    parameter names and checkpoint of TransformerEngine's. Its rows are cut over the ranks that
    share an expert."""

    axis = 0

    def __init__(
        self,
        gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__()
        self._groups = pg_collection
        shape = [output_size, input_size]
        shape[self.axis] //= pg_collection.expt_tp.size()
        for number in range(gemms):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            # Megatron's marks: reduced over the expert's own replicas, and counted on every rank
            weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
            set_tensor_model_parallel_attributes(weight, True, self.axis, 1)
            self.register_parameter(f"weight{number}", weight)

    def forward(self, tokens: Tensor, tokens_per_expert: Sequence[int]) -> tuple[Tensor, None]:
        parts = zip(tokens.split(list(tokens_per_expert)), self.parameters(), strict=True)
        return torch.cat([F.linear(part, weight) for part, weight in parts]), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None
    ) -> dict[str, Any]:
        weights = self.state_dict(prefix="", keep_vars=True)
        first, every = self._groups.ep.rank() * len(weights), self._groups.ep.size() * len(weights)
        entries = {}
        for number, (name, weight) in enumerate(weights.items()):
            of_expert = (*sharded_offsets, (len(sharded_offsets), first + number, every))
            made = make_sharded_tensors_for_checkpoint(
                {"weight": weight},
                prefix,
                {"weight": self.axis},
                of_expert,
                tp_group=self._groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            entries[prefix + name] = made[f"{prefix}weight"]
        return entries


class RowGroupedLinear(GroupedLinear):
    """Its columns are cut."""

    axis = 1


def plain_linears() -> MLPSubmodules:
    return MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=RowGroupedLinear)


def mixture_spec(experts: MLPSubmodules, column_linear: type, row_linear: type) -> ModuleSpec:
    """A mixture of these grouped linears; the linears are those of an expert that sees every
    token."""
    of_all = ModuleSpec(
        SharedExpertMLP, submodules=MLPSubmodules(linear_fc1=column_linear, linear_fc2=row_linear)
    )
    submodules = MoESubmodules(
        experts=ModuleSpec(TEGroupedMLP, submodules=experts), shared_experts=of_all, router=Router
    )
    return ModuleSpec(module=Mixture, submodules=submodules)


def with_transformer_engine_mixture(layer: ModuleSpec) -> ModuleSpec:
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelGroupedLinear,
        TEColumnParallelLinear,
        TENorm,
        TERowParallelGroupedLinear,
        TERowParallelLinear,
    )

    experts = MLPSubmodules(
        linear_fc1=TEColumnParallelGroupedLinear, linear_fc2=TERowParallelGroupedLinear
    )
    mixture = mixture_spec(experts, TEColumnParallelLinear, TERowParallelLinear)
    submodules = dataclasses.replace(layer.submodules, pre_mlp_layernorm=TENorm, mlp=mixture)
    return ModuleSpec(module=RoutedLayer, submodules=submodules)


# ---- experts that were taken


class TakenExperts:
    """The experts that routers take in a forward pass over a batch, micro-batch by micro-batch in
    the order of a plan; of the layers of this rank's stage."""

    def __init__(
        self,
        batch: SequenceBatch,
        order: Sequence[int],
        config: TransformerConfig,
        device: torch.device,
    ) -> None:
        self._batch, self._order, self._planned = batch, order, batch.sequences.select(order)
        kind = torch.uint8 if (config.num_moe_experts or 0) <= 256 else torch.int16
        shape = self._planned.tokens, config.num_layers, config.moe_router_topk
        self._table_MYK = torch.zeros(shape, dtype=kind, device=device)

    def keep(self, part: PackedBatch, chunk: Any) -> None:
        """What a model chunk has just taken for a pack."""
        assert part.routing is not None, "of a mixture"
        places_H = int(self._planned.bounds[part.rows.start]) + part.routing.own_H
        for layer in chunk.decoder.layers:
            taken_HK = layer.mlp.router.taken_LK[part.routing.seen_H].to(self._table_MYK.dtype)
            self._table_MYK[:, layer.layer_number - 1].index_copy_(0, places_H, taken_HK)

    def of_batch(self) -> SequenceBatch:
        """The batch with these experts. A collective of the ranks that share its sequences."""
        table = self._table_MYK.to(torch.int32)  # of what a rank has not seen there are zeros
        dist.all_reduce(table, group=parallel_state.get_tensor_and_context_parallel_group())
        inverse = np.argsort(self._order).tolist()
        experts_MYK = self._planned.take(table.to(self._table_MYK.dtype).cpu(), inverse)
        return dataclasses.replace(self._batch, experts_MYK=experts_MYK)


# ---- metrics


def take_routing(chunks: Iterable[Any], layers: int, experts: int, device: torch.device) -> Tensor:
    """(Y * (E + sums),) fp64 sums of this rank's routers since the last call, to be added up over
    all ranks."""
    sums = torch.zeros(layers, experts + len(_SUMS), dtype=torch.float64, device=device)
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            if (own := layer.mlp.router.take_sums()) is not None:
                sums[layer.layer_number - 1] = own
    return sums.flatten()


def routing_metrics(sums: Sequence[float], experts: int, aux_loss_coef: float) -> dict[str, float]:
    """Of a mini-batch, from the sums of all ranks (``take_routing``), means over the model's
    layers:

    ``moe/load_max``: tokens of the fullest expert over those of the mean expert;
    ``moe/idle_experts``: experts of a layer without a token; ``moe/router_entropy``: entropy of a
    router's distribution in nats; where experts were given ``moe/replay_changed``: share of those
    tokens for which the router would have chosen others; where it has a weight ``loss/balance``
    (``balance_loss``). Tokens are those of whole sequences, prompts included.
    """
    table_YS = torch.tensor(sums, dtype=torch.float64).view(-1, experts + len(_SUMS))
    counts_YE = table_YS[:, :experts]
    entropy_Y, tokens_Y, given_Y, changed_Y, balance_Y = table_YS[:, experts:].unbind(1)
    if not bool(tokens_Y.any()):
        return {}
    found = {
        "moe/load_max": (counts_YE.max(1).values / counts_YE.mean(1)).mean(),
        "moe/idle_experts": (counts_YE == 0).sum(1).double().mean(),
        "moe/router_entropy": (entropy_Y / tokens_Y).mean(),
    }
    if bool(given_Y.any()):
        found["moe/replay_changed"] = (changed_Y / given_Y).mean()
    if aux_loss_coef > 0:
        # each layer's carries its part of the mean
        found["loss/balance"] = balance_Y.sum() / aux_loss_coef
    return {name: float(value) for name, value in found.items()}
