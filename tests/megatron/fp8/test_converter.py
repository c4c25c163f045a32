"""FP8's answers as a layer converter, as far as no layer is needed."""

from __future__ import annotations

import pickle

from openrlhf_ext.fp8.recipe import RECIPES, Recipe
from openrlhf_ext.megatron.families import family_of
from openrlhf_ext.megatron.layers.fp8 import FP8Layers
from openrlhf_ext.megatron.settings import layer_converters
from openrlhf_ext.options.sections.models import FP8, DeepSpeed


class Options:
    def __init__(self, **fp8) -> None:
        self.fp8, self.ds = FP8(**fp8), DeepSpeed()


def test_products_take_16_tokens_and_gathered_blocks_are_whole():
    for emulate in (False, True):
        layers = {name: FP8Layers(Recipe(name, emulate=emulate)) for name in RECIPES}
        units = {
            name: [converter.piece_unit(pieces) for pieces in (1, 2)]
            for name, converter in layers.items()
        }
        assert units == {"blockwise": [16, 128], "current": [16, 16], "delayed": [16, 16]}


def test_the_driver_makes_it_from_the_options_and_sends_it():
    assert layer_converters(Options(), family_of("qwen2")) == ()
    made = layer_converters(
        Options(enable=True, emulate=True, recipe="current"), family_of("qwen2")
    )
    assert made == (FP8Layers(Recipe("current", "hybrid", emulate=True)),)
    assert pickle.loads(pickle.dumps(made)) == made
