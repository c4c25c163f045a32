from __future__ import annotations

import ast
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from openrlhf_ext.patches import megatron_cpu
from openrlhf_ext.patches.megatron_cpu import bytecode_folder, rewrite_for_cpu
from tests.launch import launch
from tests.patience import PATIENCE_S

on_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with CUDA Megatron is loaded as it is"
)


@pytest.mark.parametrize(
    ("source", "rewritten"),
    [
        ("torch.cuda.current_device()", "torch.device('cpu')"),
        ("torch.cuda.synchronize()", "None"),
        ("torch.zeros([], device='cuda')", "torch.zeros([], device='cpu')"),
        ("torch.zeros([], device='cuda:0')", "torch.zeros([], device='cpu')"),
        ("torch.device('cuda')", "torch.device('cpu')"),
        ("torch.device('cuda', torch.cuda.current_device())", "torch.device('cpu')"),
        ("x.cuda(non_blocking=True).view(-1)", "x.cpu().view(-1)"),
        ("torch.empty(3, pin_memory=True)", "torch.empty(3, pin_memory=False)"),
        ("p.type() in ['torch.cuda.HalfTensor']", "p.type() in ['torch.HalfTensor']"),
        ("torch.cuda.get_rng_state()", "torch.get_rng_state()"),
        ("torch.cuda.manual_seed(seed)", "torch.manual_seed(seed)"),
    ],
)
def test_cuda_expressions_name_the_cpu(source: str, rewritten: str) -> None:
    assert ast.unparse(rewrite_for_cpu(source)) == rewritten


@pytest.mark.parametrize(
    "source",
    [
        "torch.cuda.is_available()",
        "x.to('cpu')",
        "f(name='cuda')",
        "{'cuda': 1}",
        "other.device('cuda')",
    ],
)
def test_everything_else_stays(source: str) -> None:
    assert ast.unparse(rewrite_for_cpu(source)) == ast.unparse(ast.parse(source))


def test_line_numbers_are_kept() -> None:
    source = "a = 1\n\nb = f(\n    x,\n    device='cuda',\n)\ntorch.cuda.synchronize()\nboom()\n"
    lines = lambda tree: [node.lineno for node in tree.body]  # noqa: E731
    assert lines(rewrite_for_cpu(source)) == lines(ast.parse(source))


@on_cpu
def test_random_streams_are_separate_and_do_not_disturb_the_default_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    before = torch.get_rng_state()
    try:
        model_parallel_cuda_manual_seed(7, tp_rank=1, ep_rank=0, etp_rank=0, force_reset_rng=True)
        tracker = get_cuda_rng_tracker()
        expected_default = torch.rand(2, generator=torch.Generator().manual_seed(7))
        expected_stream = torch.rand(4, generator=torch.Generator().manual_seed(7 + 2718 + 1))
        with caplog.at_level(logging.WARNING):
            with tracker.fork():
                first = torch.rand(2)
            default = torch.rand(2)
            with tracker.fork():
                second = torch.rand(2)
        torch.testing.assert_close(torch.cat([first, second]), expected_stream)
        torch.testing.assert_close(default, expected_default)
        assert "CPU RNG state changed" not in caplog.text
    finally:
        torch.set_rng_state(before)


def unequal_parts() -> list[tuple[list[float], list[float]]]:
    """What a rank has of all ranks' parts, and of their sums."""
    from megatron.core.tensor_parallel import mappings

    dist.init_process_group("gloo")
    group, rank, found = dist.group.WORLD, dist.get_rank(), []
    for sizes in SIZES:
        part = torch.full((sizes[rank], 1), rank + 1.0)
        whole = mappings._gather_along_first_dim(part, group, sizes)
        summed = mappings._reduce_scatter_along_first_dim(whole, group, sizes)
        found.append((whole.flatten().tolist(), summed.flatten().tolist()))
    return found


SIZES = [2, 3], [0, 1], [0, 0]


@on_cpu
def test_ranks_exchange_parts_of_any_length() -> None:
    """Of the tokens of experts that ranks share; nobody's experts may have any."""
    for rank, found in enumerate(launch("tests.patches.test_megatron_cpu", "unequal_parts", 2)):
        for sizes, (whole, summed) in zip(SIZES, found, strict=True):
            assert whole == [1.0] * sizes[0] + [2.0] * sizes[1]
            assert summed == [2.0 * (rank + 1)] * sizes[rank]


@on_cpu
def test_jit_fusion_is_off_and_the_source_can_be_read() -> None:
    import inspect

    from megatron.core import jit
    from megatron.core.pipeline_parallel import schedules

    assert jit.jit_fuser is jit.noop_decorator
    assert 'device="cuda"' in inspect.getsource(schedules.forward_backward_no_pipelining)


def _run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def test_apply_imports_nothing_heavy_and_may_be_repeated() -> None:
    result = _run_python(
        """
        import sys
        from openrlhf_ext import patches
        patches.apply()
        finders = list(sys.meta_path)
        patches.apply()
        assert sys.meta_path == finders
        heavy = {"torch", "megatron", "openrlhf", "transformers", "ray", "vllm"} & set(sys.modules)
        assert not heavy, heavy
        """
    )
    assert result.returncode == 0, result.stderr


@on_cpu
def test_applying_after_megatron_says_so() -> None:
    result = _run_python(
        """
        import torch, sys
        sys.modules["megatron.core"] = torch  # what counts is that it is there
        from openrlhf_ext import patches
        patches.apply()
        """
    )
    assert "megatron.core was imported before openrlhf_ext.patches.apply()" in result.stderr


@on_cpu
def test_another_megatron_is_refused_at_import() -> None:
    result = _run_python(
        """
        from openrlhf_ext import patches
        patches.base.installed_version = lambda distribution: "0.17.0"
        patches.apply()
        import megatron.core
        """
    )
    assert result.returncode == 1
    assert (
        "PatchRefused: patch megatron_cpu was written for megatron-core 0.19.2, found 0.17.0"
        in result.stderr
    )


def test_with_cuda_megatron_is_loaded_as_it_is() -> None:
    result = _run_python(
        """
        from openrlhf_ext import patches
        patches.megatron_cpu.has_cuda = lambda: True
        patches.apply()
        import sys
        sys.path.append(f"{sys.prefix}/triton")  # Megatron imports it on GPUs
        import torch
        from megatron.core import jit
        assert jit.jit_fuser is torch.compile
        """
    )
    assert result.returncode == 0, result.stderr


@on_cpu
def test_rewritten_bytecode_is_cached_apart_from_the_ordinary_one(tmp_path: Path) -> None:
    code = f"""
        import sys
        from pathlib import Path
        sys.dont_write_bytecode = False
        from openrlhf_ext import patches
        patches.megatron_cpu.bytecode_folder = lambda: Path({str(tmp_path)!r})
        compiled = []
        rewrite = patches.megatron_cpu.rewrite_for_cpu
        patches.megatron_cpu.rewrite_for_cpu = lambda data, path: compiled.append(path) or rewrite(data, path)
        patches.apply()
        from megatron.core import jit
        assert jit.jit_fuser is jit.noop_decorator
        print(len(compiled))
        """
    first, second = (_run_python(code) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert int(first.stdout) > 10 and int(second.stdout) == 0
    assert list(tmp_path.glob("megatron.core.jit.*.pyc"))


def test_cache_folder_is_in_the_environment_and_depends_on_the_patch() -> None:
    assert bytecode_folder().is_relative_to(sys.prefix)
    assert megatron_cpu.PATCH.name in bytecode_folder().name
