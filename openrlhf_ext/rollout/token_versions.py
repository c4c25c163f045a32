"""Which weights each token was sampled with, when weights change in the middle of requests.

vLLM 0.29 does not report it. At every update the engine stands still; what each unfinished request has got by then was
sampled with the weights before, the rest with those after. A completion's versions are spans ``(version, start, end)``
of its tokens, in order, without gaps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openrlhf_ext.rollout.seeding import derived_seed

Span = tuple[int, int, int]
"""(version of the weights, first token, end)"""

SPANS_KEY = "weight_versions"
"""Where a response carries the spans of its whole token sequence; tokens that were not sampled are in none."""


class TokenVersions:
    """Keeps, for requests that an update interrupted, how many tokens they had by then.

    A request that was made but had not reached vLLM when an update ended counts as begun with the weights before:
    its tokens may be younger than stated, never older.
    """

    def __init__(self) -> None:
        self._changes: dict[str, list[tuple[int, int]]] = {}  # request -> (tokens by then, new version)

    def change(self, version: int, tokens: Mapping[str, int]) -> None:
        """The weights are now those of ``version``; ``tokens`` so far of every unfinished request, by request id."""
        for request, count in tokens.items():
            self._changes.setdefault(request, []).append((count, version))

    def take(self, request: str, begun_with: int, num_tokens: int) -> list[Span]:
        """Spans of a finished request that began when the weights were of version ``begun_with``; forgets it."""
        spans, version, start = [], begun_with, 0
        for count, next_version in self._changes.pop(request, ()):
            if count > start:
                spans.append((version, start, count))
            version, start = next_version, count
        return [*spans, (version, start, num_tokens)] if num_tokens > start else spans

    def forget_all(self) -> None:
        """No request is in progress: what is left belongs to requests that were given up."""
        self._changes.clear()


class ResponseRecorder:
    """Stands in for the engine while one response is made, and afterwards says which weights its tokens came from.

    Everything that executors know of an engine works; only the outputs of ``generate`` are noted in passing.
    """

    def __init__(self, engine: Any, seed: int | None = None) -> None:
        """
        Args:
            seed: of the response, from which every request without one gets a seed of its own.
        """
        self._engine, self._seed, self._turns = engine, seed, 0
        self._sampled: list[tuple[list[int], list[Span]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt_token_ids: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        """The engine's ``generate``."""
        if self._seed is not None and sampling_params.seed is None:
            sampling_params = sampling_params.clone()
            sampling_params.seed = derived_seed(self._seed, self._turns)
        self._turns += 1
        output = await self._engine.generate(prompt_token_ids, sampling_params, *args, **kwargs)
        for completion in output.outputs:
            self._sampled.append((list(completion.token_ids), completion.weight_versions))
        return output

    def annotate(self, response: Any) -> Any:
        """Adds ``SPANS_KEY`` to a response in OpenRLHF's form; one of another form is left alone.

        An action whose tokens no request returned counts as sampled with the oldest weights of the whole response.
        """
        if isinstance(response, dict) and "action_ranges" in response and self._sampled:
            oldest = min((version for _, spans in self._sampled for version, _, _ in spans), default=0)
            tokens = response["observation_tokens"]
            response[SPANS_KEY] = [
                (version, start + first, start + end)
                for start, stop in response["action_ranges"]
                for version, first, end in self._spans_of(list(tokens[start:stop]), oldest)
            ]
        return response

    def _spans_of(self, tokens: list[int], oldest: int) -> list[Span]:
        """Spans of an action's tokens, which may have been cut short; each request is used once."""
        for index, (sampled, spans) in enumerate(self._sampled):
            if sampled[: len(tokens)] == tokens:
                del self._sampled[index]
                return [(v, start, min(end, len(tokens))) for v, start, end in spans if start < len(tokens)]
        return [(oldest, 0, len(tokens))] if tokens else []


def count_tokens(output_processor: Any) -> dict[str, int]:
    """Tokens so far of every unfinished request of vLLM's output processor, by the id it was made with."""
    return {
        state.external_req_id: state.detokenizer.num_output_tokens()
        for state in output_processor.request_states.values()
        if state.detokenizer is not None
    }
