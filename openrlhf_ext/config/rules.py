"""Rules between options: each rule is one small function of the configuration. A section's own
rules are in its file.

Two kinds of facts are not checked here. Whether the run has GPUs, and how many the cluster holds,
is known when Ray places the actors. Facts that need torch (the options of an estimator, the tensors
of a model) are checked by ``openrlhf_ext.driver.preflight``, which adds them to the same report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from openrlhf_ext.config import drafts, exact_rules, precision
from openrlhf_ext.config.estimator import flag_options, initial_entropy_prompts, old_logprobs
from openrlhf_ext.config.file_rules import file_violations
from openrlhf_ext.config.files import (
    dataset_refs,
    has_weights,
    inputs_of,
    is_hub_name,
    is_url,
    model_folder,
    names_code,
)
from openrlhf_ext.config.model_rules import (
    local_shape,
    model_violations,
    scaled_models,
)
from openrlhf_ext.config.run_config import RunConfig
from openrlhf_ext.config.tokenizers import AS_TOKENIZER_JSON
from openrlhf_ext.config.trained import TrainedConfig
from openrlhf_ext.inputs import InputError
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.model.shape import read_value_scale
from openrlhf_ext.options import Section, Violation, idle_options, is_set, no_effect, value_of
from openrlhf_ext.options.sections import Eval
from openrlhf_ext.options.sections.algo import CUSTOM, DISTILLATION, ESTIMATORS, MIXED, SINGLE
from openrlhf_ext.options.table import Configuration

# Arguments of ``get_algorithm`` that are not options of an estimator, and the options that set
# them.
RESERVED_KEYS = {
    "kl": "algo.kl.*",
    "correction": "algo.advantage.is_correction_*",
    "name": "algo.advantage.estimator",
}
_ACTOR, _GUIDE, _REWARD = (
    "actor.model_name_or_path",
    "guide.model_name_or_path",
    "reward.model_name_or_path",
)
_HOST_COPY = ", or leave both out for a copy in the policy's host memory"
_MAX_CHANGE = 0.2  # the adaptive controller clips the error of the measured KL to +-20 %


@dataclass(frozen=True)
class Findings:
    violations: tuple[Violation, ...]
    warnings: tuple[str, ...]


def check_config(config: RunConfig) -> Findings:
    """Checks every rule on a configuration whose types are correct. Reads small parts of the files
    it names."""
    found = check_settings(config)
    return Findings((*found.violations, *file_violations(config)), found.warnings)


def check_settings(config: RunConfig) -> Findings:
    """Checks every rule except those about data, reward and outputs."""
    found = check_sections(config)
    of_rules = (violation for rule in RULES for violation in rule(config))
    warnings = (warning for rule in WARNINGS for warning in rule(config))
    return Findings(
        (*model_violations(config), *of_rules, *found.violations), (*warnings, *found.warnings)
    )


def check_sections(config: Configuration) -> Findings:
    """Checks the rules of each section, and finds options without an effect."""
    sections = list(_sections(config))
    violations = (violation for section in sections for violation in section.violations())
    cautions = (warning for section in sections for warning in section.cautions())
    return Findings(tuple(violations), (*cautions, *idle_options(config)))


def _sections(section: Section) -> Iterator[Section]:
    for _, value in section:
        if isinstance(value, Section):
            yield value
            yield from _sections(value)


# ---- ranks and layouts


def trained_layout(config: TrainedConfig) -> Iterator[Violation]:
    yield from _layout_violations(config.rank_options, "megatron", config.layout)


def samples_of_ranks(config: RunConfig) -> Iterator[Violation]:
    """Every data-parallel rank has at least one sample of an update."""
    if next(config.layout.problems(), None) is not None:
        return  # another rule reports it
    ranks, samples = (
        config.layout.data_parallel_size,
        min(config.train.batch_size, config.samples_per_rollout),
    )
    if ranks > samples > 0:
        yield Violation(
            ("actor.num_nodes", "train.batch_size"),
            f"the policy has {ranks} data-parallel ranks, but an update has only {samples} "
            "samples (train.batch_size). Use at least one sample per rank, or split the policy "
            "into more parts (megatron.*_parallel_size)",
        )


def profiled_ranks(config: RunConfig) -> Iterator[Violation]:
    if (
        config.profile.steps is not None
        and max(config.profile.ranks, default=0) >= config.world_size
    ):
        ranks = " ".join(map(str, config.profile.ranks))
        yield Violation(
            ("profile.ranks", "actor.num_nodes", "actor.num_gpus_per_node"),
            "profile.ranks must be below actor.num_nodes * actor.num_gpus_per_node = "
            f"{config.world_size}: got {ranks}; ranks start at 0",
        )


def critic_layout(config: RunConfig) -> Iterator[Violation]:
    if config.has_critic:
        ranks = "critic.num_nodes * critic.num_gpus_per_node"
        yield from _layout_violations(ranks, "critic.megatron", config.critic_layout)


def _layout_violations(ranks: str, prefix: str, layout: ParallelLayout) -> Iterator[Violation]:
    """Yields the layout's violations. ``prefix``: the section of the layout options; ``ranks``: the
    options whose product is the number of ranks."""
    named = {"world_size": ranks, "sequence_parallel": f"{prefix}.sequence_parallel_enable"}
    inherited = (
        "" if prefix == "megatron" else f" (options of {prefix} that are not set follow megatron.*)"
    )
    for names, problem in layout.problems(lambda field: named.get(field, f"{prefix}.{field}")):
        yield Violation(
            tuple(option for name in names for option in name.split(" * ")), problem + inherited
        )


def nodes(config: RunConfig) -> Iterator[Violation]:
    """A tensor-parallel group must fit into a node, because it communicates in every layer."""
    tp, per_node = config.megatron.tensor_parallel_size, config.actor.num_gpus_per_node
    if tp > per_node and config.actor.num_nodes > 1:
        yield Violation(
            ("megatron.tensor_parallel_size", "actor.num_gpus_per_node"),
            "megatron.tensor_parallel_size must not exceed actor.num_gpus_per_node, because every "
            f"layer would wait for the network: got {tp} and {per_node}; use "
            "megatron.pipeline_parallel_size between nodes",
        )


def optimizer_on_host(config: TrainedConfig) -> Iterator[Violation]:
    """Keeping Adam's states in host memory requires the distributed optimizer."""
    name = "megatron.distributed_optimizer_enable"
    if config.ds.optimizer_on_host and not config.megatron.distributed_optimizer_enable:
        yield Violation(
            ("ds.adam_offload", name),
            f"ds.adam_offload needs {name}, which is the default: got false; leave one of them out",
        )


