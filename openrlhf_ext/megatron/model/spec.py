"""Transformer layers for machines without TransformerEngine, and causal attention over
context-parallel ranks.

Plug-in modules of an ordinary Megatron ``ModuleSpec``, with TransformerEngine's parameter names, so
that checkpoints and the weight map are the same with and without it. They lift three limits of
megatron-core 0.19.2's own local spec:
``WrappedTorchNorm`` refuses sequence parallelism (transformer/torch_norm.py:50),
``DotProductAttention`` materializes the scores and refuses packed sequences and context parallelism
(transformer/dot_product_attention.py:57, 154), and the final norm cannot be chosen by a plain layer
spec.

Under context parallelism every rank holds two chunks of every sequence ("zig-zag", see
``step.batch``). It gathers the keys and values of all ranks, one collective per layer, and attends
from its own chunks; the backward pass scatters the summed gradients back.

Shape suffixes: L = tokens of the pack on this rank, N = query heads, K = key-value heads, D = head
dimension.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from openrlhf_ext.delta_rule import Chunks, Gaps
from openrlhf_ext.megatron.attentions import Attention
from openrlhf_ext.megatron.layers import LayerConverter
from openrlhf_ext.megatron.mlps import MLP
from openrlhf_ext.megatron.model.experts import RoutedLayer
from openrlhf_ext.megatron.model.shape import ModelShape
from openrlhf_ext.megatron.step.batch import Routing, SharedPrompts


class _GatherRanks(torch.autograd.Function):
    """(ranks, ...) of every rank's tensor; backward: the sum of all ranks' gradients of this rank's
    tensor."""

    @staticmethod
    def forward(ctx, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        tensor = tensor.contiguous()
        gathered = tensor.new_empty(group.size() * tensor.shape[0], *tensor.shape[1:])
        dist.all_gather_into_tensor(gathered, tensor, group=group)
        return gathered.unflatten(0, (group.size(), -1))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        mine = torch.empty_like(grad[0])
        dist.reduce_scatter_tensor(mine, grad.flatten(0, 1).contiguous(), group=ctx.group)
        return mine, None


class _SumRanks(torch.autograd.Function):
    """Sum over the ranks; backward: the gradient as it is, for values that every rank then uses in
    the same
    computation: the gradient of that one computation, not of as many copies of it as there are
    ranks."""

    @staticmethod
    def forward(ctx, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def sum_ranks(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of all ranks' tensors, on every rank; a gradient passes back as it is."""
    return _SumRanks.apply(tensor, group) if group.size() > 1 else tensor


def causal_attention(
    query_BLND: Tensor, key_BLKD: Tensor, value_BLKD: Tensor, scale: float
) -> Tensor:
    """Causal attention of sequences of one length; with fewer queries than keys, the queries are
    their last ones."""
    q, k, v = (t.transpose(1, 2) for t in (query_BLND, key_BLKD, value_BLKD))
    grouped = q.shape[1] != k.shape[1]
    if q.shape[2] == k.shape[2]:
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=grouped
        )
    else:
        mask = causal_lower_right(q.shape[2], k.shape[2])
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped
        )
    return out.transpose(1, 2)


class _Gather(torch.autograd.Function):
    """Rows of a tensor; ``back``: where in the result each of the tensor's rows is. ``more``: where
    those of ``rows`` are once more, then those of the first of them twice more, and so on,
    ``counts`` of them. What else the result has gets no gradient. Torch's own backward of an index
    adds row by row, and on a GPU in no certain order."""

    @staticmethod
    def forward(
        ctx, tensor: Tensor, places: Tensor, back: Tensor, rows: Tensor, more: Tensor, counts: tuple
    ) -> Tensor:
        ctx.save_for_backward(back, rows, more)
        ctx.counts = counts
        return tensor.index_select(0, places)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        back, rows, more = ctx.saved_tensors
        out = grad.index_select(0, back)
        if ctx.counts:
            # a sum that is rounded once, not after every sequence
            total = out.index_select(0, rows).to(torch.promote_types(out.dtype, torch.float32))
            for places in more.split(ctx.counts):
                total[: len(places)] += grad.index_select(0, places)
            out.index_copy_(0, rows, total.to(out.dtype))
        return out, None, None, None, None, None


