from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from openrlhf_ext.megatron.model.flops import ForwardFlops, forward_flops, peak_tflops
from openrlhf_ext.megatron.model.shape import ModelShape, read_model_shape
from tests.models import MIXTURES, make_tiny_model


def test_frozen_weights_get_no_gradients():
    flops = ForwardFlops(layers=100, attention=10, head=1)
    assert flops.training == 3 * flops.total
    assert replace(flops, frozen=True).training == 2 * 101 + 3 * 10


def test_a_model_counted_by_hand():
    """2 layers, hidden 6, 2 query heads and 1 key-value head of size 4, MLP 10, vocabulary 7."""
    shape = ModelShape(
        model_type="qwen2",
        num_layers=2,
        hidden_size=6,
        ffn_hidden_size=10,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        vocab_size=7,
        max_positions=8,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling_factor=None,
        tied_embeddings=False,
        qkv_bias=True,
        qk_norm=False,
    )
    flops = forward_flops(shape, [3, 2], predicted=4)
    # per token and layer: q 6x8, k 6x4, v 6x4, o 8x6, gate and up 6x10 each, down 10x6 = 324
    # multiply-adds
    assert flops.layers == 2 * 2 * 324 * 5
    # token i attends to i tokens: (1 + 2 + 3) + (1 + 2) = 9 pairs; 8 multiply-adds for a score and
    # 8 for the value
    assert flops.attention == 2 * 2 * (8 + 8) * 9
    assert flops.head == 2 * 6 * 7 * 4
    assert flops.total == 6480 + 576 + 336 and flops.training == 3 * flops.total


@pytest.mark.parametrize("family", ["qwen2", "llama", *MIXTURES])
def test_against_torchs_own_counter(tmp_path, family):
    """torch counts attention in full and the head for every position; the rest has to be the same
    number: of a mixture the router, the experts of each token, and the one of all tokens with its
    gate."""
    model = make_tiny_model(tmp_path, family)
    model.set_attn_implementation("eager")  # whose products the counter sees
    if family in MIXTURES:
        model.set_experts_implementation("eager")  # likewise
    shape, length = read_model_shape(tmp_path), 12
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(length)[None])
    ours = forward_flops(shape, [length], predicted=length)
    q = shape.num_heads * shape.head_dim
    full_attention = 4 * shape.num_layers * q * length * length
    assert counter.get_total_flops() == ours.layers + ours.head + full_attention
    assert ours.attention == full_attention * (length + 1) // (2 * length)


def test_devices_are_found_by_name():
    assert peak_tflops("NVIDIA H100 80GB HBM3") == peak_tflops("NVIDIA H200") == 989.4
    assert (
        peak_tflops("NVIDIA H100 PCIe") == 756.0 and peak_tflops("NVIDIA A100-SXM4-80GB") == 312.0
    )
    assert peak_tflops("NVIDIA H20") == 148.0 and peak_tflops("cpu") is None