def recomputation(config: TrainedConfig) -> Iterator[Violation]:
    name = f"{config.trained}.gradient_checkpointing_enable"
    if value_of(config, name) and config.megatron.recompute == "none":
        yield Violation(
            (name, "megatron.recompute"),
            f"{name} and megatron.recompute none contradict each other; keep one of them",
        )


def colocation(config: RunConfig) -> Iterator[Violation]:
    """Every GPU that engines share holds one policy rank and one worker of an engine."""
    engines, engine_tp = config.vllm.num_engines, config.vllm.tensor_parallel_size
    if config.engines_share_gpus and config.world_size != engines * engine_tp:
        yield Violation(
            (
                "train.colocate_all",
                "actor.num_nodes",
                "actor.num_gpus_per_node",
                "vllm.num_engines",
                "vllm.tensor_parallel_size",
            ),
            "train.colocate_all puts one policy rank and one engine worker on every GPU: "
            "actor.num_nodes * actor.num_gpus_per_node must equal vllm.num_engines * "
            f"vllm.tensor_parallel_size, got {config.world_size} and {engines} * {engine_tp} = "
            f"{engines * engine_tp}; change vllm.num_engines or the number of ranks",
        )
    shared = (
        ("critic", config.critic_ranks, "critic"),
        ("reward", config.reward_ranks, "reward model"),
    )
    for section, ranks, what in shared if config.train.colocate_all else ():
        if ranks > config.world_size:
            yield Violation(
                (f"{section}.num_gpus_per_node", f"{section}.num_nodes", "train.colocate_all"),
                f"{section}.num_nodes * {section}.num_gpus_per_node must not exceed the policy's "
                f"ranks with train.colocate_all, because the {what} shares the policy's GPUs: got "
                f"{ranks} and {config.world_size}",
            )


def fewer_engines(config: RunConfig) -> Iterator[Violation]:
    fewest, engines = config.vllm.min_engines, config.vllm.num_engines
    for option, needs_all, why in (
        (
            "train.colocate_all",
            config.engines_share_gpus,
            "because losing an engine's GPUs would lose a policy rank",
        ),
        (
            _GUIDE,
            config.guide_samples > 0,
            "because every group needs all of the guide's engines too",
        ),
    ):
        if needs_all and fewest is not None and fewest < engines:
            yield Violation(
                ("vllm.min_engines", option),
                f"vllm.min_engines must be vllm.num_engines with {option}, {why}: got {fewest} "
                f"and {engines}; leave one of them out",
            )


