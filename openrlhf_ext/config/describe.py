"""What a dry run shows: the resolved configuration, and where every rank and engine goes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from openrlhf_ext.config.access import is_set, value_of
from openrlhf_ext.config.algorithm_options import FLAG_KEYS
from openrlhf_ext.config.inputs import InputError, ModelFacts, read_model_facts
from openrlhf_ext.config.options import Option, option_table
from openrlhf_ext.config.schema import RunConfig

# giving one of these a value, even its default, asks for something
_MATTER_WHEN_SET = (
    "guide.num_nodes", "guide.num_gpus_per_node", "ref.num_nodes", "ref.num_gpus_per_node",
    "rollout.max_tokens_per_gpu", "train.max_tokens_per_gpu",
)  # fmt: skip


def format_config(config: RunConfig) -> str:
    """The resolved configuration as YAML that loads back to the same run.

    Every line that was set says where; refused options and unset ones that an estimator decides itself (OpenRLHF's clip
    and aggregation flags) are left out, secrets are masked. A comment at the top holds the estimator's merged options.
    """
    name, options, correction = config.algorithm_options()
    lines = [f"# algorithm: {name} {_flow(options)}", f"# importance correction: {_flow(correction)}"]
    section: list[str] = []
    for dotted, value, comment in _shown_values(config):
        *parents, leaf = dotted.split(".")
        common = _common_length(section, parents)
        lines += [f"{'  ' * depth}{parents[depth]}:" for depth in range(common, len(parents))]
        lines.append(f"{'  ' * len(parents)}{leaf}: {value}{comment}")
        section = parents
    return "\n".join(lines) + "\n"


def placement_table(config: RunConfig) -> str:
    """Every policy rank with its coordinates and place, every engine with its ranks, and the arithmetic of one step.

    Rank order is tp-cp-ep-pp-dp: tensor-parallel ranks are neighbours, data-parallel copies are furthest apart. Ray
    chooses the nodes; node and gpu say which slot of the policy's placement group a rank takes.
    """
    models = [*_policy_lines(config), *_companion_lines(config)]
    return "\n".join([*models, "", *_engine_lines(config), "", *_step_lines(config)]) + "\n"


def rank_coordinates(rank: int, *, tp: int, cp: int, pp: int) -> dict[str, int]:
    """Coordinates of a rank in the order tp-cp-ep-pp-dp (no expert parallelism)."""
    rest, tp_rank = divmod(rank, tp)
    rest, cp_rank = divmod(rest, cp)
    dp_rank, pp_rank = divmod(rest, pp)
    return {"tp": tp_rank, "cp": cp_rank, "pp": pp_rank, "dp": dp_rank}


def _shown_values(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """(dotted name, value as YAML, comment) of each line."""
    sources = config.sources
    for name, option in option_table().items():
        if option.unsupported is not None or name == "dry_run":
            continue
        if (name in FLAG_KEYS or name in _MATTER_WHEN_SET) and not is_set(config, name):
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
    differs = option.info.default_text is not None or value != option.default_value
    default = f" (default: {option.default})" if differs and option.default else ""
    return f"  # set: {source}{default}"


def _flow(value: Any) -> str:
    """YAML in flow style; JSON is a subset of it, apart from infinities."""
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return ".inf" if value > 0 else "-.inf"
    return json.dumps(value, ensure_ascii=False)


def _common_length(one: Sequence[str], other: Sequence[str]) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


def _policy_lines(config: RunConfig) -> Iterator[str]:
    layout = config.megatron
    tp, pp, cp = layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.context_parallel_size
    yield (
        f"policy: {config.world_size} ranks = tp {tp} x cp {cp} x pp {pp} x dp {config.data_parallel_size} "
        f"(order tp-cp-ep-pp-dp), {layout.param_dtype}"
    )
    model = _local_model(config)
    if model is not None:
        yield from _model_lines(model, tp)
    rows = [["rank", "node", "gpu", "tp", "cp", "pp", "dp", "layers"]]
    for rank in range(config.world_size):
        at = rank_coordinates(rank, tp=tp, cp=cp, pp=pp)
        node, gpu = divmod(rank, config.actor.num_gpus_per_node)
        layers = _stage_layers(model, at["pp"], pp)
        rows.append([*map(str, (rank, node, gpu, at["tp"], at["cp"], at["pp"], at["dp"])), layers])
    yield from _aligned(rows)


def _local_model(config: RunConfig) -> ModelFacts | None:
    """Facts of the model when it is a local folder, None when it is still on the hub."""
    try:
        return read_model_facts(config.actor.model_name_or_path or "")
    except InputError:
        return None


def _model_lines(model: ModelFacts, tp: int) -> Iterator[str]:
    padded = -(-model.vocab_size // tp) * tp
    padding = f", padded to {padded}" if padded != model.vocab_size else ""
    yield (
        f"model: {model.model_type}, {model.num_layers} layers, {model.num_heads} heads, {model.num_kv_heads} "
        f"key-value heads, vocabulary {model.vocab_size}{padding} ({padded // tp} per tensor-parallel rank)"
    )


def _stage_layers(model: ModelFacts | None, stage: int, stages: int) -> str:
    if model is None:
        return "?"
    size = model.num_layers // stages
    return f"{stage * size}-{(stage + 1) * size - 1}"


def _engine_lines(config: RunConfig) -> Iterator[str]:
    size = config.vllm.tensor_parallel_size
    shared = config.train.colocate_all
    where = "on the GPUs of these policy ranks" if shared else "on GPUs of their own, placed by Ray"
    yield f"rollout: {config.vllm.num_engines} vLLM engines x tp {size}, {config.rollout_dtype}, {where}"
    rows = [["engine", "policy ranks" if shared else "tp ranks"]]
    for engine in range(config.vllm.num_engines):
        first = engine * size if shared else 0
        rows.append([str(engine), " ".join(map(str, range(first, first + size)))])
    yield from _aligned(rows)
    if config.has_guide:
        policy = config.rollout.n_samples_per_prompt - config.guide_samples
        yield (
            f"rollout of the guide: {config.guide.num_engines} vLLM engines x tp {size}, {config.rollout_dtype}, on "
            f"GPUs of their own; {config.guide_samples} responses to a prompt, the policy's engines make {policy}"
        )


def _step_lines(config: RunConfig) -> Iterator[str]:
    rollout, train = config.rollout, config.train
    yield "one batch of rollouts:"
    samples = config.samples_per_rollout
    yield f"  {rollout.batch_size} prompts x {rollout.n_samples_per_prompt} responses = {samples} samples"
    updates = samples // train.batch_size * train.max_epochs
    dp = config.data_parallel_size
    yield (
        f"  {updates} optimizer step{'s' if updates != 1 else ''} of {train.batch_size} samples, dealt to {dp} "
        f"data-parallel rank{'s' if dp != 1 else ''} by length"
    )
    if train.dynamic_batch_enable:
        yield f"  micro-batches of at most {train.max_tokens_per_gpu} tokens on a rank, as many as the lengths ask for"
    else:
        fewest = math.ceil(train.batch_size / (dp * train.micro_batch_size))
        yield f"  micro-batches of at most {train.micro_batch_size} samples, {fewest} or more on a rank"


def _companion_lines(config: RunConfig) -> Iterator[str]:
    """The models beside the policy and where they are."""
    if config.has_critic:
        layout = config.critic_layout
        tp, pp, cp = layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.context_parallel_size
        shared = " on GPUs of the policy" if config.train.colocate_all else ""
        yield (
            f"critic: {config.critic_ranks} ranks{shared} = tp {tp} x cp {cp} x pp {pp} x dp "
            f"{config.critic_ranks // (tp * pp * cp)}, from "
            f"{config.critic.model_name_or_path or 'the model of the policy'}"
        )
    if config.has_reference:
        yield f"reference: {_place_of_frozen(config.reference_ranks)}"
    if config.has_guide:
        yield f"guide: {_place_of_frozen(config.guide_ranks)}, from {config.guide.model_name_or_path}"


def _place_of_frozen(ranks: int) -> str:
    """Where a model is that scores completions and is never trained."""
    return f"{ranks} ranks of its own, laid out as the policy" if ranks else "in the host memory of the policy's ranks"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
