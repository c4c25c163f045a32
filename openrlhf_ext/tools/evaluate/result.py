"""What an evaluation measured, from the lines of its problems; tables of it as papers print them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        response_length_mean: tokens.
        truncated_rate: share of completions that reached ``max_new_tokens``.
        pass_at_k: k -> chance that one of k samples is correct (unbiased).
        pass_at_k_intervals: of these.
        majority_at_k: k -> chance that the most frequent stated answer of k samples is correct, see ``Votes``.
        majority_at_k_intervals: of these.
        ties_at_k: k -> chance that several answers are the most frequent ones.
        reward_failures: completions that could not be graded.
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
    truncated_rate: float | None
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
    skipped_overlong: int, seconds: float,
) -> EvaluationResult:  # fmt: skip
    """Count what the lines of a task's problems say.

    Args:
        problems: the lines, with equally many completions each.
        ks: sizes of pass@k and maj@k; maj@n is counted in any case.
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
        truncated_rate=mean(completion["truncated"] for completion in flat) if lengths_known else None,
        pass_at_k=_each(passes, mean),
        pass_at_k_intervals=_each(passes, bootstrap_interval),
        majority_at_k=_each(majorities, mean),
        majority_at_k_intervals=_each(majorities, bootstrap_interval),
        ties_at_k={k: mean(tie for _, tie in pairs) for k, pairs in counted.items()},
        reward_failures=sum(not completion["graded"] for completion in flat),
        skipped_overlong=skipped_overlong,
        sample_answers=[_sample(problem) for problem in problems[:_SHOWN_SAMPLES]],
        seconds=seconds,
    )


def tables(results: Sequence[EvaluationResult]) -> str:
    """Markdown: a row for each benchmark in the shape of the papers' tables, then one line for each number's interval.

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
    return "\n".join(lines)


def _interval_rows(result: EvaluationResult) -> list[str]:
    numbers = [(f"mean@{result.samples_per_prompt}", result.accuracy, result.accuracy_interval, "")]
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