def rollbacks(config: RunConfig) -> Iterator[Violation]:
    if config.train.rollback_on and (not config.ckpt.saves or config.ckpt.disable_ds):
        yield Violation(
            ("train.rollback_on", "ckpt.save_steps", "ckpt.disable_ds"),
            "train.rollback_on needs checkpoints to resume from: set ckpt.save_steps without "
            "ckpt.disable_ds, or leave train.rollback_on out",
        )


def corridor_and_restarts(config: RunConfig) -> Iterator[Violation]:
    if (
        config.train.corridor
        and config.train.corridor_action == "fail"
        and config.train.max_restarts
    ):
        yield Violation(
            ("train.corridor_action", "train.max_restarts"),
            "train.corridor_action fail ends a run that train.max_restarts "
            f"{config.train.max_restarts} would start again: leave one of them out",
        )


def transport(config: RunConfig) -> Iterator[Violation]:
    options = ("vllm.sync_backend", "train.colocate_all")
    for name in ("train.full_determinism_enable", "train.exact_rollout_enable"):
        if config.vllm.sync_backend == "nccl" and value_of(config, name):
            yield Violation(
                ("vllm.sync_backend", name),
                "vllm.sync_backend nccl needs the same NCCL settings in policy and engines, but "
                f"batch-invariant engines ({name}) have other settings, one channel and one "
                f"thread: got nccl and {name}; use auto or gloo, or leave one of them out",
            )
    if config.vllm.sync_backend == "cuda_ipc" and not config.engines_share_gpus:
        yield Violation(
            options,
            "vllm.sync_backend cuda_ipc needs engines on the policy's GPUs: got cuda_ipc and "
            "engines on other GPUs; use auto or nccl",
        )


def adapters(config: RunConfig) -> Iterator[Violation]:
    """Options that exclude adapters (``ds.lora``)."""
    lora = config.ds.lora
    if not lora.enabled:
        return
    name = "ds.lora.rank" if lora.rank else "ds.lora.path"
    if config.has_critic:
        yield Violation(
            (name, "algo.advantage.estimator"),
            f"{name} applies only to the policy; OpenRLHF also gives adapters to the critic of "
            "algo.advantage.estimator gae, which is not supported here: use an estimator without "
            "a critic, or leave ds.lora.* out",
        )
    if config.vllm.lora == "adapter" and config.fp8.rollout_enable:
        yield Violation(
            (name, "vllm.lora", "fp8.rollout_enable"),
            "vllm.lora adapter does not work with fp8.rollout_enable, because the engines' layers "
            "are in FP8: set vllm.lora merged, or leave fp8.rollout_enable out",
        )


def heads_that_draft(config: RunConfig) -> Iterator[Violation]:
    if config.vllm.speculative.method != "eagle3":
        return
    if config.fp8.rollout_enable:
        why = "a head beside layers in FP8 was not tried"
        yield drafts.not_with("eagle3", "fp8.rollout_enable", True, why)
    if config.ds.lora.enabled and config.vllm.lora == "adapter":
        yield drafts.not_with("eagle3", "vllm.lora", "adapter", "a head beside them was not tried")


def reference(config: RunConfig) -> Iterator[Violation]:
    """A reference policy is either a copy in the policy's host memory or a separate group of
    ranks."""
    options = ("ref.num_nodes", "ref.num_gpus_per_node")
    if not config.has_reference or not any(is_set(config, option) for option in options):
        return
    own = config.ref.num_nodes * config.ref.num_gpus_per_node
    if config.train.colocate_actor_ref or config.train.colocate_all:
        if own != config.world_size:
            yield Violation(
                (*options, "train.colocate_actor_ref", "train.colocate_all"),
                "a reference model colocated with the policy uses the policy's ranks: "
                f"ref.num_nodes * ref.num_gpus_per_node = {own}, actor.num_nodes * "
                f"actor.num_gpus_per_node = {config.world_size}; make them equal or leave "
                "ref.num_nodes and ref.num_gpus_per_node out",
            )
        return
    yield from _whole_copies("ref", own, config)
    if config.ref.offload:
        yield Violation(
            ("ref.offload", *options),
            "ref.offload keeps the reference in the policy's host memory, but ref.num_nodes * "
            f"ref.num_gpus_per_node = {own} gives it ranks of its own: leave one of them out, or "
            "set train.colocate_actor_ref",
        )


def _whole_copies(
    section: str, ranks: int, config: RunConfig, remedy: str = _HOST_COPY
) -> Iterator[Violation]:
    """The separate ranks of a frozen model hold whole copies of it, in the policy's layout."""
    size = config.layout.model_parallel_size
    if ranks % size:
        yield Violation(
            (f"{section}.num_nodes", f"{section}.num_gpus_per_node"),
            f"{section}.num_nodes * {section}.num_gpus_per_node must be a multiple of the ranks "
            f"of one copy of the policy, because the model has the policy's layout: got {ranks} "
            f"and {size}; use another number{remedy}",
        )


