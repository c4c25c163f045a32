"""The Ray actor that holds one rank of a frozen model with ranks of its own: a reference policy, a guide."""

from __future__ import annotations

from typing import Any

import numpy as np

from openrlhf_ext.algorithms.segments import plain
from openrlhf_ext.megatron.deadlines.watchdog import phase
from openrlhf_ext.megatron.settings import PolicySettings
from openrlhf_ext.megatron.step.batch import SequenceBatch
from openrlhf_ext.ranks.actor import RankActor


class FrozenActor(RankActor):
    """One rank of a language model that scores completions and is never trained."""

    def init_model_from_pretrained(self, settings: PolicySettings) -> dict[str, Any]:
        """Builds the rank's model; returns what the process is."""
        from openrlhf_ext.megatron.policy import MegatronPolicy

        info = self.join(settings)
        with phase("building the model"):
            self.policy = MegatronPolicy(settings)
        return info

    @phase("log-probs")
    def forward(self, batch: SequenceBatch) -> np.ndarray:
        """(N,) log-probs of the response tokens of this replica's sequences."""
        return plain(self.policy.logprobs(batch).logprobs_N)
