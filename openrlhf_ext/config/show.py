"""What users are shown: `--help`, and what a dry run prints."""

from __future__ import annotations

import json
import math
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from openrlhf_ext.config import precision
from openrlhf_ext.config.estimator import FLAGS, algorithm_options
from openrlhf_ext.config.files import model_folder
from openrlhf_ext.config.run_config import RunConfig
from openrlhf_ext.inputs import InputError, did_you_mean
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.model.shape import ModelShape, read_model_shape
from openrlhf_ext.options import (
    ConfigError,
    Option,
    Violation,
    describe,
    describe_field,
    is_set,
    leaf_fields,
    nested_model,
    value_of,
)
from openrlhf_ext.options.sections.algo import CUSTOM
from openrlhf_ext.options.table import Configuration, OptionTable, table_of
from openrlhf_ext.outputs import aligned
from openrlhf_ext.redaction import HIDDEN, redact

_WIDTH = 110
_ROWS_SHOWN, _ENGINES_SHOWN = 16, 2


def format_help(
    pattern: str = "", own_file: str | None = None, model: type[Configuration] = RunConfig
) -> str:
    """The options whose group or name matches ``pattern`` (all by default), grouped, with type,
    default and help.

    ``own_file``: ``algo.module_path``, for the options of the estimator custom. ``model``: the
    command's options. Raises ConfigError: nothing matches.
    """
    table = table_of(model)
    chosen = _matching(pattern, table)
    if not chosen:
        groups = list(dict.fromkeys(map(group_of, table.values())))
        hint = did_you_mean(pattern, [*groups, *table], "choose one of the")
        raise ConfigError(
            [
                Violation(
                    (), f"--help {pattern}: no option matches; {hint} groups: {', '.join(groups)}"
                )
            ]
        )
    supported, refused = supported_and_refused(chosen)
    if (
        len(chosen) == 1
        and chosen[0].arity == "open"
        and (own_file or chosen[0].name != f"algo.{CUSTOM}")
    ):
        supported = list(method_options(chosen[0].name.removeprefix("algo."), own_file))
    blocks = [model.usage]
    supported.sort(key=lambda option: not option.section)  # those without a section come last
    for group, options in groupby(supported, key=group_of):
        blocks.append("\n".join([f"{group}:", *(_help_entry(option) for option in options)]) + "\n")
    if refused:
        heading = "rejected, or without meaning here, unless left at the default:"
        blocks.append("\n".join([heading, *map(_refused_entry, refused)]) + "\n")
    return "\n".join(blocks)


def supported_and_refused(options: Sequence[Option]) -> tuple[list[Option], list[Option]]:
    return [one for one in options if one.unsupported is None], [
        one for one in options if one.unsupported is not None
    ]


def method_options(estimator: str, own_file: str | None = None) -> Iterator[Option]:
    """The options of an estimator under their full names, those inside of maps too."""
    # late: algorithms import torch
    from openrlhf_ext.algorithms.registry import algorithm_class, algorithm_of_file

    registered = algorithm_of_file(own_file) if own_file and estimator == CUSTOM else estimator
    for name, field in leaf_fields(algorithm_class(registered).Options):
        options = [describe_field(name, field)]
        if (inner := nested_model(field)) is not None:
            options += [
                replace(option, name=f"{name}.{key}") for key, option in describe(inner).items()
            ]
        yield from (replace(option, name=f"algo.{estimator}.{option.name}") for option in options)


def _matching(pattern: str, table: OptionTable) -> list[Option]:
    pattern = pattern.removeprefix("--")
    options = list(table.values())
    in_group = [
        option
        for option in options
        if option.name == pattern or option.name.startswith(f"{pattern}.")
    ]
    return in_group or [option for option in options if pattern in option.name]


def group_of(option: Option) -> str:
    return option.section or "top level"


def _help_entry(option: Option) -> str:
    mark = "+" if option.info.added else " "
    also = f", --{option.info.also}" if option.info.also is not None else ""
    head = f" {mark} --{shown_name(option)}{also}  <{option.expects}>"
    default = f" [{option.shown_default}]" if option.shown_default else ""
    indent = " " * 7
    meaning = textwrap.wrap(
        option.help + default, _WIDTH, initial_indent=indent, subsequent_indent=indent
    )
    return "\n".join([head, *meaning])