def reward_model(config: RunConfig) -> Iterator[Violation]:
    """A reward model needs ranks, and grades whole batches, so options that need grades earlier
    exclude it."""
    if not config.has_reward_model:
        return
    yield from _whole_copies("reward", config.reward_ranks, config, "")
    if config.critic_shares_with_reward and config.critic_ranks != config.reward_ranks:
        yield Violation(
            (
                "train.colocate_critic_reward",
                "critic.num_nodes",
                "critic.num_gpus_per_node",
                "reward.num_nodes",
                "reward.num_gpus_per_node",
            ),
            "train.colocate_critic_reward puts one rank of critic and reward model on every "
            "GPU: critic.num_nodes * critic.num_gpus_per_node must equal reward.num_nodes * "
            f"reward.num_gpus_per_node, got {config.critic_ranks} and {config.reward_ranks}; "
            "make them equal, or leave train.colocate_critic_reward out",
        )
    remedy = "leave it out, or grade with reward.remote_url or an agent"
    if config.algo.dynamic_filtering_enable:
        yield Violation(
            ("algo.dynamic_filtering_enable", _REWARD),
            "algo.dynamic_filtering_enable needs rewards that come with the responses, but "
            f"{_REWARD} scores whole batches (as in OpenRLHF): {remedy}",
        )
    if config.eval.dataset is not None:
        yield Violation(
            ("eval.dataset", _REWARD),
            f"eval.dataset needs rewards that come with the responses, but {_REWARD} scores only "
            f"training batches (as in OpenRLHF): {remedy}",
        )


def guide(config: RunConfig) -> Iterator[Violation]:
    estimator = config.algo.advantage.estimator
    if estimator == DISTILLATION and not config.has_guide:
        yield Violation(
            (_GUIDE, "algo.advantage.estimator"),
            f"{_GUIDE} is required with algo.advantage.estimator {estimator}, which learns from "
            "it: give the folder of a checkpoint with the policy's tokenizer",
        )
    if estimator == MIXED and config.own_options.get("zero_batch") and not config.has_guide:
        yield Violation(
            ("algo.mixed_policy_dapo", _GUIDE),
            "algo.mixed_policy_dapo.zero_batch needs log-probs of a guide: got true and no "
            f"{_GUIDE}; set {_GUIDE}, or switch zero_batch off",
        )
    if not config.has_guide:
        return
    group = config.rollout.n_samples_per_prompt
    if config.guide_samples >= group:
        yield Violation(
            ("guide.samples_per_prompt", "rollout.n_samples_per_prompt"),
            "guide.samples_per_prompt must be below rollout.n_samples_per_prompt, because the "
            f"policy samples the other completions of a group: got {config.guide_samples} and "
            f"{group}; lower one or raise the other",
        )
    if config.train.colocate_all and config.guide_samples:
        yield Violation(
            (_GUIDE, "train.colocate_all"),
            f"{_GUIDE} and train.colocate_all cannot be used together, because the guide's "
            "engines do not share the policy's GPUs: leave one of them out",
        )
    yield from _whole_copies("guide", config.guide_ranks, config)


# ---- batches and lengths


def batches(config: RunConfig) -> Iterator[Violation]:
    """A batch of rollouts is a whole number of optimizer steps, each of whole groups.

    Batch sizes need not be divisible by the data-parallel ranks or the micro-batches: sequences are
    dealt by their cost.
    """
    prompts, group, train = (
        config.rollout.batch_size,
        config.rollout.n_samples_per_prompt,
        config.train.batch_size,
    )
    if train % group:
        yield Violation(
            ("train.batch_size", "rollout.n_samples_per_prompt"),
            "train.batch_size (samples) must be a multiple of rollout.n_samples_per_prompt, "
            f"because groups are never split: got {train} and {group}; use "
            f"{_multiples(train, group)}",
        )
    if config.samples_per_rollout % train:
        yield Violation(
            ("train.batch_size", "rollout.batch_size", "rollout.n_samples_per_prompt"),
            "train.batch_size (samples) must divide rollout.batch_size * "
            f"rollout.n_samples_per_prompt ({prompts} * {group} = {config.samples_per_rollout}): "
            f"got {train}; lower train.batch_size or raise rollout.batch_size",
        )
    if config.rollout.vllm_generate_batch_size not in (None, prompts):
        yield Violation(
            ("rollout.vllm_generate_batch_size", "rollout.batch_size"),
            f"rollout.vllm_generate_batch_size must equal rollout.batch_size: got "
            f"{config.rollout.vllm_generate_batch_size} and {prompts}; leave it out",
        )
    requests = config.vllm.max_requests
    if requests is not None and requests < group:
        yield Violation(
            ("vllm.max_requests", "rollout.n_samples_per_prompt"),
            "vllm.max_requests must be at least rollout.n_samples_per_prompt, because a group is "
            f"requested as a whole: got {requests} and {group}; raise it or leave it out",
        )


