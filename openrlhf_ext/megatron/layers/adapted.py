"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) beside the frozen linear layers of a
decoder, in every layout.

A linear that has some has two more parameters, fp32, whatever its weight is:

- column-parallel (query-key-value, gate-up): ``lora_a`` (m r, in), the matrices of its m targeted
  Hugging Face modules stacked, a copy on every tensor-parallel rank; ``lora_b`` (out / tp, r), rows
  as the rows of ``weight``
- row-parallel (attention's output, down): ``lora_a`` (r, in / tp), cut like ``weight``; ``lora_b``
  (out, r), a copy

Only what is r wide travels between ranks. Names, cuts and places are rules of the weight map
(``adapter_rules``), so that adapters are loaded, exported and sent as weights are. Shape suffixes:
L = tokens of the pack on this rank (under sequence parallelism a piece of them), K = input
features, N = output features, M = m r.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from openrlhf_ext.head.kernels import multiply
from openrlhf_ext.megatron.model.adapter import Adapter
from openrlhf_ext.megatron.model.build import HiddenStateGPTModel
from openrlhf_ext.megatron.model.hf_weights import fill_rules, load_hf, model_rules, own_shard
from openrlhf_ext.megatron.model.shape import ModelShape
from openrlhf_ext.megatron.model.spec import NormColumnParallelLinear
from openrlhf_ext.megatron.model.weight_map import (
    Rule,
    Run,
    adapter_shape,
    hf_shapes,
    shard_runs,
    targeted,
)

_STREAMS = "lora dropout", "lora dropout of a shard"
"""Random streams of masks: where tensor-parallel ranks hold the same input they draw the same
masks, from a stream that they have alike; where each holds a piece, and for other data and stages,
streams differ. Megatron's recomputation restores them, and checkpoints keep them."""


class _Down(torch.autograd.Function):
    """``x A^t`` in x's dtype: tensor cores multiply bf16, and an engine's kernels round A to it
    too. The gradient of A is summed in A's fp32. Keeps x as it is for the backward pass, not an
    fp32 copy."""

    @staticmethod
    def forward(ctx: Any, x_LK: Tensor, a_MK: Tensor) -> Tensor:
        ctx.save_for_backward(x_LK, a_MK)
        return F.linear(*_factors(x_LK, a_MK.to(x_LK.dtype))).to(x_LK.dtype)

    @staticmethod
    def backward(ctx: Any, grad_LM: Tensor) -> tuple[Tensor, Tensor]:
        x_LK, a_MK = ctx.saved_tensors
        grad, a = _factors(grad_LM, a_MK.to(grad_LM.dtype))
        return (grad @ a).to(x_LK.dtype), _fp32_product(grad_LM, x_LK)


class _Up(torch.autograd.Function):
    """``out + down B^t`` in one product, in out's dtype, to which B is rounded; the gradient of B
    is summed in fp32."""

    @staticmethod
    def forward(ctx: Any, out_LN: Tensor, down_LM: Tensor, b_NM: Tensor) -> Tensor:
        b_NM = b_NM.to(out_LN.dtype)
        ctx.save_for_backward(down_LM, b_NM)
        out, down, b = _factors(out_LN.flatten(0, -2), down_LM.flatten(0, -2), b_NM)
        return torch.addmm(out, down, b.t()).to(out_LN.dtype).view(out_LN.shape)

    @staticmethod
    def backward(ctx: Any, grad_LN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        down_LM, b_NM = ctx.saved_tensors
        grad, b = _factors(grad_LN, b_NM)
        return grad_LN, (grad @ b).to(down_LM.dtype), _fp32_product(grad_LN, down_LM)


def _factors(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Of a product whose sums are fp32. A CPU without instructions for bf16 multiplies fp32 ten
    times as fast: what is widened there (exact) gives the same numbers."""
    return tuple(tensor.float() if tensor.device.type == "cpu" else tensor for tensor in tensors)


def _fp32_product(left_LN: Tensor, right_LM: Tensor) -> Tensor:
    """(N, M) sums over L that are not rounded to the factors' dtype."""
    left_NL, right = _factors(left_LN.flatten(0, -2).t(), right_LM.flatten(0, -2))
    return multiply(
        right.new_empty(left_NL.shape[0], right.shape[1], dtype=torch.float32), left_NL, right
    )


class Adapted:
    """A linear that may have an adapter. ``is_on``: whether forward passes add it."""

    weight: Tensor
    lora_a: torch.nn.Parameter
    lora_b: torch.nn.Parameter
    config: Any
    training: bool
    adapter: Adapter | None = None
    is_on = True
    is_row = False

    def adapt(self, adapter: Adapter, modules: int, owner_N: Tensor, gated: bool) -> None:
        """Adds the parameters, zeros; the weight is frozen. ``modules``: how many of the linear's
        have an adapter,
        ``owner_N``: which of them each row of the weight belongs to, -1: to none; ``gated``: gate
        and up stacked."""
        out, width = self.weight.shape
        self.adapter, self.gated = adapter, gated
        place: dict[str, Any] = {"device": self.weight.device, "dtype": torch.float32}
        self.lora_a = torch.nn.Parameter(torch.zeros(adapter.rank * modules, width, **place))
        self.lora_b = torch.nn.Parameter(torch.zeros(out, adapter.rank, **place))
        # which rows of B belong to which part of A, for one product of all modules; no buffer, it
        # would become bf16
        self.owner_NM = (
            F.one_hot(owner_N + 1, modules + 1)[:, 1:]
            .to(**place)
            .repeat_interleave(adapter.rank, 1)
        )
        whole, cut = (self.lora_b, self.lora_a) if self.is_row else (self.lora_a, self.lora_b)
        # Megatron's marks: what to add up over the pieces of a sequence, and of what a rank has but
        # a part (norms)
        whole.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]
        cut.tensor_model_parallel, cut.partition_stride = True, 1  # type: ignore[attr-defined]
        cut.partition_dim = 1 if self.is_row else 0  # type: ignore[attr-defined]

    def down(self, x_LK: Tensor) -> Tensor:
        """(L, M) of all modules. With dropout each has a mask of its own, as in peft, drawn from
        ``_STREAMS``."""
        assert self.adapter is not None
        if not (self.adapter.dropout and self.training):
            return _Down.apply(x_LK, self.lora_a)
        own = self.is_row or self.config.sequence_parallel
        with get_cuda_rng_tracker().fork(_STREAMS[own]):
            dropped = [
                F.dropout(x_LK, self.adapter.dropout)
                for _ in range(len(self.lora_a) // self.adapter.rank)
            ]
        parts = self.lora_a.split(self.adapter.rank)
        return torch.cat([_Down.apply(x, a) for x, a in zip(dropped, parts, strict=True)], -1)

    def up(self, out_LN: Tensor, down_LM: Tensor) -> Tensor:
        """``out`` and what the adapter adds, by scale B: what an engine gets (``scaled_values``),
        rounded as there."""
        assert self.adapter is not None
        return _Up.apply(out_LN, down_LM, self.wide_b() * self.adapter.scale)

    def wide_b(self) -> Tensor:
        """(N, M) B, zero outside of a row's own module."""
        modules = self.owner_NM.shape[1] // self.lora_b.shape[1]
        return self.lora_b.repeat(1, modules) * self.owner_NM

    def merged(self) -> Tensor:
        """This rank's shard of W + scale B A, in the weight's dtype; no communication in any
        layout."""
        assert self.adapter is not None
        return (self.weight.float() + self.adapter.scale * (self.wide_b() @ self.lora_a)).to(
            self.weight.dtype
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """Megatron's own takes what it does not know for a copy on every rank: a resumed adapter
        would be wrong."""
        if self.adapter is None:
            return super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        axes = {"weight": 1, "lora_a": 1} if self.is_row else {"weight": 0, "bias": 0, "lora_b": 0}
        state = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),  # type: ignore[attr-defined]
            prefix,
            axes,
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        if self.gated:  # MLP does this for weight and bias only (transformer/mlp.py)
            state[f"{prefix}lora_b"] = apply_swiglu_sharded_factory(
                state[f"{prefix}lora_b"], sharded_offsets
            )
        return state


class AdaptedColumn(Adapted):
    """Before our column-parallel linears behind a norm."""

    normed: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        normed = self.normed(x)
        out, bias = ColumnParallelLinear.forward(self, normed, *args, **kwargs)  # type: ignore[arg-type]
        if self.adapter is None or not self.is_on:
            return out, bias
        return self.added(out, normed), bias

    def added(self, out: Tensor, normed: Tensor) -> Tensor:
        """A before the gather, so that what travels is M wide; backward a reduce-scatter, or an
        all-reduce of that."""
        down = self.down(normed)
        if self.config.sequence_parallel:
            down = gather_from_sequence_parallel_region(down)
        else:
            down = copy_to_tensor_model_parallel_region(down)
        return self.up(out, down)


class _AdaptedTE(Adapted):
    """What TransformerEngine's modules have to be told."""

    activation_dtype: torch.dtype | None

    def set_activation_dtype(self, inp: Tensor) -> None:
        """Its own wants all parameters in the input's dtype, an adapter's fp32 too
        (TransformerEngine 2.11 module/base.py:938; seen on an H200)."""
        if torch.is_autocast_enabled() or inp.dtype != self.weight.dtype:
            raise TypeError(
                f"a layer of {self.weight.dtype} got {inp.dtype}, or autocast is on: neither is "
                "built"
            )
        self.activation_dtype = inp.dtype


class AdaptedTEColumn(_AdaptedTE, AdaptedColumn):
    """Before TransformerEngine's, which norms and multiplies in one and gives what it has normed on
    demand."""

    te_return_bias: bool

    def adapt(self, adapter: Adapter, modules: int, owner_N: Tensor, gated: bool) -> None:
        assert not self.te_return_bias, "the bias is added in the product"
        super().adapt(adapter, modules, owner_N, gated)
        # of this rank's own tokens under sequence parallelism (TransformerEngine 2.11
        # module/layernorm_linear.py:533)
        self.return_layernorm_output, self.return_layernorm_output_gathered = True, False

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        found, bias = super(AdaptedColumn, self).forward(x, *args, **kwargs)  # type: ignore[misc]
        if self.adapter is None:
            return found, bias
        out, normed = found
        return (self.added(out, normed) if self.is_on else out), bias


class AdaptedRow(Adapted):
    """Before row-parallel linears."""

    is_row = True

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        out, bias = super().forward(x)  # type: ignore[misc]
        if self.adapter is None or not self.is_on:
            return out, bias
        down = self.down(x)  # partial sums
        if self.config.sequence_parallel:
            down = reduce_scatter_to_sequence_parallel_region(down)
        else:
            down = reduce_from_tensor_model_parallel_region(down)
        return self.up(out, down), bias


class AdaptedTERow(_AdaptedTE, AdaptedRow):
    """Before TransformerEngine's row-parallel linears."""


_OF_TE = {"TELayerNormColumnParallelLinear": AdaptedTEColumn, "TERowParallelLinear": AdaptedTERow}


@cache
def _class(base: type) -> type:
    """A linear of this class, ours or Megatron's, that may have an adapter. Not of one derived from
    these: its own forward pass would be passed over."""
    ours: dict[type, type] = {
        NormColumnParallelLinear: AdaptedColumn,
        RowParallelLinear: AdaptedRow,
    }
    kind = ours.get(base) or _OF_TE.get(base.__name__)
    if kind is None:
        raise ValueError(f"adapters of a {base.__name__} are not built")
    return type(f"Adapted{base.__name__}", (kind, base), {})


def adapted(linear: ModuleSpec | type) -> ModuleSpec | type:
    """A linear of a layer's spec as one that may have an adapter."""
    if isinstance(linear, ModuleSpec):
        return replace(linear, module=_class(linear.module))
    return _class(linear)


# ---- a whole model


def _drawn(rule: Rule, shape: ModelShape, seed: int, tensor: int, run: Run) -> Tensor:
    """Entries of a new adapter's matrix, the same in every layout: of A uniform within 1 / sqrt(its
    inputs), as peft's (peft 0.21.2 tuners/lora/layer.py:332), of B zero."""
    (rows, columns), name = hf_shapes(rule, shape)[tensor], rule.hf_names[tensor]
    whole = torch.zeros(rows, columns)
    if name.endswith("lora_A.weight"):
        number = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(number, "little") >> 1)
        whole.uniform_(-(columns**-0.5), columns**-0.5, generator=generator)
    return whole.narrow(rule.axis, run.start, len(run))


def add_adapters(
    chunks: Sequence[HiddenStateGPTModel],
    base: ModelShape,
    adapter: Adapter,
    seed: int,
    path: str | None,
) -> None:
    """Freezes chunks whose weights are loaded and gives their targeted linears adapters: those of
    the peft checkpoint ``path``, or new ones. Raises WeightMapError, InputError: ``path`` has
    others."""
    shape = adapter_shape(base, adapter)
    if adapter.dropout:
        _seed_streams(seed)
    for chunk in chunks:
        add_zeros(chunk, base, adapter)
    if path is not None:
        load_hf(chunks, shape, path)
    else:
        fill_rules(chunks, shape, lambda rule: partial(_drawn, rule, shape, seed))


def _seed_streams(seed: int) -> None:
    place = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    tracker = get_cuda_rng_tracker()
    for name, tensor in zip(
        _STREAMS, (-1, parallel_state.get_tensor_model_parallel_rank()), strict=True
    ):
        number = hashlib.blake2b(f"{seed} {name} {place} {tensor}".encode(), digest_size=4).digest()
        tracker.add(name, int.from_bytes(number, "little"))


def add_zeros(chunk: HiddenStateGPTModel, shape: ModelShape, adapter: Adapter) -> None:
    """Freezes a chunk and gives its targeted linears adapters of zeros."""
    chunk.requires_grad_(False)
    for rule in model_rules(chunk, shape):
        chosen = targeted(rule, adapter.targets)
        if not chosen:
            continue
        linear = chunk.get_submodule(rule.parameter.removesuffix(".weight"))
        assert isinstance(linear, Adapted), (
            f"{rule.parameter}: a {type(linear).__name__} has no adapters"
        )
        owner_N = torch.zeros(len(linear.weight), dtype=torch.long)
        if not linear.is_row:
            runs = shard_runs(rule, shape, own_shard(rule))
            owners = torch.tensor(
                [chosen.index(run.tensor) if run.tensor in chosen else -1 for run in runs]
            )
            owner_N = owners.repeat_interleave(torch.tensor([len(run) for run in runs]))
        linear.adapt(adapter, len(chosen), owner_N, gated=rule.split == "parts")
    if chunk.pre_process:
        chunk.embedding.register_forward_hook(_wants_gradients)


def _wants_gradients(_module: torch.nn.Module, _args: tuple, output: Tensor) -> Tensor:
    """Megatron's recomputation of whole layers is torch's reentrant one: where no input wants a
    gradient, parameters get none, without an error."""
    return output.requires_grad_() if torch.is_grad_enabled() else output


def adapted_linears(chunks: Iterable[GPTModel]) -> Iterator[Adapted]:
    """Those that have an adapter."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Adapted) and module.adapter is not None:
                yield module


def adapter_parameters(chunks: Iterable[GPTModel]) -> Iterator[torch.nn.Parameter]:
    for linear in adapted_linears(chunks):
        yield from (linear.lora_a, linear.lora_b)


def merged_values(chunks: Sequence[GPTModel]) -> Callable[[Tensor], Tensor]:
    """What to export of a parameter so that the base has the adapters in it."""
    linears = {id(linear.weight): linear for linear in adapted_linears(chunks)}

    def value(parameter: Tensor) -> Tensor:
        linear = linears.get(id(parameter))
        return parameter.detach() if linear is None else linear.merged().detach()

    return value


def scaled_values(chunks: Sequence[GPTModel], dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """What to export of an adapter's parameter for an engine of this dtype whose own scale is 1."""
    scale = {
        id(linear.lora_b): linear.adapter.scale
        for linear in adapted_linears(chunks)
        if linear.adapter
    }
    return lambda parameter: (parameter.detach() * scale.get(id(parameter), 1.0)).to(dtype)


@contextmanager
def without_adapters(chunks: Sequence[GPTModel]) -> Iterator[None]:
    """Forward passes in the body are the base's."""
    linears = list(adapted_linears(chunks))
    for linear in linears:
        linear.is_on = False
    try:
        yield
    finally:
        for linear in linears:
            linear.is_on = True


@contextmanager
def rounded_adapters(chunks: Sequence[GPTModel], dtype: torch.dtype) -> Iterator[None]:
    """Forward passes in the body are those of an engine of this dtype, which gets A and alpha / r B
    in it."""
    kept = [(parameter, parameter.data) for parameter in adapter_parameters(chunks)]
    for linear in adapted_linears(chunks):
        assert linear.adapter is not None
        linear.lora_a.data = linear.lora_a.data.to(dtype).float()
        scale = linear.adapter.scale
        linear.lora_b.data = (linear.lora_b.data * scale).to(dtype).float() / scale
    try:
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data
