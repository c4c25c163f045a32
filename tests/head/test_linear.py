from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_ext.head import linear_logprob_entropy
from tests.launch import launch


def reference(hidden, weight, target, temperature):
    """Full log-softmax in float64."""
    log_p = (hidden.double() @ weight.double().t() / temperature).log_softmax(-1)
    return log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def make_case(
    tokens=17, vocab=37, width=8, scale=1.0, temperature=0.7, seed=0, dtype=torch.float32, entropy_grad=False
):
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *s: torch.randn(*s, generator=generator)  # noqa: E731
    return {
        "hidden": randn(tokens, width).to(dtype), "weight": (randn(vocab, width) * scale).to(dtype),
        "target": torch.randint(0, vocab, (tokens,), generator=generator), "a": randn(tokens), "b": randn(tokens),
        "temperature": temperature, "workspace_bytes": 2000, "entropy_grad": entropy_grad,
    }  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 20), vocab=st.integers(2, 50), scale=st.sampled_from([0.0, 0.1, 1.0, 30.0]),
    temperature=st.sampled_from([0.6, 1.0, 1.3]), workspace=st.sampled_from([1, 700, 1 << 20]), seed=st.integers(0, 99),
)  # fmt: skip
def test_equals_full_softmax_in_float64(tokens, vocab, scale, temperature, workspace, seed):
    case = make_case(tokens, vocab, scale=scale, temperature=temperature, seed=seed, dtype=torch.float64)
    hidden, weight = case["hidden"].requires_grad_(), case["weight"].requires_grad_()
    out = linear_logprob_entropy(
        hidden, weight, case["target"], temperature, workspace_bytes=workspace, entropy_grad=True
    )
    logprob, entropy = reference(hidden, weight, case["target"], temperature)
    assert torch.allclose(out.logprob_T, logprob, atol=1e-9)
    assert torch.allclose(out.entropy_T, entropy, atol=1e-9)
    ours = torch.autograd.grad((out.logprob_T * case["a"] + out.entropy_T * case["b"]).sum(), (hidden, weight))
    theirs = torch.autograd.grad((logprob * case["a"] + entropy * case["b"]).sum(), (hidden, weight))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-8 * (1 + scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bounds_hold_for_peaked_and_flat_distributions(dtype):
    for scale in (0.0, 1.0, 1e4):
        case = make_case(scale=scale, dtype=dtype)
        out = linear_logprob_entropy(case["hidden"], case["weight"], case["target"])
        assert out.logprob_T.dtype == out.entropy_T.dtype == torch.float32
        assert (out.logprob_T <= 0).all() and torch.isfinite(out.logprob_T).all()
        assert (out.entropy_T >= 0).all() and (out.entropy_T <= math.log(37) + 1e-6).all()


def test_entropy_carries_no_gradient_by_default():
    case = make_case()
    out = linear_logprob_entropy(case["hidden"].requires_grad_(), case["weight"], case["target"])
    assert out.logprob_T.requires_grad and not out.entropy_T.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"vocab_size": 99}, "vocab_size must be in"),
        ({"target": torch.full((17,), 37)}, r"target ids must be in \[0, 37\)"),
        ({"target": torch.zeros(3, dtype=torch.long)}, "one target per token"),
    ],
)
def test_bad_input_is_refused(change, message):
    case = make_case()
    arguments = {"hidden_TH": case["hidden"], "weight_VH": case["weight"], "target_T": case["target"]}
    arguments |= {("target_T" if k == "target" else k): v for k, v in change.items()}
    with pytest.raises(ValueError, match=message):
        linear_logprob_entropy(**arguments)


@pytest.mark.parametrize("size", [2, 4])
def test_shards_of_unequal_true_size_equal_the_whole(size):
    cases = [
        make_case(vocab=37, entropy_grad=True),
        make_case(vocab=6, tokens=1),
        make_case(vocab=5, scale=1e4),
        make_case(vocab=64),
    ]
    ranks = launch("tests.head.sharded", "run", size, cases=cases)
    for i, case in enumerate(cases):
        hidden, weight = case["hidden"].clone().requires_grad_(), case["weight"].clone().requires_grad_()
        logprob, entropy = reference(hidden, weight, case["target"], case["temperature"])
        loss = (logprob * case["a"]).sum() + ((entropy * case["b"]).sum() if case["entropy_grad"] else 0.0)
        loss.backward()
        whole = torch.cat([rank[i]["weight"] for rank in ranks])
        assert not whole[len(weight) :].any(), "padding rows received a gradient"
        scale = 1 + weight.grad.abs().max()
        assert torch.allclose(whole[: len(weight)], weight.grad, atol=1e-5 * scale)
        for rank in ranks:
            got = rank[i]
            assert torch.allclose(got["logprob"].double(), logprob.detach(), atol=1e-5, rtol=1e-6)
            assert torch.allclose(got["entropy"].double(), entropy.detach(), atol=1e-5)
            assert torch.allclose(got["hidden"], hidden.grad, atol=1e-5 * (1 + hidden.grad.abs().max()))