class _TakeBack(torch.autograd.Function):
    """The other way: each row once."""

    @staticmethod
    def forward(ctx, tensor: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.rows = len(tensor)
        return tensor.index_select(0, back)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (back,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, back, grad), None


class WholeRows:
    """The sequences of a pack as attention needs them, whole, one behind the other: from the tokens
    that are computed, of which those of a shared prompt are in several (``SharedPrompts``), and
    from its output those tokens'."""

    def __init__(self, shared: SharedPrompts) -> None:
        self.places, self.back = shared.computed_P, shared.kept_L
        self.rows, self.more, self.counts = shared.prompts_X, shared.copies, shared.copy_counts

    def gather(self, tensor_LND: Tensor) -> Tensor:
        return _Gather.apply(tensor_LND, self.places, self.back, self.rows, self.more, self.counts)

    def take(self, output: Tensor) -> Tensor:
        return _TakeBack.apply(output, self.back)


class PaddedRows(WholeRows):
    """The same as rectangles of about as long sequences. A shorter one is padded at its end, which
    no token of it sees under a causal mask."""

    def __init__(
        self, slots: Sequence[int], device: torch.device, shared: SharedPrompts | None = None
    ) -> None:
        order = sorted(range(len(slots)), key=lambda i: -slots[i])
        self.shapes: list[tuple[int, int]] = []  # (sequences, tokens) of each rectangle
        places, back = [], torch.empty(sum(slots), dtype=torch.long)
        starts, taken = list(itertools.accumulate(slots, initial=0)), 0
        while order:
            longest = slots[order[0]]
            rows = [i for i in order if slots[i] * 4 >= longest * 3]
            order = order[len(rows) :]
            self.shapes.append((len(rows), longest))
            for i in rows:
                own = torch.arange(starts[i], starts[i + 1])
                places += [own, own[-1:].expand(longest - slots[i])]
                back[own] = torch.arange(taken, taken + slots[i])
                taken += longest
        self.places, self.back = torch.cat(places).to(device), back.to(device)
        self.rows = self.more = self.back[:0]
        self.counts = ()
        # all of one length, in their order: no copy
        self.as_they_are = shared is None and len(self.shapes) == 1 and taken == sum(slots)
        if shared is not None:
            whole = WholeRows(shared)
            self.rows, self.more, self.counts = whole.rows, self.back[whole.more], whole.counts
            self.places, self.back = whole.places[self.places], self.back[whole.back]

    def attention(
        self, query_LND: Tensor, key_LKD: Tensor, value_LKD: Tensor, scale: float
    ) -> Tensor:
        if self.as_they_are:
            query, key, value = (
                x.unflatten(0, self.shapes[0]) for x in (query_LND, key_LKD, value_LKD)
            )
            return causal_attention(query, key, value, scale).flatten(0, 1)
        rows = [self.gather(x) for x in (query_LND, key_LKD, value_LKD)]
        outputs, start = [], 0
        for shape in self.shapes:
            end = start + math.prod(shape)
            query, key, value = (x[start:end].unflatten(0, shape) for x in rows)
            outputs.append(causal_attention(query, key, value, scale).flatten(0, 1))
            start = end
        return self.take(torch.cat(outputs))


def context_parallel_attention(
    query_LND: Tensor,
    key_LKD: Tensor,
    value_LKD: Tensor,
    slots: Sequence[int],
    scale: float,
    group: dist.ProcessGroup,
) -> Tensor:
    """(L, N, D) causal attention over whole sequences, of which each has a slot of ``slots`` in the
    whole pack."""
    size, rank = group.size(), group.rank()
    gathered = _GatherRanks.apply(torch.cat([key_LKD, value_LKD], -1), group)  # (ranks, L, K, 2 D)
    outputs, start = [], 0
    for slot in slots:
        chunk = slot // (2 * size)
        key, value = _in_order(gathered[:, start : start + 2 * chunk]).chunk(2, -1)
        for half, number in enumerate((rank, 2 * size - 1 - rank)):
            first, end = start + half * chunk, (number + 1) * chunk
            query = query_LND[first : first + chunk]
            outputs.append(
                causal_attention(query[None], key[None, :end], value[None, :end], scale)[0]
            )
        start += 2 * chunk
    return torch.cat(outputs)


def _in_order(pieces: Tensor) -> Tensor:
    """One sequence in its own order from what the ranks hold of it, (ranks, 2 chunks, ...)."""
    front, back = pieces.chunk(2, 1)
    return torch.cat([front.flatten(0, 1), back.flip(0).flatten(0, 1)])


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """Root-mean-square norm over the last dimension, in fp32, scaled in the input's dtype, or by
    1 + weight in fp32 (both as transformers does)."""
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (h * (1.0 + weight.to(h.dtype))).to(x.dtype) if zero_centered else weight * h.to(x.dtype)


def _norm_weight(size: int, config: TransformerConfig) -> torch.nn.Parameter:
    """Ones, with the mark by which Megatron sums the gradients of a sequence's pieces."""
    weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron's mark
    return weight


class RMSNorm(torch.nn.Module):
    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma
        self.weight = _norm_weight(hidden_size, config)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.zero_centered)


