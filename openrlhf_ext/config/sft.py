"""The configuration of ``openrlhf_ext.cli.train_sft``: supervised fine-tuning under OpenRLHF's names."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from openrlhf_ext.config import precision
from openrlhf_ext.config.file_rules import dataset_violations, output_violations, split_violations
from openrlhf_ext.config.load import (
    Choice,
    Draft,
    as_chosen,
    collect,
    derive_paths,
    note_unsupported,
    read_command_line,
    read_files,
    resolve_paths,
    stand_in,
    typed,
)
from openrlhf_ext.config.model_rules import model_violations
from openrlhf_ext.config.rules import check_sections, policy_layout, recomputation
from openrlhf_ext.config.run_config import RunConfig, option_table
from openrlhf_ext.config.show import format_help
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.options import (
    ConfigError,
    Float,
    Int,
    Violation,
    added,
    nest,
    no_meaning,
    not_yet,
    option,
    sections,
    value_of,
)
from openrlhf_ext.options.sections.models import FP8, LrScheduler, Muon
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
from openrlhf_ext.options.table import Configuration, table_of

USAGE = """\
usage: openrlhf-ext train_sft [--config FILE.yaml ...] [--section.name value ...]

Names are those of OpenRLHF's train_sft; options marked + are added by openrlhf_ext. --help SECTION shows one group.
"""


# an option has its default and its meaning, a violation its options and its words, as in a table
# fmt: off


class SupervisedConfig(Configuration):
    """Options of ``openrlhf_ext.cli.train_sft``, typed; built and checked by :func:`load_supervised`."""

    model: Model = Model()
    megatron: sections.Megatron = sections.Megatron()
    fp8: FP8 = FP8()
    data: SupervisedData = SupervisedData()
    train: SupervisedTrain = SupervisedTrain()
    optim: Literal["adam", "muon"] = not_yet("adam", "optimizer", why="only Adam is built on Megatron's optimizer",
        instead="use adam.*")
    adam: SupervisedAdam = SupervisedAdam()
    muon: Muon = Muon()
    lr_scheduler: LrScheduler = option("cosine_with_min_lr",
        "learning rate over the optimizer steps; constant has no warm-up, only cosine_with_min_lr stays above 0")
    lr_warmup_ratio: Float = option(0.03, "share of the optimizer steps with a linear warm-up", ge=0, le=1)
    min_lr_ratio: Float = option(0.1, "final learning rate of cosine_with_min_lr, as a share of the peak", ge=0, le=1)
    max_norm: Float = option(1.0, "global gradient norm is clipped to this; 0 = no clipping", ge=0)
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
    def policy(self) -> RunConfig:
        """These options as those of a policy, for the rules, the planner and the ranks."""
        theirs, data = option_table(), self.data
        ours = [name for name, option in table_of(type(self)).items() if option.unsupported is None]
        names = {f"actor.{name}" if f"actor.{name}" in theirs else name: name for name in ours} | _NAMES
        apart = ("megatron.", "fp8.", "dry_run")  # whole sections: of these it matters what was set
        names = {name: own for name, own in names.items() if name in theirs and not name.startswith(apart)}
        return RunConfig(**nest({name: value_of(self, own) for name, own in names.items()} | {
            "actor.num_gpus_per_node": self.world_size, "megatron": self.megatron, "fp8": self.fp8,
            "algo.advantage.estimator": "grpo", "weight_sync.bucket_mib": 1,  # without a critic, and with no engine
            "data.apply_chat_template": data.apply_chat_template and data.tokenizer_chat_template is None,
        }))


def _gpus() -> int:
    """Without torch, for which --help and most faults need not wait."""
    here, visible = len(glob.glob("/dev/nvidia[0-9]*")), os.environ.get("CUDA_VISIBLE_DEVICES")
    return here if visible is None else min(here, len([name for name in visible.split(",") if name.strip()]))


# names of `SupervisedConfig.policy`, and what they are called here
_NAMES = {
    "actor.model_name_or_path": "model.model_name_or_path",
    "actor.gradient_checkpointing_enable": "model.gradient_checkpointing_enable",
    "data.prompt_dataset": "data.dataset", "data.label_key": "data.output_key",
    "rollout.micro_batch_size": "train.micro_batch_size",
}
# in messages; a prefix stands for all below it
_CALLED = {
    "actor.num_nodes * actor.num_gpus_per_node": "model.num_gpus_per_node",
    "actor.num_nodes 1, ": "", "actor.num_nodes ": "torchrun's --nnodes ",
    "actor.num_nodes": "model.num_gpus_per_node", "actor.num_gpus_per_node": "model.num_gpus_per_node",
    **_NAMES, "actor.": "",
}


Rule = Callable[[RunConfig], Iterator[Violation]]


def in_own_names(text: str) -> str:
    for theirs, ours in _CALLED.items():
        text = text.replace(theirs, ours)
    return text


def load_supervised(argv: Sequence[str], choice: Choice | None = None, more: Rule | None = None) -> SupervisedConfig:
    """Builds the configuration from command-line words, as ``load_config`` does that of ``train_ppo_ray``.

    ``choice``: what ``megatron.layout auto`` comes to. ``more``: a rule for the options as those of a policy. Raises
    ConfigError: lists every violation.
    """
    table = table_of(SupervisedConfig)
    line = read_command_line(argv, table)
    if line.help_filter is not None:
        sys.stdout.write(format_help(line.help_filter, table=table, usage=USAGE))
        raise SystemExit(0)
    settings, broken = read_files(line.config_files, table)
    draft = Draft(table, [*line.violations, *broken])
    collect(draft, [*settings, *line.settings])
    resolve_paths(draft)
    stand_in(draft)
    derive_paths(draft.values, SupervisedCkpt())
    if str(draft.values.get("model.gradient_checkpointing_enable")).lower() == "true":
        draft.values.setdefault("megatron.recompute", "full")
    config = typed(draft, SupervisedConfig)
    if choice is not None and config.megatron.layout == "auto":
        as_chosen(draft, choice(config.policy))
        config = typed(draft, SupervisedConfig)
    note_unsupported(draft, config)
    found_sections = check_sections(config)
    broken_rules = [*found_sections.violations, *_violations(config, more)]
    draft.violations += [rule for rule in broken_rules if draft.tainted.isdisjoint(rule.options)]
    if draft.violations:
        raise ConfigError(draft.violations)
    config._sources = draft.origins
    config._warnings = (*draft.lines, *found_sections.warnings)
    return config


def _violations(config: SupervisedConfig, more: Rule | None) -> Iterator[Violation]:
    """Rules between sections: those of a policy, in the names of this command."""
    if config.data.dataset is None and not config.dry_run:
        yield Violation(("data.dataset",),
            "data.dataset is required: a .jsonl file of examples, a folder or a hub name")
    if config.fp8.rollout_enable:
        yield Violation(("fp8.rollout_enable",),
            "fp8.rollout_enable is about rollout engines, which supervised training has not: leave it out")
    policy = config.policy
    rules: list[Rule] = [model_violations, policy_layout, recomputation, precision.parameters, output_violations]
    rules += [more] if more is not None else []
    of_policy = (found for rule in rules for found in rule(policy))
    yield from _answers(config)
    for found in (*of_policy, *_datasets(config)):
        yield Violation(tuple(map(in_own_names, found.options)), in_own_names(found.message))


def _datasets(config: SupervisedConfig) -> Iterator[Violation]:
    data = config.data
    read = sections.Data(
        input_key=data.input_key, label_key=None if config.model.pretrain_mode_enable else data.output_key,
        apply_chat_template=data.apply_chat_template,
    )
    of = (("data.dataset", data.dataset, "data.dataset_split", data.dataset_split),
          ("eval.dataset", config.eval.dataset, "eval.split", config.eval.split))
    for option_name, datasets, split_name, split in of:
        if datasets is not None:
            yield from dataset_violations(option_name, datasets, read, [], not config.model.pretrain_mode_enable)
            yield from split_violations(split_name, split, option_name, datasets)


def _answers(config: SupervisedConfig) -> Iterator[Violation]:
    """An example has an answer."""
    data = config.data
    plain = not (data.apply_chat_template or data.output_key or config.model.pretrain_mode_enable)
    if plain:
        yield Violation(("data.output_key", "data.apply_chat_template", "model.pretrain_mode_enable"),
            "data.output_key is required, the key of the answers: without it only a chat (data.apply_chat_template) or "
            "plain text (model.pretrain_mode_enable) can be trained on")
    if data.multiturn and data.output_key is not None:
        yield Violation(("data.multiturn", "data.output_key"),
            f"data.multiturn reads whole chats of data.input_key: leave data.output_key {data.output_key} out")
