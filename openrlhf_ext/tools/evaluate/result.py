"""What an evaluation measured, from the lines of its problems: statistics, and tables as papers
print them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from statistics import NormalDist, fmean
from typing import Any

from openrlhf_ext.inputs import shortened
from openrlhf_ext.rewards.counting import SOLVED, majorities, passes_at_k

_QUANTILE = NormalDist().inv_cdf(0.975)
_FEW_ENDED = 0.95


def clustered_standard_error(scores_by_prompt: Sequence[Sequence[float]]) -> float:
    """Standard error of the mean over all samples when the samples of a prompt belong together.

    Samples of one prompt succeed or fail together more often than samples of different prompts, so
    that the usual formula over all samples is too small. For prompts c with samples i and grand
    mean m of n samples in C prompts:
    ``sqrt(C / (C - 1) * sum_c (sum_i (s_ci - m))^2) / n`` (E. Miller, Adding Error Bars to Evals,
    2024, section 2.2, with the correction for few clusters). With equally many samples per prompt
    it is the standard error of the prompt means. Raises ValueError: fewer than two prompts, or one
    without samples.
    """
    clusters = len(scores_by_prompt)
    if clusters < 2 or not all(scores_by_prompt):
        raise ValueError(
            f"a standard error needs samples of at least two prompts, got {clusters}, each with "
            "samples"
        )
    grand_mean = fmean(chain.from_iterable(scores_by_prompt))
    samples = sum(map(len, scores_by_prompt))
    squares = math.fsum(
        math.fsum(score - grand_mean for score in scores) ** 2 for scores in scores_by_prompt
    )
    return math.sqrt(clusters / (clusters - 1) * squares) / samples


def difference_in_errors(
    first: float, first_error: float, second: float, second_error: float
) -> float:
    """How many standard errors two independent means lie apart; infinite if they differ without any
    error."""
    error = math.hypot(first_error, second_error)
    if error == 0:
        return 0.0 if first == second else math.inf
    return abs(first - second) / error


def wilson_interval(shares: Sequence[float], draws: int) -> tuple[float, float]:
    """95 % interval of the mean of each problem's share of successes, of which each is that of
    ``draws`` draws.

    Wilson's interval (1927) of the effective number of draws: all draws over the design effect,
    which is the variance of the clustered mean over that of independent draws (Franco, Little,
    Louis and Slud, Comparative Study of Confidence Intervals for Proportions in Complex Sample
    Surveys, 2019). The effect is held between 1 and ``draws``:
    the effective number lies between that of the problems and that of all draws. Where all draws
    have the same outcome the effect cannot be seen: then the number is that of the problems.
    """
    problems = len(shares)
    center = fmean(shares)
    spread = center * (1 - center)
    effect = float(draws)
    if problems > 1 and spread > 0:
        squares = math.fsum((share - center) ** 2 for share in shares)
        squared_error = squares / (problems - 1) / problems
        effect = min(max(squared_error * (problems * draws - 1) / spread, 1.0), effect)
    size = problems * draws / effect
    z = _QUANTILE
    middle = (center + z**2 / (2 * size)) / (1 + z**2 / size)
    half = z * math.sqrt(max(spread, 0.0) / size + (z / (2 * size)) ** 2) / (1 + z**2 / size)
    return min(center, middle - half), max(center, middle + half)


# ---- the result of a task

_SHOWN_SAMPLES = 3
_SHOWN_CHARACTERS = 600

Interval = tuple[float, float]


@dataclass(frozen=True)
class EvaluationResult:
    """What an evaluation measured; ``None`` where it was not asked, or there is nothing to count.

    Intervals are those of ``wilson_interval``, 95 %; ``..._at_k`` have sizes k as their keys.

    Attributes:
        model: None if saved completions were graded.
        accuracy: share of all samples whose score is at least 1, which is pass@1.
        standard_error: of the accuracy, samples of a prompt taken together.
        score_mean: mean score over all samples, what a run logs as ``eval/score_mean``.
        ended: share of completions that ended by themselves, before ``max_new_tokens``.
        extra_logs: mean of each number that the reward function logs, over the graded completions
        that have it.
        majority_at_k: empty, and the ties with it, where no completion states an answer.
        ties_at_k: chance that several answers are the most frequent ones.
        reward_failures: completions that could not be graded; they count as wrong.
        grading_error: why the first of them was not.
        skipped_overlong: prompts left out because the model has no room for them.
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
    score_mean: float
    reward_mean: float
    response_length_mean: float | None
    ended: float | None
    extra_logs: dict[str, float]
    pass_at_k: dict[int, float]
    pass_at_k_intervals: dict[int, Interval]
    majority_at_k: dict[int, float]
    majority_at_k_intervals: dict[int, Interval]
    ties_at_k: dict[int, float]
    reward_failures: int
    grading_error: str | None
    skipped_overlong: int
    sample_answers: list[dict[str, Any]]
    seconds: float

    @property
    def nothing_graded(self) -> bool:
        return self.reward_failures == self.prompts * self.samples_per_prompt


