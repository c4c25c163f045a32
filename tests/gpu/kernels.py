"""Where the device's time goes: seconds by group of kernels, the longest ones, and which attention
ran."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tests.gpu.kit import Machine

# parts of names, in this order; on a CPU the names are those of torch's operations
_GROUPS = {
    "attention": ("fmha", "flash", "attention", "cudnn_generated"),
    "head": ("_statistics_kernel", "_merge_kernel", "_gradient_kernel"),
    "quantization": ("quantize", "cast_transpose", "block_scal", "amax", "fp8"),
    "products": (
        "gemm",
        "nvjet",
        "cutlass",
        "xmma",
        "cublas",
        "splitk",
        "::mm",
        "::addmm",
        "::bmm",
        "::matmul",
    ),
    "norms": ("norm",),
    "rotary": ("rope", "rotary"),
    "swiglu": ("swiglu", "silu", "gated"),
    "optimizer": ("adam", "multi_tensor", "l2norm"),
    "copies": ("memcpy", "memset", "copy", "::cat", "catarray"),
    "reductions": ("reduce", "::sum"),
}
_OTHERS = "elementwise and others"
_TOP = 12
_NAME = 140


def profiled(machine: Machine, work: Callable[[], object]) -> dict[str, Any]:
    """Runs the work once under torch's profiler.

    Returns:
        ``seconds``: of the device (on a CPU of torch's operations themselves), all kernels
        together; ``groups``: the same by kind of kernel; ``top``: the longest kernels with their
        seconds and calls; ``attention``: see ``attention_backend``.

    Raises:
        AssertionError: the profiler saw nothing.
    """
    on_cuda = machine.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities) as profiler:
        work()
        if on_cuda:
            torch.cuda.synchronize()
    rows = []
    for event in profiler.key_averages():
        if on_cuda and (event.device_type != DeviceType.CUDA or event.is_user_annotation):
            # an operation of the host, or a span with a name: the kernels have rows of their own
            continue
        seconds = (event.self_device_time_total if on_cuda else event.self_cpu_time_total) / 1e6
        rows.append((event.key, seconds, event.count))
    found = grouped(rows)
    if not found["seconds"] > 0:
        raise AssertionError(
            "the profiler saw no kernel: CUPTI is missing, or held by another tool"
        )
    return found | {"attention": attention_backend(name for name, _, _ in rows)}


def grouped(rows: Iterable[tuple[str, float, int]]) -> dict[str, Any]:
    """Sums of (name, seconds, calls) by group, and the longest."""
    rows = sorted(rows, key=lambda row: -row[1])
    groups: dict[str, float] = {}
    for name, seconds, _ in rows:
        group = group_of(name)
        groups[group] = groups.get(group, 0.0) + seconds
    top = [
        {"name": name[:_NAME], "seconds": seconds, "calls": calls}
        for name, seconds, calls in rows[:_TOP]
    ]
    ordered = dict(sorted(groups.items(), key=lambda item: -item[1]))
    return {"seconds": sum(seconds for _, seconds, _ in rows), "groups": ordered, "top": top}


def group_of(name: str) -> str:
    """The first group one of whose marks the name has."""
    low = name.lower()
    return next(
        (group for group, marks in _GROUPS.items() if any(mark in low for mark in marks)), _OTHERS
    )


def attention_backend(names: Iterable[str]) -> dict[str, Any]:
    """What TransformerEngine has chosen in this process (None: it has computed no attention), and
    the names of attention's kernels among these."""
    module = sys.modules.get(
        "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
    )
    chosen = None
    if module is not None:
        state = module._attention_backends  # of 2.11: dot_product_attention.py:69
        ways = [way for way in ("flash", "fused", "unfused") if state.get(f"use_{way}_attention")]
        chosen = {
            "way": ways[0] if ways else None,
            "fused": str(state.get("fused_attention_backend")),
            "flash": str(state.get("flash_attention_backend")),
        }
    kernels = sorted({name[:_NAME] for name in names if group_of(name) == "attention"})
    return {"transformer_engine": chosen, "kernels": kernels}
