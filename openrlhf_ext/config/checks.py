"""All rules applied to one configuration.

What cannot be decided here: whether the run has GPUs and how many the cluster holds, which is seen when Ray places the
actors; and what needs torch to know (the options of an estimator, the tensors of a model), which
``openrlhf_ext.driver.preflight`` adds to the same report.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from openrlhf_ext.config import checkpoint_rules, file_rules, guide_rules, mode_rules, output_rules, ppo_rules, rules
from openrlhf_ext.config.access import is_set, value_of
from openrlhf_ext.config.algorithm_options import RESERVED_KEYS, correction_level, flag_options
from openrlhf_ext.config.entities.algo import CUSTOM, ESTIMATORS, GUIDED
from openrlhf_ext.config.errors import Violation
from openrlhf_ext.config.inputs import InputError, ModelFacts, read_model_facts, tokenizer_difference
from openrlhf_ext.config.paths import dataset_refs, is_hub_name, is_url
from openrlhf_ext.config.warning_rules import config_warnings

if TYPE_CHECKING:
    from openrlhf_ext.config.entities.policy import Megatron
    from openrlhf_ext.config.schema import RunConfig

# what a run writes, and whether it is a folder
_OUTPUTS = {
    "ckpt.path": True,
    "ckpt.output_dir": True,
    "logger.tensorboard_dir": True,
    "logger.metrics_path": False,
    "logger.figure_path": False,
}


@dataclass(frozen=True)
class Findings:
    """What a configuration breaks, and what it should be warned about."""

    violations: tuple[Violation, ...]
    warnings: tuple[str, ...]


def check_config(config: RunConfig) -> Findings:
    """Every rule, on a configuration whose types are right. Reads small parts of the files it names."""
    violations = [*model_violations(config), *_arithmetic(config), *_algorithm(config), *_files(config)]
    policy, _ = _model(config.actor.model_name_or_path)
    return Findings(tuple(violations), tuple(config_warnings(config, policy)))


def model_violations(config: RunConfig) -> Iterator[Violation]:
    """The rules about the models, where they are local folders: to be asked again when one has been downloaded."""
    model, problems = _model(config.actor.model_name_or_path)
    yield from problems
    if model is not None:
        yield from _model_rules(config, model)
        if model.has_weights:  # a folder of config.json alone is for a dry run
            yield from file_rules.tokenizer_violations(
                option="actor.model_name_or_path",
                folder=config.actor.model_name_or_path,
                chat=config.data.apply_chat_template,
            )
    if config.has_critic:
        yield from _critic_model(config, model)
    if config.has_guide:
        yield from _guide_model(config, model)


def _model(path: str | None, option: str = "actor.model_name_or_path") -> tuple[ModelFacts | None, list[Violation]]:
    if path is None:
        return None, [Violation((option,), f"{option} is required: the folder of a Hugging Face checkpoint")]
    if is_hub_name(path):
        return None, []
    try:
        return read_model_facts(path), []
    except InputError as error:
        return None, [Violation((option,), f"{option}: {error}")]


def _model_rules(config: RunConfig, model: ModelFacts, option: str = "actor.model_name_or_path") -> Iterator[Violation]:
    yield from rules.model_violations(
        path=option,
        model=model,
        tp=config.megatron.tensor_parallel_size,
        pp=config.megatron.pipeline_parallel_size,
        engine_tp=config.vllm.tensor_parallel_size,
        max_len=config.data.max_len,
        vp=config.megatron.virtual_pipeline_size,
    )
    yield from _recomputed_layers(option, config.megatron, model)


def _recomputed_layers(path: str, layout: Megatron, model: ModelFacts) -> Iterator[Violation]:
    yield from rules.recompute_layer_violations(
        path=path,
        granularity=layout.recompute,
        method=layout.recompute_method,
        num_layers=layout.recompute_num_layers,
        chunk_layers=model.num_layers // (layout.pipeline_parallel_size * layout.virtual_pipeline_size),
    )


def _critic_model(config: RunConfig, policy: ModelFacts | None) -> Iterator[Violation]:
    option, path = "critic.model_name_or_path", config.critic.model_name_or_path
    model, problems = (policy, []) if path is None else _model(path, option)
    yield from problems
    if model is not None:
        yield from ppo_rules.critic_model_violations(
            model=model,
            policy=policy,
            tp=config.critic_layout.tensor_parallel_size,
            pp=config.critic_layout.pipeline_parallel_size,
            vp=config.critic_layout.virtual_pipeline_size,
            max_len=config.data.max_len,
        )
        yield from _recomputed_layers(option, config.critic_layout, model)


def _guide_model(config: RunConfig, policy: ModelFacts | None) -> Iterator[Violation]:
    option, folder = guide_rules.MODEL, config.guide.model_name_or_path
    guide, problems = _model(folder, option)
    yield from problems
    if guide is None:
        return
    yield from _model_rules(config, guide, option)
    if guide.has_weights:
        yield from file_rules.tokenizer_violations(option=option, folder=folder, chat=False)
    if policy is not None:
        difference = tokenizer_difference(folder, config.actor.model_name_or_path)
        yield from guide_rules.vocabulary_violations(guide=guide, policy=policy, difference=difference)


def _arithmetic(config: RunConfig) -> Iterator[Violation]:
    layout, rollout = config.megatron, config.rollout
    yield from rules.layout_violations(
        num_nodes=config.actor.num_nodes,
        gpus_per_node=config.actor.num_gpus_per_node,
        tp=layout.tensor_parallel_size,
        pp=layout.pipeline_parallel_size,
        cp=layout.context_parallel_size,
        vp=layout.virtual_pipeline_size,
        sequence_parallel=layout.sequence_parallel_enable,
    )
    yield from _ppo(config)
    yield from _modes(config)
    yield from checkpoint_rules.checkpoint_violations(
        save_steps=config.ckpt.save_steps,
        save_hf=config.ckpt.save_hf,
        resumable=not config.ckpt.disable_ds,
        best_metric=config.ckpt.best_metric_key,
        evaluates=config.eval.steps != -1 and config.eval.dataset is not None,
    )
    yield from rules.engine_batch_violations(
        sequences=config.vllm.max_num_seqs, tokens=config.vllm.max_num_batched_tokens
    )
    yield from rules.sync_violations(backend=config.vllm.sync_backend, colocate_all=config.train.colocate_all)
    if not config.has_critic and config.algo.advantage.estimator != CUSTOM:
        yield from rules.group_violations(
            estimator=config.algo.advantage.estimator, samples_per_prompt=rollout.n_samples_per_prompt
        )
    yield from _guide(config)
    yield from rules.batch_violations(
        prompts=rollout.batch_size,
        samples_per_prompt=rollout.n_samples_per_prompt,
        generate_prompts=rollout.vllm_generate_batch_size,
        train_samples=config.train.batch_size,
    )
    dynamic = config.train.dynamic_batch_enable
    yield from rules.head_violations(head=config.megatron.head, kernels=config.megatron.head_kernels)
    yield from rules.recompute_violations(
        granularity=layout.recompute,
        modules=layout.recompute_modules,
        method=layout.recompute_method,
        num_layers=layout.recompute_num_layers,
    )
    yield from rules.packing_violations(
        enabled=dynamic,
        train_tokens=config.train.max_tokens_per_gpu
        if dynamic or "max_tokens_per_gpu" in config.train.model_fields_set
        else None,
        rollout_tokens=rollout.max_tokens_per_gpu,
        cp=layout.context_parallel_size,
        max_len=config.data.max_len,
    )
    yield from rules.length_violations(
        max_new_tokens=rollout.max_new_tokens,
        max_len=config.data.max_len,
        overlong_buffer=config.reward.overlong_buffer_len,
        overlong_factor=config.reward.overlong_penalty_factor,
        probe_length=config.weight_sync.probe_length,
    )


def _modes(config: RunConfig) -> Iterator[Violation]:
    train = config.train
    yield from mode_rules.colocation_violations(
        colocate_all=train.colocate_all,
        policy_ranks=config.world_size,
        critic_ranks=config.critic_ranks,
        num_engines=config.vllm.num_engines,
        engine_tp=config.vllm.tensor_parallel_size,
        policy_sleep=config.ds.enable_sleep,
        engine_sleep=config.vllm.enable_sleep,
    )
    yield from mode_rules.node_violations(
        num_nodes=config.actor.num_nodes,
        gpus_per_node=config.actor.num_gpus_per_node,
        tp=config.megatron.tensor_parallel_size,
    )
    yield from mode_rules.streaming_violations(
        asked=train.max_staleness,
        queue=train.async_queue_size if "async_queue_size" in train.model_fields_set else None,
        staleness=config.max_staleness,
        partial_rollout=train.partial_rollout_enable,
        async_enable=train.async_enable,
        colocate_all=train.colocate_all,
        late=train.late_groups,
        correction=correction_level(config),
        max_requests=config.vllm.max_requests,
        group_size=config.rollout.n_samples_per_prompt,
    )


def _ppo(config: RunConfig) -> Iterator[Violation]:
    critic, own = config.critic_layout, config.ref.model_fields_set & {"num_nodes", "num_gpus_per_node"}
    if config.has_critic:
        yield from ppo_rules.critic_violations(
            num_nodes=config.critic.num_nodes,
            gpus_per_node=config.critic.num_gpus_per_node,
            tp=critic.tensor_parallel_size,
            pp=critic.pipeline_parallel_size,
            cp=critic.context_parallel_size,
            vp=critic.virtual_pipeline_size,
            sequence_parallel=critic.sequence_parallel_enable,
            freezing_steps=config.critic.freezing_steps,
        )
    kl = config.algo.kl
    yield from ppo_rules.kl_violations(
        init_coef=kl.init_coef,
        target=kl.target,
        horizon=kl.horizon,
        samples=config.samples_per_rollout,
        use_loss=kl.use_loss,
        unbiased_gradient=kl.unbiased_gradient,
    )
    if config.has_reference:
        yield from ppo_rules.reference_violations(
            colocated=config.train.colocate_actor_ref or config.train.colocate_all,
            own_ranks=config.ref.num_nodes * config.ref.num_gpus_per_node if own else None,
            policy_ranks=config.world_size,
            copy=config.model_parallel_size,
            offload=config.ref.offload,
        )


def _guide(config: RunConfig) -> Iterator[Violation]:
    zero_batch = config.algo.advantage.estimator == GUIDED and bool(config.algo.mixed_policy_dapo.get("zero_batch"))
    yield from guide_rules.zero_batch_violations(zero_batch=zero_batch, has_guide=config.has_guide)
    if config.has_guide:
        yield from guide_rules.sampling_violations(
            samples=config.guide_samples,
            group=config.rollout.n_samples_per_prompt,
            colocate_all=config.train.colocate_all,
        )
        yield from guide_rules.rank_violations(own_ranks=config.guide_ranks, copy=config.model_parallel_size)


def _algorithm(config: RunConfig) -> Iterator[Violation]:
    advantage = config.algo.advantage
    yield from reserved_violations(config)
    yield from rules.correction_violations(
        level=correction_level(config),
        mode=advantage.is_correction_mode,
        gating=advantage.is_correction_gating,
        threshold=advantage.is_correction_threshold,
    )
    low, high = config.algo.dynamic_filtering_range
    yield from rules.filtering_violations(enabled=config.algo.dynamic_filtering_enable, low=low, high=high)
    yield from duplicate_violations(config)
    prompts = config.initial_entropy_prompts
    if not isinstance(prompts, int) or isinstance(prompts, bool) or prompts < 0:
        option = "algo.gtpo_conflict.initial_entropy_prompts"
        yield Violation(
            (option,), f"{option} must be a number of prompts, 0 or more (0 = do not measure): got {prompts!r}"
        )


def _files(config: RunConfig) -> Iterator[Violation]:
    yield from file_rules.reward_violations(
        remote_url=config.reward.remote_url, agent_path=config.train.agent_func_path
    )
    yield from _data(config)
    outputs = [
        output_rules.Output(option, path, is_folder)
        for option, is_folder in _OUTPUTS.items()
        if (path := value_of(config, option)) is not None
    ]
    for output in outputs:
        yield from output_rules.writable_violations(output)
    if config.has_critic and config.critic.save_value_network:
        outputs.append(output_rules.Output("critic.save_value_network", f"{config.ckpt.output_dir}_critic", True))
    yield from output_rules.overlap_violations(outputs=outputs, inputs=_inputs(config), checkpoints=config.ckpt.path)
    yield from checkpoint_rules.space_violations(config)


_SOURCES = ("data.prompt_dataset", "eval.dataset", "reward.remote_url", "train.agent_func_path", "algo.module_path")


def _inputs(config: RunConfig) -> output_rules.Inputs:
    """The local files and folders that the run reads."""
    models = [("actor.model_name_or_path", config.actor.model_name_or_path)]
    if config.has_critic:
        models.append(("critic.model_name_or_path", config.critic.model_name_or_path))
    if config.has_guide:
        models.append((guide_rules.MODEL, config.guide.model_name_or_path))
    sources = [(option, ref.path) for option in _SOURCES for ref in dataset_refs(value_of(config, option) or "")]

    def local(named: list[tuple[str, str | None]]) -> tuple[tuple[str, str], ...]:
        return tuple((option, path) for option, path in named if path and not is_url(path) and not is_hub_name(path))

    return output_rules.Inputs(models=local(models), sources=local(sources))


def _data(config: RunConfig) -> Iterator[Violation]:
    data = config.data
    keys = file_rules.RecordKeys(data.input_key, data.label_key, data.apply_chat_template)
    if data.prompt_dataset is None:
        yield Violation(
            ("data.prompt_dataset",),
            "data.prompt_dataset is required: a .jsonl file of prompts, a folder or a hub name",
        )
    else:
        yield from file_rules.dataset_violations(option="data.prompt_dataset", value=data.prompt_dataset, keys=keys)
        yield from rules.mixture_violations(datasets=data.prompt_dataset, shares=data.prompt_probs)
        yield from file_rules.prompt_count_violations(
            datasets=data.prompt_dataset, max_samples=data.max_samples, prompts=config.rollout.batch_size
        )
        yield from file_rules.split_violations(
            option="data.prompt_split",
            split=data.prompt_split,
            dataset_option="data.prompt_dataset",
            value=data.prompt_dataset,
        )
    if config.eval.dataset is not None:
        yield from file_rules.dataset_violations(option="eval.dataset", value=config.eval.dataset, keys=keys)
        yield from file_rules.split_violations(
            option="eval.split", split=config.eval.split, dataset_option="eval.dataset", value=config.eval.dataset
        )
    elif config.eval.steps != -1:
        yield Violation(
            ("eval.steps", "eval.dataset"),
            f"eval.steps has no effect without eval.dataset: got {config.eval.steps}; set the dataset too",
        )
    yield from file_rules.template_violations(template=data.input_template, chat=data.apply_chat_template)


def reserved_violations(config: RunConfig) -> Iterator[Violation]:
    """The maps of the estimators hold their options only, not the other arguments of ``get_algorithm``."""
    for name in (*ESTIMATORS, CUSTOM):
        for key, instead in RESERVED_KEYS.items():
            if key in getattr(config.algo, name):
                yield Violation(
                    (f"algo.{name}.{key}",), f"algo.{name}.{key} is not an option of an estimator; use {instead}"
                )


def duplicate_violations(config: RunConfig) -> Iterator[Violation]:
    """No option of the estimator is set to two values by two names."""
    name = config.algo.advantage.estimator
    own = getattr(config.algo, name)
    if config.algo.kl.init_coef > 0 and own.get("kl_coef"):
        yield Violation(
            ("algo.kl.init_coef", f"algo.{name}.kl_coef"),
            f"algo.kl.init_coef and algo.{name}.kl_coef both set a KL penalty: got {config.algo.kl.init_coef:g} and "
            f"{own['kl_coef']}; keep one of them",
        )
    for flag in flag_options(config):
        if flag.key in own and own[flag.key] != flag.value:
            other = f"algo.{name}.{flag.key}"
            yield Violation(
                (flag.flag, other),
                f"{flag.flag} and {other} set the same thing to two values: {flag.value!r} and {own[flag.key]!r}; keep "
                f"one of them",
            )
    actor = config.actor
    pair = actor.eps_clip_low_high
    if is_set(config, "actor.eps_clip") and pair is not None and pair != (actor.eps_clip, actor.eps_clip):
        yield Violation(
            ("actor.eps_clip", "actor.eps_clip_low_high"),
            f"actor.eps_clip and actor.eps_clip_low_high disagree: {actor.eps_clip:g} and {pair[0]:g} {pair[1]:g}; "
            f"keep one of them",
        )
    if actor.gradient_checkpointing_enable and config.megatron.recompute == "none":
        yield Violation(
            ("actor.gradient_checkpointing_enable", "megatron.recompute"),
            "actor.gradient_checkpointing_enable and megatron.recompute none disagree; keep one of them",
        )
