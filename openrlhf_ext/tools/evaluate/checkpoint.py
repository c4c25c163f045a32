"""The course of an evaluation: problems in fixed groups are sampled, graded and kept, then
counted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from openrlhf_ext.inputs import InputError, reading, require_one_beginning
from openrlhf_ext.options import required
from openrlhf_ext.options.sections import Reward
from openrlhf_ext.options.sections.evaluate import Evaluate
from openrlhf_ext.rewards.answers import (
    answer_alone,
    extract_answer,
    stated_answers,
    surely_different,
)
from openrlhf_ext.rewards.counting import SOLVED
from openrlhf_ext.rewards.executor import open_grader
from openrlhf_ext.rewards.grading import FailurePolicy, Grader, Group, RewardError, RewardResult
from openrlhf_ext.tools.evaluate.problems import MATHS, Problem, Store, Task
from openrlhf_ext.tools.evaluate.result import EvaluationResult, summarize
from openrlhf_ext.tools.evaluate.sampling import (
    Completion,
    Sampler,
    TransformersSampler,
    max_prompt_tokens,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_SHOWN = 5

Sample = Callable[[Sequence[Problem]], Awaitable[list[list[Completion]]]]
OpenSampler = Callable[
    [Evaluate, "PreTrainedTokenizerBase", Sequence[str]], AbstractAsyncContextManager[Sampler]
]
"""Loads a model for these prompts (all that will be asked), and gives its memory back."""


def evaluate(
    tasks: Sequence[Task],
    stores: Sequence[Store],
    options: Evaluate,
    ks: Sequence[int],
    open_sampler: OpenSampler,
) -> list[EvaluationResult]:
    """Sample completions of every task's problems with a Hugging Face checkpoint and grade them.

    Problems are taken in groups of ``batch_size`` sequences that do not depend on what the stores
    hold
    already: a group of which the last problem is missing is sampled again as a whole, so that a
    command that was killed ends in the bytes of one that was not, wherever the engine computes the
    same batch alike.

    ``open_sampler`` loads the model; it is not called if the stores hold everything.
    """
    from transformers import AutoConfig, AutoTokenizer

    with reading(model := required(options.model, "model"), "by transformers"):
        tokenizer: Any = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        room = max_prompt_tokens(
            AutoConfig.from_pretrained(model, trust_remote_code=False), options.max_new_tokens
        )
    prepared = [_problems_that_fit(task, tokenizer, room) for task in tasks]
    size = max(1, options.batch_size // options.n_samples)

    async def run() -> list[EvaluationResult]:
        results = []
        async with AsyncExitStack() as opened:
            samplers: list[Sampler] = []

            async def sample(group: Sequence[Problem]) -> list[list[Completion]]:
                if not samplers:
                    require_weights(required(options.model, "model"))
                    prompts = [problem.prompt for problems, _ in prepared for problem in problems]
                    samplers.append(
                        await opened.enter_async_context(open_sampler(options, tokenizer, prompts))
                    )
                return await samplers[0].sample([p.prompt for p in group], [p.index for p in group])

            for task, store, (problems, skipped) in zip(tasks, stores, prepared, strict=True):
                started = time.perf_counter()
                await _grade_groups(task, problems, sample, store, options, size)
                seconds = time.perf_counter() - started
                results.append(
                    summarize(store.results, task.name, task.path, model, ks, skipped, seconds)
                )
        return results

    return asyncio.run(run())


def grade_saved(
    task: Task,
    store: Store,
    completions: Sequence[Sequence[str]],
    options: Evaluate,
    ks: Sequence[int],
    tokenizer: PreTrainedTokenizerBase | None,
) -> EvaluationResult:
    """:func:`evaluate` of completions that are there already, without a model; the tokenizer has
    the chat template."""
    problems = _prompted(task, tokenizer)

    async def given(group: Sequence[Problem]) -> list[list[Completion]]:
        return [
            [Completion(p.prompt + text, text, text, None, None) for text in completions[p.index]]
            for p in group
        ]

    started = time.perf_counter()
    asyncio.run(
        _grade_groups(task, problems, given, store, options, size=max(1, 64 // len(completions[0])))
    )
    return summarize(
        store.results, task.name, task.path, None, ks, 0, time.perf_counter() - started
    )


def require_weights(path: str) -> None:
    """Raises InputError: the tensors of a checkpoint are not those of its model, which transformers
    and vLLM would make up, or leave as they happen to be. Warns of tensors that no model of this
    kind has."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    with reading(path, "by transformers"):
        _, found = AutoModelForCausalLM.from_pretrained(
            path,
            trust_remote_code=False,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    _require_none(path, "lacks", found["missing_keys"])
    mismatched = [name for name, *_ in found["mismatched_keys"]]
    _require_none(path, "has in another shape than its config.json says", mismatched)
    if left_over := sorted(found["unexpected_keys"]):
        logger.warning(
            "%s: %d tensors are not of this model: %s",
            path,
            len(left_over),
            ", ".join(left_over[:_SHOWN]),
        )


def _require_none(path: str, fault: str, names: Iterable[str]) -> None:
    if ordered := sorted(names):
        raise InputError(f"{path} {fault}: {', '.join(ordered[:_SHOWN])} ({len(ordered)} tensors)")


@asynccontextmanager
async def open_transformers(
    options: Evaluate, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]
) -> AsyncIterator[Sampler]:
    """Loads a checkpoint in plain transformers. Raises InputError: its numbers are not finite."""
    import torch
    from transformers import AutoModelForCausalLM

    path = required(options.model, "model")
    with reading(path, "by transformers"):
        dtype = getattr(torch, options.dtype)
        model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False, dtype=dtype)
    broken = [name for name, weight in model.named_parameters() if not weight.isfinite().all()]
    _require_none(path, "has numbers that are not finite in", broken)
    yield TransformersSampler(model, tokenizer, options)


