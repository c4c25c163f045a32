"""What the gradient is made of."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import create_model

import openrlhf_ext
from openrlhf_ext.options import Float, Int, Pair, Section, Violation, added, no_effect, option

_METHODS = Path(openrlhf_ext.__file__).parent / "algorithms/methods"
ESTIMATORS = tuple(module.name for module in pkgutil.iter_modules([str(_METHODS)]))
"""The methods of the package: names of their files, which are not imported here, since they import
torch."""
CUSTOM = "custom"
"""The estimator that the file of ``algo.module_path`` registers."""
MIXED, DISTILLATION = "mixed_policy_dapo", "on_policy_distillation"
GUIDED = (MIXED, DISTILLATION)
"""The estimators that have a guide; that of the first samples too."""
if TYPE_CHECKING:
    Estimator = str
else:
    Estimator = Literal[(*ESTIMATORS, CUSTOM)]

OPENRLHF = (
    "gae",
    "reinforce",
    "reinforce_baseline",
    "rloo",
    "group_norm",
    "dr_grpo",
    "flash_reinforce",
)
"""OpenRLHF's estimators."""
OPENRLHF_KL = 0.01
"""Their KL coefficient where none is given; the other methods' papers have no penalty."""
SINGLE = ("gae", "reinforce", "flash_reinforce", DISTILLATION, CUSTOM)
"""Estimators for which one response per prompt is enough; all others compare those of a prompt."""
# Names that are known elsewhere, and what to use here.
OTHER_ESTIMATORS = {
    "gtpo": "two methods have this name: use gtpo_entropy (arXiv 2508.04349) or gtpo_conflict "
    "(arXiv 2508.03772)",
    "ppo": "PPO with a critic is gae",
}


# an option has its default, its meaning and its bounds, as in a table


class Advantage(Section):
    """The estimator, and the correction for engines that sample from a slightly different
    policy."""

    needs = {
        "algo.advantage.estimator=gae": ("lambd",),
        "algo.advantage.estimator=gae | algo.advantage.estimator=reinforce": ("gamma",),
        "algo.advantage.is_correction_level!=off": (
            "is_correction_mode",
            "is_correction_gating",
            "is_correction_threshold",
        ),
    }

    is_correction_level: Literal["off", "token", "seq"] = option(
        "off",
        "importance correction between policy and engine: off, per token, or per sequence",
        default_text="off; token with train.max_staleness above 0 or fp8.rollout_enable, unless "
        "old log-probs are the engines'",
    )
    is_correction_mode: Literal["mask", "clip"] = option(
        "mask",
        "outside the threshold: mask = drop, clip = clamp the weight (only level token with "
        "gating ratio)",
        default_text="mask; clip with fp8.rollout_enable where possible",
    )
    is_correction_gating: Literal["ratio", "binary_kl", "tv"] = option(
        "ratio",
        "statistic compared with the threshold: the ratio of probabilities, or a divergence per "
        "token",
    )
    is_correction_threshold: tuple[Float, ...] = option(
        (0.5, 5.0),
        "LOW HIGH bounds of the statistic, or a single HIGH (a divergence takes only HIGH)",
        min_length=1,
        max_length=2,
        default_text="0.5 5; 2 with fp8.rollout_enable and mode clip",
    )
    lambd: Float = option(1, "lambda of the estimator gae", ge=0, le=1)
    gamma: Float = option(
        1, "discount factor per token of the estimators gae and reinforce", ge=0, le=1
    )
    estimator: Estimator = option(
        "gae",
        "advantage estimator and its loss (docs/algorithms.md); custom = the one in "
        "algo.module_path",
    )
    no_std_norm: bool = option(
        False,
        "subtract the mean without dividing by the std, per group or in whitening; sets "
        "normalize_std of the estimator to false",
    )


