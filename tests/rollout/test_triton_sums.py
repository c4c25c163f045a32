"""The sums of a GPU, in Triton's interpreter and compiled, are the sums of a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from openrlhf_ext.rollout.sync import plan
from openrlhf_ext.rollout.sync.plan import bit_sum, words
from tests.patience import PATIENCE_S

MODULE = "openrlhf_ext.rollout.triton_sums"
COMPILE = f"""
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from {MODULE} import _bit_sum_kernel, _mixed_kernel
kinds = [(_bit_sum_kernel, 1, words) for words in ("*i8", "*i16", "*i32", "*i64")]
for kernel, width, words in (*kinds, (_bit_sum_kernel, 16, "*i64"), (_mixed_kernel, 16, "*i64")):
    constants = {{"FACTOR": {plan._FACTOR}, "WORDS": width, "ROWS": 64, "ROUNDS": 16}}
    types = {{"words_ptr": words, "total_ptr": "*i64", "mixed_ptr": "*i64", "rows": "i32"}}
    constants = {{name: value for name, value in constants.items() if name in kernel.arg_names}}
    signature = {{name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}}
    source = ASTSource(kernel, signature, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
"""

# looked for, not imported: Triton decides when it is first imported whether its own helpers run in
# the interpreter
pytestmark = pytest.mark.skipif(
    find_spec("triton") is None,
    reason="the package 'triton' is not installed (docs/head.md: how to run these tests)",
)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float64], ids=str
)
@pytest.mark.parametrize("shape", [(0, 256), (1,), (61,), (61, 24), (70, 128), (70, 1024)], ids=str)
def test_the_kernels_sum_is_the_cpus(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: tuple
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    from openrlhf_ext.rollout import triton_sums

    generator = torch.Generator().manual_seed(len(shape))
    tensor = torch.randn(shape, generator=generator).to(dtype)
    found = words(tensor, shape, 1)
    assert found is not None
    assert triton_sums.bit_sum(found, plan._FACTOR).item() == bit_sum(found).item()
    if found.dim() == 2 and len(found):
        assert torch.equal(triton_sums.mixed(found, plan._FACTOR), plan._mixed(found))
    sys.modules.pop(MODULE, None)


def test_it_compiles_for_a_gpu_that_is_not_there() -> None:
    """In a process of its own: Triton's interpreter, once used, spoils its compiler."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", COMPILE],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert run.returncode == 0, run.stderr[-3000:]
