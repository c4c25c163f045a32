"""The state of delayed scaling in a model: scales and the largest entries of earlier micro-batches.

The largest entries are agreed on by all tensor-, context- and data-parallel ranks of a stage, so that a layer's state
is the same on each of them, in every layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from openrlhf_ext.megatron.fp8.emulated import EmulatedLinear, scalings
from openrlhf_ext.megatron.fp8.transformer_engine import linear_layers


class ScalingState:
    """What the linear layers of this rank's chunks remember; nothing unless their recipe is 'delayed'.

    Plain tensors, changed in place.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._chunks = list(chunks)

    def tensors(self) -> dict[str, Tensor]:
        """fp32 scales and histories by ``layers.<number in the whole model>.<layer>.<what>``, contiguous.

        TransformerEngine's exist from the first forward pass on.
        """
        return dict(self._tensors())

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for chunk in self._chunks:
            for path, layer in linear_layers(chunk.decoder).items():  # type: ignore[arg-type]  # torch types attributes as modules
                _, index, rest = path.split(".", 2)
                number = chunk.decoder.layers[int(index)].layer_number - 1  # type: ignore[union-attr, operator, index]
                for name, tensor in _held(layer):
                    yield f"layers.{number}.{rest}.{name}", tensor

    def reset(self) -> None:
        for name, tensor in self._tensors():
            tensor.fill_(1.0 if name.endswith("scale") else 0.0)

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """In the body passes in training are for the scales only: emulated layers do not round, and afterwards nothing
        waits to be recomputed and histories hold the last micro-batch alone, because the others were the same."""
        emulated = [scaling for chunk in self._chunks for scaling in scalings(chunk).values()]
        for scaling in emulated:
            scaling.rounds = False
        try:
            yield
        finally:
            for scaling in emulated:
                scaling.rounds = True
                scaling.forget_passes()
        for name, tensor in self._tensors():
            if name.endswith("history"):
                tensor[:-1].zero_()


def _held(layer: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    if isinstance(layer, EmulatedLinear):
        for operand, scale in layer.scaling.scales.items():
            yield f"{operand}.scale", scale.scale
            yield f"{operand}.history", scale.history_A
        return
    for direction in ("scaling_fwd", "scaling_bwd"):  # TransformerEngine's
        meta = getattr(layer, "fp8_meta", {}).get(direction)
        if meta is not None and hasattr(meta, "amax_history"):
            yield f"{direction}.scale", meta.scale
            yield f"{direction}.history", meta.amax_history
