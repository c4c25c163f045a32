"""Which weights each token was sampled with, when weights change in the middle of requests.

vLLM 0.29 does not report it. At every update the engine stands still; what each unfinished request has got by then was
sampled with the weights before, the rest with those after. A completion's versions are spans ``(version, start, end)``
of its tokens, in order, without gaps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Span = tuple[int, int, int]
"""(version of the weights, first token, end)"""


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


def count_tokens(output_processor: Any) -> dict[str, int]:
    """Tokens so far of every unfinished request of vLLM's output processor, by the id it was made with."""
    return {
        state.external_req_id: state.detokenizer.num_output_tokens()
        for state in output_processor.request_states.values()
        if state.detokenizer is not None
    }
