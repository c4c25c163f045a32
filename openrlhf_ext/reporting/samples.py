"""samples.jsonl: whole groups of completions of some steps, in the form that ``explain`` reads (docs/explain.md)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from openrlhf_ext.reporting.lines import JsonLines, step_of

_PARTS_OF_A_RUN = 20
_TOKENS = 1 << 16  # some 40 bytes each: 20 steps of a run whose groups hold no more take 50 MB
_DECIMALS = 4  # of numbers per token


class SampleWriter:
    """Writes completions of the steps that are due: the first, and every ``every``-th.

    Args:
        path: the file; folders are made. Completions of steps after ``resume_step`` are moved aside.
        every: steps; None = a twentieth of the run, -1 = never.
        groups: of a step, as for ``chosen_groups``.
    """

    def __init__(
        self, path: str | Path, every: int | None, total_steps: int, texts: Callable[[list[int]], list[str]],
        groups: int, resume_step: int = 0,
    ) -> None:  # fmt: skip
        self._every = max(1, math.ceil(total_steps / _PARTS_OF_A_RUN)) if every is None else every
        self._lines = JsonLines(path, keep=lambda record: step_of(record) <= resume_step)
        self._texts, self._groups = texts, groups

    def groups_due(self, step: int) -> int | None:
        """How many groups of the step are written, 0 = all; None = none."""
        return self._groups if self._every != -1 and (step == 1 or step % self._every == 0) else None

    def write(self, step: int, completions: Sequence[Mapping[str, Any]]) -> None:
        """Writes completions: keys of the format but ``tokens``, and ``advantages``.

        Raises:
            OSError: the file cannot be written.
        """
        for completion in completions:
            numbers = {
                key: [_rounded(key, value) for value in values]
                for key, values in completion.items()
                if isinstance(values, list) and key not in ("token_ids", "label")
            }
            tokens = self._texts(completion["token_ids"])
            self._lines.append({"step": step, **completion, "tokens": tokens, **numbers})

    def close(self) -> None:
        self._lines.close()


def chosen_groups(lengths: Sequence[int], groups: int) -> list[int]:
    """Which groups of a step are kept: the first that fit into the bound, or the shortest one if none does.

    Args:
        lengths: tokens of each group.
        groups: at most so many; 0 = all of them, whatever their size.

    Returns:
        Their positions.
    """
    if groups == 0:
        return list(range(len(lengths)))
    fitting: list[int] = []
    left = _TOKENS
    for position, tokens in enumerate(lengths):
        if tokens <= left and len(fitting) < groups:
            fitting.append(position)
            left -= tokens
    return fitting or [min(range(len(lengths)), key=lengths.__getitem__)]


def _rounded(key: str, value: float) -> float | None:
    """None stands for what is not finite, which JSON cannot hold."""
    if not math.isfinite(value):
        return None
    value = round(value, _DECIMALS)
    # rounding leaves the entropy of a certain token a little below 0, and its log-prob a little above
    limits = {"entropies": max(0.0, value), "logprobs": min(0.0, value)}
    return limits.get(key, value)
