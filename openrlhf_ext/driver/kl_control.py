"""The coefficient of the KL penalty over a run: constant, or steered to a target.

D. Ziegler et al., "Fine-Tuning Language Models from Human Preferences", arXiv 1909.08593, section 2.2, with the mean KL
per token (as OpenRLHF) instead of the KL per completion.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from openrlhf_ext.algorithms.kl import kl_k3
from openrlhf_ext.algorithms.segments import BLOCK_TOKENS

_MAX_ERROR = 0.2


class KLCoefficient:
    """The coefficient that the next batch of rollouts is trained with.

    Args:
        value: coefficient at the start.
        target: mean KL per token to steer to, nats; None for a constant coefficient.
        horizon: samples over which a deviation is corrected.
    """

    def __init__(self, value: float, target: float | None = None, horizon: int = 10000) -> None:
        self.value, self.target, self.horizon = value, target, horizon

    def update(self, kl: float, samples: int) -> None:
        """Multiplies the coefficient by ``1 + clip(kl / target - 1, +-0.2) * samples / horizon``.

        Args:
            kl: mean per token of an estimate of KL(policy || reference) on ``samples`` completions of the policy. It
                must not be negative in the mean, or the error says nothing: k3 is used, whatever the penalty uses.
        """
        if self.target is not None:
            error = min(max(kl / self.target - 1, -_MAX_ERROR), _MAX_ERROR)
            self.value *= 1 + error * samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        """What a resumed run has to know."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continues from a state."""
        self.value = float(state["value"])


def reference_kl(old_logprobs_N: Tensor, ref_logprobs_N: Tensor) -> float:
    """Mean over completion tokens of the k3 estimate of KL(policy || reference), nats; the policy sampled them."""
    blocks = zip(old_logprobs_N.split(BLOCK_TOKENS), ref_logprobs_N.split(BLOCK_TOKENS), strict=True)
    return sum(float(kl_k3(old_n.double(), ref_n.double()).sum()) for old_n, ref_n in blocks) / len(old_logprobs_N)
