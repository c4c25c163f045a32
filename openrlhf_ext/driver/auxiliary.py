"""The models beside the policy: the critic's ranks, and those of frozen models that are not in its host memory."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from openrlhf_ext.driver.checkpointing import save_hf
from openrlhf_ext.driver.settings import (
    FrozenModel,
    critic_path,
    critic_settings,
    frozen_models,
    parallel_layout,
)
from openrlhf_ext.driver.waiting import Deadline
from openrlhf_ext.megatron.model.shape import read_model_shape

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Companions:
    """The groups of ranks that a run needs besides the policy's.

    Attributes:
        critic: None if there is none.
        frozen: those of frozen models that have ranks of their own, by name.
    """

    critic: Any = None
    frozen: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def start(cls, config: Any, policy_places: Any = None) -> Companions:
        """Starts the actors, which import in the background.

        Args:
            policy_places: the policy's ``Reservation``, which a critic shares in a colocated run.
        """
        frozen = {model.name: _start_frozen(config, model) for model in frozen_models(config) if model.ranks}
        return cls(_start_critic(config, policy_places), frozen)

    def initialize(self, config: Any, session: Any, policy_settings: Any, steps: int, deadline: Deadline) -> None:
        """Loads the models on all ranks and remembers their processes.

        Args:
            steps: training steps of the run.
            policy_settings: the policy's ``PolicySettings``; critic and frozen models differ in what is said below.
        """
        refs: dict[str, list] = {}
        if self.critic is not None:
            settings = critic_settings(config, policy_settings, steps)
            refs["critic"] = self.critic.async_init_model_from_pretrained(
                settings, config.train.max_epochs, config.ds.enable_sleep
            )
        for model in frozen_models(config):
            if (group := self.frozen.get(model.name)) is not None:
                layout = parallel_layout(model.ranks, config.megatron)
                settings = dataclasses.replace(
                    policy_settings, model_path=model.path, layout=layout, optimizer=None, host_copies={}
                )
                refs[model.name] = group.async_init_model_from_pretrained(settings)
        for name, ranks in refs.items():
            infos = deadline.get(ranks)
            for info in infos:
                session.remember(f"{name} rank {info['rank']}", info)
            session.watch(name, [info["phases"] for info in infos])
            logger.info("%s ready on %d ranks", name, len(ranks))

    def experience_parts(self, config: Any, policy: Any) -> dict[str, Any]:
        """Arguments of the experience maker: ``critic``, ``kl``, and a scorer for each frozen model."""
        scorers = {model.name: self._scorer(config, policy, model) for model in frozen_models(config)}
        return {"critic": self._value_trainer(config), "kl": _kl_coefficient(config), **scorers}

    def _scorer(self, config: Any, policy: Any, model: FrozenModel) -> Any:
        from openrlhf_ext.driver.scorers import Scorer

        attention_length = read_model_shape(model.path).attention_length
        if (group := self.frozen.get(model.name)) is not None:
            return Scorer(group, "forward", model.ranks // config.model_parallel_size, attention_length)
        return Scorer(policy, f"{model.name}_logprobs", config.data_parallel_size, attention_length)

    def _value_trainer(self, config: Any) -> Any:
        from openrlhf_ext.driver.values import ValueTrainer

        if not config.has_critic:
            return None
        layout = parallel_layout(config.critic_ranks, config.critic_layout)
        return ValueTrainer(
            self.critic,
            replicas=layout.data_parallel_size,
            group_size=config.rollout.n_samples_per_prompt,
            mini_batch_size=config.train.batch_size,
            attention_length=read_model_shape(critic_path(config)).attention_length,
        )

    def save(self, config: Any) -> None:
        """Writes the critic to ``<ckpt.output_dir>_critic`` if ``critic.save_value_network`` asks for it."""
        if self.critic is not None and config.critic.save_value_network:
            path = f"{config.ckpt.output_dir}_critic"
            logger.info("writing the critic to %s", path)
            save_hf(self.critic, "critic", path, "ckpt.output_dir", config.train.step_timeout_s)


def _start_critic(config: Any, policy_places: Any) -> Any:
    if not config.has_critic:
        return None
    from openrlhf_ext.ranks.critic import CriticActor

    places = policy_places if config.train.colocate_all else None
    return _start(CriticActor, config, "the critic's ranks", config.critic_ranks, config.critic_layout, places)


def _start_frozen(config: Any, model: FrozenModel) -> Any:
    from openrlhf_ext.ranks.frozen import FrozenActor

    return _start(FrozenActor, config, f"the {model.name}'s ranks", model.ranks, config.megatron)


def _start(actor: type, config: Any, what: str, ranks: int, megatron: Any, places: Any = None) -> Any:
    from openrlhf_ext.driver.rank_group import RankGroup, reserve

    layout = parallel_layout(ranks, megatron)
    group = RankGroup(
        ray.remote(num_gpus=1)(actor),
        places or reserve(ranks, config.vllm.start_timeout_s, what),
        world_size=ranks,
        model_parallel_size=layout.model_parallel_size,
        tensor_size=layout.tensor_parallel_size,
        block_size=layout.near_ranks,
    )
    group.async_run_method("load_libraries")
    return group


def _kl_coefficient(config: Any) -> Any:
    from openrlhf_ext.driver.kl_control import KLCoefficient

    kl = config.algo.kl
    return KLCoefficient(kl.init_coef, kl.target, kl.horizon) if kl.init_coef > 0 else None