def _refused_entry(option: Option) -> str:
    assert option.unsupported is not None
    verdict = "refused" if option.unsupported.yet else "no meaning"
    text = (
        f"--{option.name} [{option.shown_default}] {verdict}: {option.unsupported.why}; "
        f"{option.unsupported.instead}"
    )
    return textwrap.fill(text, _WIDTH, initial_indent="   ", subsequent_indent=" " * 7)


def shown_name(option: Option) -> str:
    return option.name + (".<key>" if option.arity == "open" else "")


# ---- a dry run

# giving one of these a value, even its default, asks for something
_MATTER_WHEN_SET = (
    "guide.num_nodes",
    "guide.num_gpus_per_node",
    "ref.num_nodes",
    "ref.num_gpus_per_node",
    "rollout.max_tokens_per_gpu",
    "train.max_tokens_per_gpu",
)


_PUT_IN = "  # a value is hidden: fill it in before you use this file"


def format_config(config: RunConfig) -> str:
    """The resolved configuration as YAML that loads back to the same run, once what it hides is put
    in.

    Every line that was set says where; refused options and unset ones that an estimator decides
    itself (OpenRLHF's clip and aggregation flags) are left out, secrets and passwords in addresses
    are hidden. A comment at the top holds the estimator's merged options.
    """
    name, options, correction = algorithm_options(config)
    head = (
        redact(f"# algorithm: {name} {_flow(options)}"),
        f"# importance correction: {_flow(correction)}",
    )
    return "\n".join([*head, format_options(config)])


def format_options(config: Configuration) -> str:
    """The options of a configuration as YAML; see ``format_config``."""
    lines: list[str] = []
    section: list[str] = []
    for dotted, value, comment in _shown_values(config):
        *parents, leaf = dotted.split(".")
        common = len(os.path.commonprefix([section, parents]))
        lines += [f"{'  ' * depth}{parents[depth]}:" for depth in range(common, len(parents))]
        shown = redact(value)
        put_in = "" if shown == value else _PUT_IN
        lines.append(f"{'  ' * len(parents)}{leaf}: {shown}{comment}{put_in}")
        section = parents
    return "\n".join(lines) + "\n"


def placement_table(config: RunConfig) -> str:
    """Every policy rank with its coordinates and place, every engine with its ranks, and the
    arithmetic of one step.

    Ray chooses the nodes; node and gpu say which slot of the policy's placement group a rank takes.
    """
    models = [*_policy_lines(config), *_auxiliary_lines(config)]
    return "\n".join([*models, "", *_engine_lines(config), "", *_step_lines(config)]) + "\n"


def shown_options(config: Configuration) -> dict[str, Any]:
    """Every option that means something, by its name, as JSON can hold it; secrets and passwords in
    addresses are hidden."""
    shown: dict[str, Any] = {}
    for name, option in table_of(type(config)).items():
        if option.unsupported is None:
            value = value_of(config, name)
            shown[name] = HIDDEN if option.info.secret and value is not None else _as_json(value)
    return shown


