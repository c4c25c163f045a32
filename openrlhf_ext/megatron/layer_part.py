"""What attentions and MLPs of a decoder layer have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class LayerPart(ABC):
    """What the rest of the package asks of every kind of either. Its fields have the names and
    values of ``ModelShape``'s."""

    # how Megatron cuts each parameter, its rows and columns (see ``Rule``), in the order in which
    # it builds them;
    # ``{expert}`` stands for the number of an expert on its rank
    parameters: ClassVar[dict[str, tuple[Any, ...]]]
    # what most families call the tensors, in the order in which they are exported; ``{expert}``:
    # number of an expert
    names: ClassVar[dict[str, tuple[str, ...]]]

    hidden_size: int

    @staticmethod
    def problems(config: Mapping[str, Any]) -> Iterator[str]:
        """Settings of a ``config.json`` (``Family.usual``) that this kind cannot build, one text
        for each."""
        yield from ()

    @property
    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Entries of each dimension that only this kind has, by its name in ``parameters``."""

    @property
    @abstractmethod
    def divided(self) -> dict[str, int]:
        """Counts that the tensor-parallel size must divide, by their names in messages."""

    @property
    @abstractmethod
    def token_weights(self) -> int:
        """Number of weights that each token is multiplied by."""

    @abstractmethod
    def megatron_arguments(self) -> dict[str, Any]:
        """Arguments of TransformerConfig."""
