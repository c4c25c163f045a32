"""What exact mode needs of a machine."""

from __future__ import annotations

import pytest
import torch

from openrlhf_ext.exact import TESTED_VLLM, limits


def test_the_version_of_vllm(monkeypatch):
    for found, problem in ((TESTED_VLLM, False), (f"{TESTED_VLLM}+cpu", False), ("0.1", True)):
        monkeypatch.setattr(limits, "version", lambda package, found=found: found)
        assert (limits.vllm_problem() is not None) == problem, found


@pytest.mark.parametrize(
    ("machine_type", "flags", "is_tried"),
    [
        ("x86_64", "fpu avx2 avx512f avx512dq avx512bw avx512vl", True),
        ("x86_64", "fpu avx2 avx512f", False),
        ("x86_64", "", False),
        ("aarch64", "fp asimd", False),
    ],
)
def test_the_processor(tmp_path, monkeypatch, machine_type, flags, is_tried):
    about = tmp_path / "cpuinfo"
    about.write_text(f"processor\t: 0\nmodel name\t: Chip 7\nflags\t\t: {flags}\n")
    monkeypatch.setattr(limits, "_CPUINFO", about)
    monkeypatch.setattr(limits.platform, "machine", lambda: machine_type)
    problem = limits.processor_problem()
    assert problem is None if is_tried else problem.startswith(f"Chip 7 ({machine_type}): ")


def test_the_flags_of_this_processor_say_what_torch_says():
    assert (limits.processor_problem() is None) == torch.cpu._is_avx512_supported()


def test_the_longest_sequence_fills_a_tile(monkeypatch):
    assert limits.longest_sequence(2, 64) >= 32  # of this machine
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"l2_cache_size": 2 << 20})
    # (queries and outputs, keys and values) * head, and 32 scores
    assert limits.longest_sequence(2, 64) == (1 << 20) // (64 * 12 + 128) // 32 * 32
    assert limits.longest_sequence(4, 64) < limits.longest_sequence(2, 64)