class NormColumnParallelLinear(ColumnParallelLinear):
    """RMS norm followed by a column-parallel linear; parameter names of
    TELayerNormColumnParallelLinear."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs
    ) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.eps, self.zero_centered = (
            config.layernorm_epsilon,
            config.layernorm_zero_centered_gamma,
        )
        self.layer_norm_weight = _norm_weight(input_size, config)

    def normed(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.layer_norm_weight, self.eps, self.zero_centered)

    def forward(self, x: Tensor, *args, **kwargs):
        return super().forward(self.normed(x), *args, **kwargs)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            {"weight": 0, "bias": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """Megatron's description of a pack, for attention on the host and on the device."""

    # length of each sequence's slot, on the host, because reading it from the device stalls
    slots: tuple[int, ...]
    # (sequences + 1,) int32 where the slots begin and end, on the device that computes
    boundaries: Tensor
    positions_L: Tensor  # of each token that comes, in its sequence
    # slots and boundaries are of whole sequences, what comes may be less
    shared: SharedPrompts | None = None
    routing: Routing | None = None  # of a mixture of experts
    _gaps: Gaps | None = None

    @cached_property
    def rows(self) -> PaddedRows:
        """Made by the first layer that asks, for all of them."""
        return PaddedRows(self.slots, self.boundaries.device, self.shared)

    @cached_property
    def host_boundaries(self) -> Tensor:
        """The boundaries on the host, int64."""
        return torch.tensor([*itertools.accumulate(self.slots, initial=0)])

    @cached_property
    def long_boundaries(self) -> Tensor:
        """The boundaries as int64, one tensor for all layers: kernels keep what they make of it."""
        return self.boundaries.long()

    @cached_property
    def chunks(self) -> Chunks:
        """Made by the first layer that asks."""
        return Chunks(self.slots, self.boundaries.device)

    def gaps(self, width: int) -> Gaps:
        """For convolutions of this width, which all layers have."""
        if self._gaps is None:
            self._gaps = Gaps(self.slots, width, self.boundaries.device)
        return self._gaps

    @property
    def whole(self) -> WholeRows | None:
        """None where the tokens that come are those of whole sequences."""
        return None if self.shared is None else WholeRows(self.shared)


class CausalAttention(torch.nn.Module):
    """Causal scaled-dot-product attention inside every sequence of a pack, those of about one
    length together (the train step of a toy takes 4 % less than with one by one); on a GPU in half
    precision torch's variable-length flash attention."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        pg_collection: ProcessGroupCollection,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_,
    ) -> None:
        super().__init__()
        if (attention_dropout or config.attention_dropout) != 0.0:
            raise ValueError(
                "attention dropout is not built: got "
                f"{attention_dropout or config.attention_dropout}"
            )
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.cp_group = pg_collection.cp

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return {}

    def forward(
        self,
        query_LND: Tensor,
        key_LKD: Tensor,
        value_LKD: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSequences | None = None,
        **_,
    ) -> Tensor:
        if attention_mask is not None or packed_seq_params is None:
            raise ValueError("CausalAttention takes packed sequences and no mask")
        slots = packed_seq_params.slots
        if self.cp_group.size() > 1:
            return context_parallel_attention(
                query_LND, key_LKD, value_LKD, slots, self.scale, self.cp_group
            )
        if query_LND.is_cuda and query_LND.dtype in (torch.bfloat16, torch.float16):
            return self._varlen(query_LND, key_LKD, value_LKD, packed_seq_params)
        return packed_seq_params.rows.attention(query_LND, key_LKD, value_LKD, self.scale)

    def _varlen(
        self, query_LND: Tensor, key_LKD: Tensor, value_LKD: Tensor, pack: PackedSequences
    ) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        longest, whole = pack.max_seqlen_q, pack.whole
        if whole is not None:
            query_LND, key_LKD, value_LKD = (
                whole.gather(x) for x in (query_LND, key_LKD, value_LKD)
            )
        out = varlen_attn(
            query_LND,
            key_LKD,
            value_LKD,
            pack.boundaries,
            pack.boundaries,
            longest,
            longest,
            scale=self.scale,
            window_size=(-1, 0),
            enable_gqa=query_LND.shape[1] != key_LKD.shape[1],
        )
        assert isinstance(out, Tensor), "a tuple only if auxiliary outputs are asked for"
        return out if whole is None else whole.take(out)


def layer_spec(attention: Attention, mlp: type[MLP]) -> ModuleSpec:
    return ModuleSpec(
        module=RoutedLayer if mlp.is_mixture else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=attention.spec(
                RMSNorm, NormColumnParallelLinear, RowParallelLinear, CausalAttention
            ),
            self_attn_bda=get_bias_dropout_add,
            mlp_bda=get_bias_dropout_add,
            **mlp.submodules(
                RMSNorm, NormColumnParallelLinear, ColumnParallelLinear, RowParallelLinear
            ),
        ),
    )


def block_spec(
    config: TransformerConfig,
    shape: ModelShape,
    vp_stage: int | None = None,
    converters: Sequence[LayerConverter] = (),
    layer: Callable[[Attention, type[MLP]], ModuleSpec] = layer_spec,
    norm: type = RMSNorm,
) -> TransformerBlockSubmodules:
    first = get_transformer_layer_offset(config, vp_stage)
    end = first + get_num_layers_to_build(config, vp_stage)
    layers = [layer(attention, shape.family.mlp) for attention in shape.attentions[first:end]]
    for number, spec in enumerate(layers, first):
        for converter in converters:
            converter.convert(spec, number, config.num_layers)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)
