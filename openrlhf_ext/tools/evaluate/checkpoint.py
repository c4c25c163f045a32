"""Accuracy of a checkpoint on a problem file, with plain transformers and the run's own reward function."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf_ext.rewards.answers import extract_answer, normalized
from openrlhf_ext.rewards.errors import FailurePolicy, RewardError
from openrlhf_ext.rewards.executor import open_grader
from openrlhf_ext.rewards.grading import Grader, RewardResult, RewardSettings
from openrlhf_ext.tools.evaluate.accuracy import clustered_standard_error, majority_at_k, mean, pass_at_k
from openrlhf_ext.tools.evaluate.problems import Problem, load_problems
from openrlhf_ext.tools.evaluate.sampling import Completion, max_prompt_tokens, sample_completions

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
_SOLVED = 1.0  # a completion is correct when its score reaches this
_SHOWN_SAMPLES = 3
_IN_FLIGHT_PER_WORKER = 4  # enough to keep the workers busy; waiting samples would run into the pool's queue deadline


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """How to sample and grade.

    Attributes:
        input_key, label_key, limit, input_template, apply_chat_template: see ``load_problems``.
        n_samples, temperature, top_p, max_new_tokens, batch_size, seed, device: see ``sample_completions``.
        dtype: of the weights: ``float32``, ``bfloat16`` or ``float16``.
        num_workers, reward_timeout_s, max_failures: see ``RewardSettings``. A completion that is not graded is wrong.
    """

    input_key: str = "question"
    label_key: str = "answer"
    limit: int | None = None
    input_template: str | None = None
    apply_chat_template: bool = False
    n_samples: int = 4
    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 64
    batch_size: int = 256
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    num_workers: int = 2
    reward_timeout_s: float = 30.0
    max_failures: int = 10


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
    """What an evaluation measured.

    Attributes:
        model, dataset: what was evaluated on what.
        accuracy: mean score over all samples.
        standard_error: of the accuracy, samples of a prompt taken together; ``None`` for a single prompt.
        prompts, samples_per_prompt: counts.
        reward_mean: mean reward over all samples.
        response_length_mean: tokens.
        truncated_rate: share of completions that reached ``max_new_tokens``.
        pass_at_k: chance that one of k samples is correct, for k = 1, 2, 4, ...
        majority_at_n: chance that the most frequent stated answer is correct.
        reward_failures: completions that could not be graded.
        skipped_overlong: prompts left out because the model has no room for them.
        sample_answers: the first completions of the first prompts.
        options: as given.
        seconds: sampling and grading, without loading the model.
    """

    model: str
    dataset: str
    accuracy: float
    standard_error: float | None
    prompts: int
    samples_per_prompt: int
    reward_mean: float
    response_length_mean: float
    truncated_rate: float
    pass_at_k: dict[int, float]
    majority_at_n: float
    reward_failures: int
    skipped_overlong: int
    sample_answers: list[SampleAnswer]
    seconds: float
    options: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        return asdict(self)


def evaluate_checkpoint(
    path: str | Path, dataset: str | Path, reward_path: str, options: EvaluationOptions | None = None
) -> EvaluationResult:
    """Sample completions for a problem file with a Hugging Face checkpoint and grade them.

    Args:
        path: the checkpoint's folder, with its tokenizer.
        dataset: JSONL file.
        reward_path: Python file with ``reward_func``, or addresses of reward servers.
        options: the defaults of :class:`EvaluationOptions` if ``None``.

    Raises:
        ValueError: the data or an option is wrong; names it.
        RewardFailureLimit, RewardImportError: grading failed.
    """
    options = options or EvaluationOptions()
    model, tokenizer = _load(path, options)
    return evaluate_model(model, tokenizer, dataset, reward_path, options, name=str(path))


def evaluate_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: str | Path,
    reward_path: str,
    options: EvaluationOptions,
    name: str = "",
) -> EvaluationResult:
    """:func:`evaluate_checkpoint` for a model in memory."""
    problems, skipped = _problems_that_fit(model, tokenizer, dataset, options)
    grader = open_grader(_reward_settings(reward_path, options))
    policy = FailurePolicy(options.max_failures)
    started = time.perf_counter()
    try:
        grader.start()
        completions = _sample(model, tokenizer, problems, options)
    except BaseException:
        asyncio.run(grader.aclose())
        raise
    grades = asyncio.run(_grade_all(grader, policy, problems, completions, options.num_workers))
    return EvaluationResult(
        model=name,
        dataset=str(dataset),
        prompts=len(problems),
        samples_per_prompt=options.n_samples,
        reward_failures=policy.count,
        skipped_overlong=skipped,
        sample_answers=_first_samples(problems, completions, grades),
        seconds=time.perf_counter() - started,
        options=asdict(options),
        **_grade_statistics(completions, grades),
        **_length_statistics(completions),
    )


def _load(path: str | Path, options: EvaluationOptions) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, options.dtype))
    return model, AutoTokenizer.from_pretrained(path)


def _problems_that_fit(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dataset: str | Path, options: EvaluationOptions
) -> tuple[list[Problem], int]:
    problems = load_problems(
        dataset,
        options.input_key,
        options.label_key,
        options.limit,
        options.input_template,
        tokenizer if options.apply_chat_template else None,
    )
    room = max_prompt_tokens(model, options.max_new_tokens)
    if room is None:
        return problems, 0
    fitting = [p for p in problems if len(tokenizer(p.prompt, add_special_tokens=False)["input_ids"]) <= room]
    if not fitting:
        raise ValueError(f"no prompt of {dataset} fits the {room} tokens that --max_new_tokens leaves the model")
    if skipped := len(problems) - len(fitting):
        logger.warning("%s: %d of %d prompts are longer than %d tokens and left out", dataset, skipped, len(problems),
                       room)  # fmt: skip
    return fitting, len(problems) - len(fitting)


def _reward_settings(reward_path: str, options: EvaluationOptions) -> RewardSettings:
    return RewardSettings(
        remote_url=reward_path,
        num_workers=options.num_workers,
        timeout_s=options.reward_timeout_s,
        max_failures=options.max_failures,
    )


def _sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], options: EvaluationOptions
) -> list[list[Completion]]:
    return sample_completions(
        model,
        tokenizer,
        [problem.prompt for problem in problems],
        n_samples=options.n_samples,
        temperature=options.temperature,
        top_p=options.top_p,
        max_new_tokens=options.max_new_tokens,
        batch_size=options.batch_size,
        seed=options.seed,
        device=options.device,
    )


async def _grade_all(
    grader: Grader,
    policy: FailurePolicy,
    problems: Sequence[Problem],
    completions: Sequence[Sequence[Completion]],
    num_workers: int,
) -> list[list[RewardResult]]:
    """Grade everything and close the grader."""
    in_flight = asyncio.Semaphore(_IN_FLIGHT_PER_WORKER * num_workers)

    async def grade(problem: Problem, completion: Completion) -> RewardResult:
        async with in_flight:
            try:
                return await grader.grade(completion.query, problem.prompt, problem.label)
            except RewardError as error:
                policy.tolerate(error)
                return RewardResult(reward=policy.failure_value, score=0.0)

    try:
        groups = (
            asyncio.gather(*(grade(problem, completion) for completion in group))
            for problem, group in zip(problems, completions, strict=True)
        )
        return await asyncio.gather(*groups)
    finally:
        await grader.aclose()


def _grade_statistics(
    completions: Sequence[Sequence[Completion]], grades: Sequence[Sequence[RewardResult]]
) -> dict[str, Any]:
    scores = [[grade.score for grade in group] for group in grades]
    return {
        "accuracy": mean(score for group in scores for score in group),
        "standard_error": clustered_standard_error(scores) if len(scores) > 1 else None,
        "reward_mean": mean(grade.reward for group in grades for grade in group),
        "pass_at_k": _pass_at_powers_of_two(scores),
        "majority_at_n": mean(_majority(*pair) for pair in zip(completions, scores, strict=True)),
    }


def _length_statistics(completions: Sequence[Sequence[Completion]]) -> dict[str, Any]:
    flat = [completion for group in completions for completion in group]
    return {
        "response_length_mean": mean(completion.tokens for completion in flat),
        "truncated_rate": mean(completion.truncated for completion in flat),
    }


def _pass_at_powers_of_two(scores: Sequence[Sequence[float]]) -> dict[int, float]:
    samples = len(scores[0])
    solved = [sum(score >= _SOLVED for score in group) for group in scores]
    powers = [2**exponent for exponent in range(samples.bit_length())]
    return {k: mean(pass_at_k(samples, correct, k) for correct in solved) for k in powers}


def _majority(completions: Sequence[Completion], scores: Sequence[float]) -> float:
    answers = [extract_answer(completion.text) for completion in completions]
    votes = [
        (None if answer is None else normalized(answer), score >= _SOLVED)
        for answer, score in zip(answers, scores, strict=True)
    ]
    return majority_at_k(votes, len(votes))


def _first_samples(
    problems: Sequence[Problem],
    completions: Sequence[Sequence[Completion]],
    grades: Sequence[Sequence[RewardResult]],
) -> list[SampleAnswer]:
    first = list(zip(problems, completions, grades, strict=True))[:_SHOWN_SAMPLES]
    return [
        SampleAnswer(problem.prompt, group[0].text, problem.label, graded[0].reward, graded[0].score)
        for problem, group, graded in first
    ]
