"""The converters of the package, and those that a run's options ask for."""

from __future__ import annotations

from typing import Any

from openrlhf_ext.megatron.fp8.converter import FP8Layers
from openrlhf_ext.megatron.layers.converter import LayerConverter

KNOWN: tuple[type[LayerConverter], ...] = (FP8Layers,)


def layer_converters(config: Any) -> tuple[LayerConverter, ...]:
    """Of the policy's decoder, from the sections of a ``RunConfig``, in the order in which they are applied."""
    recipe = config.fp8.training_recipe
    return () if recipe is None else (FP8Layers(recipe),)
