"""KL to a reference policy: the estimators k1, k2, k3 and where they act.

`kl_coef` of an algorithm is the k3 penalty in the loss. The `kl=` mapping of `get_algorithm`
chooses another estimator, or puts the penalty into the reward. `KLCoefficient` steers the
coefficient from batch to batch.

Shape suffixes: N = tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from openrlhf_ext.algorithms.batch import RolloutBatch, check_values
from openrlhf_ext.algorithms.option_blocks import Options, parse
from openrlhf_ext.algorithms.segments import Segments
from openrlhf_ext.options import Float, Violation, option

_MAX_KL_ERROR = 0.2


def kl_k1(new_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """`new - ref`: unbiased for KL(new || ref) on tokens sampled from the new policy; may be
    negative."""
    return new_logprobs - ref_logprobs


def kl_k2(new_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """`(new - ref)^2 / 2`: biased, low variance; its gradient is the gradient of the KL."""
    return 0.5 * (new_logprobs - ref_logprobs) ** 2


def kl_k3(new_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """`e^x - x - 1` with `x = ref - new`: unbiased and never negative (Schulman, "Approximating KL
    Divergence")."""
    x = ref_logprobs - new_logprobs
    return torch.expm1(x) - x


_MAX_WEIGHT, _MOST_KL = 10.0, 10.0
KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": kl_k1,
    "k2": kl_k2,
    "k3": kl_k3,
}


class KLPenalty(Options):
    """Parsed `kl=` mapping."""

    coef: Float = option(..., "coefficient", ge=0)
    estimator: Literal["k1", "k2", "k3"] = option("k3", "estimator of the KL")
    place: Literal["loss", "reward"] = option(
        "loss", "subtracted from each token's objective, or its sum from the reward"
    )
    unbiased_gradient: bool = option(
        False,
        "in the loss: keep the estimator's value, but give it the gradient of the KL itself, "
        "weighted by new / old",
    )

    def violations(self) -> Iterator[Violation]:
        if self.unbiased_gradient and self.place == "reward":
            yield Violation(
                ("unbiased_gradient", "place"),
                "unbiased_gradient needs place loss: a penalty in the reward has no gradient of "
                "its own",
            )

    def mean(self, policy_N: Tensor, ref_N: Tensor, segments: Segments) -> float:
        """The KL that an adaptive controller compares with its target: a mean of estimates clamped
        to +-10.

        For a penalty in the loss, the mean over all tokens; in the reward, first the mean over each
        completion's tokens (OpenRLHF 0.11.2, `experience_maker.py:215`, `ppo_actor.py:333`).
        """
        kl_N = _bounded_kl(self.estimator, policy_N.double(), ref_N.double(), _MOST_KL)
        if self.place == "loss":
            return float(kl_N.mean())
        return float((segments.sums(kl_N) / segments.lengths_B).mean())

    def in_loss(
        self, new_N: Tensor, ref_N: Tensor, old_N: Tensor, mask_N: Tensor, most: float | None = None
    ) -> Tensor:
        """(N,) penalty per token without its coefficient, within `most`, 0 outside the mask.

        Each entry depends on its own token only. The gradient of k1 is the gradient of the
        log-prob, which is 0 in expectation on samples of the policy. The gradient of k3 is the
        gradient of KL(ref || new). With `unbiased_gradient`, every estimator has the gradient `w k1
        grad log new` of KL(new || ref) on samples of the old policy, with `w = new / old` (at most
        10, as in OpenRLHF).
        """
        value_N = masked_kl(self.estimator, new_N, ref_N, mask_N, most)
        if not self.unbiased_gradient:
            return value_N
        old_N = torch.where(mask_N, old_N, 0.0)
        weight_N = (torch.where(mask_N, new_N.detach(), 0.0) - old_N).exp().clamp(max=_MAX_WEIGHT)
        slope_N = weight_N * masked_kl("k2", new_N, ref_N, mask_N)
        return value_N.detach() + slope_N - slope_N.detach()


def parse_kl(values: Mapping[str, Any] | None, kl_coef: float, owner: str) -> KLPenalty | None:
    """The penalty of the `kl=` mapping, or of `kl_coef`; None when the coefficient is 0.

    Raises:
        ValueError: the mapping is illegal, or both forms are set.
    """
    if values is None:
        return KLPenalty(coef=kl_coef) if kl_coef > 0 else None
    if kl_coef > 0:
        raise ValueError(
            f"{owner}: kl_coef = {kl_coef} and kl = {dict(values)} both set a penalty; give one "
            "of them"
        )
    penalty = parse(KLPenalty, values, owner="kl")
    return penalty if penalty.coef > 0 else None


def masked_kl(
    estimator: str, policy_N: Tensor, ref_N: Tensor, mask_N: Tensor, most: float | None = None
) -> Tensor:
    """(N,) estimate per token, within `most`, 0 outside the mask."""
    return _bounded_kl(
        estimator, torch.where(mask_N, policy_N, 0.0), torch.where(mask_N, ref_N, 0.0), most
    )


def _bounded_kl(estimator: str, policy_N: Tensor, ref_N: Tensor, most: float | None) -> Tensor:
    """The estimate clamped to +-most; OpenRLHF's `compute_approx_kl` (`models/utils.py:54`) clamps
    to +-10."""
    if most is None:
        return KL_ESTIMATORS[estimator](policy_N, ref_N)
    # The value is beyond the bound already; an overflowing exponential would make the gradient 0 *
    # inf.
    if estimator == "k3":
        policy_N = torch.maximum(policy_N, ref_N.detach() - most)
    return KL_ESTIMATORS[estimator](policy_N, ref_N).clamp(-most, most)


def reward_kl(penalty: KLPenalty, batch: RolloutBatch, most: float | None = None) -> Tensor:
    """(N,) amount that a KL in the reward, within `most`, subtracts per token.

    Raises ValueError with the first token whose KL overflows.
    """
    penalty_N = penalty.coef * _bounded_kl(
        penalty.estimator, batch["old_logprobs"], batch["ref_logprobs"], most
    )
    check_values(
        f"KL penalty {penalty.estimator} of log-probs old and ref", penalty_N, batch.segments
    )
    return penalty_N


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