def summarize(
    problems: Sequence[Mapping[str, Any]],
    benchmark: str,
    dataset: str,
    model: str | None,
    ks: Sequence[int],
    skipped_overlong: int,
    seconds: float,
) -> EvaluationResult:
    """Counts what the lines of a task's problems say; maj@n whatever ``ks`` holds."""
    groups = [problem["completions"] for problem in problems]
    flat = list(chain.from_iterable(groups))
    right = []
    votes = []
    for group in groups:
        is_right = [bool(completion["score"] >= SOLVED) for completion in group]
        stated = [completion["vote"] for completion in group]
        right.append(is_right)
        votes.append(list(zip(stated, is_right, strict=True)))

    samples = len(groups[0])
    passes = passes_at_k(right, ks)
    chances = {}
    ties = {}
    for k, counted in majorities(votes, sorted({*ks, samples})).items():
        chances[k] = [chance for chance, _ in counted]
        ties[k] = fmean(tie for _, tie in counted)

    error = clustered_standard_error(right) if len(right) > 1 else None
    lengths_known = all(completion["tokens"] is not None for completion in flat)
    length = fmean(completion["tokens"] for completion in flat) if lengths_known else None
    ended = fmean(not completion["truncated"] for completion in flat) if lengths_known else None
    ungraded = [completion for completion in flat if not completion["graded"]]
    return EvaluationResult(
        benchmark=benchmark,
        model=model,
        dataset=dataset,
        accuracy=fmean(chain.from_iterable(right)),
        accuracy_interval=wilson_interval([fmean(group) for group in right], samples),
        standard_error=error,
        prompts=len(groups),
        samples_per_prompt=samples,
        score_mean=fmean(completion["score"] for completion in flat),
        reward_mean=fmean(completion["reward"] for completion in flat),
        response_length_mean=length,
        ended=ended,
        extra_logs=_log_means(flat),
        pass_at_k={k: fmean(shares) for k, shares in passes.items()},
        pass_at_k_intervals=_intervals(passes, samples),
        majority_at_k={k: fmean(shares) for k, shares in chances.items()},
        majority_at_k_intervals=_intervals(chances, samples),
        ties_at_k=ties,
        reward_failures=len(ungraded),
        grading_error=next((c["error"] for c in ungraded if "error" in c), None),
        skipped_overlong=skipped_overlong,
        sample_answers=[_sample(problem) for problem in problems[:_SHOWN_SAMPLES]],
        seconds=seconds,
    )