def _as_json(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {str(key): _as_json(inner) for key, inner in value.items()}
    if isinstance(value, Sequence):
        return [_as_json(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _shown_values(config: Configuration) -> Iterator[tuple[str, str, str]]:
    """(dotted name, value as YAML, comment) of each line."""
    sources = config.sources
    for name, option in table_of(type(config)).items():
        if option.unsupported is not None or name.startswith("dry_run"):
            continue
        if (name in FLAGS or name in _MATTER_WHEN_SET) and not is_set(config, name):
            continue
        value = value_of(config, name)
        if option.arity == "open":
            for dotted, leaf in _leaves(name, value):
                yield dotted, _flow(leaf), _comment(option, leaf, sources.get(dotted))
        elif option.info.secret and value is not None:
            yield name, "null", "  # hidden"
        else:
            yield name, _flow(value), _comment(option, value, sources.get(name))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    else:
        yield name, value


def _comment(option: Option, value: Any, source: str | None) -> str:
    """Where a value that was set comes from, and the default when it differs."""
    if source is None:
        return ""
    differs = option.info.default_text is not None or value != option.default
    default = f" (default: {option.shown_default})" if differs and option.shown_default else ""
    return f"  # set: {source}{default}"


def _flow(value: Any) -> str:
    """YAML in flow style; JSON is a subset of it, apart from infinities."""
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return ".inf" if value > 0 else "-.inf"
    return json.dumps(value, ensure_ascii=False)


def _policy_lines(config: RunConfig) -> Iterator[str]:
    layout = config.layout
    yield f"policy: {_degrees(layout)} (order {layout.order}), {config.megatron.param_dtype}"
    model = _local_model(config)
    if model is not None:
        yield from _model_lines(model, layout.tensor_parallel_size)
    yield from precision.lines(config, model)
    rows = [["ranks", "node", "gpus", "tp", "cp", "pp", "dp", "layers"]]
    for ranks in _alike(layout, config.actor.num_gpus_per_node):
        columns = zip(
            *(_place(layout, rank, config.actor.num_gpus_per_node) for rank in ranks), strict=True
        )
        stage = layout.place(ranks[0]).stage
        spans = [_span(column) for column in columns]
        rows.append([*spans, _stage_layers(model, stage, layout)])
    yield from (f"  {line}" for line in aligned(rows[: _ROWS_SHOWN + 1]))
    if len(rows) > _ROWS_SHOWN + 1:
        yield (
            f"  ... and so on, up to rank {layout.world_size - 1}: ranks are numbered in the "
            f"order {layout.order}"
        )


def _place(layout: ParallelLayout, rank: int, per_node: int) -> tuple[int, ...]:
    place = layout.place(rank)
    return (rank, *divmod(rank, per_node), place.tensor, place.context, place.stage, place.replica)


def _alike(layout: ParallelLayout, per_node: int) -> Iterator[list[int]]:
    """Ranks one after the other on a node that differ in one coordinate only."""
    run: list[int] = []
    for rank in range(layout.world_size):
        if run and not _goes_on(
            *(_place(layout, one, per_node)[1:] for one in (run[0], run[-1], rank))
        ):
            yield run
            run = []
        run.append(rank)
    yield run


def _goes_on(first: tuple[int, ...], last: tuple[int, ...], place: tuple[int, ...]) -> bool:
    """Whether a place (node, GPU, coordinates) is the next on the node and on the line from first
    to last."""
    before, now = (
        [axis for axis in range(2, len(to)) if to[axis] != first[axis]] for to in (last, place)
    )
    return (
        place[0] == first[0]
        and len(now) == 1
        and before in ([], now)
        and place[now[0]] == last[now[0]] + 1
    )


def _span(column: Sequence[int]) -> str:
    return str(column[0]) if column[0] == column[-1] else f"{column[0]}-{column[-1]}"


def _degrees(layout: ParallelLayout) -> str:
    shares = f"ep {layout.expert_parallel_size} x {layout.expert_copies} replicas"
    experts = f", experts: {shares}" if layout.expert_parallel_size > 1 else ""
    return (
        f"{layout.world_size} ranks = tp {layout.tensor_parallel_size} x cp "
        f"{layout.context_parallel_size} x pp {layout.pipeline_parallel_size} x dp "
        f"{layout.data_parallel_size}{experts}"
    )


def _local_model(config: RunConfig) -> ModelShape | None:
    try:
        folder = model_folder(config.actor.model_name_or_path or "")
        return None if folder is None else read_model_shape(folder)
    except InputError:
        return None


def _model_lines(model: ModelShape, tp: int) -> Iterator[str]:
    padded = model.padded_vocab_size(tp)
    padding = f", padded to {padded}" if padded != model.vocab_size else ""
    yield (
        f"model: {model.model_type}, {model.num_layers} layers, {model.num_heads} heads, "
        f"{model.num_kv_heads} key-value heads, vocabulary {model.vocab_size}{padding} "
        f"({padded // tp} per tensor-parallel rank)"
    )


def _stage_layers(model: ModelShape | None, stage: int, layout: ParallelLayout) -> str:
    if model is None:
        return "?"
    chunks = layout.chunk_layers(model.num_layers)
    return " ".join(_span(layers) for (at, _), layers in chunks.items() if at == stage)


def _engine_lines(config: RunConfig) -> Iterator[str]:
    size = config.vllm.tensor_parallel_size
    shared = config.engines_share_gpus
    where = "on the GPUs of these policy ranks" if shared else "on their own GPUs, placed by Ray"
    yield (
        f"rollout: {config.vllm.num_engines} vLLM engines x tp {size}, {config.rollout_dtype}, "
        f"{where}"
    )
    if shared:
        for engine in range(min(config.vllm.num_engines, _ENGINES_SHOWN)):
            yield (
                f"  engine {engine}: rank{'s' if size > 1 else ''} "
                f"{_span([engine * size, (engine + 1) * size - 1])}"
            )
        if config.vllm.num_engines > _ENGINES_SHOWN:
            yield f"  ... and so on, up to engine {config.vllm.num_engines - 1}"
    if config.guide_samples:
        policy = config.rollout.n_samples_per_prompt - config.guide_samples
        yield (
            f"rollout of the guide: {config.guide.num_engines} vLLM engines x tp {size}, "
            f"{config.rollout_dtype}, on their own GPUs; {config.guide_samples} responses per "
            f"prompt, the policy's engines sample {policy}"
        )


def _step_lines(config: RunConfig) -> Iterator[str]:
    rollout, train = config.rollout, config.train
    yield "one batch of rollouts:"
    samples = config.samples_per_rollout
    yield (
        f"  {rollout.batch_size} prompts x {rollout.n_samples_per_prompt} responses = {samples} "
        "samples"
    )
    updates = samples // train.batch_size * train.max_epochs
    dp = config.layout.data_parallel_size
    yield (
        f"  {updates} optimizer step{'s' if updates != 1 else ''} of {train.batch_size} samples, "
        f"distributed to {dp} data-parallel rank{'s' if dp != 1 else ''} by length"
    )
    if train.dynamic_batch_enable:
        yield (
            f"  micro-batches of at most {train.max_tokens_per_gpu} tokens on a rank, as many as "
            "the lengths require"
        )
    else:
        fewest = math.ceil(train.batch_size / (dp * train.micro_batch_size))
        yield (
            f"  micro-batches of at most {train.micro_batch_size} samples, {fewest} or more on a "
            "rank"
        )


def _auxiliary_lines(config: RunConfig) -> Iterator[str]:
    if config.has_critic:
        shared = ", on GPUs of the policy" if config.train.colocate_all else ""
        own = config.critic.model_name_or_path
        model = own or (
            "the reward model" if config.has_reward_model else "the model of the policy"
        )
        yield f"critic: {_degrees(config.critic_layout)}{shared}, from {model}"
    if config.has_reward_model:
        sharer = (
            "policy"
            if config.train.colocate_all
            else "critic"
            if config.critic_shares_with_reward
            else ""
        )
        where = f"GPUs of the {sharer}" if sharer else "their own GPUs"
        yield (
            f"reward model: {config.reward_ranks} ranks, in the policy's layout, on {where}, from "
            f"{config.reward.model_name_or_path}"
        )
    if config.has_reference:
        yield f"reference: {_place_of_frozen(config.reference_ranks)}"
    if config.has_guide:
        yield (
            f"guide: {_place_of_frozen(config.guide_ranks)}, from {config.guide.model_name_or_path}"
        )


def _place_of_frozen(ranks: int) -> str:
    return (
        f"{ranks} ranks of its own, in the policy's layout"
        if ranks
        else "in the host memory of the policy's ranks"
    )


# ---- the JSON schema, by which editors complete and check YAML files: options.schema.json

SCHEMA = Path(__file__).resolve().parents[1] / "options.schema.json"
"""Made by ``benchmarks/option_tables.py --schema``."""


def modeline(file: Path) -> str:
    """The line by which editors find the schema from a YAML file."""
    return f"# yaml-language-server: $schema={os.path.relpath(SCHEMA, file.resolve().parent)}\n"
