"""The options of ``openrlhf_ext.cli.train_sft``: supervised fine-tuning under OpenRLHF's names."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from openrlhf_ext.config.run_config import RunConfig
from openrlhf_ext.config.trained import TrainedConfig
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

# an option has its default and its meaning, as in a table


class SupervisedConfig(TrainedConfig, Optimizer):
    """Options of ``openrlhf_ext.cli.train_sft``, typed; built by ``load`` and checked by
    ``sft_rules.check_supervised``."""

    needs = {
        "lr_scheduler!=constant": ("lr_warmup_ratio",),
        "lr_scheduler=cosine_with_min_lr": ("min_lr_ratio",),
    }
    usage: ClassVar[str] = (
        "usage: openrlhf-ext train_sft [--config FILE.yaml ...] [--section.name value ...]\n\n"
        "Names are those of OpenRLHF's train_sft; options marked + are added by openrlhf_ext. "
        "--help SECTION shows one group.\n"
    )
    trained: ClassVar[str] = "model"
    rank_options: ClassVar[str] = "model.num_gpus_per_node"
    data_options: ClassVar[tuple[str, ...]] = ("data.dataset", "eval.dataset")
    names_in_run: ClassVar[Mapping[str, str]] = {
        "actor.num_nodes": "torchrun's --nnodes",
        "actor.num_gpus_per_node": "model.num_gpus_per_node",
        "actor.model_name_or_path": "model.model_name_or_path",
    }

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
    local_rank: Int = no_meaning(
        -1,
        "rank on the node, set by DeepSpeed's launcher",
        why="the environment variable LOCAL_RANK sets it",
        instead="leave it out",
    )
    use_ms: bool = not_yet(
        False,
        "load models and data from ModelScope",
        why="only local folders and the Hugging Face hub are read",
        instead="download first and give the local paths",
    )
    dry_run: bool = added(
        False, "check whether the run would start, print ranks and configuration, and stop"
    )

    @property
    def world_size(self) -> int:
        """Ranks: what a launcher says, else what the command starts on this machine."""
        if (said := os.environ.get("WORLD_SIZE", "")).isdecimal():
            return int(said)
        return self.model.num_gpus_per_node or _gpus() or 1

    @property
    def model_options(self) -> list[str]:
        return ["model.model_name_or_path"]

    def as_run(self) -> RunConfig:
        """The run whose policy is trained as these options say; its engines matter to nobody."""
        # of several nodes: more than the option takes
        ranks = {"num_gpus_per_node": self.world_size}
        actor = sections.Actor(model_name_or_path=self.model_path)
        return RunConfig(
            actor=actor.model_copy(update=ranks),
            megatron=self.megatron,
            fp8=self.fp8,
            train=sections.Train(**dict(self.train)),
            rollout=sections.Rollout(micro_batch_size=self.train.micro_batch_size),
            data=sections.Data(max_len=self.data.max_len),
            ds=sections.DeepSpeed(lora=self.ds.lora, adam_offload=self.ds.adam_offload),
            weight_sync=sections.WeightSync(bucket_mib=1),
            algo=sections.Algo(advantage=sections.Advantage(estimator="grpo")),
        )

    def resolved(self) -> Iterable[tuple[str, Any]]:
        if self.model.gradient_checkpointing_enable:
            yield "megatron.recompute", "full"


def _gpus() -> int:
    """Without torch, for which --help and most faults need not wait."""
    here, visible = len(glob.glob("/dev/nvidia[0-9]*")), os.environ.get("CUDA_VISIBLE_DEVICES")
    return (
        here
        if visible is None
        else min(here, len([name for name in visible.split(",") if name.strip()]))
    )