def _prompted(task: Task, tokenizer: PreTrainedTokenizerBase | None) -> list[Problem]:
    with reading(f"the prompts of {task.path}"):
        return [
            Problem(p.index, task.style.prompt(p.prompt, tokenizer), p.label) for p in task.problems
        ]


def _problems_that_fit(
    task: Task, tokenizer: PreTrainedTokenizerBase, room: int | None
) -> tuple[list[Problem], int]:
    problems = _prompted(task, tokenizer)
    tokens = tokenizer([problem.prompt for problem in problems], add_special_tokens=False)[
        "input_ids"
    ]
    require_one_beginning(tokenizer, tokens, f"the prompts of {task.path}")
    if room is None:
        return problems, 0
    fitting = [problem for problem, ids in zip(problems, tokens, strict=True) if len(ids) <= room]
    if not fitting:
        raise ValueError(
            f"no prompt of {task.path} fits the {max(room, 0)} tokens that --max_new_tokens "
            "leaves of the model's length (max_position_embeddings)"
        )
    if skipped := len(problems) - len(fitting):
        said = "%s: %d of %d prompts are longer than %d tokens and left out"
        logger.warning(said, task.path, skipped, len(problems), room)
    return fitting, skipped


async def _grade_groups(
    task: Task,
    problems: Sequence[Problem],
    sample: Sample,
    store: Store,
    options: Evaluate,
    size: int,
) -> None:
    if done := len(store.results):
        logger.info(
            "%s: %d of %d problems are there from an earlier command",
            task.name,
            done,
            len(problems),
        )
    if done >= len(problems):
        return
    workers = options.num_workers
    grader = open_grader(
        Reward(remote_url=task.reward, num_workers=workers, timeout_s=options.reward_timeout_s)
    )
    tolerated = 10 if options.max_failures is None and options.reward else options.max_failures
    policy = FailurePolicy(tolerated)
    try:
        grader.start()
        for start in range(done - done % size, len(problems), size):
            group = problems[start : start + size]
            answers = await sample(group)
            # a grader may want them all
            in_flight = max(_IN_FLIGHT_PER_WORKER * workers, len(answers[0]))
            grading = Grading(grader, policy, in_flight, by_equality=task.reward == MATHS)
            graded = await asyncio.gather(*map(partial(_graded, task, grading), group, answers))
            store.append(graded[max(0, done - start) :])
            logger.info("%s: %d of %d problems", task.name, len(store.results), len(problems))
    finally:
        await grader.aclose()


