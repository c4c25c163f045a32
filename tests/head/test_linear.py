from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_ext.head import NonFiniteLogitsError, linear_logprob_entropy, linear_token_loss
from tests.head.cases import assert_near, expected, make_case, reference
from tests.head.naive import naive_logprob_entropy


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 40),
    vocab=st.integers(2, 500),
    scale=st.sampled_from([0.0, 0.1, 1.0, 30.0]),
    temperature=st.sampled_from([0.6, 1.0, 1.3, "per token"]),
    workspace=st.sampled_from([1, 30_000, 1 << 20]),
    seed=st.integers(0, 99),
)
def test_equals_full_softmax_in_float64(tokens, vocab, scale, temperature, workspace, seed):
    case = make_case(
        tokens, vocab, scale=scale, temperature=temperature, seed=seed, dtype=torch.float64
    )
    want, leaves = expected(case), case.leaves()
    out = linear_logprob_entropy(
        *leaves, case.target, case.temperature, workspace_bytes=workspace, entropy_grad=True
    )
    assert_near(out.logprob_T, want.logprob, 1e-11)
    assert_near(out.entropy_T, want.entropy, 1e-11)
    value = (out.logprob_T * case.slope + out.entropy_T * case.entropy_slope).sum()
    for ours, theirs in zip(torch.autograd.grad(value, leaves), want.both_grads, strict=True):
        assert_near(ours, theirs, 1e-8 * (1 + scale))


