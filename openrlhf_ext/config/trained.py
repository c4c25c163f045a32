"""The common part of all trainers' configurations, so that rules and records can treat them
alike."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.options import sections
from openrlhf_ext.options.sections.models import FP8
from openrlhf_ext.options.table import Configuration


class TrainedConfig(Configuration):
    """Options of a command that trains a model."""

    trained: ClassVar[str]
    """The section of the model under training."""
    rank_options: ClassVar[str]
    """Options whose product is the number of ranks."""
    data_options: ClassVar[tuple[str, ...]]
    code_options: ClassVar[tuple[str, ...]] = ()
    names_in_run: ClassVar[Mapping[str, str]] = {}
    """This command's names for options of ``as_run``, where they differ."""

    if TYPE_CHECKING:  # each command declares its sections in the order of its help
        megatron: sections.Megatron
        fp8: FP8
        data: Any
        train: Any
        eval: Any
        ckpt: Any
        logger: Any
        ds: Any

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of ranks of the model under training."""

    @property
    @abstractmethod
    def model_options(self) -> list[str]:
        """The options that name the models of the run."""

    @abstractmethod
    def as_run(self) -> Any:
        """The ``RunConfig`` that trains the policy as these options say, for the planner."""

    @property
    def layout(self) -> ParallelLayout:
        """The layout of the model under training."""
        return ParallelLayout.of(self.megatron, self.world_size)

    @property
    def model_path(self) -> str | None:
        """The path of the model under training."""
        return getattr(self, self.trained).model_name_or_path

    @property
    def training_label(self) -> str:
        """A label for training-time changes to layers, shown in progress lines, records and
        checkpoints; mostly empty."""
        return self.fp8.training_label