def groups(config: RunConfig) -> Iterator[Violation]:
    """Most estimators compare the responses to one prompt with each other."""
    estimator, group = config.algo.advantage.estimator, config.rollout.n_samples_per_prompt
    if group < 2 and estimator not in SINGLE:
        yield Violation(
            ("rollout.n_samples_per_prompt", "algo.advantage.estimator"),
            "rollout.n_samples_per_prompt must be at least 2 for algo.advantage.estimator "
            f"{estimator}, which compares the responses to one prompt: got {group}; 8 is a usual "
            "value",
        )


def lengths(config: RunConfig) -> Iterator[Violation]:
    """Responses fit into sequences, and the overlong buffer into responses."""
    response, max_len = config.rollout.max_new_tokens, config.data.max_len
    if response is not None and response >= max_len:
        yield Violation(
            ("rollout.max_new_tokens", "data.max_len"),
            "rollout.max_new_tokens must be below data.max_len, because the prompt needs room: "
            f"got {response} and {max_len} tokens; lower one or raise the other",
        )
    probe = config.weight_sync.probe_length
    if probe is not None and probe >= max_len:
        yield Violation(
            ("weight_sync.probe_length", "data.max_len"),
            f"weight_sync.probe_length must be below data.max_len: got {probe} and {max_len} "
            "tokens",
        )
    buffer = config.reward.overlong_buffer_len
    if buffer is not None and (response is None or buffer > response):
        yield Violation(
            ("reward.overlong_buffer_len", "rollout.max_new_tokens"),
            f"reward.overlong_buffer_len must not exceed rollout.max_new_tokens: got {buffer:g} "
            f"and {'null' if response is None else response} tokens",
        )


def evaluations(config: RunConfig) -> Iterator[Violation]:
    """An evaluation's options are consistent, and the best checkpoint can be determined."""
    given = config.eval
    if given.remote_url is not None and config.train.agent_func_path is not None:
        yield Violation(
            ("eval.remote_url", "train.agent_func_path"),
            "eval.remote_url and train.agent_func_path cannot be used together, because an agent "
            "grades its own rollouts: leave eval.remote_url out",
        )
    if given.dataset is not None and not any(given.violations()):
        for each in given.sets:
            response = each.max_new_tokens
            if response is not None and response >= config.data.max_len:
                yield Violation(
                    ("eval.max_new_tokens", "data.max_len"),
                    "eval.max_new_tokens must be below data.max_len, because the prompt needs "
                    f"room: got {response} and {config.data.max_len} tokens; lower one or raise "
                    "the other",
                )
    if given.async_enable and config.max_staleness == 0:
        yield Violation(
            ("eval.async_enable", "train.max_staleness"),
            "eval.async_enable needs engines that sample while the policy trains: with "
            "train.max_staleness 0 they are idle during training (or asleep, with "
            "train.colocate_all), so nothing would be gained; set train.max_staleness to at least "
            "1, or leave eval.async_enable out",
        )
    yield from _best_metric(config)


TRAINING_METRICS = ("accuracy/mean", "score/mean", "reward/mean")
_OF_EVALUATIONS = ("accuracy", "score_mean", "reward_mean", "response_length_mean")


def evaluation_metrics(given: Eval) -> list[str]:
    """Returns the evaluation metrics by which checkpoints can be compared."""
    every = [f"eval/{metric}" for metric in _OF_EVALUATIONS]
    for each in () if any(given.violations()) else given.sets:
        prefix = f"eval/{each.name}/" if each.name else "eval/"
        every += [f"{prefix}{metric}" for metric in _OF_EVALUATIONS if each.name]
        every += [
            f"{prefix}pass@{2**exponent}"
            for exponent in range(each.n_samples_per_prompt.bit_length())
        ]
    return every


