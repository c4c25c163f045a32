"""Model FLOPs of a decoder, a multiplication and an addition being two operations: matrix products
of the layers (all tokens), causal attention, and the vocabulary projection (only positions whose
next token is a response token). Norms, rotary embedding, softmax, the optimizer and recomputation
are not counted, so that MFU tells how much of the hardware the model itself uses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from openrlhf_ext.megatron.model.shape import ModelShape

# operations of the backward pass per operation of the forward pass: gradients of both factors of
# every product
BACKWARD = 2

# dense bf16 TFLOP/s of a device by a part of its name, without sparsity (NVIDIA's data sheets; SXM
# where there are two)
PEAK_BF16_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "H200": 989.4,
    "H800": 989.4,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "B200": 2250.0,
    "GB200": 2500.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A40": 149.7,
    "RTX 4090": 165.2,
}


@dataclass(frozen=True)
class ForwardFlops:
    """``frozen``: of a model whose weights get no gradients, because adapters are trained, whose
    own few operations are not counted."""

    layers: int
    attention: int
    head: int
    frozen: bool = False

    @property
    def total(self) -> int:
        return self.layers + self.attention + self.head

    @property
    def training(self) -> int:
        weights = self.layers + self.head
        return self.total + BACKWARD * self.attention + (1 if self.frozen else BACKWARD) * weights


def forward_flops(shape: ModelShape, lengths: Iterable[int], predicted: int) -> ForwardFlops:
    """FLOPs of a forward pass over whole sequences, of whose tokens ``predicted`` are response
    tokens."""
    lengths = list(lengths)
    weights = shape.of_layers(lambda kind: kind.token_weights)
    weights += shape.num_layers * shape.mlp.token_weights
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    outputs = 1 if shape.value_head is not None else shape.vocab_size
    return ForwardFlops(
        layers=2 * weights * sum(lengths),
        # scores, and the weighted sum of values; states of linear attention
        attention=2 * 2 * shape.of_layers(lambda kind: kind.pair_width) * pairs
        + shape.of_layers(lambda kind: kind.token_operations) * sum(lengths),
        head=2 * shape.hidden_size * outputs * predicted,
    )


def peak_tflops(device_name: str) -> float | None:
    # "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
    words = set(re.split(r"[\s-]+", device_name))
    known = [peak for part, peak in PEAK_BF16_TFLOPS.items() if words.issuperset(part.split())]
    return known[0] if known else None
