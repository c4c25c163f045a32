"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464) and its causal convolution, over packs of
sequences, in plain torch with autograd, for the policy and for engines on CPU.

For every head a state S runs over a sequence, in fp32:

    S <- exp(g_t) S;   S <- S + k_t (beta_t (v_t - S^T k_t))^T;   o_t = S^T q_t

What happens within chunks of tokens is matrix products over all chunks of a pack at once; only
states go from chunk to chunk, for all sequences at a time. The grid of chunks begins anew with every
sequence, so a pack gives each sequence the bits that it has alone.

Shape suffixes: L = tokens of the pack, B = sequences, J = chunks of all sequences, C = tokens of a
chunk, H = value heads, G = key heads, K, V = entries of a head's key and value, D = channels of the
convolution, W = its width.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


class Inputs(NamedTuple):
    """What the rule reads of each token: queries and keys, which it brings to length 1 and of which
    each head serves H / G value heads; values; the log of the decay; how much is written."""

    q_LGK: Tensor
    k_LGK: Tensor
    v_LHV: Tensor
    g_LH: Tensor
    beta_LH: Tensor

    @classmethod
    def of_layer(
        cls,
        heads: Sequence[Tensor],
        beta_LH: Tensor,
        decay_LH: Tensor,
        decay_log_H: Tensor,
        decay_bias_H: Tensor,
    ) -> Inputs:
        """From what a layer projects; ``heads``: queries, keys, and values."""
        q_LGK, k_LGK, v_LHV = heads
        wide = _wide(v_LHV.dtype)
        rate_LH = F.softplus(decay_LH.to(wide) + decay_bias_H.to(wide))
        decays_LH = -decay_log_H.to(wide).exp() * rate_LH
        return cls(q_LGK, k_LGK, v_LHV, decays_LH, beta_LH.to(wide).sigmoid())


class Chunks:
    """Where the tokens of a pack are in its chunks: the first chunks of all sequences, the longest
    sequence first, then all second chunks, and so on. Of the lengths alone."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        counts = [-(-length // CHUNK) for length in lengths]
        self.order_B = torch.tensor(sorted(range(len(lengths)), key=lambda row: -counts[row]))
        places_B = torch.argsort(self.order_B)
        # how many sequences have a chunk of this number, and the chunks before them
        self.alive = [sum(count > number for count in counts) for number in range(max(counts))]
        starts = torch.tensor([*itertools.accumulate(self.alive, initial=0)])
        places = []
        for row, length in enumerate(lengths):
            token = torch.arange(length)
            places.append((starts[token // CHUNK] + places_B[row]) * CHUNK + token % CHUNK)
        self.total = sum(counts)
        self.places_L = torch.cat(places).to(device)

    def cut(self, x_L: Tensor) -> Tensor:
        """(J, C, ...). Zeros behind the end of a sequence leave its state as it is."""
        whole = x_L.new_zeros(self.total * CHUNK, *x_L.shape[1:])
        return whole.index_copy(0, self.places_L, x_L).unflatten(0, (self.total, CHUNK))

    def joined(self, x_JC: Tensor) -> Tensor:
        """(L, ...)."""
        return x_JC.flatten(0, 1).index_select(0, self.places_L)


def gated_delta_rule(inputs: Inputs, chunks: Chunks) -> Tensor:
    """(L, H, V) outputs in the type of the values; states are fp32, or fp64 if the values are."""
    return _Rule.apply(chunks, _wide(inputs.v_LHV.dtype), *inputs)


def continued(inputs: Inputs, chunks: Chunks, state_BHKV: Tensor) -> tuple[Tensor, Tensor]:
    """(L, H, V) outputs, and the states after the sequences that begin with these states."""
    order_B = chunks.order_B
    outputs_LHV, ordered_BHKV = _outputs(inputs, chunks, state_BHKV.dtype, state_BHKV[order_B])
    return outputs_LHV, torch.empty_like(state_BHKV).index_copy(0, order_B, ordered_BHKV)


def next_tokens(inputs: Inputs, state_BHKV: Tensor) -> tuple[Tensor, Tensor]:
    """`continued` of one token for each sequence, by the definition."""
    q, k, v, g, beta = (x.to(state_BHKV.dtype) for x in inputs)
    q, k = _heads(q, k, v.shape[1])
    state = state_BHKV * g.exp()[..., None, None]
    read_BHV = (k[..., None, :] @ state)[..., 0, :]
    written_BHV = beta[..., None] * (v - read_BHV)
    state = state + k[..., None] * written_BHV[..., None, :]
    return (q[..., None, :] @ state)[..., 0, :].to(inputs.v_LHV.dtype), state


class _Rule(torch.autograd.Function):
    """Keeps its inputs only; the backward pass computes the chunks again. States and triangles are
    2 K + 6 C numbers for each token and head, eight times the inputs in bf16."""

    @staticmethod
    def forward(ctx: Any, chunks: Chunks, wide: torch.dtype, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.chunks, ctx.wide = chunks, wide
        return _outputs(Inputs(*inputs), chunks, wide)[0]

    @staticmethod
    def backward(ctx: Any, grad_LHV: Tensor) -> tuple[Tensor | None, ...]:
        inputs = Inputs(*(tensor.detach().requires_grad_() for tensor in ctx.saved_tensors))
        with torch.enable_grad():
            output_LHV, _ = _outputs(inputs, ctx.chunks, ctx.wide)
        return None, None, *torch.autograd.grad(output_LHV, inputs, grad_LHV)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def unit(x: Tensor) -> Tensor:
    """Vectors along the last dimension at length 1."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def _heads(q: Tensor, k: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Queries and keys (., G, ..., K) of each of the value heads, at their length."""
    q, k = unit(q) * k.shape[-1] ** -0.5, unit(k)
    copies = heads // k.shape[1]
    return q.repeat_interleave(copies, 1), k.repeat_interleave(copies, 1)


