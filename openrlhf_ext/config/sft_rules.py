"""Rules of supervised fine-tuning."""

from __future__ import annotations

import os
from collections.abc import Iterator

from openrlhf_ext.config import precision
from openrlhf_ext.config.file_rules import dataset_violations, output_violations
from openrlhf_ext.config.model_rules import (
    trained_violations,
)
from openrlhf_ext.config.records import Wanted
from openrlhf_ext.config.rules import (
    Findings,
    check_sections,
    optimizer_on_host,
    recomputation,
    trained_layout,
    unexecuted_code,
)
from openrlhf_ext.config.sft import SupervisedConfig
from openrlhf_ext.inputs import shown
from openrlhf_ext.options import Violation


def check_supervised(config: SupervisedConfig) -> Findings:
    """Every rule of supervised fine-tuning."""
    found = check_sections(config)
    chat = config.data.apply_chat_template and config.data.tokenizer_chat_template is None
    rules = (
        trained_layout,
        optimizer_on_host,
        recomputation,
        precision.parameters,
        output_violations,
        example_violations,
        launcher,
    )
    of_rules = [violation for rule in rules for violation in rule(config)]
    if config.fp8.rollout_enable:
        of_rules.append(
            Violation(
                ("fp8.rollout_enable",),
                "fp8.rollout_enable is for rollout engines, which supervised fine-tuning does not "
                "have: leave it out",
            )
        )
    warnings = (*unexecuted_code(config), *found.warnings)
    return Findings(
        (*found.violations, *trained_violations(config, chat=chat), *of_rules), warnings
    )


def launcher(config: SupervisedConfig) -> Iterator[Violation]:
    """What torchrun, or another launcher, says in variables: numbers, and as many ranks as were
    asked for."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT"):
        if not (value := os.environ.get(name, "0")).isdecimal():
            yield Violation(
                (),
                f"{name} must be a whole number, as a launcher sets it: got {shown(value)}; "
                "unset it",
            )
    if "WORLD_SIZE" not in os.environ:
        return
    option, ranks, total = (
        "model.num_gpus_per_node",
        config.model.num_gpus_per_node,
        config.world_size,
    )
    if ranks is not None and (
        total % ranks or os.environ.get("LOCAL_WORLD_SIZE", str(ranks)) != str(ranks)
    ):
        yield Violation(
            (option,),
            f"{option} {ranks} contradicts the launcher, which started {total} ranks "
            "(WORLD_SIZE): leave it out, or unset WORLD_SIZE and RANK, so that the command starts "
            "the ranks itself",
        )


def example_violations(config: SupervisedConfig) -> Iterator[Violation]:
    """Examples of supervised fine-tuning are given, and have answers."""
    data, plain = config.data, config.model.pretrain_mode_enable
    if data.dataset is None and not config.dry_run:
        yield Violation(
            ("data.dataset",),
            "data.dataset is required: a .jsonl file of examples, a folder or a hub name",
        )
    if not (data.apply_chat_template or data.output_key or plain):
        yield Violation(
            ("data.output_key", "data.apply_chat_template", "model.pretrain_mode_enable"),
            "data.output_key is required, the key of the answers: without it only a chat "
            "(data.apply_chat_template) or plain text (model.pretrain_mode_enable) can be "
            "trained on",
        )
    if data.multiturn and data.output_key is not None:
        yield Violation(
            ("data.multiturn", "data.output_key"),
            "data.multiturn reads whole chats from data.input_key: leave data.output_key "
            f"{data.output_key} out",
        )
    wanted = wanted_examples(config)
    if data.dataset is not None:
        yield from dataset_violations("data.dataset", data.dataset, data.dataset_split, wanted, [])
    if config.eval.dataset is not None:
        yield from dataset_violations(
            "eval.dataset", config.eval.dataset, config.eval.split, wanted, []
        )


def wanted_examples(config: SupervisedConfig) -> Wanted:
    data, plain = config.data, config.model.pretrain_mode_enable
    label = None if plain else data.output_key
    return Wanted(data.input_key, label, data.apply_chat_template, not plain, "data.output_key")
