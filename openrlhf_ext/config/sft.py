"""The options of ``openrlhf_ext.cli.train_sft``: supervised fine-tuning under OpenRLHF's names."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from openrlhf_ext.inputs import shown
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.options import Int, added, no_meaning, not_yet, sections
from openrlhf_ext.options.sections.models import FP8, Optimizer
from openrlhf_ext.options.sections.sft import (
    Model,
    SupervisedAdam,
    SupervisedCkpt,
    SupervisedData,
    SupervisedDeepSpeed,
    SupervisedEval,
    SupervisedLogger,
    SupervisedTrain,
)
from openrlhf_ext.options.table import Configuration

# an option has its default and its meaning, as in a table
# fmt: off

_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class SupervisedConfig(Configuration, Optimizer):
    """Options of ``openrlhf_ext.cli.train_sft``, typed; built by ``load`` and checked by ``rules.check_supervised``."""

    needs = {"lr_scheduler!=constant": ("lr_warmup_ratio",), "lr_scheduler=cosine_with_min_lr": ("min_lr_ratio",)}
    usage: ClassVar[str] = (
        "usage: openrlhf-ext train_sft [--config FILE.yaml ...] [--section.name value ...]\n\nNames are those of "
        "OpenRLHF's train_sft; options marked + are added by openrlhf_ext. --help SECTION shows one group.\n"
    )
    trained: ClassVar[str] = "model"
    rank_options: ClassVar[str] = "model.num_gpus_per_node"
    data_options: ClassVar[tuple[str, ...]] = ("data.dataset", "eval.dataset")
    code_options: ClassVar[tuple[str, ...]] = ()

    model: Model = Model()
    megatron: sections.Megatron = sections.Megatron()
    fp8: FP8 = FP8()
    data: SupervisedData = SupervisedData()
    train: SupervisedTrain = SupervisedTrain()
    adam: SupervisedAdam = SupervisedAdam()
    eval: SupervisedEval = SupervisedEval()
    ckpt: SupervisedCkpt = SupervisedCkpt()
    logger: SupervisedLogger = SupervisedLogger()
    ds: SupervisedDeepSpeed = SupervisedDeepSpeed()
    local_rank: Int = no_meaning(-1, "rank on the node, set by DeepSpeed's launcher",
        why="LOCAL_RANK of the environment says it", instead="leave it out")
    use_ms: bool = not_yet(
        False, "load models and data from ModelScope", why="only local folders and the Hugging Face hub are read",
        instead="download first and give the local paths",
    )
    dry_run: bool = added(False, "say whether the run would start, print ranks and configuration, and stop")

    @property
    def world_size(self) -> int:
        """Ranks: what a launcher says, else what the command starts on this machine."""
        if "WORLD_SIZE" in os.environ:
            return int(os.environ["WORLD_SIZE"])
        return self.model.num_gpus_per_node or _gpus() or 1

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout.of(self.megatron, self.world_size)

    @property
    def training_label(self) -> str:
        """What of the layers records and checkpoints must not hide; mostly empty."""
        return self.fp8.training_label

    @property
    def model_path(self) -> str | None:
        return self.model.model_name_or_path

    @property
    def model_options(self) -> list[str]:
        return ["model.model_name_or_path"]

    def resolved(self) -> Iterable[tuple[str, Any]]:
        if self.model.gradient_checkpointing_enable:
            yield "megatron.recompute", "full"


def launcher_faults(ranks: int | None = None) -> Iterator[str]:
    """What is wrong with the variables that a launcher such as torchrun sets; ``ranks``: model.num_gpus_per_node."""
    given = {name: os.environ[name] for name in _LAUNCHER if name in os.environ}
    wrong = [f"{name}={shown(value)} is no whole number" for name, value in given.items() if not value.isdecimal()]
    if (missing := [name for name in _LAUNCHER[:3] if name not in given]) and {"RANK", "WORLD_SIZE"} & given.keys():
        wrong.append(f"{' and '.join(missing)} must be set, too, beside {', '.join(given)}")
    if wrong or "WORLD_SIZE" not in given:
        yield from (f"{fault}: a launcher of ranks, such as torchrun, sets it; unset all of them" for fault in wrong)
        return
    rank, total, here = (int(given.get(name, ranks or 0)) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if rank >= total:
        yield f"RANK must be below WORLD_SIZE: got {rank} and {total}"
    if ranks is not None and (here != ranks or total % ranks):
        yield (f"model.num_gpus_per_node {ranks} contradicts the launcher, which started {here} ranks on this node, "
            f"{total} in all (WORLD_SIZE): leave it out, or unset WORLD_SIZE and RANK: the command then starts ranks")


def _gpus() -> int:
    """Without torch, for which --help and most faults need not wait."""
    here, visible = len(glob.glob("/dev/nvidia[0-9]*")), os.environ.get("CUDA_VISIBLE_DEVICES")
    return here if visible is None else min(here, len([name for name in visible.split(",") if name.strip()]))
