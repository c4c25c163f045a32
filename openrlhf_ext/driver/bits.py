"""The proof of exact mode: the two log-probs of a sampled token, the engine's and the policy's, are
the same bits.

Nothing is computed for it: the policy's log-probs are those of the update itself. Counted are
tokens that the current weights sampled and that the policy saw before the batch moved it. Shape
suffixes: B = completions, N = response tokens of all completions, n = those that count.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openrlhf_ext.driver.scoring import Scored
from openrlhf_ext.exact import NotExact
from openrlhf_ext.exact.walk import Digests, first_difference
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.step.batch import LogprobEntropy
from openrlhf_ext.reporting import EventLog
from openrlhf_ext.rollout.response import Response

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bits:
    """How many tokens count, of how many the log-probs are ``differing`` bits, and the counted
    token whose log-probs are farthest apart: its ``response``, its ``place`` in ``tokens_S``, and
    both log-probs (``policy``, ``engine``)."""

    tokens: int
    differing: int
    response: Response
    place: int
    policy: float
    engine: float

    @property
    def facts(self) -> dict[str, Any]:
        """Plain values."""
        facts = {name: value for name, value in vars(self).items() if name != "response"}
        return facts | {"token": int(self.response.tokens_S[self.place])}


def compared_bits(scored: Scored, old: LogprobEntropy, version: int) -> Bits | None:
    """Compares the log-probs of a step. ``old``: the policy's, of its weights ``version``, where
    they were computed before the first update or in it. None if no token counts."""
    engine_N = scored.rollout.rollout_logprobs
    if engine_N is None:
        return None
    counted_N = _counted(scored, version)
    policy_n, engine_n = old.logprobs_N[counted_N].float(), engine_N[counted_N].float()
    if not len(policy_n):
        return None
    same_n = policy_n.view(torch.int32) == engine_n.view(torch.int32)
    gap_n = (policy_n.double() - engine_n.double()).abs().nan_to_num(torch.inf)
    worst = int(torch.where(same_n, -1.0, gap_n).argmax())
    number = int(counted_N.nonzero()[worst])
    bounds = scored.rollout.segments.bounds
    row = int(np.searchsorted(bounds, number, side="right")) - 1
    response = scored.samples[row]
    places = np.concatenate([np.arange(start, stop) for start, stop in response.actions])
    return Bits(
        len(same_n),
        int((~same_n).sum()),
        response,
        int(places[number - bounds[row]]),
        float(policy_n[worst]),
        float(engine_n[worst]),
    )


def _counted(scored: Scored, version: int) -> Tensor:
    """(N,) whether a token counts."""
    counted = []
    for row, sample in enumerate(scored.samples):
        current_S = np.zeros(len(sample.tokens_S), dtype=bool)
        if row < scored.seen_before.stop and not sample.from_guide:
            for then, start, stop in sample.versions:
                current_S[start:stop] = then == version
        counted += [current_S[start:stop] for start, stop in sample.actions]
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype=bool), *counted]))


def said_difference(
    layout: ParallelLayout, ranks: Sequence[Digests], engines: Mapping[int, Sequence[Digests]]
) -> str:
    """Says where policy and engines part. ``ranks``: digests of every rank, in order; ``engines``:
    those of each engine's workers, by its number."""
    found = []
    for number, workers in engines.items():
        for worker, engine in enumerate(workers):
            stages = layout.ranks(tensor=worker, replica=0)
            policy = {name: digest for rank in stages for name, digest in ranks[rank].items()}
            if (place := first_difference(policy, engine)) is not None:
                found.append((place, f"engine {number}, worker {worker}"))
    if not found:
        return (
            "with the present weights all modules compute the same bits for this text: look at the "
            "output layer, the temperature, or at weights that were old when the step was made"
        )
    (module, token), where = found[0]
    return (
        f"for this text and the present weights the first module that differs is {module!r}, from "
        f"token {token} on ({where}); those before it compute the same bits"
    )


@dataclass
class BitJudge:
    """Ends a run whose first step is not exact, and tells of later ones.

    ``walk`` looks for the module that computes something else, for the text that it gets, and
    returns a sentence.
    """

    events: EventLog
    walk: Callable[[Sequence[int]], str]
    _proved: bool = field(default=False, init=False)

    def judge(self, step: int, found: Bits | None) -> None:
        """Raises NotExact if tokens differ in the first step in which tokens count."""
        if found is None:
            return
        if found.differing:
            said = _SAID.format(**found.facts)
            if not self._proved:
                walked = self.walk(found.response.tokens_S.tolist())
                raise NotExact(f"train.exact_rollout_enable: in step {step} {said}\n{walked}")
            logger.warning("step %d is not exact: %s", step, said)
            self.events.note("not_exact", **found.facts)
        self._proved = True


_SAID = (
    "the log-probs of {differing} of {tokens} tokens are not the same bits in policy and engine; "
    "the worst is token {token} at place {place} of its sequence: policy {policy!r}, engine "
    "{engine!r}"
)
