"""Rules about the models of a run: they can be cut as the layouts say, and know each other's
tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from openrlhf_ext.config import drafts, exact_rules, precision
from openrlhf_ext.config.file_rules import tokenizer_violations
from openrlhf_ext.config.files import has_weights, model_folder
from openrlhf_ext.config.run_config import RunConfig
from openrlhf_ext.config.tokenizers import tokenizer_difference, unknown_tokens
from openrlhf_ext.config.trained import TrainedConfig
from openrlhf_ext.inputs import InputError
from openrlhf_ext.megatron.layout import PIPELINE_ENDS, ParallelLayout
from openrlhf_ext.megatron.model.adapter import chosen_adapter
from openrlhf_ext.megatron.model.shape import ModelShape, read_model_shape, read_value_scale
from openrlhf_ext.options import Section, Violation, value_of
from openrlhf_ext.options.sections import Megatron

# a violation has its options and its words, as in a table

_ACTOR, _CRITIC, _GUIDE = (
    "actor.model_name_or_path",
    "critic.model_name_or_path",
    "guide.model_name_or_path",
)
_REWARD = "reward.model_name_or_path"
_MOST_LORA_RANK = 512  # vllm 0.32.0 config/lora.py


def model_violations(config: RunConfig) -> Iterator[Violation]:
    """The rules about the models, where they are local folders: to be asked again when one has been
    downloaded."""
    yield from trained_violations(config, chat=config.data.apply_chat_template)
    policy, _ = local_shape(_ACTOR, config.actor.model_name_or_path)
    if config.has_critic:
        yield from _critic_rules(config, policy)
    if config.has_reward_model:
        yield from _reward_rules(config, policy)
    yield from _scale_rules(config)
    if config.has_guide:
        yield from _guide_rules(config, policy)


def trained_violations(config: TrainedConfig, *, chat: bool) -> Iterator[Violation]:
    """Those about the model under training; ``chat``: its tokenizer has to have a template."""
    option, folder = config.model_options[0], config.model_path
    model, problems = local_shape(option, folder)
    yield from problems
    if model is None or folder is None:
        return
    yield from shape_violations(config, model, option)
    yield from (
        _mixture_rules(config, model, option) if model.num_experts else _dense_rules(config, option)
    )
    if has_weights(folder):
        yield from tokenizer_violations(option, folder, chat=chat)
    if config.ds.lora.enabled:
        yield from _adapter_rules(config, model)
    if isinstance(config, RunConfig):
        yield from exact_rules.model(config, model, option)
        yield from drafts.of_model(config, model, option)


def local_shape(option: str, path: str | None) -> tuple[ModelShape | None, list[Violation]]:
    """What is known of the model named by an option, None where nothing is here, and why it cannot
    be used."""
    if path is None:
        return None, [
            Violation((option,), f"{option} is required: the folder of a Hugging Face checkpoint")
        ]
    folder = model_folder(path)
    if folder is None:
        return None, []
    try:
        return read_model_shape(folder), []
    except InputError as error:
        return None, [Violation((option,), f"{option}: {error}")]


def shape_violations(config: TrainedConfig, model: ModelShape, option: str) -> Iterator[Violation]:
    """What holds for a model under training, and for a guide, which is laid out and sampled from as
    the policy."""
    yield from divisible(option, model, "megatron.{}".format, config.megatron)
    if isinstance(config, RunConfig):
        yield from _heads_divisible(
            option, model, "vllm.tensor_parallel_size", config.vllm.tensor_parallel_size
        )
    yield from _positions(option, model, config)
    yield from precision.model_violations(option, model, config)


def _adapter_rules(config: TrainedConfig, model: ModelShape) -> Iterator[Violation]:
    lora = config.ds.lora
    name = "ds.lora.path" if lora.path is not None else "ds.lora.rank"
    if config.fp8.enable:
        yield Violation(
            (name, "fp8.enable"),
            f"{name} keeps the linear layers' weights in megatron.param_dtype; adapters with FP8 "
            "layers are not supported: got fp8.enable; leave one of them out",
        )
    try:
        rank = chosen_adapter(lora, model.family).rank
    except InputError as error:
        name = "ds.lora.path" if lora.path is not None else "ds.lora.target_modules"
        yield Violation((name,), f"{name}: {error}")
        return
    if isinstance(config, RunConfig) and rank > _MOST_LORA_RANK and config.vllm.lora == "adapter":
        yield Violation(
            (name, "vllm.lora"),
            f"{name}: an adapter's rank must be at most {_MOST_LORA_RANK} if vLLM applies it: got "
            f"{rank}; set vllm.lora merged, or a lower rank",
        )


def _critic_rules(config: RunConfig, policy: ModelShape | None) -> Iterator[Violation]:
    own = config.critic.model_name_or_path is not None
    option = _CRITIC if own or not config.has_reward_model else _REWARD
    model, problems = local_shape(option, config.critic_model)
    yield from problems if own else []  # other rules are about policy and reward model
    if model is not None:
        yield from divisible(option, model, "critic.megatron.{}".format, config.critic_megatron)
        yield from _scores(
            option, model, "a critic", "an algo.advantage.estimator without one, such as grpo"
        )
        if not model.num_experts:  # one that inherits the policy's sizes has no use for them
            yield from _no_experts(option, "critic.megatron", config.critic.megatron)
        yield from _reads_policy(_CRITIC, model, policy, config) if own else []


def _reward_rules(config: RunConfig, policy: ModelShape | None) -> Iterator[Violation]:
    folder, policy_folder = (
        config.reward.model_name_or_path or "",
        config.actor.model_name_or_path or "",
    )
    model, problems = local_shape(_REWARD, folder)
    yield from problems
    if model is None:
        return
    yield from divisible(_REWARD, model, "megatron.{}".format, config.even_megatron)
    yield from _scores(_REWARD, model, "a reward model", "serve it: reward.remote_url")
    yield from _reads_policy(_REWARD, model, policy, config)
    if policy is not None and (difference := unknown_tokens(folder, policy_folder)) is not None:
        yield Violation(
            (_REWARD, _ACTOR),
            f"{_REWARD} must have the tokens of {_ACTOR}, because it gets the sampled token ids: "
            f"{difference}; use a reward model of the policy's family, or serve this one and give "
            "its address as reward.remote_url",
        )


def _scores(option: str, model: ModelShape, role: str, remedy: str) -> Iterator[Violation]:
    if not model.family.critic_class:
        yield Violation(
            (option,),
            f"{option}: {role} of model_type {model.model_type} is not supported, because "
            f"transformers has no class that reads it; use a model of another type, or {remedy}",
        )


def _reads_policy(
    option: str, model: ModelShape, policy: ModelShape | None, config: RunConfig
) -> Iterator[Violation]:
    """What holds for a model that gets the policy's sequences."""
    yield from _positions(option, model, config)
    if policy is not None and model.vocab_size < policy.vocab_size:
        yield Violation(
            (option,),
            f"{option} must know the tokens of the policy: its vocabulary has {model.vocab_size} "
            f"entries, the policy's {policy.vocab_size}; use a model of the same family",
        )