def _outputs(
    inputs: Inputs, chunks: Chunks, wide: torch.dtype, before_BHKV: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs and states after each sequence; states are in the order of ``chunks.order_B``."""
    parts = inputs.q_LGK, inputs.k_LGK, inputs.v_LHV, inputs.beta_LH
    q, k, v, beta = (chunks.cut(x.to(wide)).transpose(1, 2) for x in parts)  # (J, H, C, ...)
    q, k = _heads(q, k, v.shape[1])
    beta = beta[..., None]
    # Log of the decay since the chunk began. Its differences between near tokens are small: in fp32
    # they would have the rounding of the sums.
    sums_JHC = chunks.cut(inputs.g_LH.double()).transpose(1, 2).cumsum(-1)
    since_JHC = sums_JHC.to(wide)
    causal_CC = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (sums_JHC[..., :, None] - sums_JHC[..., None, :]).to(wide)
    decay = decay.masked_fill(~causal_CC, float("-inf")).exp()

    # What a chunk writes: (1 + strict lower part of beta k k^T decay) u = beta (v - decayed k S).
    lower = ((beta * k) @ k.mT * decay).tril(-1)
    right = torch.cat([beta * v, beta * k * since_JHC.exp()[..., None]], -1)
    eye = torch.eye(CHUNK, dtype=wide, device=q.device)
    solved = torch.linalg.solve_triangular(lower + eye, right, upper=False, unitriangular=True)
    own, of_state = solved.split([v.shape[-1], k.shape[-1]], -1)

    inner = (q @ k.mT) * decay
    q = q * since_JHC.exp()[..., None]
    k = k * (sums_JHC[..., -1:] - sums_JHC).to(wide).exp()[..., None]
    last = since_JHC[..., -1, None, None].exp()
    if before_BHKV is None:
        sizes = chunks.alive[0], own.shape[1], of_state.shape[-1], own.shape[-1]
        before_BHKV = own.new_zeros(sizes)
    outputs, after_BHKV = _along_sequences(chunks, before_BHKV, own, of_state, q, inner, k, last)
    return chunks.joined(outputs.transpose(1, 2)).to(inputs.v_LHV.dtype), after_BHKV


def _along_sequences(chunks: Chunks, state: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
    """(J, H, C, V), and the last states: from chunk to chunk."""
    outputs, ended = [], []
    for own_, of_state_, q, inner, k, last in zip(
        *(part.split(chunks.alive) for part in parts), strict=True
    ):
        ended.append(state[len(own_) :])  # the shortest sequences
        state = state[: len(own_)]
        written = own_ - of_state_ @ state
        outputs.append(q @ state + inner @ written)
        state = state * last + k.mT @ written
    return torch.cat(outputs), torch.cat([state, *reversed(ended)])


class Gaps:
    """A pack with room for zeros before each sequence, so that a convolution does not see the
    sequence before."""

    def __init__(
        self, lengths: Sequence[int], width: int, device: torch.device | str = "cpu"
    ) -> None:
        starts = itertools.accumulate(lengths, initial=0)
        places = [
            torch.arange(start, start + length) + (row + 1) * (width - 1)
            for row, (start, length) in enumerate(zip(starts, lengths, strict=False))
        ]
        self.size = sum(lengths) + len(lengths) * (width - 1)
        self.places_L = torch.cat(places).to(device)


def causal_convolution(x_LD: Tensor, weight_D1W: Tensor, gaps: Gaps) -> Tensor:
    """(L, D) depthwise convolution over each token and the W - 1 tokens before it in its
    sequence."""
    padded = x_LD.new_zeros(gaps.size, x_LD.shape[1]).index_copy(0, gaps.places_L, x_LD)
    found_DL = F.conv1d(padded.t(), weight_D1W, groups=len(weight_D1W))
    # of the token at row t of the padded pack at row t - (W - 1)
    return found_DL.t().index_select(0, gaps.places_L - (weight_D1W.shape[-1] - 1))