def _best_metric(config: RunConfig) -> Iterator[Violation]:
    best, given = config.ckpt.best_metric_key, config.eval
    if not best:
        return
    if best in TRAINING_METRICS:
        if config.ckpt.save_steps == -1:
            yield Violation(
                ("ckpt.best_metric_key", "ckpt.save_steps"),
                f"ckpt.best_metric_key {best} compares saved steps: set ckpt.save_steps (1 = "
                "every step)",
            )
        return
    if best not in (known := evaluation_metrics(given)):
        yield Violation(
            ("ckpt.best_metric_key",),
            f"ckpt.best_metric_key must be one of {', '.join((*known, *TRAINING_METRICS))}: got "
            f"{best}",
        )
    if given.steps == -1 or given.dataset is None:
        yield Violation(
            ("ckpt.best_metric_key", "eval.steps", "eval.dataset"),
            f"ckpt.best_metric_key {best} needs evaluations during training: set eval.dataset "
            "and eval.steps",
        )
    elif given.async_enable:
        yield Violation(
            ("ckpt.best_metric_key", "eval.async_enable"),
            f"ckpt.best_metric_key {best} and eval.async_enable cannot be used together, because "
            "an evaluation during training ends after the weights it measured are gone: leave "
            "eval.async_enable out, or keep every checkpoint",
        )


# ---- streaming


def streaming(config: RunConfig) -> Iterator[Violation]:
    """Groups of unbounded staleness need an importance correction, or are dropped."""
    if config.max_staleness == 0:
        return
    # Without partial rollouts no request is running at a sync, so no group can be late.
    uncorrected = config.correction_level == "off" and not config.ratios_to_engines
    if config.partial_rollouts and config.train.late_groups == "train" and uncorrected:
        yield Violation(
            ("train.late_groups", "algo.advantage.is_correction_level"),
            "train.late_groups train needs an importance correction, but "
            "algo.advantage.is_correction_level is off: groups may lag by any number of weight "
            "versions; set --train.late_groups wait or drop, or a correction",
        )


# ---- the algorithm


def reserved_keys(config: RunConfig) -> Iterator[Violation]:
    """The maps of the estimators hold only their options, not the other arguments of
    ``get_algorithm``."""
    for name in (*ESTIMATORS, CUSTOM):
        for key in RESERVED_KEYS.keys() & config.algo.of(name).keys():
            yield Violation(
                (f"algo.{name}.{key}",),
                f"algo.{name}.{key} is not an option of an estimator; use {RESERVED_KEYS[key]}",
            )


def adaptive_kl(config: RunConfig) -> Iterator[Violation]:
    """The controller must not change the sign of the coefficient."""
    kl = config.algo.kl
    if kl.target is not None and config.samples_per_rollout * _MAX_CHANGE >= kl.horizon:
        yield Violation(
            ("algo.kl.horizon", "rollout.batch_size", "rollout.n_samples_per_prompt"),
            f"algo.kl.horizon must be above {_MAX_CHANGE:g} * the samples of a batch of rollouts, "
            f"or one batch could change the sign of the coefficient: got {kl.horizon} samples and "
            f"{config.samples_per_rollout}; raise it (10000 is usual)",
        )


def two_names(config: RunConfig) -> Iterator[Violation]:
    """No estimator option is set to two values under two names."""
    estimator, own, actor = config.algo.advantage.estimator, config.own_options, config.actor
    if config.algo.kl.init_coef > 0 and own.get("kl_coef"):
        yield Violation(
            ("algo.kl.init_coef", f"algo.{estimator}.kl_coef"),
            f"algo.kl.init_coef and algo.{estimator}.kl_coef both set a KL penalty: got "
            f"{config.algo.kl.init_coef:g} and {own['kl_coef']}; keep one of them",
        )
    for flag in flag_options(config):
        if flag.key in own and own[flag.key] != flag.value:
            other = f"algo.{estimator}.{flag.key}"
            yield Violation(
                (flag.flag, other),
                f"{flag.flag} and {other} set the same thing to two values: {flag.value!r} and "
                f"{own[flag.key]!r}; keep one of them",
            )
    reward = config.reward
    if reward.overlong_buffer_len is not None and reward.length_penalty.kind != "none":
        yield Violation(
            ("reward.overlong_buffer_len", "reward.length_penalty.kind"),
            "reward.overlong_buffer_len and reward.length_penalty.kind both set the penalty on "
            f"long responses: got {reward.overlong_buffer_len:g} and "
            f"{reward.length_penalty.kind}; keep one of them (the first is kind dapo with l_max "
            "rollout.max_new_tokens)",
        )
    pair = actor.eps_clip_low_high
    if (
        is_set(config, "actor.eps_clip")
        and pair is not None
        and pair != (actor.eps_clip, actor.eps_clip)
    ):
        yield Violation(
            ("actor.eps_clip", "actor.eps_clip_low_high"),
            f"actor.eps_clip and actor.eps_clip_low_high disagree: {actor.eps_clip:g} and "
            f"{pair[0]:g} {pair[1]:g}; keep one of them",
        )


