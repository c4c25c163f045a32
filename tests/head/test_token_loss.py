from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_ext.head import linear_token_loss
from tests.head.cases import ClippedLoss, assert_near, expected, make_case


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 40),
    vocab=st.integers(2, 500),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    temperature=st.sampled_from([0.6, 1.0, "per token"]),
    workspace=st.sampled_from([1, 30_000, 1 << 20]),
    recompute=st.sampled_from([None, True, False]),
    seed=st.integers(0, 99),
)
def test_value_and_gradients_equal_autograd_through_all_logits(
    tokens, vocab, scale, temperature, workspace, recompute, seed
):
    case = make_case(
        tokens, vocab, scale=scale, temperature=temperature, seed=seed, dtype=torch.float64
    )
    want, leaves = expected(case), case.leaves()
    out = linear_token_loss(
        *leaves,
        case.target,
        case.loss,
        case.temperature,
        workspace_bytes=workspace,
        recompute=recompute,
    )
    assert_near(out.value, want.loss, 1e-10)
    assert_near(out.logprob_T, want.logprob, 1e-11)
    assert_near(out.entropy_T, want.entropy, 1e-11)
    assert not out.logprob_T.requires_grad and not out.entropy_T.requires_grad
    for ours, theirs in zip(
        torch.autograd.grad(3 * out.value, leaves), want.loss_grads, strict=True
    ):
        assert_near(ours, 3 * theirs, 1e-9 * (1 + scale))


@pytest.mark.parametrize("recompute", [True, False])
def test_entropies_may_be_part_of_the_loss(recompute):
    case = make_case(tokens=30, vocab=300, dtype=torch.float64)
    slope_T, leaves = torch.randn(30, dtype=torch.float64), case.leaves()
    log_p = (leaves[0] @ leaves[1].T / case.temperature).log_softmax(-1)
    bonus = -((log_p.exp() * log_p).sum(-1) * slope_T).sum()
    value = case.loss(log_p.gather(1, case.target[:, None])[:, 0], slice(0, 30)).sum() + bonus
    want = torch.autograd.grad(value, leaves)
    out = linear_token_loss(
        *leaves,
        case.target,
        case.loss,
        case.temperature,
        workspace_bytes=30_000,
        recompute=recompute,
        entropy_slope_T=slope_T,
    )
    plain = linear_token_loss(*leaves, case.target, case.loss, case.temperature)
    assert_near(out.value, plain.value + bonus, 1e-10)
    for ours, theirs in zip(torch.autograd.grad(out.value, leaves), want, strict=True):
        assert_near(ours, theirs, 1e-9)


def test_gradcheck():
    case = make_case(tokens=6, vocab=9, width=3, dtype=torch.float64, temperature="per token")

    def value(hidden, weight):
        return linear_token_loss(hidden, weight, case.target, case.loss, case.temperature).value

    assert torch.autograd.gradcheck(value, case.leaves())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recompute", [True, False])
def test_precision_of_training_formats(dtype, recompute):
    case = make_case(tokens=200, vocab=1500, width=32, dtype=dtype)
    want, leaves = expected(case), case.leaves()
    out = linear_token_loss(
        *leaves,
        case.target,
        case.loss,
        case.temperature,
        workspace_bytes=500_000,
        recompute=recompute,
    )
    assert_near(out.value, want.loss)
    for ours, theirs in zip(torch.autograd.grad(out.value, leaves), want.loss_grads, strict=True):
        assert_near(ours, theirs, 1e-5 if dtype == torch.float32 else 1e-2)


def test_without_gradients_only_the_values_are_made():
    case = make_case()
    want = expected(case)
    with torch.no_grad():
        out = linear_token_loss(case.hidden, case.weight, case.target, case.loss, case.temperature)
    assert not out.value.requires_grad
    assert_near(out.value, want.loss)


def test_token_loss_sees_every_token_once():
    case = make_case(tokens=100, vocab=400)
    seen = []

    def loss(logprob_B, rows):
        seen.extend(range(100)[rows])
        return logprob_B * 0.0

    linear_token_loss(
        case.hidden.requires_grad_(), case.weight, case.target, loss, workspace_bytes=1
    )
    assert seen == list(range(100))


def test_a_loss_that_is_constant_has_gradient_zero():
    case = make_case()
    hidden = case.hidden.requires_grad_()
    out = linear_token_loss(
        hidden, case.weight, case.target, lambda lp, rows: torch.full_like(lp, 0.5).detach()
    )
    out.value.backward()
    assert out.value.item() == pytest.approx(8.5) and not hidden.grad.any()


def test_a_loss_that_is_not_elementwise_in_shape_is_refused():
    case = make_case()
    with pytest.raises(ValueError, match=r"one term per token, elementwise: got \(\) for \(17,\)"):
        linear_token_loss(
            case.hidden.requires_grad_(), case.weight, case.target, lambda lp, rows: lp.sum()
        )


def test_gradient_of_one_backward_pass_survives_another_forward():
    """Pipeline schedules run several forward passes before the first backward pass."""
    cases = [make_case(seed=seed) for seed in range(3)]
    weight = cases[0].weight.clone().requires_grad_()
    hiddens = [case.hidden.clone().requires_grad_() for case in cases]
    outs = [
        linear_token_loss(h, weight, c.target, c.loss, 0.7)
        for h, c in zip(hiddens, cases, strict=True)
    ]
    for out in outs:
        out.value.backward()
    total = 0.0
    for hidden, case in zip(hiddens, cases, strict=True):
        want = expected(replace(case, weight=weight.detach()))
        assert_near(hidden.grad, want.loss_grads[0])
        total = total + want.loss_grads[1]
    assert_near(weight.grad, total)


def test_gradients_are_finite_where_ratios_overflow():
    case = make_case(tokens=4)
    hidden, weight = case.leaves()
    logprob = expected(case).logprob.float()
    old = logprob - torch.tensor([100.0, -100.0, 0.0, 0.05])
    terms = ClippedLoss(torch.tensor([1.0, -1.0, 1.0, -1.0]), torch.full((4,), 0.25), old)
    out = linear_token_loss(hidden, weight, case.target, terms, case.temperature)
    grads = torch.autograd.grad(out.value, (hidden, weight))
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][:2].any() and grads[0][2:].any(1).all()
