"""OpenRLHF's samples generator on engines that may be replaced while they generate.

Which engine gets which prompt and what is asked of it stay upstream's. The loop that collects the responses is ours,
because upstream's ends at the first engine that fails.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import ray

from openrlhf_ext.compat import Experience, SamplesGenerator, collect_prompt_batch
from openrlhf_ext.controller.engine_recovery import EngineGuard, GroupRequests


class RecoveringSamplesGenerator(SamplesGenerator):
    """``SamplesGenerator`` whose prompts survive their engine. Used by one thread at a time."""

    def __init__(
        self,
        *args: Any,
        guard: EngineGuard,
        suspended: Callable[[], AbstractContextManager] = nullcontext,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            guard: of the engines.
            suspended: see ``GroupRequests``.
            *args, **kwargs: upstream's.
        """
        super().__init__(*args, **kwargs)
        self.guard = guard
        self._suspended = suspended
        self._requests = GroupRequests(guard, suspended)

    def _dispatch_prompts_to_vllm(self, prompts: list[str], labels: list[str], **kwargs: Any) -> list:
        unfinished = self.guard.ask("get_num_unfinished_requests", self._suspended)
        engines = self.vllm_engines
        self.vllm_engines = [_Recorder(self._requests, *numbers) for numbers in enumerate(unfinished)]
        try:
            return super()._dispatch_prompts_to_vllm(prompts, labels, **kwargs)
        finally:
            self.vllm_engines = engines

    def _generate_vllm(
        self, dataloader_iter: Any, num_prompts: int, dynamic_filtering: bool, **kwargs: Any
    ) -> tuple[list[Experience], int, bool]:
        """Accepted samples, prompts drawn, whether the prompts are used up.

        With ``dynamic_filtering`` a group whose mean score is outside of the range is replaced by another prompt's.
        """
        prompts, labels, images, is_exhausted = collect_prompt_batch(dataloader_iter, num_prompts)
        if not prompts:
            return [], 0, True
        drawn = len(prompts)
        pending = self._dispatch_prompts_to_vllm(prompts, labels, images=images, **kwargs)
        accepted: list[Experience] = []
        while pending:
            responses, pending = self._requests.next_finished(pending)
            group = [self._process_response_into_experience(response, **kwargs) for response in responses]
            if not dynamic_filtering or self._is_kept(group):
                accepted += group
                continue
            prompts, labels, images, is_exhausted = collect_prompt_batch(dataloader_iter, 1)
            drawn += len(prompts)
            if prompts:
                pending += self._dispatch_prompts_to_vllm(prompts, labels, images=images, **kwargs)
        return accepted, drawn, is_exhausted

    def _is_kept(self, group: list[Experience]) -> bool:
        """Whether the mean score of a group is inside ``algo.dynamic_filtering_range``; ungraded groups are kept."""
        if any(sample.scores is None for sample in group):
            return True
        low, high = self.args.algo.dynamic_filtering_range
        return low < sum(float(sample.scores[0]) for sample in group) / len(group) < high


class _Recorder:
    """What upstream's dispatch sees of an engine: how much it has to do, and a way to ask for responses."""

    def __init__(self, requests: GroupRequests, index: int, unfinished: int) -> None:
        self.get_num_unfinished_requests = _Remote(lambda: ray.put(unfinished))
        self.generate_responses = _Remote(lambda **arguments: requests.send(index, arguments))


class _Remote:
    """A function with the call of a Ray method."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.remote = function
