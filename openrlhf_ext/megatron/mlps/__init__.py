"""The kinds of MLP that a decoder layer may have: one file each. A family names its kind.

Configuration and driver ask a kind too, so it imports neither torch nor Megatron before a model is
built.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from openrlhf_ext.megatron.layer_part import LayerPart

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from openrlhf_ext.megatron.layout import ParallelLayout


@dataclass(frozen=True)
class MLP(LayerPart):
    """What the rest of the package asks of every kind of MLP."""

    # field of ``ModelShape`` -> its entry of config.json, and the largest value accepted
    entries: ClassVar[dict[str, tuple[str, int]]]
    is_mixture: ClassVar[bool] = False
    # of ``megatron.recompute_modules``, for this kind
    recompute_module: ClassVar[Literal["mlp", "moe"]] = "mlp"
    # field of ``ModelShape`` -> its entry of config.json, true or false
    flags: ClassVar[dict[str, str]] = {}

    @staticmethod
    def problems(config: Mapping[str, Any]) -> Iterator[str]:
        if config["hidden_act"] != "silu":
            yield f"hidden_act must be 'silu', got {config['hidden_act']!r}"

    @property
    def expert_weights(self) -> int:
        """Number of weights of all experts of a layer, which are dealt over ranks."""
        return 0

    @property
    def idle_weights(self) -> int:
        """Those of the experts that a token is not multiplied by."""
        return 0

    @abstractmethod
    def activation_bytes(
        self, tokens: int, layout: ParallelLayout, entry: int, linear_input: int
    ) -> int:
        """Bytes that autograd keeps after the norm; ``entry``: bytes of an entry, ``linear_input``:
        of an entry of the down projection's input."""

    def moved_bytes(self, entry: int) -> int:
        """Bytes of the GPU's memory that a layer's forward pass writes and reads for each token and
        entry of its hidden state because tokens go to experts."""
        return 0

    def exchange_bytes(self, tokens: int, layout: ParallelLayout, entry: int) -> int:
        """Bytes that a layer's pass holds for a while, beside what autograd keeps, because tokens
        go to experts."""
        return 0

    @staticmethod
    @abstractmethod
    def submodules(
        norm: type, norm_linear: type, column_linear: type, row_linear: type
    ) -> dict[str, Any]:
        """The MLP's part of the submodules of our layers, made of these: ``norm_linear`` is a
        column-parallel linear with a norm before it."""

    @classmethod
    @abstractmethod
    def transformer_engine_layer(cls, layer: ModuleSpec) -> ModuleSpec:
        """TransformerEngine's layer with this MLP, from Megatron's dense one. Raises ValueError: it
        cannot have it."""
