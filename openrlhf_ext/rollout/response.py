"""What is asked of an engine, and what comes back: a group of graded completions as flat arrays.

Importable without Ray, vLLM and torch. Shape suffixes: S = tokens of a sequence, T = its completion tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from openrlhf_ext.rollout.seeding import derived_seed
from openrlhf_ext.rollout.token_versions import SPANS_KEY, Span


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled.

    Attributes:
        temperature, top_p: as vLLM's.
        max_new_tokens: longest completion; None = what ``max_len`` leaves after the prompt.
        max_len: longest sequence, prompt and completion together.
    """

    temperature: float
    top_p: float
    max_new_tokens: int | None
    max_len: int


@dataclass(frozen=True)
class GroupRequest:
    """One prompt, of which ``samples`` graded completions are wanted.

    Attributes:
        seed: of the group; None = the engine's own random numbers.
    """

    prompt: str
    label: Any
    samples: int
    sampling: Sampling
    seed: int | None = None

    def seed_of(self, sample: int) -> int | None:
        """Of the completion at this place in the group."""
        return None if self.seed is None else derived_seed(self.seed, sample)


@dataclass(frozen=True)
class Response:
    """One graded completion.

    Attributes:
        tokens_S: int32 prompt and completion, and for agents the observations in between.
        logprobs_T: fp32 log-probs that the engine sampled the completion tokens with; None if it does not tell.
        actions: [start, stop) ranges of the completion tokens in ``tokens_S``, in order.
        versions: which weights sampled what, as ranges of ``tokens_S``; empty if that is not known.
        reward, score: what is trained on, and correctness.
        truncated: cut at the length limit without end of sequence.
        extra_logs: the reward function's own numbers, and ``reward_failed``.
    """

    tokens_S: np.ndarray
    logprobs_T: np.ndarray | None
    actions: tuple[tuple[int, int], ...]
    versions: tuple[Span, ...]
    reward: float
    score: float
    truncated: bool
    extra_logs: dict[str, float]

    @property
    def sampled(self) -> int:
        """Completion tokens."""
        return sum(stop - start for start, stop in self.actions)

    @property
    def span(self) -> int:
        """Tokens from the first to the last one of the completion, observations in between included."""
        return self.actions[-1][1] - self.actions[0][0] if self.actions else 0

    @classmethod
    def of_agent(cls, answer: Mapping[str, Any], max_len: int) -> Response:
        """From a response in the form of OpenRLHF's executors, cut after ``max_len`` tokens."""
        tokens_S = np.asarray(answer["observation_tokens"][:max_len], dtype=np.int32)
        actions = tuple(_cut(answer["action_ranges"], len(tokens_S)))
        logprobs = answer["rollout_log_probs"]
        if logprobs is not None:
            kept = [np.asarray(logprobs[start:stop], dtype=np.float32) for start, stop in actions]
            logprobs = np.concatenate([np.zeros(0, np.float32), *kept])
        versions = ((version, *span) for version, first, end in answer.get(SPANS_KEY, ())
                    for span in _cut([(first, end)], len(tokens_S)))  # fmt: skip
        return cls(
            tokens_S, logprobs, actions, tuple(versions), float(answer["reward"]), float(answer["scores"]),
            bool(answer.get("truncated", False)), {name: float(value) for name, value in answer["extra_logs"].items()},
        )  # fmt: skip


def _cut(spans: Iterable[tuple[int, int]], length: int) -> Iterable[tuple[int, int]]:
    """The parts of ``spans`` below ``length``."""
    return ((int(start), min(int(stop), length)) for start, stop in spans if start < length)
