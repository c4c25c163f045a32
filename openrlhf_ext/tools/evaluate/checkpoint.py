"""The course of an evaluation: problems in fixed groups are sampled, graded and kept, then counted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from openrlhf_ext.rewards.errors import FailurePolicy
from openrlhf_ext.rewards.executor import open_grader
from openrlhf_ext.rewards.grading import RewardSettings
from openrlhf_ext.tools.evaluate.grading import MATHS, SOLVED, Grading
from openrlhf_ext.tools.evaluate.problems import Problem, Task
from openrlhf_ext.tools.evaluate.result import EvaluationResult, summarize
from openrlhf_ext.tools.evaluate.sampling import (
    Completion,
    Sampler,
    SamplingSettings,
    TransformersSampler,
    max_prompt_tokens,
)
from openrlhf_ext.tools.evaluate.store import Store

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GradingSettings:
    """How to grade.

    Attributes:
        num_workers, reward_timeout_s: see ``RewardSettings``.
        max_failures: gradings of a problem file that may fail; ``None``: any number. They count as wrong.
    """

    num_workers: int = 2
    reward_timeout_s: float = 30.0
    max_failures: int | None = None


Sample = Callable[[Sequence[Problem]], Awaitable[list[list[Completion]]]]
OpenSampler = Callable[["PreTrainedTokenizerBase", Sequence[str]], AbstractAsyncContextManager[Sampler]]
"""Loads a model for these prompts (all that will be asked), and gives its memory back."""


def evaluate(
    tasks: Sequence[Task], stores: Sequence[Store], model: str, sampling: SamplingSettings, grading: GradingSettings,
    ks: Sequence[int], open_sampler: OpenSampler,
) -> list[EvaluationResult]:  # fmt: skip
    """Sample completions of every task's problems with a Hugging Face checkpoint and grade them.

    Problems are taken in groups of ``sampling.batch_size`` sequences that do not depend on what the stores hold
    already: a group of which the last problem is missing is sampled again as a whole, so that a command that was killed
    ends in the bytes of one that was not, wherever the engine computes the same batch alike.

    Args:
        tasks: what to evaluate on.
        stores: for each task, where its graded problems are kept.
        model: the checkpoint's folder, with its tokenizer.
        sampling, grading: how.
        ks: sizes of pass@k and maj@k.
        open_sampler: loads the model; not called if the stores hold everything.

    Returns:
        One result for each task.

    Raises:
        ValueError: the data or an option is wrong; names it.
        RewardFailureLimit, RewardImportError: grading failed.
        RolloutError: the engine failed.
    """
    from transformers import AutoConfig, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    room = max_prompt_tokens(AutoConfig.from_pretrained(model), sampling.max_new_tokens)
    prepared = [_problems_that_fit(task, tokenizer, room) for task in tasks]
    size = max(1, sampling.batch_size // sampling.n_samples)

    async def run() -> list[EvaluationResult]:
        results = []
        async with AsyncExitStack() as opened:
            samplers: list[Sampler] = []

            async def sample(group: Sequence[Problem]) -> list[list[Completion]]:
                if not samplers:
                    prompts = [problem.prompt for problems, _ in prepared for problem in problems]
                    samplers.append(await opened.enter_async_context(open_sampler(tokenizer, prompts)))
                return await samplers[0].sample([p.prompt for p in group], [p.index for p in group])

            for task, store, (problems, skipped) in zip(tasks, stores, prepared, strict=True):
                started = time.perf_counter()
                await _grade_groups(task, problems, sample, store, grading, size)
                seconds = time.perf_counter() - started
                results.append(summarize(store.results, task.name, task.path, model, ks, skipped, seconds))
        return results

    return asyncio.run(run())


def grade_saved(
    task: Task, store: Store, completions: Sequence[Sequence[str]], grading: GradingSettings, ks: Sequence[int],
    tokenizer: PreTrainedTokenizerBase | None,
) -> EvaluationResult:  # fmt: skip
    """:func:`evaluate` of completions that are there already, without a model.

    Args:
        completions: texts for each problem, equally many.
        tokenizer: for the chat template, where the task asks for it.
    """
    problems = [Problem(p.index, task.style.prompt(p.prompt, tokenizer), p.label) for p in task.problems]

    async def given(group: Sequence[Problem]) -> list[list[Completion]]:
        return [
            [Completion(query=p.prompt + text, text=text, tokens=None, truncated=None) for text in completions[p.index]]
            for p in group
        ]

    started = time.perf_counter()
    asyncio.run(_grade_groups(task, problems, given, store, grading, size=max(1, 64 // len(completions[0]))))
    return summarize(store.results, task.name, task.path, None, ks, 0, time.perf_counter() - started)


@asynccontextmanager
async def open_transformers(
    folder: str, tokenizer: PreTrainedTokenizerBase, sampling: SamplingSettings, device: str, dtype: str
) -> AsyncIterator[Sampler]:
    """Load a checkpoint in plain transformers.

    Args:
        folder: the checkpoint.
        tokenizer: its tokenizer.
        device: where to run.
        dtype: of the weights: ``float32``, ``bfloat16`` or ``float16``.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    yield TransformersSampler(model, tokenizer, sampling, device)


