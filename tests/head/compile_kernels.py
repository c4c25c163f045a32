"""Compiles every variant of the Triton kernels for compute capability 9.0, down to machine code;
needs no GPU.

A process of its own (``python -m tests.head.compile_kernels``): Triton's interpreter, once used,
spoils its compiler.
"""

from __future__ import annotations

import itertools

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from openrlhf_ext.head import triton_kernels


def main() -> None:
    kernels = (
        triton_kernels._statistics_kernel,
        triton_kernels._merge_kernel,
        triton_kernels._gradient_kernel,
    )
    for kernel, scaled, entropy, out in itertools.product(
        kernels, (True, False), (True, False), ("*fp32", "*bf16")
    ):
        constants = {
            "SCALED": scaled,
            "ENTROPY": entropy,
            "BLOCK": triton_kernels._BLOCK,
            "PARTS": 4,
        }
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
        types = {
            "column_ptr": "*i64",
            "tokens": "i32",
            "columns": "i32",
            "stride": "i32",
            "out_ptr": out,
        }
        signature = {
            name: "constexpr" if name in constants else types.get(name, "*fp32")
            for name in kernel.arg_names
        }
        compiled = triton.compile(
            ASTSource(kernel, signature, constexprs=constants),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": triton_kernels._WARPS},
        )
        assert compiled.asm["cubin"]


if __name__ == "__main__":
    main()
