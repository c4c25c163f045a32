"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464) and its causal convolution, over packs of
sequences, in plain torch with gradients of their own, for the policy and for engines on CPU.

For every head a state S runs over a sequence, in fp32:

    S <- exp(g_t) S;   S <- S + k_t (beta_t (v_t - S^T k_t))^T;   o_t = S^T q_t

What happens within chunks of tokens is matrix products over all chunks of a pack at once; only
states go from chunk to chunk, for all sequences at a time. The grid of chunks begins anew with every
sequence, so a pack gives each sequence the bits that it has alone.

Shape suffixes: L = tokens of the pack, B = sequences, C = tokens of a chunk, H = value heads, G = key
heads, N = heads of all chunks, M = heads of all sequences, K, V = entries of a head's key and value,
2 = a query and its key, X = 2 C of them, D = channels of the convolution, W = its width, S = tokens
of the pack with gaps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Short sequences fill it better, long ones take fewer steps of larger products. 16 instead of 64 makes
# 35 tokens a third cheaper, and 2,000 tokens of heads of 128 entries two fifths dearer.
CHUNK = 16


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
        lengths_B = torch.tensor(lengths)
        counts_B = -(-lengths_B // CHUNK)
        self.order_B = torch.argsort(-counts_B, stable=True)
        places_B = torch.argsort(self.order_B)
        # how many sequences have a chunk of this number, and the chunks before them
        numbers = torch.arange(int(counts_B.max()))
        self.alive = (counts_B[:, None] > numbers).sum(0).tolist()
        before = torch.tensor([*itertools.accumulate(self.alive, initial=0)])
        # of each token, within its sequence
        starts_B = lengths_B.cumsum(0) - lengths_B
        token_L = torch.arange(sum(lengths)) - starts_B.repeat_interleave(lengths_B)
        row_L = places_B.repeat_interleave(lengths_B)
        places_L = (before[token_L // CHUNK] + row_L) * CHUNK + token_L % CHUNK
        self.total = sum(self.alive)
        self.places_L = places_L.to(device)

    def cut(self, x_LH: Tensor) -> Tensor:
        """(N, C, ...). Zeros behind the end of a sequence leave its state as it is."""
        whole = x_LH.new_zeros(self.total * CHUNK, *x_LH.shape[1:])
        whole.index_copy_(0, self.places_L, x_LH)
        return whole.unflatten(0, (self.total, CHUNK)).transpose(1, 2).flatten(0, 1)

    def joined(self, x_NC: Tensor) -> Tensor:
        """(L, H, ...)."""
        by_tokens = x_NC.unflatten(0, (self.total, -1)).transpose(1, 2)
        return by_tokens.flatten(0, 1).index_select(0, self.places_L)


def gated_delta_rule(inputs: Inputs, chunks: Chunks) -> Tensor:
    """(L, H, V) outputs in the type of the values; states are fp32, or fp64 if the values are."""
    return _Rule.apply(chunks, *inputs)


def continued(inputs: Inputs, chunks: Chunks, state_BHKV: Tensor) -> tuple[Tensor, Tensor]:
    """(L, H, V) outputs, and the states after the sequences that begin with these states."""
    parts = _Parts.of(inputs, chunks, state_BHKV.dtype)
    steps = [*_along_sequences(parts, state_BHKV[chunks.order_B].flatten(0, 1))]
    # a sequence ends with the last chunk that it has
    going = [len(step.out_NCV) for step in steps[1:]] + [0]
    ended = [step.after_NKV[count:] for step, count in zip(steps, going, strict=True)]
    ended_BHKV = torch.cat(ended[::-1]).view_as(state_BHKV)
    after_BHKV = torch.empty_like(state_BHKV).index_copy_(0, chunks.order_B, ended_BHKV)
    return chunks.joined(_outputs(steps)).to(inputs.v_LHV.dtype), after_BHKV


def next_tokens(inputs: Inputs, state_BHKV: Tensor) -> Tensor:
    """(B, H, V) outputs of one token for each sequence, by the definition. The states become those
    after it, in place."""
    qk_BH2K = _queries_and_keys(inputs, state_BHKV.dtype)
    v_BHV, g_BH, beta_BH = (x.to(state_BHKV.dtype) for x in inputs[2:])
    kept_BH1 = g_BH.exp()[..., None]
    # S is read once: S^T q = decay S_before^T q + (k q) written
    read_q_BHV, read_k_BHV = (qk_BH2K @ state_BHKV).unbind(-2)
    written_BHV = beta_BH[..., None] * (v_BHV - kept_BH1 * read_k_BHV)
    products_BH1 = qk_BH2K.prod(-2).sum(-1, keepdim=True)
    k_BHK1 = qk_BH2K[..., 1, :, None]
    state_BHKV.mul_(kept_BH1[..., None]).addcmul_(k_BHK1, written_BHV[..., None, :])
    return (kept_BH1 * read_q_BHV + products_BH1 * written_BHV).to(inputs.v_LHV.dtype)


class _Rule(torch.autograd.Function):
    """Keeps its inputs only; the backward pass computes the chunks again. States and triangles are
    K V / C + 6 C numbers for each token and head, many times the inputs."""

    @staticmethod
    def forward(ctx: Any, chunks: Chunks, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.chunks = chunks
        inputs = Inputs(*tensors)
        parts = _Parts.of(inputs, chunks, _wide(inputs.v_LHV.dtype))
        outputs_NCV = _outputs(_along_sequences(parts, parts.first_states()))
        return chunks.joined(outputs_NCV).to(inputs.v_LHV.dtype)

    @staticmethod
    def backward(ctx: Any, grad_LHV: Tensor) -> tuple[Tensor | None, ...]:
        inputs, chunks = Inputs(*ctx.saved_tensors), ctx.chunks
        parts = _Parts.of(inputs, chunks, _wide(inputs.v_LHV.dtype))
        back = _back_along_sequences(parts, chunks.cut(grad_LHV.to(parts.v_NCV.dtype)))
        # of outputs and last states no gradient needs the values
        steps = _along_sequences(parts, parts.first_states())
        kept = ((step.free_NCV, step.written_NCV, step.before_NKV) for step in steps)
        free, written, before = map(torch.cat, zip(*kept, strict=True))
        qk, *others = map(chunks.joined, _gradients(parts, back, free, written, before))
        found = *_gradients_of_raw(inputs, qk), *others
        return None, *(grad.to(x.dtype).view_as(x) for grad, x in zip(found, inputs, strict=True))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def unit(x: Tensor) -> Tensor:
    """Vectors along the last dimension at length 1."""
    return x * _inverse_length(x)


def _inverse_length(x: Tensor) -> Tensor:
    return torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def _queries_and_keys(inputs: Inputs, wide: torch.dtype) -> Tensor:
    """(L, H, 2, K) of the key head of each value head, at their length; queries are scaled."""
    qk_LG2K = unit(torch.stack([inputs.q_LGK, inputs.k_LGK], 2).to(wide))
    qk_LG2K[:, :, 0] *= qk_LG2K.shape[-1] ** -0.5
    return qk_LG2K.repeat_interleave(inputs.v_LHV.shape[1] // qk_LG2K.shape[1], 1)


def _gradients_of_raw(inputs: Inputs, grad_LH2K: Tensor) -> tuple[Tensor, Tensor]:
    """Of queries and keys (L, G, K), given those of `_queries_and_keys`."""
    raw_LG2K = torch.stack([inputs.q_LGK, inputs.k_LGK], 2).to(grad_LH2K.dtype)
    grad_LG2K = grad_LH2K.unflatten(1, (raw_LG2K.shape[1], -1)).sum(2)
    grad_LG2K[:, :, 0] *= raw_LG2K.shape[-1] ** -0.5
    inverse_LG21 = _inverse_length(raw_LG2K)
    along_LG2K = raw_LG2K * inverse_LG21
    outward_LG21 = (along_LG2K * grad_LG2K).sum(-1, keepdim=True)
    q_LGK, k_LGK = (inverse_LG21 * (grad_LG2K - along_LG2K * outward_LG21)).unbind(2)
    return q_LGK, k_LGK


class _Parts(NamedTuple):
    """What each chunk knows without the state S before it.

    ``pairs`` are the products of its queries and keys with its keys, decayed: at and below the
    diagonal for queries, below it for keys. The chunk writes ``inverse`` (beta (v - read)), where
    ``of_state`` S is what queries and keys read. To the state after it is added what it writes times
    ``to_state``."""

    qk_NC2K: Tensor
    v_NCV: Tensor
    beta_NC1: Tensor
    decay_NCC: Tensor
    pairs_NC2C: Tensor
    inverse_NCC: Tensor
    of_state_NXK: Tensor
    to_state_NCK: Tensor
    since_NC1: Tensor
    until_NC1: Tensor
    counts: list[int]

    @classmethod
    def of(cls, inputs: Inputs, chunks: Chunks, wide: torch.dtype) -> _Parts:
        qk = chunks.cut(_queries_and_keys(inputs, wide))
        beta = chunks.cut(inputs.beta_LH.to(wide))[..., None]
        # Log of the decay since the chunk began. Its differences between near tokens are small: in
        # fp32 they would have the rounding of the sums.
        sums = chunks.cut(inputs.g_LH.double()).cumsum(-1)
        causal_CC = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=qk.device).tril()
        decay = (sums[..., :, None] - sums[..., None, :]).to(wide)
        decay = decay.masked_fill_(~causal_CC, float("-inf")).exp_()
        since = sums.to(wide).exp()[..., None]
        until = (sums[..., -1:] - sums).to(wide).exp_()[..., None]

        k = qk[:, :, 1]
        pairs = (qk.flatten(1, 2) @ k.mT).unflatten(1, (CHUNK, 2)) * decay[:, :, None]
        pairs[:, :, 1].tril_(-1)
        eye = torch.eye(CHUNK, dtype=wide, device=qk.device).expand_as(decay)
        # takes the diagonal as ones
        inverse = torch.linalg.solve_triangular(
            beta * pairs[:, :, 1], eye, upper=False, unitriangular=True
        )
        heads = len(qk) // chunks.total
        return cls(
            qk,
            chunks.cut(inputs.v_LHV.to(wide)),
            beta,
            decay,
            pairs,
            inverse,
            (since[:, :, None] * qk).flatten(1, 2),
            until * k,
            since,
            until,
            [heads * count for count in chunks.alive],
        )

    def first_states(self) -> Tensor:
        """(M, K, V)."""
        return self.v_NCV.new_zeros(self.counts[0], self.qk_NC2K.shape[-1], self.v_NCV.shape[-1])

    def in_turn(self, *more: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """The parts that go along sequences, and more of the chunks: of all first chunks, of all
        second chunks, and so on."""
        along = (
            self.beta_NC1,
            self.pairs_NC2C[:, :, 0],
            self.inverse_NCC,
            self.of_state_NXK,
            self.to_state_NCK,
            self.since_NC1[:, -1:],
        )
        return zip(*(part.split(self.counts) for part in along + more), strict=True)


class _Steps(NamedTuple):
    """``free``: the values less what the state already says of their keys. ``before``, ``after``:
    the states around a chunk."""

    out_NCV: Tensor
    free_NCV: Tensor
    written_NCV: Tensor
    before_NKV: Tensor
    after_NKV: Tensor


def _along_sequences(parts: _Parts, state_MKV: Tensor) -> Iterator[_Steps]:
    """From chunk to chunk."""
    for beta, inner, inverse, of_state, to_state, last, v in parts.in_turn(parts.v_NCV):
        before = state_MKV[: len(v)]
        read_q, read_k = (of_state @ before).unflatten(1, (CHUNK, 2)).unbind(2)
        free = v - read_k
        written = inverse @ (beta * free)
        state_MKV = torch.baddbmm(last * before, to_state.mT, written)
        yield _Steps(torch.baddbmm(read_q, inner, written), free, written, before, state_MKV)


def _outputs(steps: Iterable[_Steps]) -> Tensor:
    """(N, C, V)."""
    return torch.cat([step.out_NCV for step in steps])


class _Back(NamedTuple):
    """Gradients of the state after each chunk, of beta ``free``, and of what queries and keys read."""

    after_NKV: Tensor
    right_NCV: Tensor
    read_NXV: Tensor


def _back_along_sequences(parts: _Parts, grad_NCV: Tensor) -> _Back:
    found = []
    after = parts.first_states()[:0]
    for beta, inner, inverse, of_state, to_state, last, grad in [*parts.in_turn(grad_NCV)][::-1]:
        # the sequences that end here hand on no state
        after = torch.cat([after, after.new_zeros(len(grad) - len(after), *after.shape[1:])])
        right = inverse.mT @ torch.baddbmm(inner.mT @ grad, to_state, after)
        read = torch.stack([grad, -beta * right], 2).flatten(1, 2)
        found.append((after, right, read))
        after = torch.baddbmm(last * after, of_state.mT, read)
    return _Back(*map(torch.cat, zip(*found[::-1], strict=True)))


def _gradients(
    parts: _Parts, back: _Back, free_NCV: Tensor, written_NCV: Tensor, before_NKV: Tensor
) -> tuple[Tensor, ...]:
    """Of queries and keys (N, C, 2, K), values (N, C, V), decays (N, C), and beta (N, C)."""
    qk, k, strict = parts.qk_NC2K, parts.qk_NC2K[:, :, 1], parts.pairs_NC2C[:, :, 1]
    pairs = (back.read_NXV @ written_NCV.mT).unflatten(1, (CHUNK, 2))
    pairs[:, :, 1].tril_(-1)
    decays = (pairs * parts.pairs_NC2C).sum(2)
    pairs = (pairs * parts.decay_NCC[:, :, None]).flatten(1, 2)
    of_state = (back.read_NXV @ before_NKV.mT).unflatten(1, (CHUNK, 2))
    of_state *= parts.since_NC1[:, :, None]
    to_state = (written_NCV @ back.after_NKV.mT) * parts.until_NC1
    grad_qk = (pairs @ k).unflatten(1, (CHUNK, 2)) + of_state
    grad_qk[:, :, 1] += torch.baddbmm(to_state, pairs.mT, qk.flatten(1, 2))

    until = (to_state * k).sum(-1)
    sums = decays.sum(-1) - decays.sum(-2) + (of_state * qk).sum((-2, -1)) - until
    last = (back.after_NKV * before_NKV).sum((-2, -1)) * parts.since_NC1[:, -1, 0]
    sums[:, -1] += until.sum(-1) + last
    grad_g = sums.double().flip(-1).cumsum(-1).flip(-1)

    own = torch.baddbmm(free_NCV, strict, written_NCV, alpha=-1)
    grad_beta = (back.right_NCV * own).sum(-1)
    return grad_qk, parts.beta_NC1 * back.right_NCV, grad_g, grad_beta


class Gaps:
    """A pack with room for W - 1 tokens before each sequence, so that a convolution does not see the
    sequence before: zeros, or the tokens that a sequence goes on from."""

    def __init__(
        self, lengths: Sequence[int], width: int, device: torch.device | str = "cpu"
    ) -> None:
        lengths_B = torch.tensor(lengths)
        self.room = width - 1
        self.size = sum(lengths) + len(lengths) * self.room
        rows_B = torch.arange(len(lengths))
        gaps_L = (rows_B + 1).repeat_interleave(lengths_B) * self.room
        self.places_L = (torch.arange(sum(lengths)) + gaps_L).to(device)
        ends_B = lengths_B.cumsum(0) + (rows_B + 1) * self.room
        self.ends_B = ends_B.to(device)
        self.starts_B = (ends_B - lengths_B - self.room).to(device)

    def padded(self, x_LD: Tensor, behind: int = 0) -> Tensor:
        """(S, D); ``behind``: zeros after the last sequence."""
        whole = x_LD.new_zeros(self.size + behind, x_LD.shape[1])
        return whole.index_copy_(0, self.places_L, x_LD)

    def of_room(self, first_B: Tensor) -> Tensor:
        """(B (W - 1),) places of the W - 1 rows from these on."""
        return (first_B[:, None] + torch.arange(self.room, device=first_B.device)).flatten()


def causal_convolution(x_LD: Tensor, weight_D1W: Tensor, gaps: Gaps) -> Tensor:
    """(L, D) depthwise convolution over each token and the W - 1 tokens before it in its sequence,
    added up in fp32, or fp64 if x is."""
    return _Convolution.apply(gaps, x_LD, weight_D1W)


def continued_convolution(
    x_LD: Tensor, weight_D1W: Tensor, gaps: Gaps, before_BWD: Tensor
) -> tuple[Tensor, Tensor]:
    """The same for sequences that go on from their last W - 1 tokens (B, W - 1, D), and what the
    next ones go on from."""
    padded_SD = gaps.padded(x_LD.to(before_BWD.dtype))
    padded_SD.index_copy_(0, gaps.of_room(gaps.starts_B), before_BWD.flatten(0, 1))
    out_SD = _convolved(padded_SD, _taps(weight_D1W, padded_SD.dtype))
    after_SD = padded_SD.index_select(0, gaps.of_room(gaps.ends_B - gaps.room))
    out_LD = out_SD.index_select(0, gaps.places_L - gaps.room).to(x_LD.dtype)
    return out_LD, after_SD.view_as(before_BWD)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gaps: Gaps, x_LD: Tensor, weight_D1W: Tensor) -> Tensor:
        ctx.save_for_backward(x_LD, weight_D1W)
        ctx.gaps = gaps
        wide = _wide(x_LD.dtype)
        out_SD = _convolved(gaps.padded(x_LD.to(wide)), _taps(weight_D1W, wide))
        return out_SD.index_select(0, gaps.places_L - gaps.room).to(x_LD.dtype)

    @staticmethod
    def backward(ctx: Any, grad_LD: Tensor) -> tuple[Tensor | None, ...]:
        (x_LD, weight_D1W), gaps = ctx.saved_tensors, ctx.gaps
        wide = _wide(x_LD.dtype)
        padded_SD, taps_WD = gaps.padded(x_LD.to(wide)), _taps(weight_D1W, wide)
        grad_SD = gaps.padded(grad_LD.to(wide), behind=gaps.room)
        grad_x_LD = _convolved(grad_SD, taps_WD.flip(0)).index_select(0, gaps.places_L)
        own_SD = grad_SD[gaps.room : gaps.size]
        found_WD = [
            (padded_SD[tap : tap + len(own_SD)] * own_SD).sum(0) for tap in range(len(taps_WD))
        ]
        grad_weight_D1W = torch.stack(found_WD, -1)[:, None]
        return None, grad_x_LD.to(x_LD.dtype), grad_weight_D1W.to(weight_D1W.dtype)


def _taps(weight_D1W: Tensor, dtype: torch.dtype) -> Tensor:
    """(W, D), of which a row is read as fast as the tokens are."""
    return weight_D1W[:, 0].t().to(dtype).contiguous()


def _convolved(padded_SD: Tensor, taps_WD: Tensor) -> Tensor:
    """(S - W + 1, D): row s is of the tokens from s to s + W - 1."""
    rows = len(padded_SD) - len(taps_WD) + 1
    out_SD = padded_SD[:rows] * taps_WD[0]
    for place, tap_D in enumerate(taps_WD[1:], 1):
        out_SD.addcmul_(padded_SD[place : place + rows], tap_D)
    return out_SD
