"""Gated delta nets on vLLM's CPU build, with the patch and without it; tests/rollout/test_hybrid.py
has whole engines."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from openrlhf_ext.delta_rule import Chunks, Gaps, Inputs, causal_convolution, gated_delta_rule
from openrlhf_ext.patches import vllm_gdn
from tests.patience import PATIENCE_S

INSPECT = """
import sys
from openrlhf_ext import patches
from openrlhf_ext.patches import vllm_gdn
if {stock}:
    vllm_gdn._CHANGES.clear()
    vllm_gdn.DEFERRED.clear()
patches.apply()
import torch
import vllm
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.model_executor.models.registry import ModelRegistry
sys.modules["torchvision"] = None
model = ModelRegistry.models["Qwen3_5ForCausalLM"]
model.load_model_cls()
assert model.inspect_model_cls().is_hybrid
usual = gdn_attention.register_cpu_gdn_attention_ops.__globals__["cpu_gdn_attention_core"]
assert usual.__module__ == vllm_gdn.__name__
gdn_attention.register_cpu_gdn_attention_ops()
schema = str(torch.ops.vllm.cpu_gdn_attention_core.default._schema)
assert "Tensor(a3!) core_attn_out" in schema and schema.endswith("-> ()"), schema
"""


@pytest.mark.parametrize("stock", [False, True])
def test_a_text_model_needs_no_torchvision(stock: bool) -> None:
    run = subprocess.run(
        [sys.executable, "-c", INSPECT.format(stock=stock)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (run.returncode != 0) == stock, run.stderr
    if stock:
        assert "torchvision" in run.stderr.splitlines()[-1]


KEY_HEADS, HEADS, KEYS, VALUES, WIDTH, SLOTS = 2, 4, 16, 8, 4, 5
PARTS = [KEY_HEADS * KEYS, KEY_HEADS * KEYS, HEADS * VALUES]


def heads(mixed_LD: Tensor) -> list[Tensor]:
    parts = zip(mixed_LD.split(PARTS, -1), (KEYS, KEYS, VALUES), strict=True)
    return [part.unflatten(-1, (-1, size)) for part, size in parts]


def layer() -> Any:
    """What the operator reads of vLLM's; the slots of requests have what others left."""
    return SimpleNamespace(
        conv1d=SimpleNamespace(weight=torch.randn(sum(PARTS), 1, WIDTH), bias=None),
        activation="silu",
        A_log=torch.randn(HEADS),
        dt_bias=torch.randn(HEADS),
        kv_cache=[
            torch.full((SLOTS, WIDTH - 1, sum(PARTS)), torch.nan),
            torch.full((SLOTS, HEADS, VALUES, KEYS), torch.nan),
        ],
        rearrange_mixed_qkv=lambda mixed_LD: [part[None] for part in heads(mixed_LD)],
    )


def step(going: list[int], begun: dict[int, tuple[int, bool]]) -> Any:
    """``going``: slots of requests with one more token; ``begun``: by slot, how many tokens of a
    prompt, and whether they go on."""
    lengths = [1] * len(going) + [length for length, _ in begun.values()]
    return SimpleNamespace(
        num_decodes=len(going),
        num_decode_tokens=len(going),
        num_prefills=len(begun),
        num_prefill_tokens=sum(length for length, _ in begun.values()),
        non_spec_state_indices_tensor=torch.tensor([*going, *begun], dtype=torch.int32),
        non_spec_query_start_loc=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(
            0, dtype=torch.int32
        ),
        has_initial_state=torch.tensor([True] * len(going) + [each for _, each in begun.values()]),
    )


def test_requests_in_steps_get_what_whole_sequences_do() -> None:
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    torch.manual_seed(0)
    own, lengths = layer(), {1: 85, 3: 7, 4: 2}
    mixed = {slot: torch.randn(length, sum(PARTS)) for slot, length in lengths.items()}
    small = {slot: torch.randn(length, 2 * HEADS) for slot, length in lengths.items()}
    steps = [
        step([], {1: (70, False), 3: (5, False)}),
        step([3], {1: (13, True), 4: (1, False)}),
        step([4, 1, 3], {}),
        step([1], {}),
    ]
    done, found = dict.fromkeys(lengths, 0), {slot: [] for slot in lengths}
    for each in steps:
        slots = each.non_spec_state_indices_tensor.tolist()
        sizes = each.non_spec_query_start_loc.diff().tolist()
        rows = {
            slot: slice(done[slot], done[slot] + size)
            for slot, size in zip(slots, sizes, strict=True)
        }
        mixed_LD = torch.cat([mixed[slot][row] for slot, row in rows.items()])
        b_LH, a_LH = torch.cat([small[slot][row] for slot, row in rows.items()]).chunk(2, -1)
        out_LHV = torch.full((len(mixed_LD), HEADS, VALUES), torch.nan)
        vllm_gdn._attend(gdn_attention, own, each, mixed_LD, b_LH, a_LH, out_LHV)
        for slot, part in zip(slots, out_LHV.split(sizes), strict=True):
            found[slot].append(part)
            done[slot] += len(part)
    assert done == lengths
    gaps = Gaps([*lengths.values()], WIDTH)
    convolved = F.silu(causal_convolution(torch.cat([*mixed.values()]), own.conv1d.weight, gaps))
    b_LH, a_LH = torch.cat([*small.values()]).chunk(2, -1)
    inputs = Inputs.of_layer(heads(convolved), b_LH, a_LH, own.A_log, own.dt_bias)
    expected = gated_delta_rule(inputs, Chunks([*lengths.values()]))
    assert (
        torch.cat([part for parts in found.values() for part in parts]) - expected
    ).abs().max() < 1e-5
    untouched = [slot for slot in range(SLOTS) if slot not in lengths]
    assert all(cache[untouched].isnan().all() for cache in own.kv_cache)
