"""Settings that are allowed but deserve a warning: what is risky, and what has no effect beside the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from openrlhf_ext.config import checkpoint_rules
from openrlhf_ext.config.access import is_set, leaf_fields, value_of
from openrlhf_ext.config.algorithm_options import correction_level
from openrlhf_ext.config.entities.algo import CUSTOM, ESTIMATORS
from openrlhf_ext.config.inputs import ModelFacts
from openrlhf_ext.config.paths import dataset_refs, is_hub_name

if TYPE_CHECKING:
    from openrlhf_ext.config.schema import RunConfig


def config_warnings(config: RunConfig, model: ModelFacts | None) -> Iterator[str]:
    """All warnings, on a configuration whose types are right.

    Args:
        model: facts of the policy's model, where it is a local folder.
    """
    yield from _input_warnings(config, model)
    yield from _sampling_warnings(config)
    yield from _idle_warnings(config)
    yield from checkpoint_rules.checkpoint_warnings(config)
    yield from _mode_warnings(config)


def _mode_warnings(config: RunConfig) -> Iterator[str]:
    train = config.train
    if train.colocate_all and not (config.ds.enable_sleep and config.vllm.enable_sleep):
        yield (
            "train.colocate_all without both ds.enable_sleep and vllm.enable_sleep: policy and engines are in the "
            "memory of a GPU at the same time; vllm.gpu_memory_utilization must leave room for the policy"
        )
    if config.max_staleness > 0 and train.full_determinism_enable:
        yield (
            "train.full_determinism_enable with train.max_staleness above 0: which group is finished first, and which "
            "token meets new weights first, depends on timing, so two runs differ"
        )
    if config.weight_sync.timeout_s >= config.megatron.collective_timeout_s:
        yield (
            f"weight_sync.timeout_s {config.weight_sync.timeout_s:g} is not below megatron.collective_timeout_s "
            f"{config.megatron.collective_timeout_s:g}: an engine that hangs in a weight sync is not replaced, because "
            "the policy's ranks give up first"
        )
    if config.vllm.max_restarts and config.vllm.hang_timeout_s >= config.rollout.timeout_s:
        yield (
            f"vllm.hang_timeout_s {config.vllm.hang_timeout_s:g} is not below rollout.timeout_s "
            f"{config.rollout.timeout_s:g}: an engine that hangs while it generates is not replaced, because the batch "
            "is given up first"
        )
    if not train.async_enable:
        yield from _no_effect(config, "train.async_queue_size", "train.async_enable is off")
    if config.max_staleness == 0:
        yield from _no_effect(config, "train.late_groups", "train.max_staleness is 0: no group is late")


def _input_warnings(config: RunConfig, model: ModelFacts | None) -> Iterator[str]:
    path = config.actor.model_name_or_path
    if path is not None and is_hub_name(path):
        yield (
            f"actor.model_name_or_path {path} is taken for a hub name: whether the layout fits the model is not "
            f"checked before it is downloaded"
        )
    if model is not None and not model.has_weights:
        yield f"actor.model_name_or_path {path} holds no *.safetensors file: the policy cannot load its weights"
    for option in ("data.prompt_dataset", "eval.dataset"):
        for ref in dataset_refs(value_of(config, option) or ""):
            if ref.path and is_hub_name(ref.path):
                yield f"{option} {ref.path} is taken for a hub name: its keys are not checked before it is downloaded"
    if "\\n" in (config.data.input_template or ""):
        yield "data.input_template contains a backslash and an n: write a line break ($'\\n' in bash)"


def _sampling_warnings(config: RunConfig) -> Iterator[str]:
    if config.rollout.top_p < 1:
        yield (
            f"rollout.top_p {config.rollout.top_p:g} < 1: the engines sample from a cut distribution, the policy "
            f"trains the whole one, so ratios are biased; 1.0 is on-policy"
        )


def _idle_warnings(config: RunConfig) -> Iterator[str]:
    """Settings that do nothing beside the others."""
    estimator = config.algo.advantage.estimator
    for name in (*ESTIMATORS, CUSTOM):
        if name != estimator and getattr(config.algo, name):
            yield f"algo.{name}.* has no effect: algo.advantage.estimator is {estimator}"
    if estimator != CUSTOM:
        yield from _no_effect(config, "algo.module_path", f"algo.advantage.estimator is {estimator}, not custom")
    if correction_level(config) == "off":
        for leaf in ("mode", "gating", "threshold"):
            yield from _no_effect(config, f"algo.advantage.is_correction_{leaf}", "is_correction_level is off")
    if not config.has_critic:
        critic_options = [name for name in option_names_below(config, "critic") if is_set(config, name)]
        for name in ("algo.advantage.gamma", "algo.advantage.lambd", *critic_options):
            yield from _no_effect(config, name, f"algo.advantage.estimator is {estimator}, which has no critic")
    if config.algo.kl.init_coef == 0:
        for leaf in ("estimator", "use_loss", "unbiased_gradient"):
            yield from _no_effect(config, f"algo.kl.{leaf}", "algo.kl.init_coef is 0")
    elif config.algo.kl.use_loss and config.algo.kl.estimator == "k1" and not config.algo.kl.unbiased_gradient:
        yield (
            "algo.kl.use_loss with algo.kl.estimator k1 does not hold the policy back: the gradient of k1 is 0 in the "
            "mean; use k2 or k3, or add algo.kl.unbiased_gradient"
        )
    if not config.has_reference:
        for name in ("ref.num_nodes", "ref.num_gpus_per_node", "ref.offload", "train.colocate_actor_ref"):
            yield from _no_effect(config, name, "no reference model is built without a KL penalty")
    if not config.algo.dynamic_filtering_enable:
        for name in ("algo.dynamic_filtering_range", "rollout.max_filter_batches"):
            yield from _no_effect(config, name, "algo.dynamic_filtering_enable is off")
    yield from _idle_schedule_warnings(config)
    if config.train.dynamic_batch_enable:
        for name in ("train.micro_batch_size", "rollout.micro_batch_size"):
            yield from _no_effect(config, name, "train.dynamic_batch_enable fills micro-batches up to a token budget")
    if config.eval.dataset is None:
        for leaf in ("split", "temperature", "n_samples_per_prompt"):
            yield from _no_effect(config, f"eval.{leaf}", "eval.dataset is not set")


def _idle_schedule_warnings(config: RunConfig) -> Iterator[str]:
    for side in ("actor", "critic") if config.has_critic else ("actor",):
        schedule = getattr(config, side).lr_scheduler
        if schedule == "constant":
            yield from _no_effect(config, f"{side}.lr_warmup_ratio", f"{side}.lr_scheduler constant has no warm-up")
        if schedule != "cosine_with_min_lr":
            yield from _no_effect(config, f"{side}.min_lr_ratio", f"{side}.lr_scheduler is {schedule}")


def option_names_below(config: RunConfig, entity: str) -> list[str]:
    """Names of the supported and unsupported options of one entity."""
    return [name for name, _ in leaf_fields(type(config)) if name.startswith(f"{entity}.")]


def _no_effect(config: RunConfig, name: str, reason: str) -> Iterator[str]:
    if value_of(config, name) != value_of(type(config)(), name):
        yield f"{name} has no effect: {reason}"