async def _graded(
    task: Task, grading: Grading, problem: Problem, completions: Sequence[Completion]
) -> dict[str, Any]:
    alone = [answer_alone(c.body, task.answers) for c in completions]
    # another reward function looks for its answer itself
    whole = task.answers == "any" or task.reward != MATHS
    group = Group(len(completions))
    grades = await asyncio.gather(
        *(
            grading.grade(
                c.query if whole else problem.prompt + answer,
                problem.prompt,
                problem.label,
                c.body if whole else answer,
                group,
                place,
            )
            for place, (c, answer) in enumerate(zip(completions, alone, strict=True))
        )
    )
    lines = [
        _line(completion, grade) for completion, grade in zip(completions, grades, strict=True)
    ]
    texts = [answer_alone(c.text, task.answers) for c in completions]
    votes = await grading.votes(texts, [line["score"] >= SOLVED for line in lines])
    return {
        "problem": problem.index,
        "prompt": problem.prompt,
        "label": problem.label,
        "completions": [{**line, "vote": vote} for line, vote in zip(lines, votes, strict=True)],
    }


def _line(completion: Completion, grade: RewardResult | RewardError) -> dict[str, Any]:
    failure = f"{type(grade).__name__}: {grade.message}" if isinstance(grade, RewardError) else None
    grade = RewardResult(reward=0.0, score=0.0) if isinstance(grade, RewardError) else grade
    return {
        "text": completion.text,
        "tokens": completion.tokens,
        "truncated": completion.truncated,
        "reward": grade.reward,
        "score": grade.score,
        "graded": failure is None,
        "extra_logs": grade.extra_logs,
        **({} if failure is None else {"error": failure}),
    }


# ---- grades and votes

# enough to keep the workers busy; waiting samples would run into the pool's queue deadline
_IN_FLIGHT_PER_WORKER = 4


class Grading:
    """Grades and groups completions through one grader, which the caller starts and closes.

    ``by_equality``: the grader compares the label, taken as an answer, with the stated answer, so
    that it can also tell which wrong answers are equal; else answers are equal if their normalized
    texts are.
    """

    def __init__(
        self, grader: Grader, policy: FailurePolicy, in_flight: int, *, by_equality: bool
    ) -> None:
        self._grader, self._policy, self._by_equality = grader, policy, by_equality
        self._in_flight = asyncio.Semaphore(in_flight)

    async def grade(self, *sample: Any) -> RewardResult | RewardError:
        """The grade of one completion, of ``Grader.grade``, or why it cannot be graded;
        RewardFailureLimit if too many cannot."""
        async with self._in_flight:
            try:
                return await self._grader.grade(*sample)
            except RewardError as error:
                self._policy.tolerate(error)
                return error

    async def votes(self, texts: Sequence[str], correct: Sequence[bool]) -> list[int | None]:
        """For each completion of a problem the number of the answer it votes for; ``None``: it
        states none.

        All correct answers are one, since each equals the label. Wrong ones are compared with the
        first of each group; those of the same normalized text are equal in any case.
        """
        # the first answer of each; "" for the correct one, wherever it comes
        groups: list[str] = []
        known: dict[tuple[bool, str] | None, int | None] = {None: None}
        stated = stated_answers(texts, correct)
        for text, answer in zip(texts, stated, strict=True):
            if answer is not None and answer not in known:
                known[answer] = await self._group_of(
                    "" if answer[0] else extract_answer(text) or "", groups
                )
        return [known[answer] for answer in stated]

    async def _group_of(self, answer: str, groups: list[str]) -> int:
        others = [number for number, first in enumerate(groups) if first and answer]
        same = await asyncio.gather(*(self._equal(groups[number], answer) for number in others))
        found = next(
            (number for number, is_same in zip(others, same, strict=True) if is_same), None
        )
        if found is None:
            groups.append(answer)
            return len(groups) - 1
        return found

    async def _equal(self, first: str, second: str) -> bool:
        if not self._by_equality or surely_different(first, second):
            return False
        async with self._in_flight:
            try:
                result = await self._grader.grade(
                    f"<answer>{second}</answer>", "", f"<answer>{first}</answer>"
                )
            except RewardError as error:
                logger.warning(
                    "two answers could not be compared and count as different: %s", error
                )
                return False
        return result.score >= SOLVED
