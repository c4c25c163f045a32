"""The sections of a configuration: one file per group, each with its options (unit, meaning,
bounds) and its own rules.

Rules between sections are in ``openrlhf_ext.config.rules``.
"""

from __future__ import annotations

from openrlhf_ext.options.sections.algo import Advantage, Algo, Kl
from openrlhf_ext.options.sections.evaluation import Eval, HeldOutSet
from openrlhf_ext.options.sections.models import (
    Actor,
    Adam,
    Critic,
    CriticAdam,
    DeepSpeed,
    Guide,
    Megatron,
    Ref,
)
from openrlhf_ext.options.sections.rollout import Reward, Rollout, Speculative, Vllm, WeightSync
from openrlhf_ext.options.sections.run import Ckpt, Data, Logger, Profile, Train

__all__ = [
    "Actor", "Adam", "Advantage", "Algo", "Ckpt", "Critic", "CriticAdam", "Data", "DeepSpeed", "Eval",
    "Guide", "HeldOutSet", "Kl", "Logger", "Megatron", "Profile", "Ref", "Reward", "Rollout", "Speculative", "Train",
    "Vllm", "WeightSync",
]  # fmt: skip
