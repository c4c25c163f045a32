"""The Triton kernels in Triton's interpreter on the CPU, and compiled for a GPU that need not be
there."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from openrlhf_ext.head import linear_logprob_entropy, linear_token_loss
from openrlhf_ext.head.kernels import TorchKernels, choose_kernels
from openrlhf_ext.head.statistics import TokenGradient
from tests.head.cases import assert_near, expected, make_case
from tests.patience import PATIENCE_S

MODULE = "openrlhf_ext.head.triton_kernels"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="the package 'triton' is not installed (docs/head.md: how to run these tests on a CPU)",
)


@pytest.fixture
def interpreter(monkeypatch):
    """Kernels that run in the interpreter: Triton decides when it sees the decorated functions."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield
    sys.modules.pop(MODULE, None)


def test_triton_is_refused_with_the_reason_where_it_cannot_run(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        ValueError, match="'triton' cannot run here: (the package|the tensors are on cpu)"
    ):
        choose_kernels("triton", torch.float32, torch.device("cpu"))
    assert isinstance(choose_kernels("auto", torch.float32, torch.device("cpu")), TorchKernels)


@needs_triton
def test_fp64_is_refused(interpreter):
    with pytest.raises(
        ValueError, match="its statistics are fp32, these inputs need torch.float64"
    ):
        choose_kernels("triton", torch.float64, torch.device("cpu"))


@needs_triton
@pytest.mark.parametrize("scaled", [True, False])
# one, two, four and three programs a row
@pytest.mark.parametrize("columns", [1, 300, 5000, 4 * 4096, 4 * 4096 + 1])
def test_tile_passes_equal_the_torch_kernels(interpreter, columns, scaled):
    triton_kernels = choose_kernels("triton", torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(columns)
    logits = 3 * torch.randn(6, columns, generator=generator)
    logits[3] *= 1e4
    column = torch.tensor([0, columns - 1, columns, -1, -columns - 5, columns // 2])
    scale = torch.rand(6, generator=generator) + 0.5 if scaled else None
    ours = triton_kernels.statistics(logits.clone(), torch.empty_like(logits), column, scale)
    theirs = TorchKernels().statistics(logits.clone(), torch.empty_like(logits), column, scale)
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-5)

    maximum, total, weighted, _ = theirs
    token = TokenGradient(maximum, total.log(), torch.randn(6, generator=generator), column, scale)
    entropy = token._replace(
        entropy_coefficient_B=torch.randn(6, generator=generator),
        entropy_B=total.log() - weighted / total,
    )
    for case in (token, entropy):
        for dtype in (torch.float32, torch.bfloat16):
            out = [torch.full_like(logits, 7.0, dtype=dtype) for _ in range(2)]
            triton_kernels.gradient(logits.clone(), case, out[0])
            TorchKernels().gradient(logits.clone(), case, out[1])
            torch.testing.assert_close(*out)


@needs_triton
def test_nan_logits_give_nan_statistics(interpreter):
    logits = torch.zeros(3, 10)
    logits[1, 4] = float("nan")
    part = choose_kernels("triton", torch.float32, torch.device("cpu")).statistics(
        logits, None, torch.zeros(3, dtype=torch.long), None
    )
    assert part[1].isnan().tolist() == [False, True, False]


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_head_with_triton_kernels(interpreter, dtype):
    case = make_case(tokens=21, vocab=300, width=16, temperature="per token", dtype=dtype)
    want = expected(case)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for workspace in (1, 1 << 20):
        options = {"workspace_bytes": workspace, "implementation": "triton"}
        leaves = case.leaves()
        out = linear_logprob_entropy(
            *leaves, case.target, case.temperature, entropy_grad=True, **options
        )
        assert_near(out.logprob_T, want.logprob)
        assert_near(out.entropy_T, want.entropy)
        value = (out.logprob_T * case.slope + out.entropy_T * case.entropy_slope).sum()
        for a, b in zip(torch.autograd.grad(value, leaves), want.both_grads, strict=True):
            assert_near(a, b, tolerance)
        for recompute in (True, False):
            loss = linear_token_loss(
                *leaves, case.target, case.loss, case.temperature, recompute=recompute, **options
            )
            assert_near(loss.value, want.loss)
            for a, b in zip(torch.autograd.grad(loss.value, leaves), want.loss_grads, strict=True):
                assert_near(a, b, tolerance)


@needs_triton
def test_kernels_compile_for_a_gpu_that_is_not_there():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.head.compile_kernels"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert run.returncode == 0, run.stderr[-3000:]