def _intervals(shares: Mapping[int, Sequence[float]], samples: int) -> dict[int, Interval]:
    """Of what takes k samples at a time, of which there are n // k that share none."""
    return {k: wilson_interval(each, samples // k) for k, each in shares.items()}


def _log_means(completions: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    logged: dict[str, list[float]] = {}
    for completion in completions:
        for name, value in completion["extra_logs"].items():
            logged.setdefault(name, []).append(value)
    return {name: fmean(values) for name, values in sorted(logged.items())}


def tables(results: Sequence[EvaluationResult], before: Mapping[str, Any] | None = None) -> str:
    """Markdown, aligned for a terminal: with several tasks a row for each, as papers print them;
    then a table for each task, of everything that was measured. Numbers of an earlier result stand
    beside those of the only task."""
    parts = [_overview(results)] if len(results) > 1 else []
    for result in results:
        heading = (
            f"{result.benchmark}: {result.prompts} problems x {result.samples_per_prompt} "
            "completions"
        )
        lines = [heading]
        if result.model is not None:
            lines.append(f"model  {result.model}")
        lines += [f"data   {result.dataset}", "", *_numbers(result, before)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _overview(results: Sequence[EvaluationResult]) -> str:
    """Percentages; values of several k stand between slashes, in the order of the heading; "-": no
    votes."""
    voted = next((result.majority_at_k for result in results if result.majority_at_k), {})
    passes = [k for k in results[0].pass_at_k if k > 1]
    votes = [k for k in voted if k > 1]

    heading = ["benchmark", "problems", f"accuracy (n = {results[0].samples_per_prompt})"]
    for name, ks in (("pass", passes), ("maj", votes)):
        if ks:
            heading.append(f"{name}@{'/'.join(map(str, ks))}")
    rows = [heading]
    for result in results:
        row = [result.benchmark, str(result.prompts), f"{100 * result.accuracy:.1f}"]
        if passes:
            row.append(_slashed(result.pass_at_k, passes))
        if votes:
            row.append(_slashed(result.majority_at_k, votes))
        rows.append(row)
    return "\n".join(_aligned(rows))


def _slashed(shares: Mapping[int, float], ks: Sequence[int]) -> str:
    return "/".join(f"{100 * shares[k]:.1f}" for k in ks) if shares else "-"


def _numbers(result: EvaluationResult, before: Mapping[str, Any] | None) -> list[str]:
    intervals = {"accuracy": result.accuracy_interval}
    for k, interval in result.pass_at_k_intervals.items():
        intervals[f"pass@{k}"] = interval
    for k, interval in result.majority_at_k_intervals.items():
        intervals[f"maj@{k}"] = interval
    ties = {
        f"maj@{k}": f" (ties: {_percent(share)})" for k, share in result.ties_at_k.items() if share
    }

    rows = [["number", "value", "95 % interval"]]
    for name, share in _shares(asdict(result)).items():
        low, high = intervals[name]
        value = _percent(share) + ties.get(name, "")
        rows.append([name, value, f"{100 * low:.1f} to {_percent(high)}"])
    rows += [[name, value, ""] for name, value in _measured(result)]

    if before is not None:
        earlier = {name: _percent(share) for name, share in _shares(before).items()}
        earlier["mean score"] = f"{before['score_mean']:.3f}"
        rows[0].append("before")
        for row in rows[1:]:
            row.append(earlier.get(row[0], ""))
    return _aligned(rows)


def _shares(result: Mapping[str, Any]) -> dict[str, float]:
    """The accuracy, and pass@k and maj@k of k above 1, by name; a saved result has k as text."""
    shares = {"accuracy": result["accuracy"]}
    for name, key in (("pass", "pass_at_k"), ("maj", "majority_at_k")):
        for k, value in result.get(key, {}).items():
            if int(k) > 1:
                shares[f"{name}@{k}"] = value
    return shares


def _measured(result: EvaluationResult) -> list[tuple[str, str]]:
    found = [
        ("mean score", f"{result.score_mean:.3f}"),
        ("mean reward", f"{result.reward_mean:.3f}"),
    ]
    if result.response_length_mean is not None:
        found.append(("length", f"{result.response_length_mean:.1f} tokens"))
    if result.ended is not None:
        found.append(("ended", _percent(result.ended)))
    found += [(f"reward log {name}", f"{value:.4g}") for name, value in result.extra_logs.items()]
    return found


def notes(result: EvaluationResult) -> list[str]:
    """What a reader of the numbers has to know: completions without a grade, prompts left out,
    scores between."""
    found = []
    if result.reward_failures:
        found.append(
            f"{result.reward_failures} completions could not be graded and count as wrong; the "
            f"first: {result.grading_error}"
        )
    elif result.accuracy == 0 and result.score_mean > 0:
        found.append(
            "no score reaches 1, which is what counts as right: have the reward function return "
            "'scores' of 0 and 1 beside its 'rewards'"
        )
    if result.ended is not None and result.ended < _FEW_ENDED:
        found.append(
            f"{100 * (1 - result.ended):.0f} % of the completions were cut at --max_new_tokens "
            "before they had ended: a larger one may change every number"
        )
    if result.skipped_overlong:
        found.append(f"{result.skipped_overlong} prompts are too long for the model and left out")
    return [f"{result.benchmark}: {note}" for note in found]


def examples(result: EvaluationResult, before: Mapping[str, Any] | None = None) -> str:
    earlier = {sample["prompt"]: sample for sample in (before or {}).get("sample_answers", [])}
    parts = []
    for sample in result.sample_answers:
        lines = [("prompt", sample["prompt"]), ("reference", str(sample["label"]))]
        if was := earlier.get(sample["prompt"]):
            lines.append(("before", f"[score {was['score']:g}] {was['completion']}"))
        grade = f"score {sample['score']:g}" if sample["graded"] else "not graded"
        lines.append(("completion", f"[{grade}] {sample['completion']}"))
        shown = []
        for name, text in lines:
            short = shortened(text, _SHOWN_CHARACTERS).strip().replace("\n", "\n" + 12 * " ")
            shown.append(f"{name:<11} {short}")
        parts.append("\n".join(shown))
    return "\n\n".join(parts)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _sample(problem: Mapping[str, Any]) -> dict[str, Any]:
    first = problem["completions"][0]
    return {
        "prompt": problem["prompt"],
        "completion": first["text"],
        "label": problem["label"],
        "reward": first["reward"],
        "score": first["score"],
        "graded": first["graded"],
    }
