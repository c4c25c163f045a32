"""The gated delta rule and its convolution against their definitions, token by token, in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from openrlhf_ext.delta_rule import (
    CHUNK,
    Chunks,
    Gaps,
    Inputs,
    causal_convolution,
    gated_delta_rule,
    unit,
)

GROUPS, HEADS, KEYS, VALUES = 2, 4, 8, 6
LENGTHS = st.lists(st.integers(1, 3 * CHUNK), min_size=1, max_size=5)


def drawn(tokens: int, dtype: torch.dtype = torch.float64, decay: float = 1.0) -> Inputs:
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return Inputs(
        normal(tokens, GROUPS, KEYS),
        normal(tokens, GROUPS, KEYS),
        normal(tokens, HEADS, VALUES),
        -decay * F.softplus(normal(tokens, HEADS)),
        normal(tokens, HEADS).sigmoid(),
    )


def by_definition(inputs: Inputs, lengths: list[int]) -> Tensor:
    """(L, H, V), token by token."""
    heads, keys, values = inputs.v_LHV.shape[1], inputs.k_LGK.shape[2], inputs.v_LHV.shape[2]
    each = heads // inputs.k_LGK.shape[1]
    q, k = (unit(x).repeat_interleave(each, 1) for x in (inputs.q_LGK, inputs.k_LGK))
    outputs, token = [], 0
    for length in lengths:
        state_HKV = q.new_zeros(heads, keys, values)
        for _ in range(length):
            state_HKV = state_HKV * inputs.g_LH[token].exp()[:, None, None]
            read_HV = torch.einsum("hkv,hk->hv", state_HKV, k[token])
            written_HV = inputs.beta_LH[token][:, None] * (inputs.v_LHV[token] - read_HV)
            state_HKV = state_HKV + torch.einsum("hk,hv->hkv", k[token], written_HV)
            outputs.append(torch.einsum("hkv,hk->hv", state_HKV, q[token] * keys**-0.5))
            token += 1
    return torch.stack(outputs)


def gradients(function, inputs: Inputs) -> list[Tensor]:
    leaves = Inputs(*(tensor.clone().requires_grad_() for tensor in inputs))
    output = function(leaves)
    weights = torch.randn(
        output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    return list(torch.autograd.grad((output * weights).sum(), leaves))


@pytest.mark.parametrize("decay", [0.0, 1.0, 200.0])
def test_chunks_give_what_the_definition_gives(decay: float) -> None:
    lengths = [1, CHUNK, 2 * CHUNK + 5, 7, CHUNK + 1]
    inputs, chunks = drawn(sum(lengths), decay=decay), Chunks(lengths)
    expected = by_definition(inputs, lengths)
    torch.testing.assert_close(gated_delta_rule(inputs, chunks), expected, atol=1e-12, rtol=1e-10)
    wanted = gradients(lambda given: by_definition(given, lengths), inputs)
    found = gradients(lambda given: gated_delta_rule(given, chunks), inputs)
    for name, one, other in zip(Inputs._fields, found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-8, msg=name)


def test_in_fp32_a_token_that_forgets_all_does_not_make_its_neighbors_inexact() -> None:
    """With sums of the decays in fp32 outputs and gradients were off by 5e-5."""
    inputs = drawn(2 * CHUNK)
    decays_LH = inputs.g_LH.clone()
    decays_LH[::8], decays_LH[1::2] = -300.0, 0.01 * decays_LH[1::2]
    inputs, lengths = inputs._replace(g_LH=decays_LH), [2 * CHUNK]

    def in_fp32(given: Inputs) -> Tensor:
        return gated_delta_rule(Inputs(*(x.float() for x in given)), Chunks(lengths)).double()

    expected = by_definition(inputs, lengths)
    assert (in_fp32(inputs) - expected).abs().max() < 2e-6
    wanted = gradients(lambda given: by_definition(given, lengths), inputs)
    for one, other in zip(gradients(in_fp32, inputs), wanted, strict=True):
        assert (one - other).norm() < 2e-6 * other.norm()


@given(lengths=LENGTHS, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_pack_gives_each_sequence_the_bits_that_it_has_alone(
    lengths: list[int], dtype: torch.dtype
) -> None:
    inputs = drawn(sum(lengths), dtype)
    together = gated_delta_rule(inputs, Chunks(lengths)).split(lengths)
    for row, alone in enumerate(zip(*(x.split(lengths) for x in inputs), strict=True)):
        found = gated_delta_rule(Inputs(*alone), Chunks([lengths[row]]))
        if torch.cpu._is_avx512_supported():
            assert torch.equal(found, together[row])
        else:  # the product's kernel of other processors may depend on how many there are
            rel = 2e-2 if dtype == torch.bfloat16 else 1e-4
            torch.testing.assert_close(found, together[row], rtol=rel, atol=1e-5)


@given(lengths=LENGTHS, width=st.integers(1, 4))
def test_a_convolution_sees_its_own_sequence_only(lengths: list[int], width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x_LD = torch.randn(sum(lengths), 5, generator=generator, requires_grad=True)
    weight_D1W = torch.randn(5, 1, width, generator=generator, requires_grad=True)
    found = causal_convolution(x_LD, weight_D1W, Gaps(lengths, width))
    rows = []
    for own in x_LD.split(lengths):
        padded = F.pad(own, (0, 0, width - 1, 0))
        windows = padded.unfold(0, width, 1)  # (tokens, channels, width)
        rows.append((windows * weight_D1W[:, 0]).sum(-1))
    expected, grad_LD = torch.cat(rows), torch.randn(x_LD.shape, generator=generator)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    gradients = (
        torch.autograd.grad(output, (x_LD, weight_D1W), grad_LD) for output in (found, expected)
    )
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    alone = [causal_convolution(x, weight_D1W, Gaps([len(x)], width)) for x in x_LD.split(lengths)]
    assert torch.equal(found, torch.cat(alone))
