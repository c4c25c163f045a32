"""The Ray actor that holds one rank of the critic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from openrlhf_ext.algorithms.segments import plain
from openrlhf_ext.driver.values import ValueMiniBatch
from openrlhf_ext.megatron.deadlines.watchdog import phase
from openrlhf_ext.megatron.settings import CriticSettings
from openrlhf_ext.megatron.step.batch import SequenceBatch
from openrlhf_ext.ranks.actor import RankActor
from openrlhf_ext.ranks.checkpoint import CheckpointedRank
from openrlhf_ext.ranks.offload import SleepingRank

if TYPE_CHECKING:
    from openrlhf_ext.megatron.critic import MegatronCritic


class CriticActor(SleepingRank, CheckpointedRank, RankActor):
    """One rank of the critic. Every RPC is a collective: the group calls it on all ranks."""

    def init_model_from_pretrained(
        self, settings: CriticSettings, max_epochs: int, sleeps: bool = False
    ) -> dict[str, Any]:
        """Builds the rank's model and optimizer; returns what the process is."""
        from openrlhf_ext.megatron.critic import MegatronCritic

        info = self.join(settings.model)
        with phase("building the critic"):
            self.critic, self.max_epochs = MegatronCritic(settings), max_epochs
        self.watch_states(self.critic, sleeps)
        self.release_model()
        return info

    @phase("values")
    def forward(self, batch: SequenceBatch) -> np.ndarray:
        """(N,) values at the response tokens of this replica's sequences."""
        self.reload_states("parameters")
        return plain(self.critic.values(batch))

    @phase("training the critic")
    def fit(self, mini_batches: list[ValueMiniBatch]) -> dict[str, float]:
        """One optimizer step per mini-batch, ``max_epochs`` times over; means over the steps, the same on every rank.

        Args:
            mini_batches: this replica's share of every optimizer step.
        """
        self.reload_states()
        steps = [
            self.critic.train_step(mini.batch, mini.targets) for _ in range(self.max_epochs) for mini in mini_batches
        ]
        self.release_model()
        mean = {name: sum(step[name] for step in steps) / len(steps) for name in steps[-1]}
        return mean | {"value/lr": steps[-1]["value/lr"]}

    def save_model(self, path: str) -> dict[str, int]:
        """Writes the critic as an HF checkpoint; returns the sizes of its files on rank 0."""
        self.reload_states("parameters")
        return self.critic.save_hf(path)

    def checkpointed_model(self) -> MegatronCritic:
        """The critic (``CheckpointedRank``), on its device."""
        self.reload_states()
        return self.critic
