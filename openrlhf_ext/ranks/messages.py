"""What the driver tells ranks besides the settings of their models (``megatron.settings``): plain values."""

from __future__ import annotations

from dataclasses import dataclass

from openrlhf_ext.algorithms import LossBatch
from openrlhf_ext.megatron.step.batch import SequenceBatch, ValueTargets


@dataclass(frozen=True)
class SleepModes:
    """Which sides give up their memory while the other works: ``ds.enable_sleep`` and ``vllm.enable_sleep``.

    Attributes:
        engine_share: of the GPU's memory, that an engine takes on a policy rank's GPU; None: engines have their own.
    """

    policy: bool = False
    engines: bool = False
    engine_share: float | None = None


@dataclass
class TrainingShard:
    """One data-parallel rank's part of every optimizer step: of the rows that it computed the old log-probs of.

    Attributes:
        mini_batches: each carries its whole step's denominators.
        seed: of random choices.
    """

    mini_batches: list[LossBatch]
    seed: int


@dataclass(frozen=True)
class CriticMiniBatch:
    """One data-parallel rank's part of one optimizer step of the critic."""

    batch: SequenceBatch
    targets: ValueTargets