@pytest.mark.parametrize("vocab", [32_000, 128_256, 151_936, 152_064, 50_257])
def test_vocabularies_of_real_models(vocab):
    case = make_case(tokens=9, vocab=vocab, width=16, seed=vocab)
    want, leaves = expected(case), case.leaves()
    out = linear_logprob_entropy(*leaves, case.target, case.temperature, workspace_bytes=4 << 20)
    assert_near(out.logprob_T, want.logprob)
    assert_near(out.entropy_T, want.entropy)
    grads = torch.autograd.grad((out.logprob_T * case.slope).sum(), leaves)
    for ours, theirs in zip(grads, want.output_grads, strict=True):
        assert_near(ours, theirs)
    loss = linear_token_loss(*leaves, case.target, case.loss, case.temperature)
    assert_near(loss.value, want.loss)
    for ours, theirs in zip(torch.autograd.grad(loss.value, leaves), want.loss_grads, strict=True):
        assert_near(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
def test_peaked_and_flat_distributions(dtype, scale):
    case = make_case(vocab=300, scale=scale, dtype=dtype)
    out = linear_logprob_entropy(case.hidden, case.weight, case.target)
    logprob, entropy = reference(case.hidden, case.weight, case.target, 1.0)
    assert out.logprob_T.dtype == out.entropy_T.dtype == torch.float32
    assert (out.logprob_T <= 0).all() and torch.isfinite(out.logprob_T).all()
    assert (out.entropy_T >= 0).all() and (out.entropy_T <= math.log(300) + 1e-6).all()
    # logits of 1e4 are known to 1e-3 in fp32, whatever is done with them
    tolerance = 1e-5 + 3e-7 * (case.hidden.double() @ case.weight.double().t()).abs().max().item()
    assert (out.logprob_T - logprob).abs().max() < tolerance
    assert (out.entropy_T - entropy).abs().max() < tolerance


def test_large_logits_that_are_exact_lose_nothing():
    """Statistics are relative to the maximum: an offset of 1e4 to all logits changes no digit of
    the results."""
    generator = torch.Generator().manual_seed(0)
    small = torch.randint(-8, 8, (5, 300), generator=generator).float()
    target = torch.arange(5) * 50
    plain = linear_logprob_entropy(torch.eye(5), small.t().contiguous(), target)
    for offset in (1e4, -1e4):
        moved = linear_logprob_entropy(torch.eye(5), (small + offset).t().contiguous(), target)
        assert torch.equal(moved.logprob_T, plain.logprob_T)
        assert torch.equal(moved.entropy_T, plain.entropy_T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_operands_give_fp32_results(dtype):
    """The operands are rounded, nothing after them is: no worse than float64 on the same
    operands."""
    case = make_case(tokens=50, vocab=700, width=32, dtype=dtype, temperature="per token")
    want, leaves = expected(case), case.leaves()
    out = linear_logprob_entropy(*leaves, case.target, case.temperature, workspace_bytes=100_000)
    assert_near(out.logprob_T, want.logprob)
    assert_near(out.entropy_T, want.entropy)
    grads = torch.autograd.grad((out.logprob_T * case.slope).sum(), leaves)
    for ours, theirs in zip(grads, want.output_grads, strict=True):
        assert ours.dtype == dtype
        # one rounding of the result
        assert_near(ours, theirs, 1e-2 if dtype == torch.bfloat16 else 2e-3)


def test_results_do_not_depend_on_the_workspace_beyond_rounding():
    case = make_case(tokens=300, vocab=2000, width=16)
    results = []
    for workspace in (1, 200_000, 1 << 20, 256 << 20):
        leaves = case.leaves()
        out = linear_logprob_entropy(
            *leaves, case.target, case.temperature, workspace_bytes=workspace
        )
        results.append((*out, *torch.autograd.grad((out.logprob_T * case.slope).sum(), leaves)))
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            assert_near(a.detach(), b.detach(), 3e-6)


def test_gradcheck():
    case = make_case(tokens=6, vocab=9, width=3, dtype=torch.float64, temperature="per token")

    def outputs(hidden, weight):
        return linear_logprob_entropy(
            hidden, weight, case.target, case.temperature, entropy_grad=True
        )

    assert torch.autograd.gradcheck(outputs, case.leaves())


def test_targets_may_repeat_and_calls_may_be_empty():
    case = make_case(tokens=12, vocab=5)
    same = torch.full((12,), 3)
    leaves = case.leaves()
    out = linear_logprob_entropy(*leaves, same)
    want = case.leaves(torch.float64)
    theirs = torch.autograd.grad((reference(*want, same, 1.0)[0] * case.slope).sum(), want)
    for a, b in zip(
        torch.autograd.grad((out.logprob_T * case.slope).sum(), leaves), theirs, strict=True
    ):
        assert_near(a, b)
    hidden = torch.zeros(0, 8, requires_grad=True)
    empty = linear_logprob_entropy(hidden, case.weight, same[:0])
    empty.logprob_T.sum().backward()
    assert empty.logprob_T.shape == empty.entropy_T.shape == (0,) and hidden.grad.shape == (0, 8)


def test_entropy_carries_no_gradient_by_default():
    case = make_case()
    out = linear_logprob_entropy(case.hidden.requires_grad_(), case.weight, case.target)
    assert out.logprob_T.requires_grad and not out.entropy_T.requires_grad


def test_frozen_weight_gets_no_gradient():
    case = make_case()
    hidden, weight = case.hidden.requires_grad_(), case.weight
    linear_logprob_entropy(hidden, weight, case.target).logprob_T.sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_naive_equals_the_blocked_head():
    case = make_case(temperature="per token")
    want, leaves = expected(case), case.leaves()
    out = naive_logprob_entropy(*leaves, case.target, case.temperature, entropy_grad=True)
    assert_near(out.logprob_T, want.logprob)
    value = (out.logprob_T * case.slope + out.entropy_T * case.entropy_slope).sum()
    for ours, theirs in zip(torch.autograd.grad(value, leaves), want.both_grads, strict=True):
        assert_near(ours, theirs)


@pytest.mark.parametrize("call", ["logprob", "token loss"])
def test_nan_is_reported_with_its_rows(call):
    case = make_case(tokens=40, vocab=50)
    case.hidden[[3, 31], 2] = torch.tensor([float("nan"), float("inf")])

    def run(**options):
        if call == "logprob":
            return linear_logprob_entropy(
                *leaves, case.target, workspace_bytes=1, **options
            ).logprob_T
        return linear_token_loss(
            *leaves, case.target, case.loss, workspace_bytes=1, **options
        ).value

    leaves = case.leaves()
    with pytest.raises(
        NonFiniteLogitsError, match="hidden states of 1 tokens are NaN or infinite: rows 3"
    ) as caught:
        run()
    assert caught.value.tokens == [3]
    assert run(checks=False).isnan().any()
    case.hidden[[3, 31], 2] = 0.0
    case.weight[7, 1] = float("nan")
    leaves = case.leaves()
    with pytest.raises(
        NonFiniteLogitsError,
        match="hidden states are finite, but the logits of 40 tokens .* and 32",
    ):
        run()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature must be > 0"),
        (
            {"temperature": torch.tensor([1.0, 0.0] + [1.0] * 15)},
            "temperature must be > 0, got 0.0",
        ),
        ({"temperature": torch.ones(3)}, r"a number or one per token: got \(3,\) for \(17,\)"),
        ({"vocab_size": 99}, "vocab_size must be in"),
        ({"target_T": torch.full((17,), 37)}, r"target ids must be in \[0, 37\)"),
        ({"target_T": torch.zeros(3, dtype=torch.long)}, "one target per token"),
        (
            {"weight_VH": torch.zeros(37, 9)},
            r"hidden \(T, H\) and weight \(V, H\), got \(17, 8\) and \(37, 9\)",
        ),
        ({"weight_VH": torch.zeros(37, 8, dtype=torch.bfloat16)}, "one format"),
        ({"workspace_bytes": 0}, "workspace_bytes must be > 0, got 0"),
        (
            {"implementation": "cuda"},
            "implementation must be 'auto', 'torch' or 'triton', got 'cuda'",
        ),
    ],
)
def test_bad_input_is_refused(change, message):
    case = make_case()
    arguments = {
        "hidden_TH": case.hidden,
        "weight_VH": case.weight,
        "target_T": case.target,
    } | change
    with pytest.raises(ValueError, match=message):
        linear_logprob_entropy(**arguments)