class Kl(Section):
    """A KL penalty against the initial policy; only this penalty needs a reference model."""

    needs = {"algo.kl.init_coef": ("estimator", "use_loss", "unbiased_gradient")}

    target: Float | None = option(
        None,
        "target of the adaptive controller: mean KL per token, nats; null = a constant coefficient",
        gt=0,
    )
    horizon: Int = option(
        10000, "samples over which the adaptive controller corrects a deviation", ge=1
    )
    init_coef: Float = option(
        0.0,
        "coefficient of the KL penalty; the initial one if algo.kl.target is set",
        ge=0,
        default_text="0.01 with OpenRLHF's estimators, else 0",
    )
    estimator: Literal["k1", "k2", "k3"] = option(
        "k1",
        "estimator of the KL per token, d = log-prob of the policy minus the reference's: d, "
        "d^2/2, exp(-d)-1+d",
    )
    unbiased_gradient: bool = option(
        False,
        "with algo.kl.use_loss: give the penalty the importance-corrected gradient of the KL, "
        "for any estimator",
    )
    use_loss: bool = option(
        False, "add the KL penalty to the loss of each token instead of the reward"
    )

    def violations(self) -> Iterator[Violation]:
        """The adaptive controller has a penalty to control."""
        if self.target is not None and self.init_coef == 0:
            yield Violation(
                ("algo.kl.target", "algo.kl.init_coef"),
                "algo.kl.target needs algo.kl.init_coef > 0, because the controller multiplies "
                f"it: got target {self.target:g} and coefficient 0; set the coefficient or leave "
                "the target out",
            )

    def cautions(self) -> Iterator[str]:
        if (
            self.init_coef
            and self.use_loss
            and self.estimator == "k1"
            and not self.unbiased_gradient
        ):
            yield (
                "algo.kl.use_loss with algo.kl.estimator k1 does not constrain the policy: the "
                "expected gradient of k1 is 0; use k2 or k3, or add algo.kl.unbiased_gradient"
            )


class Algo(Section):
    """The algorithm; every estimator has an open map of its own options, declared in the file of
    its method."""

    needs = {
        "algo.advantage.estimator=custom": ("module_path",),
        "algo.dynamic_filtering_enable": ("dynamic_filtering_range",),
    }

    advantage: Advantage = Advantage()
    kl: Kl = Kl()
    old_logprobs: Literal["auto", "policy", "engine"] = added(
        "auto",
        "old log-probs of the ratios: policy = from a forward pass of the policy before the "
        "update; engine = those the engine sampled with; auto = those the update itself computes "
        "where they are the same (docs/algorithms.md), else policy; with "
        "train.exact_rollout_enable engine where possible (docs/exact.md)",
    )
    entropies: Literal["policy", "engine"] = added(
        "policy",
        "entropies that a method uses for shaping: policy = from a forward pass of the policy, "
        "exact; engine = of the distribution that the engine sampled each token from, which needs "
        "no forward pass (docs/algorithms.md)",
        default_text="policy; engine with train.exact_rollout_enable where there is no such pass",
    )
    dynamic_filtering_enable: bool = option(
        False,
        "sample new prompts to replace those whose mean score is outside "
        "algo.dynamic_filtering_range",
    )
    dynamic_filtering_range: Pair = option(
        (0, 1), "LOW HIGH of the mean score of a prompt's responses, both exclusive"
    )
    module_path: str | None = added(
        None,
        "a .py file that registers your own algorithm, for the estimator custom",
        path="input",
    )

    def of(self, estimator: str) -> dict[str, Any]:
        """The map of an estimator's options."""
        options: dict[str, Any] = getattr(self, estimator)
        return options

    def violations(self) -> Iterator[Violation]:
        """The range of mean scores that are kept is not empty."""
        low, high = self.dynamic_filtering_range
        if self.dynamic_filtering_enable and low >= high:
            yield Violation(
                ("algo.dynamic_filtering_range",),
                f"algo.dynamic_filtering_range must be LOW HIGH with LOW < HIGH: got {low:g} "
                f"{high:g}",
            )

    def cautions(self) -> Iterator[str]:
        estimator = self.advantage.estimator
        for name in (*ESTIMATORS, CUSTOM):
            if name != estimator and self.of(name):
                keys = " ".join(self.of(name))
                yield no_effect(f"algo.{name}.*", keys, f"algo.advantage.estimator is {estimator}")


if not TYPE_CHECKING:
    _MAPS = {
        name: (
            dict[str, Any],
            added(dict, f"options of the estimator {name} (docs/methods.md)", default_text=""),
        )
        for name in (*ESTIMATORS, CUSTOM)
    }
    Algo = create_model("Algo", __base__=Algo, __module__=__name__, __doc__=Algo.__doc__, **_MAPS)
