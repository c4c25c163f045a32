"""What an evaluation measured, from the lines of its problems; tables of it as papers print them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from openrlhf_ext.tools.evaluate.accuracy import (
    Votes,
    bootstrap_interval,
    clustered_standard_error,
    mean,
    pass_at_k,
)
from openrlhf_ext.tools.evaluate.grading import SOLVED

_SHOWN_SAMPLES = 3

Interval = tuple[float, float]


@dataclass(frozen=True)
class SampleAnswer:
    """One graded completion, for showing."""

    prompt: str
    completion: str
    label: Any
    reward: float
    score: float


@dataclass(frozen=True)
class EvaluationResult:
    """What an evaluation measured. Intervals are 95 % bootstrap intervals over problems.

    Attributes:
        benchmark: name of the task.
        model, dataset: what was evaluated on what; no model if saved completions were graded.
        accuracy: mean score over all samples; with scores of 0 and 1 this is mean@n, and pass@1.
        accuracy_interval: of the accuracy.
        standard_error: of the accuracy, samples of a prompt taken together; ``None`` for a single prompt.
        prompts, samples_per_prompt: counts.
        reward_mean: mean reward over all samples.
        response_length_mean: tokens; ``None`` where they are not known.
        ended: share of completions that ended by themselves, before ``max_new_tokens``; ``None`` likewise.
        short_tokens, short_share: which completions count as short, and how many are; ``None`` if that is not asked.
        short_accuracy, long_accuracy: mean score of the short ones and of the others; ``None`` where there are none.
        greedy_accuracy, greedy_accuracy_interval: mean score of one completion of the most likely tokens for each
            problem, which no other number counts; ``None`` if that is not asked.
        entropy_right, entropy_wrong: nats, mean over all tokens of the correct completions and of the others; ``None``
            where there are none, or it is not asked.
        kl_to_reference: divergence of the model from the reference, nats, mean over all tokens; ``None`` likewise.
        extra_logs: mean of each number that the reward function logs, over the graded completions that have it.
        pass_at_k: k -> chance that one of k samples is correct (unbiased).
        pass_at_k_intervals: of these.
        majority_at_k: k -> chance that the most frequent stated answer of k samples is correct, see ``Votes``.
        majority_at_k_intervals: of these.
        ties_at_k: k -> chance that several answers are the most frequent ones.
        reward_failures: completions that could not be graded, greedy ones included.
        skipped_overlong: prompts left out because the model has no room for them.
        sample_answers: the first completions of the first prompts.
        seconds: sampling and grading, with loading the model.
    """

    benchmark: str
    model: str | None
    dataset: str
    accuracy: float
    accuracy_interval: Interval
    standard_error: float | None
    prompts: int
    samples_per_prompt: int
    reward_mean: float
    response_length_mean: float | None
    ended: float | None
    short_tokens: int | None
    short_share: float | None
    short_accuracy: float | None
    long_accuracy: float | None
    greedy_accuracy: float | None
    greedy_accuracy_interval: Interval | None
    entropy_right: float | None
    entropy_wrong: float | None
    kl_to_reference: float | None
    extra_logs: dict[str, float]
    pass_at_k: dict[int, float]
    pass_at_k_intervals: dict[int, Interval]
    majority_at_k: dict[int, float]
    majority_at_k_intervals: dict[int, Interval]
    ties_at_k: dict[int, float]
    reward_failures: int
    skipped_overlong: int
    sample_answers: list[SampleAnswer]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        return asdict(self)


def summarize(
    problems: Sequence[Mapping[str, Any]], benchmark: str, dataset: str, model: str | None, ks: Sequence[int],
    skipped_overlong: int, seconds: float, short_tokens: int | None = None,
) -> EvaluationResult:  # fmt: skip
    """Count what the lines of a task's problems say.

    Args:
        problems: the lines, with equally many completions each.
        ks: sizes of pass@k and maj@k; maj@n is counted in any case.
        short_tokens: longest completion that counts as short; needs completions whose tokens are known.
    """
    groups = [problem["completions"] for problem in problems]
    flat = [completion for group in groups for completion in group]
    samples = len(groups[0])
    scores = [[completion["score"] for completion in group] for group in groups]
    solved = [sum(score >= SOLVED for score in group) for group in scores]
    passes = {k: [pass_at_k(samples, correct, k) for correct in solved] for k in ks}
    votes = [[(completion["vote"], completion["score"] >= SOLVED) for completion in group] for group in groups]
    counted = {k: list(map(Votes(samples, k).count, votes)) for k in sorted({*ks, samples})}
    majorities = {k: [majority for majority, _ in pairs] for k, pairs in counted.items()}
    means = [mean(group) for group in scores]
    lengths_known = all(completion["tokens"] is not None for completion in flat)
    greedy = [problem["greedy"] for problem in problems if "greedy" in problem]
    greedy_scores = [completion["score"] for completion in greedy]
    right, wrong = _split(flat, lambda completion: completion["score"] >= SOLVED)
    short, long = _split(flat, lambda c: c["tokens"] <= short_tokens) if short_tokens is not None else ([], [])
    return EvaluationResult(
        benchmark=benchmark,
        model=model,
        dataset=dataset,
        accuracy=mean(score for group in scores for score in group),
        accuracy_interval=bootstrap_interval(means),
        standard_error=clustered_standard_error(scores) if len(scores) > 1 else None,
        prompts=len(groups),
        samples_per_prompt=samples,
        reward_mean=mean(completion["reward"] for completion in flat),
        response_length_mean=mean(completion["tokens"] for completion in flat) if lengths_known else None,
        ended=mean(not completion["truncated"] for completion in flat) if lengths_known else None,
        short_tokens=short_tokens,
        short_share=len(short) / len(flat) if short_tokens is not None else None,
        short_accuracy=_mean_or_none(completion["score"] for completion in short),
        long_accuracy=_mean_or_none(completion["score"] for completion in long),
        greedy_accuracy=_mean_or_none(greedy_scores),
        greedy_accuracy_interval=bootstrap_interval(greedy_scores) if greedy else None,
        entropy_right=_token_mean(right, "entropy"),
        entropy_wrong=_token_mean(wrong, "entropy"),
        kl_to_reference=_token_mean(flat, "kl"),
        extra_logs=_log_means(flat),
        pass_at_k=_each(passes, mean),
        pass_at_k_intervals=_each(passes, bootstrap_interval),
        majority_at_k=_each(majorities, mean),
        majority_at_k_intervals=_each(majorities, bootstrap_interval),
        ties_at_k={k: mean(tie for _, tie in pairs) for k, pairs in counted.items()},
        reward_failures=sum(not completion["graded"] for completion in [*flat, *greedy]),
        skipped_overlong=skipped_overlong,
        sample_answers=[_sample(problem) for problem in problems[:_SHOWN_SAMPLES]],
        seconds=seconds,
    )


def _split(
    completions: Sequence[Mapping[str, Any]], first: Callable[[Mapping[str, Any]], bool]
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    return [c for c in completions if first(c)], [c for c in completions if not first(c)]


def _mean_or_none(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return mean(numbers) if numbers else None


def _token_mean(completions: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Mean over all tokens of what is kept as each completion's mean; ``None`` if it is not measured of any."""
    measured = [completion for completion in completions if name in completion]
    if not measured:
        return None
    tokens = sum(completion["tokens"] for completion in measured)
    return math.fsum(completion[name] * completion["tokens"] for completion in measured) / tokens


