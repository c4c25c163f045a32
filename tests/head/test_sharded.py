from __future__ import annotations

import pytest
import torch

from tests.head.cases import Case, assert_near, expected, make_case
from tests.head.memory import MIB, SLACK
from tests.launch import launch


@pytest.mark.parametrize("size", [2, 4])
def test_shards_of_unequal_true_size_equal_the_whole(size):
    cases = [
        make_case(tokens=40, vocab=37, dtype=torch.float64, temperature="per token"),
        make_case(tokens=1, vocab=6, dtype=torch.float64),  # one of four ranks holds padding alone
        make_case(tokens=23, vocab=5, scale=1e2, dtype=torch.float64),
        make_case(tokens=50, vocab=640, dtype=torch.float64),
        make_case(tokens=30, vocab=64),
        make_case(tokens=0, vocab=64),
    ]
    lopsided_workspace = 48 << 20
    results = launch(
        "tests.head.sharded",
        "run",
        size,
        cases=cases,
        workspaces=[1, 1 << 20],
        lopsided_workspace=lopsided_workspace,
    )
    ranks = [ways for ways, _ in results]
    for _, extra in results:
        assert extra is None or extra <= lopsided_workspace + SLACK, f"{extra / MIB:.1f} MiB"
    for i, case in enumerate(cases):
        want = expected(case)
        tolerance = 1e-9 if case.hidden.dtype == torch.float64 else 1e-5
        for way in ranks[0][i]:
            whole = torch.cat([rank[i][way]["weight"] for rank in ranks])
            assert not whole[len(case.weight) :].any(), f"{way}: padding rows received a gradient"
            grads = want.loss_grads if "loss" in way else want.both_grads
            assert_near(whole[: len(case.weight)], grads[1], tolerance)
            assert_near(hidden_grad([rank[i][way] for rank in ranks], case), grads[0], tolerance)
            for rank in ranks:
                got = rank[i][way]
                assert_near(got["logprob"], want.logprob, tolerance)
                assert_near(got["entropy"], want.entropy, tolerance)
                if "value" in got:
                    assert_near(got["value"], want.loss, tolerance)


def hidden_grad(got: list[dict], case: Case) -> torch.Tensor:
    """Gradient of the case's hidden states, the same on every rank; other tokens of a sequence have
    none."""
    if "rows" not in got[0]:
        for rank in got:
            assert torch.equal(rank["hidden"], got[0]["hidden"])
        return got[0]["hidden"]
    whole = torch.cat([rank["hidden"] for rank in got])
    rows = got[0]["rows"]
    rest = torch.ones(len(whole), dtype=torch.bool).index_fill_(0, rows, False)
    assert not whole[rest].any()
    return whole[rows]


def test_every_rank_reports_the_same_fault():
    ranks = launch("tests.head.sharded", "refuse", 2, case=make_case(tokens=40, vocab=30))
    assert ranks[0] == ranks[1]
    rows, counts, hidden, weight = ranks[0]
    assert "sequence_rows must be in [0, 2 ranks * 43 tokens): got" in rows and "..86" in rows
    assert counts.startswith(
        "ValueError: rows_per_rank must count sequence_rows by rank: got [0, 40], they are ["
    )
    assert (
        hidden == "NonFiniteLogitsError: the hidden states of 1 tokens are NaN or infinite: rows 4"
    )
    assert weight.startswith(
        "NonFiniteLogitsError: the hidden states are finite, but the logits of 40 tokens"
    )


def test_megatron_adds_the_gradient_of_the_weight_once():
    for results in launch("tests.head.sharded", "megatron_main_grad", 2):
        for got in results:
            # bf16 weights: the operands are rounded, the sum in main_grad is not; autograd's own
            # share of a tied weight is a bf16 gradient per micro-batch
            tolerance = 1e-5 if got["dtype"] == torch.float32 or not got["tied"] else 1e-2
            assert got["main_grad"].dtype == torch.float32
            assert_near(got["main_grad"], got["want"], tolerance)
            assert got["grad"] is None and got["flag"]