def _problems_that_fit(task: Task, tokenizer: PreTrainedTokenizerBase, room: int | None) -> tuple[list[Problem], int]:
    problems = [Problem(p.index, task.style.prompt(p.prompt, tokenizer), p.label) for p in task.problems]
    if room is None:
        return problems, 0
    fitting = [p for p in problems if len(tokenizer(p.prompt, add_special_tokens=False)["input_ids"]) <= room]
    if not fitting:
        raise ValueError(f"no prompt of {task.path} fits the {room} tokens that --max_new_tokens leaves the model")
    if skipped := len(problems) - len(fitting):
        logger.warning("%s: %d of %d prompts are longer than %d tokens and left out", task.path, skipped, len(problems),
                       room)  # fmt: skip
    return fitting, len(problems) - len(fitting)


async def _grade_groups(
    task: Task, problems: Sequence[Problem], sample: Sample, store: Store, settings: GradingSettings, size: int
) -> None:
    """Sample, grade and keep what the store does not hold yet."""
    done = len(store.results)
    if done >= len(problems):
        return
    grader = open_grader(
        RewardSettings(remote_url=task.reward, num_workers=settings.num_workers, timeout_s=settings.reward_timeout_s)
    )
    policy = FailurePolicy(settings.max_failures)
    grading = Grading(grader, policy, settings.num_workers, by_equality=task.reward == MATHS)
    try:
        grader.start()
        for start in range(done - done % size, len(problems), size):
            group = problems[start : start + size]
            completions = await sample(group)
            graded = await asyncio.gather(*map(_graded, [grading] * len(group), group, completions))
            store.append(graded[max(0, done - start) :])
            logger.info("%s: %d of %d problems", task.name, len(store.results), len(problems))
    finally:
        await grader.aclose()


async def _graded(grading: Grading, problem: Problem, completions: Sequence[Completion]) -> dict[str, Any]:
    """The line of one problem."""
    grades = await asyncio.gather(*(grading.grade(c.query, problem.prompt, problem.label) for c in completions))
    scores = [0.0 if grade is None else grade.score for grade in grades]
    votes = await grading.votes([c.text for c in completions], [score >= SOLVED for score in scores])
    return {
        "problem": problem.index,
        "prompt": problem.prompt,
        "label": problem.label,
        "completions": [
            {
                "text": completion.text, "tokens": completion.tokens, "truncated": completion.truncated,
                "reward": 0.0 if grade is None else grade.reward, "score": score, "graded": grade is not None,
                "vote": vote,
            }
            for completion, grade, score, vote in zip(completions, grades, scores, votes, strict=True)
        ],
    }  # fmt: skip