Rule = Callable[[RunConfig], Iterator[Violation]]
LAYOUT_RULES: tuple[Rule, ...] = (
    trained_layout,
    samples_of_ranks,
    profiled_ranks,
    critic_layout,
    nodes,
    optimizer_on_host,
    recomputation,
    precision.parameters,
    colocation,
    reference,
    guide,
    reward_model,
    exact_rules.layout,
)
"""Rules about the layout of models and engines."""
RULES: tuple[Rule, ...] = (
    *LAYOUT_RULES, fewer_engines, rollbacks, corridor_and_restarts, transport, adapters, batches, groups, lengths,
    evaluations, streaming, reserved_keys, adaptive_kl, two_names, exact_rules.settings,
    drafts.settings, heads_that_draft,
)  # fmt: skip


def _multiples(value: int, factor: int) -> str:
    """Returns the multiples of ``factor`` next to ``value``, as a remedy."""
    below = value // factor * factor
    return " or ".join(str(choice) for choice in (below, below + factor) if choice > 0)


# ---- warnings


def hub_names(config: RunConfig) -> Iterator[str]:
    """Hub names are not checked, because their files are not on this machine."""
    path = config.actor.model_name_or_path
    if path is not None and model_folder(path) is None:
        yield (
            f"{_ACTOR} {path} is treated as a hub name: the layout is not checked against the "
            "model before the download"
        )
    reward = config.reward.model_name_or_path if config.has_reward_model else None
    for option, folder, what in ((_ACTOR, path, "policy"), (_REWARD, reward, "reward model")):
        model, _ = local_shape(option, folder)
        if model is not None and not is_hub_name(folder or "") and not has_weights(folder or ""):
            yield (
                f"{option} {folder} holds no *.safetensors file: the {what} cannot load its weights"
            )
    for option in ("data.prompt_dataset", "eval.dataset"):
        for ref in dataset_refs(inputs_of(config, option)):
            if ref.path and is_hub_name(ref.path):
                yield (
                    f"{option} {ref.path} is treated as a hub name: its keys are not checked "
                    "before the download"
                )


def unexecuted_code(config: TrainedConfig) -> Iterator[str]:
    for option in config.model_options:
        if names_code(folder := str(value_of(config, option) or "")):
            yield (
                f"{option}: {folder} has its own Python code (auto_map), which is not executed: "
                "the other files define model and tokenizer; where the tokenizer needs the code: "
                f"{AS_TOKENIZER_JSON}"
            )


def memory_and_timing(config: RunConfig) -> Iterator[str]:
    if config.engines_share_gpus and not (config.ds.enable_sleep and config.vllm.enable_sleep):
        yield (
            "train.colocate_all without both ds.enable_sleep and vllm.enable_sleep: policy and "
            "engines use a GPU's memory at the same time; vllm.gpu_memory_utilization must leave "
            "room for the policy"
        )
    if config.train.colocate_all and config.has_reward_model and not config.reward.offload:
        yield (
            "train.colocate_all with a reward model and without reward.offload: its weights stay "
            "in GPU memory while the engines sample and the policy trains; "
            "vllm.gpu_memory_utilization must leave room for them"
        )
    if config.max_staleness > 0 and config.train.full_determinism_enable:
        yield (
            "train.full_determinism_enable with train.max_staleness above 0: which group finishes "
            "first, and which token first uses new weights, depends on timing, so two runs differ"
        )
    if config.vllm.speculative.method != "none" and config.train.full_determinism_enable:
        yield (
            "train.full_determinism_enable with vllm.speculative.method "
            f"{config.vllm.speculative.method}: which random numbers a token takes depends on the "
            "drafts that its step has room for, so two runs may differ where steps are full"
        )
    if config.weight_sync.timeout_s >= config.megatron.collective_timeout_s:
        yield (
            f"weight_sync.timeout_s {config.weight_sync.timeout_s:g} is not below "
            f"megatron.collective_timeout_s {config.megatron.collective_timeout_s:g}: an engine "
            "that hangs in a weight sync is not replaced, because the policy's ranks give up "
            "first"
        )
    if (
        config.vllm.max_restarts or config.vllm.min_engines
    ) and config.vllm.hang_timeout_s >= config.rollout.timeout_s:
        yield (
            f"vllm.hang_timeout_s {config.vllm.hang_timeout_s:g} is not below rollout.timeout_s "
            f"{config.rollout.timeout_s:g}: an engine that hangs while it generates is not "
            "replaced, because the batch times out first"
        )