def scaled_models(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Options and folders of the models that ``reward.normalize_enable`` is about, where they are
    here."""
    named = {_REWARD: config.reward.model_name_or_path} if config.has_reward_model else {}
    if config.has_critic and config.critic.model_name_or_path is not None:
        named[_CRITIC] = config.critic.model_name_or_path
    elif config.has_critic and not named:
        named[_ACTOR] = config.critic_model
    for option, name in named.items() if config.reward.normalize_enable else ():
        if (
            name is not None
            and (folder := model_folder(name)) is not None
            and not local_shape(option, folder)[1]
        ):
            yield option, folder


def _scale_rules(config: RunConfig) -> Iterator[Violation]:
    for option, folder in scaled_models(config):
        try:
            read_value_scale(folder)
        except InputError as error:
            yield Violation(
                (option, "reward.normalize_enable"),
                f"{option}, with reward.normalize_enable: {error}",
            )


def _guide_rules(config: RunConfig, policy: ModelShape | None) -> Iterator[Violation]:
    folder, policy_folder = (
        config.guide.model_name_or_path or "",
        config.actor.model_name_or_path or "",
    )
    model, problems = local_shape(_GUIDE, folder)
    yield from problems
    if model is None:
        return
    yield from shape_violations(config, model, _GUIDE)
    if has_weights(folder):
        yield from tokenizer_violations(_GUIDE, folder, chat=False)
    remedy = "use a guide of the policy's family"
    if (
        policy is not None
        and (difference := tokenizer_difference(folder, policy_folder)) is not None
    ):
        yield Violation(
            (_GUIDE, _ACTOR),
            f"{_GUIDE} must have the tokenizer of {_ACTOR}, because each reads the other's "
            f"tokens: {difference}; {remedy}",
        )
    if policy is not None and model.vocab_size != policy.vocab_size:
        yield Violation(
            (_GUIDE, _ACTOR),
            f"{_GUIDE} must have as many vocabulary entries (vocab_size in config.json) as "
            f"{_ACTOR}, because each must know every token of the other: got {model.vocab_size} "
            f"and {policy.vocab_size}; {remedy}, or resize the embeddings of one of them",
        )


def divisible(
    option: str, model: ModelShape, named: Callable[[str], str], layout: Megatron
) -> Iterator[Violation]:
    """The model of ``option`` can be cut as the layout says; ``named``: what the command calls a
    field of it."""
    tp, pp, vp = map(
        named, ("tensor_parallel_size", "pipeline_parallel_size", "virtual_pipeline_size")
    )
    stages, chunks = layout.pipeline_parallel_size, layout.virtual_pipeline_size
    cut = ParallelLayout.of(layout, stages)
    yield from _heads_divisible(option, model, tp, layout.tensor_parallel_size)
    for what, size in model.mlp.divided.items():
        if size % layout.tensor_parallel_size:
            yield _indivisible(option, tp, layout.tensor_parallel_size, what, size)
    yield from _whole_sequences(option, model, named, layout)
    if model.num_experts:
        yield from _experts_can_be_cut(option, model, named, layout)
    ends = [field for field, layers in zip(PIPELINE_ENDS, cut.given_layers, strict=True) if layers]
    uneven = [*map(named, ends)]
    if uneven and stages == 1:
        return  # a rule of layouts says so
    try:
        sizes = sorted(set(cut.stage_layers(model.num_layers)))
    except ValueError as error:
        yield (
            _uneven(option, pp, uneven, ends[-1], model, cut, error)
            if uneven
            else _indivisible(option, pp, stages, "layers", model.num_layers)
        )
        return
    together = math.gcd(*sizes)
    if together % chunks:
        got = (
            f"{stages} * {chunks}"
            if len(sizes) == 1
            else f"{chunks} and stages of {_either(sizes)} layers"
        )
        must = (
            f"{pp} * {vp} must divide the model's layers"
            if len(sizes) == 1
            else f"{vp} must divide every stage"
        )
        yield Violation(
            (option, pp, vp, *uneven),
            f"{must}: got {got}, the model of {option} has {model.num_layers}; use a {vp} of "
            f"{_divisors(together)}",
        )
        return
    per_chunk = together // chunks
    if (layout.recompute, layout.recompute_method) == (
        "full",
        "uniform",
    ) and per_chunk % layout.recompute_num_layers:
        name = "megatron.recompute_num_layers"
        yield Violation(
            (option, name, *uneven),
            f"{name} must divide the layers of a model chunk with megatron.recompute_method "
            f"uniform: got {layout.recompute_num_layers}, a chunk of the model of {option} has "
            f"{_either([size // chunks for size in sizes])}; use {_divisors(per_chunk)}",
        )


def _whole_sequences(
    option: str, model: ModelShape, named: Callable[[str], str], layout: Megatron
) -> Iterator[Violation]:
    """The layers whose attention needs them whole get them so."""
    name, size = named("context_parallel_size"), layout.context_parallel_size
    reasons = sorted({kind.no_context_parallel for kind in model.attention_counts} - {""})
    if size > 1 and reasons:
        yield Violation(
            (option, name),
            f"{name} must be 1 for the model of {option}, got {size}: {'; '.join(reasons)}; leave "
            "it out",
        )


def _experts_can_be_cut(
    option: str, model: ModelShape, named: Callable[[str], str], megatron: Megatron
) -> Iterator[Violation]:
    tp, cp, pp, sp, ep, etp = map(
        named,
        (
            "tensor_parallel_size",
            "context_parallel_size",
            "pipeline_parallel_size",
            "sequence_parallel_enable",
            "expert_parallel_size",
            "expert_tensor_parallel_size",
        ),
    )
    cut = ParallelLayout.of(megatron, megatron.pipeline_parallel_size)
    mixture = f"a mixture of experts (the model of {option})"
    if model.num_experts % cut.expert_parallel_size:
        yield _indivisible(option, ep, cut.expert_parallel_size, "experts", model.num_experts)
    if model.ffn_hidden_size % cut.expert_tensor:
        yield _indivisible(option, etp, cut.expert_tensor, "expert width", model.ffn_hidden_size)
    if cut.expert_parallel_size == 1 and cut.expert_tensor != cut.tensor_parallel_size:
        # Megatron reduces such experts' gradients with all others', over ranks that hold other
        # parts of them
        got = f"{etp} {megatron.expert_tensor_parallel_size}"
        if megatron.expert_tensor_parallel_size is None:
            got = (
                f"{cp} {megatron.context_parallel_size} with {pp} {megatron.pipeline_parallel_size}"
            )
        yield Violation(
            (option, ep, etp, tp, cp, pp),
            f"{mixture} with {ep} 1 is split by {tp} only, here {cut.tensor_parallel_size}: got "
            f"{got}; leave it out, or use a {ep} above 1",
        )
    if cut.tensor_parallel_size > 1 and not cut.sequence_parallel:
        yield Violation(
            (option, tp, sp),
            f"{mixture} needs {sp} with a {tp} above 1: got {cut.tensor_parallel_size} without "
            f"it; add {sp}",
        )


def cpu_engine_violations(config: RunConfig) -> Iterator[Violation]:
    """What vLLM's CPU build lacks for models whose layers keep a state; to be asked where it is
    known that engines have no GPU."""
    sampled = {_ACTOR: config.actor.model_name_or_path}
    if config.guide_samples:
        sampled[_GUIDE] = config.guide.model_name_or_path
    for option, folder in sampled.items():
        model, _ = local_shape(option, folder)
        if model is None or not model.keeps_states:
            continue
        why = f"the model of {option} has gated delta nets, and engines run on CPU"
        if config.vllm.enable_prefix_caching:
            yield Violation(
                ("vllm.enable_prefix_caching", option),
                f"vllm.enable_prefix_caching must be false, because {why}: there vLLM keeps no "
                "states of prefixes; leave it out",
            )
        if option == _ACTOR and config.ds.lora.enabled and config.vllm.lora == "adapter":
            yield Violation(
                ("vllm.lora", option),
                f"vllm.lora must be merged, because {why}: there vLLM has no adapters of them; "
                "got adapter; set vllm.lora merged",
            )


def _mixture_rules(config: TrainedConfig, model: ModelShape, option: str) -> Iterator[Violation]:
    """What a mixture of experts under training does not have."""
    if "mlp" in config.megatron.recompute_modules and config.megatron.recompute == "selective":
        yield _other_module(option, "mlp", "dense models", "moe")
    if isinstance(config, RunConfig) and config.replays_rollout and config.guide_samples:
        yield Violation(
            ("train.routing_replay", "guide.model_name_or_path"),
            "train.routing_replay replays the experts of the model that sampled, but a guide has "
            f"other experts than the policy: got {config.train.routing_replay} and samples of a "
            "guide; leave one of them out",
        )
    if (
        isinstance(config, RunConfig)
        and config.replays_rollout
        and not config.vllm.enable_prefix_caching
    ):
        yield Violation(
            ("train.routing_replay", "vllm.enable_prefix_caching"),
            "train.routing_replay rollout needs vllm.enable_prefix_caching true, got false: vLLM "
            "stores the experts that its routers chose with the blocks of its prefix cache; set "
            "it to true",
        )
    engine = config.vllm.tensor_parallel_size if isinstance(config, RunConfig) else 1
    if model.ffn_hidden_size % engine:
        yield _indivisible(
            option, "vllm.tensor_parallel_size", engine, "expert width", model.ffn_hidden_size
        )


def _no_experts(option: str, section: str, megatron: Section) -> Iterator[Violation]:
    for field in ("expert_parallel_size", "expert_tensor_parallel_size"):
        if (size := getattr(megatron, field)) not in (None, 1):
            yield Violation(
                (option, f"{section}.{field}"),
                f"{section}.{field} applies only to mixtures of experts, but the model of "
                f"{option} is dense: got {size}; leave it out",
            )


def _dense_rules(config: TrainedConfig, option: str) -> Iterator[Violation]:
    """What a dense model under training does not have."""
    yield from _no_experts(option, "megatron", config.megatron)
    name = f"{config.trained}.aux_loss_coef"
    if coefficient := value_of(config, name):
        yield Violation(
            (option, name),
            f"{name} applies only to mixtures of experts, but the model of {option} is dense: got "
            f"{coefficient:g}; leave it out",
        )
    if isinstance(config, RunConfig) and config.train.routing_replay != "off":
        yield Violation(
            (option, "train.routing_replay"),
            f"train.routing_replay applies only to mixtures of experts, but the model of {option} "
            f"is dense: got {config.train.routing_replay}; leave it out",
        )
    if "moe" in config.megatron.recompute_modules and config.megatron.recompute == "selective":
        yield _other_module(option, "moe", "mixtures of experts", "mlp")


def _other_module(option: str, module: str, owners: str, remedy: str) -> Violation:
    return Violation(
        (option, "megatron.recompute_modules"),
        f"megatron.recompute_modules {module} applies only to {owners}, but the model of {option} "
        f"is not one: got {module}; use {remedy}",
    )


def _uneven(
    option: str,
    pp: str,
    given: list[str],
    changed: str,
    model: ModelShape,
    cut: ParallelLayout,
    error: ValueError,
) -> Violation:
    """Stages with layers of their own leave the others unevenly many; says what the field
    ``changed`` could be."""
    possible = [
        layers
        for layers in range(1, model.num_layers)
        if _can_be_cut(cut, changed, layers, model.num_layers)
    ]
    wanted = getattr(cut, changed)
    near = sorted(sorted(possible, key=lambda layers: abs(layers - wanted))[:3])
    remedy = f"use a {given[-1]} of {_either(near)}" if near else f"use fewer stages ({pp})"
    got = " and ".join(
        f"{name} {layers}"
        for name, layers in zip(given, filter(None, cut.given_layers), strict=True)
    )
    return Violation(
        (option, pp, *given),
        f"{' and '.join(given)} must leave the other stages an equal number of layers, at least "
        f"one each: got {got} with {pp} {cut.pipeline_parallel_size}; of the model of {option}, "
        f"{error}; {remedy}",
    )


def _can_be_cut(cut: ParallelLayout, name: str, layers: int, num_layers: int) -> bool:
    changed: dict[str, Any] = {name: layers}
    try:
        return bool(dataclasses.replace(cut, **changed).chunk_layers(num_layers))
    except ValueError:
        return False


def _either(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))


def _heads_divisible(
    option: str, model: ModelShape, size_option: str, size: int
) -> Iterator[Violation]:
    divided: dict[str, int] = {}
    shared: dict[str, int] = {}
    for attention in model.attention_counts:
        divided |= attention.divided
        shared |= attention.shared
    for what, count in divided.items():
        if count % size:
            yield _indivisible(option, size_option, size, what, count)
    for what, count in shared.items():
        if count % size and size % count:
            yield Violation(
                (option, size_option),
                f"{size_option} must divide the model's {what} or be a multiple of them: got "
                f"{size}, the model of {option} has {count}; use {_divisors(count)}",
            )


def _indivisible(option: str, size_option: str, size: int, what: str, count: int) -> Violation:
    return Violation(
        (option, size_option),
        f"{size_option} must divide the model's {what}: got {size}, the model of {option} has "
        f"{count}; use {_divisors(count)}",
    )


def _positions(option: str, model: ModelShape, config: TrainedConfig) -> Iterator[Violation]:
    max_len = config.data.max_len
    if model.max_positions is not None and max_len > model.max_positions:
        kind = model.rotary["rope_type"]
        said = f" and its rope_type {kind}" if kind in ("yarn", "linear") else ""
        yield Violation(
            (option, "data.max_len"),
            f"data.max_len must not exceed the model's max_position_embeddings{said}: got "
            f"{max_len} > {model.max_positions} tokens of the model of {option}; lower "
            "data.max_len, or extend the window with YaRN (docs/models.md#positions)",
        )
    yield from beyond_window(option, model, "data.max_len", max_len)
    # its kernel takes no factor, and does not say so (megatron-core 0.19.2
    # models/common/embeddings/rope_utils.py:320)
    if config.megatron.rope_fusion and (factor := model.rotary_factor) != 1.0:
        yield Violation(
            (option, "megatron.rope_fusion"),
            f"megatron.rope_fusion ignores the factor of cosines and sines, which is {factor:g} "
            f"for the model of {option} (rope_type {model.rotary['rope_type']}): leave "
            "megatron.rope_fusion out",
        )


def beyond_window(
    option: str, model: ModelShape, length_option: str, length: int
) -> Iterator[Violation]:
    """Attention with a window is that without one in sequences that are not longer; others are not
    computed."""
    if model.window is not None and length > model.window:
        yield Violation(
            (option, length_option),
            f"{length_option} must not exceed the attention window of the model of {option} "
            "(sliding_window in its config.json); longer sequences are not supported: got "
            f"{length} > {model.window} tokens; set {length_option} to at most {model.window}",
        )


def _divisors(number: int) -> str:
    """The smallest divisors, as a remedy."""
    found = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    return ", ".join(map(str, found[:8]))
