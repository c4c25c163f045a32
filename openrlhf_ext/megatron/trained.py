"""The trained part of a model: all of its weights, or adapters beside frozen weights. Code that
loads, exports, saves, or compares a model calls ``BuiltModel.trained`` and need not know which of
the two it is.

Every method is a collective over all ranks of the model unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from openrlhf_ext.megatron.frozen import FrozenCopy
from openrlhf_ext.megatron.layers.adapted import (
    adapter_parameters,
    add_adapters,
    merged_values,
    rounded_adapters,
    scaled_values,
    without_adapters,
)
from openrlhf_ext.megatron.layers.lora import LoRALayers, adapters_of
from openrlhf_ext.megatron.model.adapter import WEIGHTS
from openrlhf_ext.megatron.model.hf_files import adapter_side_files
from openrlhf_ext.megatron.model.hf_weights import HFExporter, Ownership, Value

Form = Literal["adapter", "merged"]
"""The form of adapters in engines (``vllm.lora``)."""


class WholeModel:
    """All weights are trained, or none. These methods are also the defaults of ``Adapters``."""

    is_beside_weights = False

    def __init__(self, model: Any) -> None:
        self._model = model  # a ``BuiltModel``; its module imports this one

    def build(self) -> None:
        """Adds the trained parameters to chunks whose weights are loaded."""

    def in_fp32(self, chunk: torch.nn.Module) -> Iterable[torch.nn.Parameter]:
        """Parameters that stay fp32 in a bf16 model. Not a collective."""
        return ()

    def is_saved(self, parameter: Tensor) -> bool:
        """Whether a resumable checkpoint holds the parameter. Not a collective."""
        return True

    def facts(self) -> dict[str, Any]:
        """Facts that a resumable checkpoint must match besides shape and precision."""
        return {}

    def exporter(self, value: Value | None = None) -> HFExporter:
        """Returns an exporter of the trained weights in Hugging Face form; ``value``: see
        ``HFExporter``."""
        return self._model.exporter(value)

    def engine_exporter(self, form: Form, dtype: torch.dtype, most_streams: int) -> HFExporter:
        """Returns an exporter of the weights that engines of this ``dtype`` get in a weight
        sync."""
        return self._model.exporter(most_streams=most_streams)

    def as_in_engines(
        self, form: Form, dtype: torch.dtype, version: int
    ) -> AbstractContextManager[None]:
        """Inside the body, forward passes match the engines that have update ``version`` (0: no
        update yet). Not a collective."""
        return nullcontext()

    def shows_every_step(self, form: Form) -> bool:
        """Whether a step that changes parameters always changes the weights in the engines. Not a
        collective."""
        return True

    def as_loaded(self) -> AbstractContextManager[None]:
        """Inside the body, forward passes use the loaded weights without the adapters. Not a
        collective."""
        return nullcontext()

    def reference(self, state: Iterable[Tensor]) -> FrozenCopy | None:
        """Returns a copy of the present weights; None if they stay frozen and ``as_loaded``
        provides them."""
        return FrozenCopy(self._model.chunks, state=state)

    def write(
        self, target: str | Path, entries: Mapping[str, Any] | None, value: Value | None
    ) -> dict[str, int]:
        """Writes the trained weights as a Hugging Face checkpoint; see ``BuiltModel.write_rows``.

        ``entries``: additional entries of its config.json.
        """
        return self._model.write_hf(target, entries, value)


class Adapters(WholeModel):
    """Adapters beside frozen weights (``layers.adapted``); their checkpoints hold only the
    adapters, in peft's format."""

    is_beside_weights = True

    def __init__(self, model: Any, lora: LoRALayers) -> None:
        super().__init__(model)
        self._lora = lora
        self._shape = lora.shape(model.shape)
        self._fingerprint: str | None = None

    def build(self) -> None:
        add_adapters(
            self._model.chunks,
            self._model.shape,
            self._lora.adapter,
            self._lora.seed,
            self._lora.path,
        )

    def in_fp32(self, chunk: torch.nn.Module) -> Iterable[torch.nn.Parameter]:
        return adapter_parameters([chunk])

    def is_saved(self, parameter: Tensor) -> bool:
        return parameter.requires_grad  # the base stays in its own checkpoint

    def facts(self) -> dict[str, Any]:
        return {
            "adapters": {
                **self._lora.adapter.options,
                "weights of the base": self.base_fingerprint(),
            }
        }

    def base_fingerprint(self) -> str:
        """Returns a fingerprint of the frozen weights, the same in every layout."""
        if self._fingerprint is None:
            self._fingerprint = self._model.exporter().fingerprint()
        return self._fingerprint

    def exporter(self, value: Value | None = None) -> HFExporter:
        return self._exporter(value, 1, torch.float32)

    def engine_exporter(self, form: Form, dtype: torch.dtype, most_streams: int) -> HFExporter:
        if form == "merged":
            return self._model.exporter(merged_values(self._model.chunks), most_streams)
        return self._exporter(scaled_values(self._model.chunks, dtype), most_streams, dtype)

    def _exporter(self, value: Value | None, most_streams: int, dtype: torch.dtype) -> HFExporter:
        ownership = Ownership(self._shape, self._model.settings.layout, most_streams)
        return HFExporter(self._model.chunks, ownership, value, dtype)

    def as_in_engines(
        self, form: Form, dtype: torch.dtype, version: int
    ) -> AbstractContextManager[None]:
        if version == 0:
            return self.as_loaded()
        return nullcontext() if form == "merged" else rounded_adapters(self._model.chunks, dtype)

    def shows_every_step(self, form: Form) -> bool:
        # A few updates of an adapter may be below the bf16 resolution of the merged weights.
        return form == "adapter" or self._model.dtype == torch.float32

    def as_loaded(self) -> AbstractContextManager[None]:
        return without_adapters(self._model.chunks)

    def reference(self, state: Iterable[Tensor]) -> FrozenCopy | None:
        return None

    def write(
        self, target: str | Path, entries: Mapping[str, Any] | None, value: Value | None
    ) -> dict[str, int]:
        """Writes the adapters in the format that peft and vLLM load, in fp32, with the
        tokenizer."""
        files = adapter_side_files(
            self._model.side_files, self._lora.adapter.config(self._model.settings.model_path)
        )
        return self._model.write_rows(
            self.exporter(value).rows(), self._shape, torch.float32, files, target, single=WEIGHTS
        )


def trained_of(model: Any) -> WholeModel:
    """Returns ``Adapters`` if a converter of the model's layers adds adapters, else
    ``WholeModel``."""
    lora = adapters_of(model.settings.converters)
    return WholeModel(model) if lora is None else Adapters(model, lora)
