"""A head whose log-probs come from whole rows, computed in another way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from openrlhf_ext.head import linear_logprob_entropy, linear_token_loss

TOKENS, HIDDEN, VOCAB, ROWS = 300, 24, 50, 64
TEMPERATURE = 0.7


class Shifted:
    """Log-probs that no other path has, by 0.25 nats; logits are the usual ones."""

    def __init__(self, weight_VH: Tensor) -> None:
        self.weight_VH = weight_VH.detach()

    def logits(self, hidden_BH: Tensor) -> Tensor:
        return hidden_BH.float() @ self.weight_VH.float().t()

    def logprobs(self, logits_BV: Tensor, temperature: float) -> Tensor:
        assert logits_BV.shape[1] == VOCAB
        return (logits_BV / temperature).log_softmax(-1) + 0.25


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden_TH = torch.randn(TOKENS, HIDDEN, dtype=dtype).requires_grad_()
    weight_VH = torch.randn(ROWS, HIDDEN, dtype=dtype).requires_grad_()  # 14 rows are padding
    return hidden_TH, weight_VH, torch.randint(VOCAB, (TOKENS,))


def gradients(value: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, inputs)


@pytest.mark.parametrize("workspace", [1 << 30, 1 << 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_are_those_of_the_rows_and_entropies_and_gradients_the_heads_own(
    dtype: torch.dtype, workspace: int
) -> None:
    hidden_TH, weight_VH, target_T = operands(dtype)
    call = (hidden_TH, weight_VH, target_T)
    common = {"temperature": TEMPERATURE, "vocab_size": VOCAB, "workspace_bytes": workspace}
    rows = Shifted(weight_VH)
    plain = linear_logprob_entropy(*call, entropy_grad=True, **common)
    whole = linear_logprob_entropy(*call, entropy_grad=True, whole_rows=rows, **common)
    assert torch.allclose(whole.logprob_T, plain.logprob_T + 0.25, rtol=0, atol=1e-4)
    assert torch.allclose(whole.entropy_T, plain.entropy_T, rtol=0, atol=1e-4)
    factors_T = torch.randn(TOKENS)

    def value(output):
        return (factors_T * output.logprob_T).sum() + (factors_T * output.entropy_T).sum()

    tolerance = {torch.float32: 1e-4, torch.bfloat16: 1e-2}[dtype]
    expected = gradients(value(plain), *call[:2])
    for got, want in zip(gradients(value(whole), *call[:2]), expected, strict=True):
        assert torch.allclose(got, want, rtol=tolerance, atol=10 * tolerance)

    seen = []

    def terms(logprob_B: Tensor, places: slice | Tensor) -> Tensor:
        seen.append(logprob_B.detach())
        return factors_T[places] * logprob_B

    fused = linear_token_loss(
        *call, token_loss=terms, entropy_slope_T=factors_T, whole_rows=rows, **common
    )
    assert torch.equal(fused.logprob_T, whole.logprob_T)
    assert torch.equal(torch.cat(seen), whole.logprob_T), "the loss gets the same log-probs"
    for got, want in zip(gradients(fused.value, *call[:2]), expected, strict=True):
        assert torch.allclose(got, want, rtol=tolerance, atol=10 * tolerance)


def test_a_temperature_of_each_token_is_refused() -> None:
    hidden_TH, weight_VH, target_T = operands(torch.float32)
    temperature_T = torch.ones(TOKENS)
    with pytest.raises(ValueError, match="one temperature for all tokens"):
        linear_logprob_entropy(
            hidden_TH, weight_VH, target_T, temperature_T, whole_rows=Shifted(weight_VH)
        )
