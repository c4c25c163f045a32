"""Groups that come from two sources: a part from the policy's engines, the others from those of a guide."""

from __future__ import annotations

import dataclasses

import ray

from openrlhf_ext.driver.rollouts import GroupRequests, Key
from openrlhf_ext.rollout.response import GroupRequest, Response


class GuidedRequests:
    """In the place of ``GroupRequests``: a request for ``guide_samples`` goes in two parts to two sets of engines.

    A group is finished when both parts are there; the policy's completions come first, ``Response.from_guide`` marks
    the guide's. Requests without ``guide_samples``, those of evaluations, go to the policy's engines whole.
    """

    def __init__(self, policy: GroupRequests, guide: GroupRequests) -> None:
        """
        Args:
            policy: to the engines that have the policy's weights.
            guide: to those that have the guide's.
        """
        self._sources = (policy, guide)
        self._parts: dict[Key, dict[int, list[Response]]] = {}  # of groups: what has come, by number of the source

    def ask(self, key: Key, request: GroupRequest) -> None:
        """Ask for a group; ``key`` comes back with it."""
        policy, guide = self._sources
        of_guide = request.guide_samples
        of_policy = request.samples - of_guide
        policy.ask(key, dataclasses.replace(request, samples=of_policy, guide_samples=0))
        if of_guide:
            self._parts[key] = {}
            seed = request.seed_of(of_policy)  # other seeds than those of the policy's completions
            guide.ask(key, dataclasses.replace(request, samples=of_guide, guide_samples=0, seed=seed))

    def answers(self, timeout_s: float) -> list[tuple[Key, list[Response]]]:
        """Groups whose two parts have come, as ``GroupRequests.answers``; after ``timeout_s`` seconds maybe none.

        Raises:
            EngineLost, RayTaskError: see ``GroupRequests.answers``.
        """
        if pending := [call for source in self._sources for call in source.pending]:
            pause = min(source.pause_s for source in self._sources)
            ray.wait(pending, num_returns=1, timeout=min(timeout_s, pause))
        finished = []
        for number, source in enumerate(self._sources):
            for key, responses in source.answers(0.0):
                if (group := self._whole(key, number, responses)) is not None:
                    finished.append((key, group))
        return finished

    def _whole(self, key: Key, number: int, responses: list[Response]) -> list[Response] | None:
        """The group, if this was the part of it that was missing."""
        if key not in self._parts:
            return responses
        parts = self._parts[key]
        parts[number] = [dataclasses.replace(r, from_guide=bool(number)) for r in responses]
        if len(parts) < len(self._sources):
            return None
        del self._parts[key]
        return [*parts[0], *parts[1]]
