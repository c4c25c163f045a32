"""The protocol between kernels and Megatron's DDP; ``test_sharded`` has the same with the real
DDP."""

from __future__ import annotations

import pytest
import torch

from openrlhf_ext.head import linear_logprob_entropy, linear_token_loss
from tests.head.cases import assert_near, expected, make_case


def parameter(case, *, main_grad: torch.dtype, tied: bool = False) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(case.weight.clone())
    weight.main_grad = torch.full(weight.shape, 0.25, dtype=main_grad)  # of earlier micro-batches
    weight.grad_added_to_main_grad = False
    weight.zero_out_wgrad = tied
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_main_grad_gets_the_gradient_in_fp32_and_autograd_only_that_of_another_use(dtype, tied):
    case = make_case(tokens=60, vocab=90, dtype=dtype)
    want, weight = expected(case), parameter(case, main_grad=torch.float32, tied=tied)
    hidden = case.hidden.requires_grad_()
    (
        linear_logprob_entropy(hidden, weight, case.target, 0.7).logprob_T * case.slope
    ).sum().backward()
    linear_token_loss(hidden, weight, case.target, case.loss, 0.7).value.backward()
    assert_near(weight.main_grad - 0.25, want.output_grads[1] + want.loss_grads[1])
    assert weight.grad_added_to_main_grad and weight.grad is None
    if tied:
        loss = linear_token_loss(hidden, weight, case.target, case.loss, 0.7).value
        (loss + 3 * weight[5].sum()).backward()
        assert weight.grad.sum() == 3 * weight.shape[1] and (weight.grad[5] == 3).all()


def test_hooks_of_the_parameter_run_without_a_gradient():
    """Megatron's DDP counts on its hook, which hangs on the node that accumulates the gradient."""
    case, ran = make_case(), []
    weight = parameter(case, main_grad=torch.float32)
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: ran.append(weight.grad))
    linear_token_loss(case.hidden, weight, case.target, case.loss, 0.7).value.backward()
    assert ran == [None]


def test_low_precision_main_grad_is_left_to_ddp():
    """Adding every block to a bf16 buffer would round every block."""
    case = make_case(tokens=60, vocab=90, dtype=torch.bfloat16)
    want, weight = expected(case), parameter(case, main_grad=torch.bfloat16)
    linear_token_loss(case.hidden, weight, case.target, case.loss, 0.7).value.backward()
    assert not weight.grad_added_to_main_grad and (weight.main_grad == 0.25).all()
    assert_near(weight.grad, want.loss_grads[1], 1e-2)


def test_loss_scale_has_to_be_announced():
    case = make_case()
    want, weight = expected(case), parameter(case, main_grad=torch.float32)
    hidden = case.hidden.requires_grad_()
    (
        8 * linear_token_loss(hidden, weight, case.target, case.loss, 0.7, grad_scale=8.0).value
    ).backward()
    assert_near(weight.main_grad - 0.25, 8 * want.loss_grads[1])
    assert_near(hidden.grad, 8 * want.loss_grads[0])
    out = linear_token_loss(hidden, weight, case.target, case.loss, 0.7)
    with pytest.raises(
        ValueError, match=r"for grad_scale = 1.0; the backward pass brings 8.0: pass that"
    ):
        (8 * out.value).backward()


def test_passes_without_gradients_leave_main_grad_alone():
    case = make_case()
    weight = parameter(case, main_grad=torch.float32)
    with torch.no_grad():
        linear_token_loss(case.hidden, weight, case.target, case.loss)
        linear_logprob_entropy(case.hidden, weight, case.target)
    assert (weight.main_grad == 0.25).all() and not weight.grad_added_to_main_grad
