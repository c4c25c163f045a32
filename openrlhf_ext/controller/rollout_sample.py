"""A graded completion that knows which weights its tokens were sampled with, and how old those are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from openrlhf_ext.compat import Experience
from openrlhf_ext.rollout.token_versions import Span

UNSAMPLED = -1


@dataclass
class RolloutSample(Experience):
    """OpenRLHF's experience of one completion.

    Attributes:
        token_versions: (1, S - 1) int64 as ``action_mask``: entry p says which version of the weights token p + 1 was
            sampled with, ``UNSAMPLED`` where it was not; None where the executor's responses do not tell.
    """

    token_versions: Tensor | None = None

    @classmethod
    def of(cls, experience: Experience, spans: Iterable[Span] | None) -> RolloutSample:
        """``experience`` with versions from spans of its whole sequence; a sequence that was cut short cuts them."""
        values = {field.name: getattr(experience, field.name) for field in fields(Experience)}
        return cls(**values, token_versions=_versions(spans, experience.sequences.shape[1]))


def _versions(spans: Iterable[Span] | None, length: int) -> Tensor | None:
    if spans is None:
        return None
    versions_S = torch.full((length,), UNSAMPLED, dtype=torch.long)
    for version, start, end in spans:
        versions_S[start:end] = version
    return versions_S[1:].unsqueeze(0)


def staleness_metrics(samples: Sequence[Experience], version: int) -> dict[str, float]:
    """How many weight updates the policy, now at ``version``, is ahead of the weights that sampled each token.

    Empty if any response does not tell.
    """
    per_sample = [getattr(sample, "token_versions", None) for sample in samples]
    if any(versions is None for versions in per_sample):
        return {}
    ages = [version - versions[versions != UNSAMPLED] for versions in per_sample]
    youngest_and_oldest = [torch.stack(age.aminmax()).tolist() for age in ages if len(age)]
    if not youngest_and_oldest:
        return {}
    return {
        "staleness/mean": float(sum(age.sum() for age in ages)) / sum(map(len, ages)),
        "staleness/max": float(max(oldest for _, oldest in youngest_and_oldest)),
        "staleness/mixed_fraction": sum(low < high for low, high in youngest_and_oldest) / len(ages),
    }
