"""The course of an evaluation: problems in fixed groups are sampled, graded and kept, then counted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from openrlhf_ext.inputs import reading
from openrlhf_ext.options.sections import Reward
from openrlhf_ext.rewards.executor import open_grader
from openrlhf_ext.rewards.grading import FailurePolicy, RewardError, RewardResult
from openrlhf_ext.tools.evaluate.grading import MATHS, SOLVED, Grading
from openrlhf_ext.tools.evaluate.measures import Measures
from openrlhf_ext.tools.evaluate.problems import Problem, Task
from openrlhf_ext.tools.evaluate.result import EvaluationResult, summarize
from openrlhf_ext.tools.evaluate.sampling import (
    Answers,
    Completion,
    Sampler,
    SamplingSettings,
    TransformersSampler,
    max_prompt_tokens,
)
from openrlhf_ext.tools.evaluate.store import Store

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GradingSettings:
    """How to grade.

    Attributes:
        max_failures: gradings of a problem file that may fail; ``None``: any number. They count as wrong.
    """

    num_workers: int = 2
    reward_timeout_s: float = 30.0
    max_failures: int | None = None


Sample = Callable[[Sequence[Problem]], Awaitable[list[Answers]]]
OpenSampler = Callable[["PreTrainedTokenizerBase", Sequence[str]], AbstractAsyncContextManager[Sampler]]
"""Loads a model for these prompts (all that will be asked), and gives its memory back."""


def evaluate(
    tasks: Sequence[Task], stores: Sequence[Store], model: str, sampling: SamplingSettings, grading: GradingSettings,
    ks: Sequence[int], open_sampler: OpenSampler, short_tokens: int | None = None,
) -> list[EvaluationResult]:  # fmt: skip
    """Sample completions of every task's problems with a Hugging Face checkpoint and grade them.

    Problems are taken in groups of ``sampling.batch_size`` sequences that do not depend on what the stores hold
    already: a group of which the last problem is missing is sampled again as a whole, so that a command that was killed
    ends in the bytes of one that was not, wherever the engine computes the same batch alike.

    Args:
        stores: for each task, where its graded problems are kept.
        open_sampler: loads the model; not called if the stores hold everything.
        short_tokens: completions of at most this many tokens are counted apart; ``None``: none are.

    Returns:
        One result for each task.

    Raises:
        ValueError: the data or an option is wrong; names it.
        RewardFailureLimit, RewardImportError: grading failed.
        RolloutError: the engine failed.
    """
    from transformers import AutoConfig, AutoTokenizer

    with reading(model, "by transformers"):
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
        room = max_prompt_tokens(AutoConfig.from_pretrained(model), sampling.max_new_tokens)
    prepared = [_problems_that_fit(task, tokenizer, room) for task in tasks]
    size = max(1, sampling.batch_size // sampling.n_samples)

    async def run() -> list[EvaluationResult]:
        results = []
        async with AsyncExitStack() as opened:
            samplers: list[Sampler] = []

            async def sample(group: Sequence[Problem]) -> list[Answers]:
                if not samplers:
                    prompts = [problem.prompt for problems, _ in prepared for problem in problems]
                    samplers.append(await opened.enter_async_context(open_sampler(tokenizer, prompts)))
                return await samplers[0].sample([p.prompt for p in group], [p.index for p in group])

            for task, store, (problems, skipped) in zip(tasks, stores, prepared, strict=True):
                started = time.perf_counter()
                await _grade_groups(task, problems, sample, store, grading, size)
                seconds = time.perf_counter() - started
                results.append(
                    summarize(store.results, task.name, task.path, model, ks, skipped, seconds, short_tokens)
                )
        return results

    return asyncio.run(run())


def grade_saved(
    task: Task, store: Store, completions: Sequence[Sequence[str]], grading: GradingSettings, ks: Sequence[int],
    tokenizer: PreTrainedTokenizerBase | None,
) -> EvaluationResult:  # fmt: skip
    """:func:`evaluate` of completions that are there already, without a model.

    Args:
        tokenizer: for the chat template, where the task asks for it.
    """
    problems = [Problem(p.index, task.style.prompt(p.prompt, tokenizer), p.label) for p in task.problems]

    async def given(group: Sequence[Problem]) -> list[Answers]:
        return [
            Answers([Completion(query=p.prompt + text, text=text, body=text, tokens=None, truncated=None)
                     for text in completions[p.index]])
            for p in group
        ]  # fmt: skip

    started = time.perf_counter()
    asyncio.run(_grade_groups(task, problems, given, store, grading, size=max(1, 64 // len(completions[0]))))
    return summarize(store.results, task.name, task.path, None, ks, 0, time.perf_counter() - started)


@asynccontextmanager
async def open_transformers(
    folder: str, tokenizer: PreTrainedTokenizerBase, sampling: SamplingSettings, device: str, dtype: str, *,
    entropy: bool = False, reference: str | None = None,
) -> AsyncIterator[Sampler]:  # fmt: skip
    """Load a checkpoint in plain transformers.

    Args:
        dtype: of the weights: ``float32``, ``bfloat16`` or ``float16``.
        reference: folder of a checkpoint from which the divergence is measured too; ``None``: it is not.
    """
    import torch
    from transformers import AutoModelForCausalLM

    def load(path: str) -> PreTrainedModel:
        with reading(path, "by transformers"):
            return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))

    model, measure = load(folder), None
    if entropy or reference is not None:
        other = None if reference is None else load(reference)
        measure = Measures(model, other, sampling.temperature, sampling.batch_size, device)
    yield TransformersSampler(model, tokenizer, sampling, device, measure)


def _problems_that_fit(task: Task, tokenizer: PreTrainedTokenizerBase, room: int | None) -> tuple[list[Problem], int]:
    problems = [Problem(p.index, task.style.prompt(p.prompt, tokenizer), p.label) for p in task.problems]
    if room is None:
        return problems, 0
    fitting = [p for p in problems if len(tokenizer(p.prompt, add_special_tokens=False)["input_ids"]) <= room]
    if not fitting:
        raise ValueError(
            f"no prompt of {task.path} fits the {max(room, 0)} tokens that --max_new_tokens leaves of the model's "
            "length (max_position_embeddings)"
        )
    if skipped := len(problems) - len(fitting):
        logger.warning("%s: %d of %d prompts are longer than %d tokens and left out", task.path, skipped, len(problems),
                       room)  # fmt: skip
    return fitting, len(problems) - len(fitting)


async def _grade_groups(
    task: Task, problems: Sequence[Problem], sample: Sample, store: Store, settings: GradingSettings, size: int
) -> None:
    """Sample, grade and keep what the store does not hold yet."""
    if done := len(store.results):
        logger.info("%s: %d of %d problems are there from an earlier command", task.name, done, len(problems))
    if done >= len(problems):
        return
    grader = open_grader(
        Reward(remote_url=task.reward, num_workers=settings.num_workers, timeout_s=settings.reward_timeout_s)
    )
    policy = FailurePolicy(settings.max_failures)
    grading = Grading(grader, policy, settings.num_workers, by_equality=task.reward == MATHS)
    try:
        grader.start()
        for start in range(done - done % size, len(problems), size):
            group = problems[start : start + size]
            answers = await sample(group)
            graded = await asyncio.gather(*map(_graded, [grading] * len(group), group, answers))
            store.append(graded[max(0, done - start) :])
            logger.info("%s: %d of %d problems", task.name, len(store.results), len(problems))
    finally:
        await grader.aclose()


async def _graded(grading: Grading, problem: Problem, answers: Answers) -> dict[str, Any]:
    completions = answers.completions
    sampled = [*completions, *([answers.greedy] if answers.greedy is not None else [])]
    grades = await asyncio.gather(*(grading.grade(c.query, problem.prompt, problem.label, c.body) for c in sampled))
    lines = [_line(completion, grade) for completion, grade in zip(sampled, grades, strict=True)]
    samples, greedy = lines[: len(completions)], lines[len(completions) :]
    votes = await grading.votes([c.text for c in completions], [line["score"] >= SOLVED for line in samples])
    return {
        "problem": problem.index,
        "prompt": problem.prompt,
        "label": problem.label,
        "completions": [{**line, "vote": vote} for line, vote in zip(samples, votes, strict=True)],
        **({"greedy": greedy[0]} if greedy else {}),
    }


def _line(completion: Completion, grade: RewardResult | RewardError) -> dict[str, Any]:
    """What is kept of one completion; without a grade it is wrong."""
    failure = f"{type(grade).__name__}: {grade.message}" if isinstance(grade, RewardError) else None
    grade = RewardResult(reward=0.0, score=0.0) if isinstance(grade, RewardError) else grade
    optional = {"error": failure, "entropy": completion.entropy, "kl": completion.kl}
    return {
        "text": completion.text, "tokens": completion.tokens, "truncated": completion.truncated,
        "reward": grade.reward, "score": grade.score, "graded": failure is None, "extra_logs": grade.extra_logs,
        **{name: value for name, value in optional.items() if value is not None},
    }  # fmt: skip
