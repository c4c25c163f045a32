"""What the configurations of all trainers have, so that rules and records ask them alike."""

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
    """What this command calls the options of ``as_run``, where the names differ."""

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
        """Ranks of the model under training."""

    @property
    @abstractmethod
    def model_options(self) -> list[str]:
        """The options that name the models of the run."""

    @abstractmethod
    def as_run(self) -> Any:
        """The ``RunConfig`` whose policy is trained as these options say, for the planner."""

    @property
    def layout(self) -> ParallelLayout:
        """Of the model under training."""
        return ParallelLayout.of(self.megatron, self.world_size)

    @property
    def model_path(self) -> str | None:
        """Of the model under training."""
        return getattr(self, self.trained).model_name_or_path

    @property
    def training_label(self) -> str:
        """What of the trained layers progress lines, records and checkpoints must not hide; mostly
        empty."""
        return self.fp8.training_label
