"""The coefficient of the KL penalty, which may change from batch to batch."""

from __future__ import annotations

from collections.abc import Mapping

_MAX_KL_ERROR = 0.2


class KLCoefficient:
    """The KL penalty's coefficient for the next batch: constant, or controlled so that the mean KL
    per token in nats reaches ``target`` within ``horizon`` samples.

    D. Ziegler et al., "Fine-Tuning Language Models from Human Preferences", arXiv 1909.08593,
    section 2.2, with the mean KL per token (as OpenRLHF) instead of the KL per completion.
    """

    def __init__(self, value: float, target: float | None = None, horizon: int = 10000) -> None:
        self.value, self.target, self.horizon = value, target, horizon

    def update(self, kl: float, samples: int) -> None:
        """Multiplies the coefficient by
        ``1 + clip(kl / target - 1, +-0.2) * samples / horizon``."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -_MAX_KL_ERROR), _MAX_KL_ERROR)
            self.value *= 1 + error * samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Returns the state for a checkpoint."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continues from a state."""
        self.value = float(state["value"])
