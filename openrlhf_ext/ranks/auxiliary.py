"""The Ray actors of models beside the policy that have ranks of their own: the critic, and frozen
models."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from openrlhf_ext.algorithms.segments import plain
from openrlhf_ext.groups.watchdog import phase
from openrlhf_ext.megatron.settings import ModelSettings
from openrlhf_ext.megatron.step.batch import SequenceBatch, ValueTargets
from openrlhf_ext.ranks.actor import RankActor, TrainedActor


@dataclass(frozen=True)
class CriticMiniBatch:
    batch: SequenceBatch
    targets: ValueTargets


class CriticActor(TrainedActor):
    def init_model(self, settings: ModelSettings, max_epochs: int, sleeps: bool) -> dict[str, Any]:
        from openrlhf_ext.megatron.critic import MegatronCritic

        info = self.join(settings)
        with phase("building the critic"):
            self.critic, self.max_epochs = MegatronCritic(settings), max_epochs
        self.hold(self.critic, sleeps)
        self.release_model()
        return info

    @phase("values")
    def forward(self, batch: SequenceBatch) -> np.ndarray:
        """(N,) values at the response tokens of this replica's sequences."""
        self.reload_states("parameters")
        return plain(self.critic.values(batch))

    @phase("training the critic")
    def fit(
        self, mini_batches: list[CriticMiniBatch], before: Fraction, after: Fraction
    ) -> dict[str, float]:
        """One optimizer step per mini-batch, ``max_epochs`` times over; means over the steps, the
        same on every rank. ``before`` and ``after``: share of the run that is completed, for the
        schedule."""
        self.reload_states()
        todo = mini_batches * self.max_epochs
        self.critic.plan_rates(before, after, len(todo))
        steps = [
            self.critic.train_step(mini.batch, mini.targets, more=number < len(todo))
            for number, mini in enumerate(todo, start=1)
        ]
        self.release_model()
        mean = {name: sum(step[name] for step in steps) / len(steps) for name in steps[-1]}
        return mean | {"value/lr": steps[-1]["value/lr"]}


class RewardActor(RankActor):
    """One rank of a reward model. With ``offload`` its weights are in host memory while it has
    nothing to score."""

    def init_model(self, settings: ModelSettings, offload: bool) -> dict[str, Any]:
        from openrlhf_ext.megatron.critic import ValueDecoder
        from openrlhf_ext.megatron.host_memory import ModelStates

        info = self.join(settings)
        with phase("building the reward model"):
            self.model = ValueDecoder(settings)
        self.states = ModelStates(self.model.models, None, self.model.device)
        self.offload = offload
        if offload:
            self.states.offload()
        return info

    @phase("rewards")
    def forward(self, batch: SequenceBatch) -> np.ndarray:
        """(N,) values of the states before the response tokens of this replica's sequences."""
        self.states.reload()
        values_N = plain(self.model.values(batch))
        if self.offload:
            self.states.offload()
        return values_N


class FrozenActor(RankActor):
    """One rank of a language model that scores completions and is never trained."""

    def init_model(self, settings: ModelSettings) -> dict[str, Any]:
        from openrlhf_ext.megatron.policy import MegatronPolicy

        info = self.join(settings)
        with phase("building the model"):
            self.policy = MegatronPolicy(settings)
        return info

    @phase("log-probs")
    def forward(self, batch: SequenceBatch) -> np.ndarray:
        """(N,) log-probs of the response tokens of this replica's sequences."""
        return plain(self.policy.logprobs(batch).logprobs_N)