def _log_means(completions: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = sorted({name for completion in completions for name in completion["extra_logs"]})
    logs = [completion["extra_logs"] for completion in completions]
    return {name: mean(each[name] for each in logs if name in each) for name in names}


def measured(result: EvaluationResult) -> list[tuple[str, str]]:
    """What is known beside the accuracies of all samples: names and values as they are shown."""
    found = [
        ("length", result.response_length_mean, 1, "{:.1f} tokens"),
        ("ended", result.ended, 100, "{:.1f} %"),
        (f"short (up to {result.short_tokens})", result.short_share, 100, "{:.1f} %"),
        ("accuracy, short", result.short_accuracy, 100, "{:.1f} %"),
        ("accuracy, longer", result.long_accuracy, 100, "{:.1f} %"),
        ("entropy, right", result.entropy_right, 1, "{:.4f} nats"),
        ("entropy, wrong", result.entropy_wrong, 1, "{:.4f} nats"),
        ("KL to reference", result.kl_to_reference, 1, "{:.4f} nats"),
        *((f"log {name}", value, 1, "{:.4g}") for name, value in result.extra_logs.items()),
    ]
    return [(name, form.format(scale * value)) for name, value, scale, form in found if value is not None]


def tables(results: Sequence[EvaluationResult]) -> str:
    """Markdown: a row for each benchmark in the shape of the papers' tables, then one line for each number's interval,
    then what else was measured.

    Percentages. ``mean@n`` is the mean over all samples; values of several k stand between slashes, in the order of the
    heading.
    """
    lines = []
    for n, ks in dict.fromkeys((result.samples_per_prompt, tuple(result.pass_at_k)) for result in results):
        rows = [r for r in results if (r.samples_per_prompt, tuple(r.pass_at_k)) == (n, ks)]
        votes = [k for k in rows[0].majority_at_k if k > 1]
        slashes = "/".join(map(str, ks))
        lines += [
            f"| benchmark | problems | mean@{n} | pass@{slashes} | maj@{'/'.join(map(str, votes))} |",
            "|---|---|---|---|---|",
            *(
                f"| {r.benchmark} | {r.prompts} | {_percent(r.accuracy)} | "
                f"{'/'.join(_percent(r.pass_at_k[k]) for k in ks)} | "
                f"{'/'.join(_percent(r.majority_at_k[k]) for k in votes)} |"
                for r in rows
            ),
            "",
        ]
    lines += ["| benchmark | number | value | 95 % interval | ties |", "|---|---|---|---|---|"]
    for result in results:
        lines += _interval_rows(result)
    if others := [f"| {r.benchmark} | {name} | {value} |" for r in results for name, value in measured(r)]:
        lines += ["", "| benchmark | measure | value |", "|---|---|---|", *others]
    return "\n".join(lines)


def _interval_rows(result: EvaluationResult) -> list[str]:
    numbers = [(f"mean@{result.samples_per_prompt}", result.accuracy, result.accuracy_interval, "")]
    if result.greedy_accuracy is not None and result.greedy_accuracy_interval is not None:
        numbers.append(("greedy", result.greedy_accuracy, result.greedy_accuracy_interval, ""))
    numbers += [(f"pass@{k}", value, result.pass_at_k_intervals[k], "") for k, value in result.pass_at_k.items()]
    numbers += [
        (f"maj@{k}", value, result.majority_at_k_intervals[k], _percent(result.ties_at_k[k]))
        for k, value in result.majority_at_k.items()
        if k > 1
    ]
    return [
        f"| {result.benchmark} | {name} | {_percent(value)} | {_percent(low)} to {_percent(high)} | {ties} |"
        for name, value, (low, high), ties in numbers
    ]


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _each(values: Mapping[int, list[float]], reduce: Callable[[list[float]], Any]) -> dict[int, Any]:
    return {k: reduce(numbers) for k, numbers in values.items()}


def _sample(problem: Mapping[str, Any]) -> SampleAnswer:
    first = problem["completions"][0]
    return SampleAnswer(problem["prompt"], first["text"], problem["label"], first["reward"], first["score"])