def restarts(config: RunConfig) -> Iterator[str]:
    ckpt, restarts = config.ckpt, config.train.max_restarts
    if restarts and (not ckpt.saves or ckpt.disable_ds):
        yield (
            f"train.max_restarts {restarts}: without ckpt.save_steps a restart begins from the "
            "first step"
        )


def unused_modes(config: RunConfig) -> Iterator[str]:
    """Options of modes that are off. Token budgets count if they are set, even to the default."""
    for name in ("train.max_tokens_per_gpu", "rollout.max_tokens_per_gpu"):
        if (
            is_set(config, name)
            and value_of(config, name) is not None
            and not config.train.dynamic_batch_enable
        ):
            reason = "train.dynamic_batch_enable is off"
            yield no_effect(
                name,
                value_of(config, name),
                reason,
                "set train.dynamic_batch_enable, or leave it out",
            )


def unused_passes(config: RunConfig) -> Iterator[str]:
    """Without log-probs, values or scores before the update there are no forward-only
    micro-batches."""
    name, reason = (
        "rollout.micro_batch_size",
        "there is no forward pass before the update (algo.old_logprobs)",
    )
    if config.train.dynamic_batch_enable or config.sources.get(name, "").startswith("default"):
        return  # another rule reports it, or the user did not set it
    found = [*_idle(config, name, reason)]
    others = (
        config.has_reference or config.has_guide or config.has_critic or config.has_reward_model
    )
    # Checked last, because it may import an estimator.
    if (
        found
        and not others
        and old_logprobs(config)[0] != "policy"
        and not initial_entropy_prompts(config)
    ):
        yield from found


def unused_models(config: RunConfig) -> Iterator[str]:
    if not config.has_reference:
        for name in (
            "ref.num_nodes",
            "ref.num_gpus_per_node",
            "ref.offload",
            "train.colocate_actor_ref",
        ):
            yield from _idle(
                config,
                name,
                "no reference model is built without a KL penalty",
                "set algo.kl.init_coef",
            )


def unused_reward_model(config: RunConfig) -> Iterator[str]:
    """As in OpenRLHF, no reward model is built if there is another source of rewards."""
    name = config.reward.model_name_or_path
    if name is not None and not config.has_reward_model:
        other = (
            "reward.remote_url" if config.reward.remote_url is not None else "train.agent_func_path"
        )
        yield no_effect(
            _REWARD, name, f"rewards come from {other}; no reward model is built (as in OpenRLHF)"
        )
    for option, folder in scaled_models(config):
        try:
            scale = read_value_scale(folder)
        except InputError:
            continue  # reported as a violation
        if scale is None:
            yield (
                f"reward.normalize_enable has no effect on {option}, because its config.json has "
                "no mean and std"
            )


def unused_graders(config: RunConfig) -> Iterator[str]:
    if config.has_reward_model:
        for leaf in (
            "timeout_s",
            "max_failures",
            "failure_value",
            "num_workers",
            "memory_mib",
            "environment",
        ):
            yield from _idle(config, f"reward.{leaf}", f"{_REWARD} grades responses")
    if config.reward.remote_url and all(map(is_url, config.reward.remote_url.split(","))):
        for leaf in ("num_workers", "memory_mib", "environment"):
            yield from _idle(
                config, f"reward.{leaf}", "reward.remote_url names servers, which grade elsewhere"
            )


def token_budgets(config: RunConfig) -> Iterator[str]:
    """As in OpenRLHF, a sequence longer than the budget gets its own micro-batch."""
    max_len, cp = config.data.max_len, config.megatron.context_parallel_size
    for name in (
        ("train.max_tokens_per_gpu", "rollout.max_tokens_per_gpu")
        if config.train.dynamic_batch_enable
        else ()
    ):
        tokens = value_of(config, name)
        if tokens is not None and tokens * cp < max_len:
            yield (
                f"{name} * megatron.context_parallel_size is below data.max_len ({tokens} * {cp} < "
                f"{max_len} tokens): a longer sequence gets its own micro-batch and needs memory "
                "for all its tokens"
            )


WARNINGS: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
    hub_names,
    unexecuted_code,
    memory_and_timing,
    precision.determinism,
    restarts,
    unused_modes,
    unused_passes,
    unused_models,
    unused_reward_model,
    unused_graders,
    token_budgets,
    exact_rules.unused,
)


def _idle(config: RunConfig, name: str, reason: str, remedy: str = "leave it out") -> Iterator[str]:
    value: Any = value_of(config, name)
    if value != value_of(RunConfig(), name):
        yield no_effect(name, value, reason, remedy)
