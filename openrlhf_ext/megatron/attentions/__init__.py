"""The kinds of attention that a decoder layer may have: one file each. A family names its kinds, and
config.json says the kind of each layer.

Configuration and driver ask a kind too, so it imports neither torch nor Megatron before a model is
built.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from openrlhf_ext.megatron.layer_part import LayerPart

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from openrlhf_ext.megatron.layout import ParallelLayout


@dataclass(frozen=True)
class Kept:
    """Bytes that autograd keeps of a layer's attention for a micro-batch, without its norm.

    Attributes:
        around: before and after the core.
        core: of what recomputation of attention (core_attn) computes again.
        operands: the tensors that this recomputation keeps instead of ``core``.
    """

    around: int
    core: int
    operands: int


@dataclass(frozen=True)
class Attention(LayerPart):
    """What the rest of the package asks of every kind of attention."""

    # what ``layer_types`` of config.json calls its layers
    layer_type: ClassVar[str]
    # entries of config.json that have to be there -> the largest value accepted
    entries: ClassVar[dict[str, int]]
    # matrices of linear layers that get no adapters
    without_adapters: ClassVar[tuple[str, ...]] = ()
    # why a sequence cannot be split over context-parallel ranks; empty: it can
    no_context_parallel: ClassVar[str] = ""
    # its name, and why its linear layers cannot be FP8, in trainer or engines; empty: they can
    no_fp8: ClassVar[str] = ""
    # what has to be installed where there are GPUs: a module, and its requirement
    gpu_module: ClassVar[tuple[str, str] | None] = None

    @staticmethod
    @abstractmethod
    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of ``ModelShape`` that only this kind has, from a ``config.json``
        (``Family.usual``)."""

    @property
    def shared(self) -> dict[str, int]:
        """Counts that the tensor-parallel size must divide or be a multiple of."""
        return {}

    @property
    def pair_width(self) -> int:
        """Entries that a token and each token it sees multiply: for scores, and again for weighted
        values."""
        return 0

    @property
    def token_operations(self) -> int:
        """Operations of a token that depend neither on weights nor on the sequence's length."""
        return 0

    @abstractmethod
    def kept(self, tokens: int, layout: ParallelLayout, entry: int, linear_input: int) -> Kept:
        """For ``tokens`` of a rank; ``entry``: bytes of an entry, ``linear_input``: of an entry of a
        linear layer's input, of which the layer has a copy if they differ."""

    def token_bytes(self, tensor_parallel_size: int, entry: int) -> int:
        """Bytes that an engine's worker keeps for each token of a request."""
        return 0

    def request_bytes(self, tensor_parallel_size: int, entry: int) -> int:
        """Bytes that an engine's worker keeps for each request, whatever its length."""
        return 0

    @abstractmethod
    def spec(self, norm: type, norm_linear: type, row_linear: type, core: type) -> ModuleSpec:
        """The attention of our layers, made of these: ``norm_linear`` is a column-parallel linear
        with a norm before it, ``core`` attends from queries to keys."""

    def transformer_engine_layer(self, layer: ModuleSpec) -> ModuleSpec:
        """TransformerEngine's layer with this attention, from Megatron's with full attention."""
        return layer
