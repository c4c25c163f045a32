"""Lets transformers give tokenizers and configurations without importing what generates, and what
detects objects.

Dependency: transformers 5.19.0.

Wrong there: modules that every process needs import, at their top, what a few uses need:
  models/auto/auto_factory.py:41                   generation (torch's compiler, FSDP), for remote
                                                   models
  loss/loss_for_object_detection.py:27 and others  scipy.optimize
  configuration_utils.py:36                        tokenizers of GGUF files
That is a second of a processor in the driver and in every command that reads a tokenizer, a third
of one in an engine.

Changes: these import statements, and no others, bind names that import their module when they are
first used. The one function that needs a class where only its name is bound gets the class before
it runs. Another transformers is left as it is: it only starts more slowly.

Remove when: transformers imports these inside the functions that use them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from openrlhf_ext.patches.base import Patch
from openrlhf_ext.patches.import_hooks import patch_finder
from openrlhf_ext.patches.openrlhf_imports import deferring

_LOSSES = (
    "deformable_detr",
    "for_object_detection",
    "grounding_dino",
    "lw_detr",
    "rf_detr",
    "rt_detr",
)


def _install() -> None:
    for name in _LOSSES:
        patch_finder.run_around(
            f"transformers.loss.loss_{name}", partial(deferring, PATCH, ("scipy.optimize",))
        )
    patch_finder.run_around("transformers.models.auto.auto_factory", _without_generation)
    patch_finder.run_around(
        "transformers.configuration_utils",
        partial(deferring, PATCH, ("transformers.modeling_gguf_pytorch_utils",)),
    )


PATCH = Patch(
    name="transformers_imports",
    dependency="transformers",
    versions=("5.19.0",),
    problem=(
        "models/auto/auto_factory.py:41 and loss/loss_for_object_detection.py:27 import "
        "generation and scipy.optimize in every process that reads a tokenizer, which uses "
        "neither"
    ),
    change="these import statements bind names that import their module when they are first used",
    removal="transformers imports these inside the functions that use them",
    install=_install,
    need=lambda: (True, "transformers imports what generates wherever a tokenizer is read"),
    optional=True,
)


@contextmanager
def _without_generation(factory: ModuleType) -> Iterator[None]:
    with deferring(PATCH, ("transformers.generation",), factory):
        yield
    add: Any = vars(factory)["add_generation_mixin_to_remote_model"]

    def add_generation_mixin_to_remote_model(model_class: type) -> type:
        from transformers.generation import GenerationMixin

        # a base class: a name that stands for it is none
        vars(factory)["GenerationMixin"] = GenerationMixin
        return add(model_class)

    vars(factory)["add_generation_mixin_to_remote_model"] = add_generation_mixin_to_remote_model
