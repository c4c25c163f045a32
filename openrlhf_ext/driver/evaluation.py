"""Evaluations of a run: the requests to the engines, and the metrics of the answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean, stdev

from openrlhf_ext.config import RunConfig
from openrlhf_ext.driver.rollouts import Group, Prompt
from openrlhf_ext.options.sections import HeldOutSet
from openrlhf_ext.rewards.answers import stated_answers
from openrlhf_ext.rewards.counting import SOLVED, accuracy, majorities, passes_at_k, powers_of_two
from openrlhf_ext.rollout.response import GroupRequest, Response, Sampling, graded

# means over several sets, each with the same weight
_MEANS = ("accuracy", "score_mean", "reward_mean", "response_length_mean")
Texts = Callable[[Sequence[Response]], list[str]]
"""Returns the text of each completion, with special tokens."""
Key = tuple[str, int]


@dataclass(frozen=True)
class HeldOut:
    """A set of held-out prompts and how it is sampled."""

    options: HeldOutSet
    prompts: Sequence[Prompt]

    def requests(self, config: RunConfig) -> dict[Key, GroupRequest]:
        """Returns the requests to the engines. The seeds are those of ``openrlhf-ext evaluate
        --seed <train.seed>``: they depend on the prompt's place in the file and the sample's
        number, not on the weights."""
        options = self.options
        longest = options.max_new_tokens or config.rollout.max_new_tokens
        sampling = Sampling(options.temperature, options.top_p, longest, config.data.max_len)
        grader = None if options.remote_url == config.reward.remote_url else options.remote_url
        return {
            (f"evaluating {options.name}".strip(), prompt.number): GroupRequest(
                prompt.text,
                prompt.label,
                options.n_samples_per_prompt,
                sampling,
                (config.train.seed, prompt.number),
                grader=grader,
            )
            for prompt in self.prompts
        }


@dataclass
class Evaluation:
    """An evaluation in progress, of the weights after ``step`` steps, which the engines know as
    ``version``; ``restarts``: engine restarts before it."""

    step: int
    version: int
    restarts: int
    requests: list[dict[Key, GroupRequest]]
    started: float = field(default_factory=time.perf_counter)

    @property
    def all_requests(self) -> dict[Key, GroupRequest]:
        requests: dict[Key, GroupRequest] = {}
        for of_set in self.requests:
            requests |= of_set
        return requests

    def groups(
        self, sets: Sequence[HeldOut], answers: Mapping[Key, list[Response]]
    ) -> list[list[Group]]:
        """Returns the answers as groups, set by set."""
        groups = []
        for each, keys in zip(sets, self.requests, strict=True):
            asked = zip(each.prompts, keys, strict=True)
            groups.append([Group(prompt, answers[key]) for prompt, key in asked])
        return groups


def weight_versions(responses: Sequence[Response]) -> set[int]:
    """Returns the weight versions of all tokens, where the responses report them."""
    return {version for response in responses for version, _, _ in response.versions}


def evaluation_metrics(
    sets: Sequence[HeldOutSet], groups: Sequence[Sequence[Group]], texts: Texts
) -> dict[str, float]:
    """Returns the metrics of an evaluation under the names of docs/metrics.md: ``eval/...`` for one
    set without a name; for named sets, ``eval/NAME/...`` and means over the sets."""
    found = [
        set_metrics(own, each.temperature, texts) for each, own in zip(sets, groups, strict=True)
    ]
    if not sets[0].name:
        return {f"eval/{name}": value for name, value in found[0].items()} | _by_source(groups[0])

    metrics = {}
    for name in _MEANS:
        metrics[f"eval/{name}"] = sum(each[name] for each in found) / len(found)
    # The sets are sampled independently.
    for name in ("accuracy_stderr", "score_mean_stderr"):
        metrics[f"eval/{name}"] = math.hypot(*(each[name] for each in found)) / len(found)
    metrics["eval/samples"] = sum(each["samples"] for each in found)
    for options, each in zip(sets, found, strict=True):
        metrics |= {f"eval/{options.name}/{name}": value for name, value in each.items()}
    return metrics


def set_metrics(groups: Sequence[Group], temperature: float, texts: Texts) -> dict[str, float]:
    """Returns the metrics of one set: accuracy (share of right completions: mean@n) and mean score,
    both with their standard error over prompts; mean reward and length; pass@k and maj@k; length
    and entropy of right and of wrong completions. maj@k needs completions that state answers
    (``rewards.answers``); entropy needs the engine's log-probs."""
    responses = list(chain.from_iterable(group.responses for group in groups))
    shares = [accuracy(group.scores) for group in groups]
    mean_scores = [group.mean_score for group in groups]
    return {
        "accuracy": fmean(shares),
        "accuracy_stderr": _standard_error(shares),
        "score_mean": fmean(mean_scores),
        "score_mean_stderr": _standard_error(mean_scores),
        "reward_mean": sum(graded(response.reward) for response in responses) / len(responses),
        "response_length_mean": sum(response.span for response in responses) / len(responses),
        "samples": float(len(responses)),
        **_at_k(groups, texts),
        **_of_right_and_wrong(responses, temperature),
    }


def _standard_error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _is_right(response: Response) -> bool:
    return graded(response.score) >= SOLVED


def _at_k(groups: Sequence[Group], texts: Texts) -> dict[str, float]:
    right = []
    votes = []
    for group in groups:
        is_right = [_is_right(response) for response in group.responses]
        stated = stated_answers(texts(group.responses), is_right)
        right.append(is_right)
        votes.append(list(zip(stated, is_right, strict=True)))

    ks = powers_of_two(len(groups[0].responses))
    metrics = {f"pass@{k}": fmean(shares) for k, shares in passes_at_k(right, ks).items()}
    for k, counted in majorities(votes, ks).items():
        metrics[f"maj@{k}"] = fmean(chance for chance, _ in counted)
    return metrics


def _of_right_and_wrong(responses: Sequence[Response], temperature: float) -> dict[str, float]:
    """Returns mean length and estimated entropy of right and of wrong completions, if there are
    any. The estimate is minus the mean log-prob of the sampled tokens: only their log-probs are
    known."""
    metrics = {}
    for name, is_right in (("right", True), ("wrong", False)):
        own = [response for response in responses if _is_right(response) == is_right]
        if not own:
            continue
        metrics[f"length_{name}"] = sum(response.span for response in own) / len(own)
        logprobs = [response.logprobs_T for response in own if response.logprobs_T is not None]
        tokens = sum(map(len, logprobs))
        if temperature > 0 and tokens and len(logprobs) == len(own):
            total = sum(float(each.sum(dtype="float64")) for each in logprobs)
            metrics[f"entropy_{name}"] = -total / tokens
    return metrics


def _by_source(groups: Sequence[Group]) -> dict[str, float]:
    """Returns OpenRLHF's metrics for held-out records of several ``datasource`` values: for each,
    the mean over prompts of the best and of the mean score."""
    sources: dict[str, list[Group]] = {}
    for group in groups:
        sources.setdefault(group.prompt.source, []).append(group)
    if len(sources) < 2:
        return {}

    metrics = {}
    for source, own in sorted(sources.items()):
        best = [max(group.scores) for group in own]
        metrics[f"eval_{source}_pass{len(own[0].responses)}"] = sum(best) / len(own)
        metrics[f"eval_{source}_pass1"] = sum(group.mean_score for group in own) / len(own)
    return metrics
