"""vLLM's sampler of drafts on a CPU, with the patch and without it."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections import Counter
from itertools import product

import pytest

from openrlhf_ext.patches.import_hooks import MARK
from tests.patience import PATIENCE_S

SAMPLES = 100_000
SAMPLE = f"""
    import json, sys
    from types import SimpleNamespace
    import torch
    import openrlhf_ext.patches as patches
    patches.apply() if "patched" in sys.argv else None
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler as sampler
    current_platform.register_triton_kernel_overrides()
    torch.manual_seed(0)
    n, temperature, top_p = {SAMPLES}, 0.7, 0.9
    logits = torch.randn(3, 4)  # of two drafted tokens, and of one more
    def full(value): return torch.full((n,), value)
    asked = SimpleNamespace(all_greedy=False, all_random=True, generators={{}}, top_k=None,
                            temperature=full(temperature), top_p=full(top_p))
    ends = 2 * torch.arange(1, n + 1, dtype=torch.int32)
    processed = sampler.apply_sampling_constraints(logits[:2].repeat(n, 1), ends, asked)
    last = sampler.apply_top_k_top_p(logits[2:] / temperature, None, torch.tensor([top_p]))
    bonus = torch.multinomial(last[0].softmax(-1), n, replacement=True)[:, None].int()
    drafts = logits[:2].argmax(-1).int()
    sampled = sampler.rejection_sample(drafts.repeat(n), [2] * n, 2, ends, None, processed, bonus, asked)
    exact = sampler.apply_top_k_top_p(logits / temperature, None, torch.full((3,), top_p)).softmax(-1)
    print(json.dumps([exact.tolist(), drafts.tolist(), sampled.tolist()]))
    """


def run_python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


def deviation(way: str) -> float:
    """Chi-square over its degrees of freedom, of 100,000 requests' tokens."""
    run = run_python(SAMPLE, way)
    assert run.returncode == 0, run.stderr
    exact, drafts, sampled = json.loads(run.stdout.splitlines()[-1])
    counts = Counter(tuple(token for token in row if token >= 0) for row in sampled)
    expected: dict[tuple[int, ...], float] = {}
    for text in product(range(4), repeat=3):
        kept = 1 + next((i for i in range(2) if text[i] != drafts[i]), 2)
        share = 1.0
        for place in range(kept):
            share *= exact[place][text[place]]
        expected[text[:kept]] = SAMPLES * share
    assert sum(counts.values()) == SAMPLES
    cells = [text for text, mean in expected.items() if mean > 10]
    squares = [(counts[text] - expected[text]) ** 2 / expected[text] for text in cells]
    return sum(squares) / (len(cells) - 1)


def test_drafts_leave_the_distribution_as_it_is() -> None:
    assert deviation("patched") < 3.0


def test_without_the_patch_they_do_not() -> None:
    assert not deviation("stock") < 100.0


@pytest.mark.parametrize(
    "module", ["vllm.utils.cpu_triton_utils", "vllm.v1.worker.gpu_model_runner"]
)
def test_a_worker_that_vllm_spawns_gets_it_from_the_worker_extension(module: str) -> None:
    """By then it has imported what is changed."""
    code = f"""
        import {module} as changed
        assert not hasattr(changed, "{MARK}")
        import openrlhf_ext.rollout.worker_extension
        assert hasattr(changed, "{MARK}")
        """
    run = run_python(code)
    assert run.returncode == 0, run.stderr
