"""Engines and prompts in the hand of a test: which group is finished when, and with which weights,
it says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from openrlhf_ext.config import RunConfig
from openrlhf_ext.driver.rollouts import Key
from openrlhf_ext.rollout.response import GroupRequest, Response, Sampling

SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=4, max_len=16)


_NAMES = {
    "batch_size": ("rollout", "batch_size"), "samples": ("rollout", "n_samples_per_prompt"),
    "max_new_tokens": ("rollout", "max_new_tokens"), "max_filter_batches": ("rollout", "max_filter_batches"),
    "timeout_s": ("rollout", "timeout_s"), "max_len": ("data", "max_len"), "max_staleness": ("train", "max_staleness"),
    "late": ("train", "late_groups"), "seed": ("train", "seed"), "guide_samples": ("guide", "samples_per_prompt"),
    "filter_range": ("algo", "dynamic_filtering_range"),
}  # fmt: skip


def run_config(**sections: dict[str, Any]) -> RunConfig:
    """A configuration with these options, without its checks: ``run_config(train={"seed": 1})``."""
    return RunConfig(**sections)


def options(more: dict[str, dict[str, Any]] | None = None, **changes: Any) -> RunConfig:
    """Two groups of two completions a step, on policy; `seed`: of all groups; `more`: other options
    by section."""
    given = {
        "batch_size": 2,
        "samples": 2,
        "max_new_tokens": 4,
        "max_len": 16,
        "timeout_s": 600.0,
        **changes,
    }
    sections: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        section, option = _NAMES[name]
        sections.setdefault(section, {})[option] = value
    if "seed" in given:
        sections["train"]["full_determinism_enable"] = True
    if "filter_range" in given:
        sections["algo"]["dynamic_filtering_enable"] = True
    if "guide_samples" in given:
        sections["guide"]["model_name_or_path"] = "guide"
        sections.setdefault("algo", {})["advantage"] = {"estimator": "mixed_policy_dapo"}
    sections.setdefault("algo", {}).setdefault("advantage", {"estimator": "grpo"})
    for section, values in (more or {}).items():
        sections[section] = {**sections.get(section, {}), **values}
    return run_config(**sections)


def response(text: str, begun: int, ended: int, score: float = 0.5) -> Response:
    """A prompt of two tokens and a completion of two, the second sampled with the weights at its
    end.

    What is trained on is another number than correctness, as with most reward functions.
    """
    spans = ((begun, 2, 4),) if begun == ended else ((begun, 2, 3), (ended, 3, 4))
    tokens_S = np.array([1, 2, len(text), 4], dtype=np.int32)
    logprobs_T = np.array([-0.5, -1.0], dtype=np.float32)
    return Response(
        tokens_S, logprobs_T, ((2, 4),), spans, 2 * score - 1, score, False, {"reward_failed": 0.0}
    )


class Loader(list):
    """A loader of prompts ``first``, ``first + 1``, ... whose state is how many were drawn in this
    episode."""

    def __init__(self, count: int, first: int = 0) -> None:
        super().__init__(("source", f"{first + i}", f"label {first + i}") for i in range(count))
        self._start = self._drawn = 0

    def __iter__(self):
        self._drawn, self._start = self._start, 0
        while self._drawn < len(self):
            self._drawn += 1
            yield self[self._drawn - 1]
        self._drawn = 0  # as torchdata's loader: what was used up begins anew

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self._drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start = state["drawn"]


class Requests:
    """In the place of ``GroupRequests``: a group is answered when the test has finished it.

    Attributes:
        pending, pause_s: there are no calls to wait for.
        version: of the weights that sample now.
        asked: keys in the order in which they were asked for, also those that are finished.
        at_once: every group but the ``stuck`` ones is finished as soon as it is waited for.
    """

    pending, pause_s = (), 1.0

    def __init__(
        self, at_once: bool = False, stuck: Iterable[int] = (), score: Any = lambda prompt: 0.5
    ) -> None:
        self.version, self.at_once, self.stuck, self.score = 0, at_once, set(stuck), score
        self.asked: list[Key] = []
        self.waiting: dict[Key, tuple[GroupRequest, int]] = {}
        self._finished: list[tuple[Key, list[Response]]] = []

    def __len__(self) -> int:
        return len(self.waiting) + len(self._finished)

    def ask(self, key: Key, request: GroupRequest, first: bool = False) -> None:
        self.asked.append(key)
        self.waiting[key] = request, self.version

    def finish(self, *keys: Key) -> None:
        """These groups come with the next answers."""
        for key in keys:
            request, begun = self.waiting.pop(key)
            made = response(request.prompt, begun, self.version, self.score(request.prompt))
            of_guide = replace(made, from_guide=True)
            group = [made] * (request.samples - request.guide_samples) + [
                of_guide
            ] * request.guide_samples
            self._finished.append((key, group))

    def answers(self, timeout_s: float) -> list[tuple[Key, list[Response]]]:
        if self.at_once:
            self.finish(*(key for key in list(self.waiting) if key not in self.stuck))
        assert self._finished or timeout_s == 0 or not self.waiting, (
            "waits for groups that the test does not finish"
        )
        finished, self._finished = self._finished, []
        return finished
