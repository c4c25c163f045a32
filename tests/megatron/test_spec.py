"""Attention over the sequences of a pack, many at once, against one sequence at a time."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.megatron.model.spec import PaddedRows, WholeRows
from openrlhf_ext.megatron.step.batch import PackShape, pack
from tests.sequences import grouped


def one_by_one(query_LND, key_LKD, value_LKD, slots, scale):
    outputs = []
    for q, k, v in zip(*(x.split(slots) for x in (query_LND, key_LKD, value_LKD)), strict=True):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qnd,knd->nqk", q, k) * scale
        hidden = torch.ones(len(q), len(q)).triu(1).bool()
        outputs.append(
            torch.einsum("nqk,knd->qnd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        )
    return torch.cat(outputs)


@given(slots=st.lists(st.integers(1, 40), min_size=1, max_size=9), seed=st.integers(0, 99))
def test_together_as_one_by_one(slots, seed) -> None:
    """Values and gradients in fp64; a rectangle is padded by at most a third of its tokens."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [
        torch.randn(sum(slots), n, 8, dtype=torch.float64, generator=generator) for n in (4, 2, 2)
    ]
    weights = torch.randn(sum(slots), 4, 8, dtype=torch.float64, generator=generator)
    rows = PaddedRows(slots, torch.device("cpu"))
    results = []
    for attention in (lambda *x: rows.attention(*x, 0.3), lambda *x: one_by_one(*x, slots, 0.3)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        output = attention(*leaves)
        (output * weights).sum().backward()
        results.append([output.detach(), *(leaf.grad for leaf in leaves)])
    for ours, truth in zip(*results, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-12)
    assert len(rows.places) * 3 <= sum(slots) * 4


@given(
    groups=st.lists(
        st.tuples(st.integers(2, 9), st.lists(st.integers(1, 12), min_size=1, max_size=5)),
        max_size=4,
    ),
    seed=st.integers(0, 99),
)
def test_sequences_that_share_a_prompt_as_one_by_one(groups, seed) -> None:
    """Values and gradients in fp64, in rectangles and in whole sequences, as kernels of GPUs get
    them; against torch's own indices, whose backward adds up what a token of a prompt gets from
    every sequence."""
    part = pack(grouped([(5, [3, 1, 4]), *groups]), PackShape(shares_prompts=True))
    assert part.shared is not None
    generator = torch.Generator().manual_seed(seed)
    size, shared = len(part.packed_L), part.shared
    inputs = [torch.randn(size, n, 8, dtype=torch.float64, generator=generator) for n in (4, 2, 2)]
    weights = torch.randn(size, 4, 8, dtype=torch.float64, generator=generator)
    padded, whole = PaddedRows(part.slots, torch.device("cpu"), shared), WholeRows(shared)
    ways = (
        lambda *x: one_by_one(*(each[shared.computed_P] for each in x), part.slots, 0.3)[
            shared.kept_L
        ],
        lambda *x: padded.attention(*x, 0.3),
        lambda *x: whole.take(one_by_one(*map(whole.gather, x), part.slots, 0.3)),
    )
    truth, *ours = [], [], []
    for attention, results in zip(ways, (truth, *ours), strict=True):
        leaves = [x.clone().requires_grad_() for x in inputs]
        output = attention(*leaves)
        (output * weights).sum().backward()
        results += [output.detach(), *(leaf.grad for leaf in leaves)]
    for results in ours:
        for found, expected in zip(results, truth, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
