"""Executors that turn a prompt into a group of graded completions; a completion that cannot be
graded gets a set reward."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import aiohttp
import numpy as np

from openrlhf_ext.options.sections import Reward
from openrlhf_ext.redaction import redact, redacted
from openrlhf_ext.rewards.grading import (
    FAILED_KEY,
    Failure,
    FailurePolicy,
    Grader,
    Group,
    InvalidAnswer,
    RewardError,
    RewardInvalid,
    RewardPoolClosed,
    RewardResult,
    RewardServerError,
    RewardTimeout,
    parse_answer,
)
from openrlhf_ext.rewards.pool import RewardPool
from openrlhf_ext.rollout.response import GroupRequest, Response

logger = logging.getLogger(__name__)
_BUSY_STATUSES = frozenset({408, 425, 429})
_BODY_SHOWN = 500
_LARGEST_BODY = 4 << 20  # bytes; an answer is one number or a few


class HttpReward:
    """Grades samples on reward servers, one request per sample, in round-robin order.

    A request posts ``{"query": [query], "prompts": [prompt], "labels": [label]}``; the answer is
    the dict that a reward function returns. Requests that time out, cannot connect or get status
    5xx, 408, 425 or 429 go to the next server after a pause that doubles. Bound to the event loop
    of its first ``grade`` call.
    """

    def __init__(
        self, urls: Sequence[str], timeout_s: float = 30.0, retries: int = 4, pause_s: float = 0.5
    ) -> None:
        self._urls = cycle(urls)
        self._timeout_s = timeout_s
        self._retries = retries
        self._pause_s = pause_s
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    def start(self) -> None:
        """Does nothing: no work is needed before the first sample."""

    async def grade(
        self, query: str, prompt: str, label: Any, completion: str | None = None, *_: object
    ) -> RewardResult:
        """Like ``Grader.grade``; servers get OpenRLHF's three fields, not the completion. Raises
        RewardError."""
        sample = (prompt, query.removeprefix(prompt) if completion is None else completion, label)
        payload = json.dumps({"query": [query], "prompts": [prompt], "labels": [label]}).encode()
        for attempt in range(self._retries + 1):
            url = next(self._urls)
            try:
                return await self._request(url, payload, sample)
            except Failure as failure:
                if attempt == self._retries:
                    raise failure.kind(
                        f"{failure} (request {attempt + 1}, the last)", *sample
                    ) from failure
                logger.warning("%s (request %d of %d)", failure, attempt + 1, self._retries + 1)
            await asyncio.sleep(self._pause_s * 2**attempt)
        raise AssertionError("unreachable: the last request returned or raised")

    async def aclose(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def _request(
        self, url: str, payload: bytes, sample: tuple[str, str, Any]
    ) -> RewardResult:
        started = time.perf_counter()
        shown = redact(url)
        session = self._open_session()
        try:
            async with session.post(
                url, data=payload, headers={"Content-Type": "application/json"}
            ) as response:
                body = await _body(response)
            _check_status(response, body, shown, sample)
            if len(body) > _LARGEST_BODY:
                raise InvalidAnswer(f"answered more than {_LARGEST_BODY >> 20} MiB")
            answer = json.loads(body.decode(response.charset or "utf-8"))
            return parse_answer(answer, time.perf_counter() - started)
        except (RewardError, Failure):
            raise
        except TimeoutError:
            message = (
                f"reward server {shown} did not answer within {self._timeout_s:g} s "
                "(--reward.timeout_s)"
            )
            raise Failure(RewardTimeout, message) from None
        except aiohttp.ClientError as error:
            message = f"reward server {shown}: {type(error).__name__}: {redact(str(error))}"
            # The error's own text may contain the full address.
            raise Failure(RewardServerError, message) from None
        # Nesting raises RecursionError, a charset LookupError: a server may send anything.
        except Exception as error:
            raise RewardInvalid(
                f"reward server {shown} gave no reward as JSON: {error}", *sample
            ) from error

    def _open_session(self) -> aiohttp.ClientSession:
        if self._closed:
            raise RewardPoolClosed("the connections to the reward servers are closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self._timeout_s)
            )
        return self._session


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """The body of the response; of a longer one, the first ``_LARGEST_BODY`` bytes and one more."""
    try:
        return await response.content.readexactly(_LARGEST_BODY + 1)
    except asyncio.IncompleteReadError as end:
        return end.partial


def _check_status(
    response: aiohttp.ClientResponse, body: bytes, url: str, sample: tuple[str, str, Any]
) -> None:
    if response.status < 400:
        return
    said = body.decode(errors="replace")[:_BODY_SHOWN]
    message = f"reward server {url} answered {response.status} {response.reason}: {said}"
    if response.status >= 500 or response.status in _BUSY_STATUSES:
        raise Failure(RewardServerError, message)
    raise RewardServerError(message, *sample)


class GradedExecutor:
    """Base of executors whose samples all have a finite reward.

    A sample that cannot be graded gets ``failures.failure_value``, score 0 and
    ``extra_logs["reward_failed"] = 1``, until the policy stops the run.
    """

    def __init__(self, failures: FailurePolicy) -> None:
        self._failures = failures

    async def respond(self, request: GroupRequest, tokenizer: Any, engine: Any) -> list[Response]:
        """The completions of one prompt, graded. Raises RewardFailureLimit, RewardImportError."""
        raise NotImplementedError

    def take_failures(self) -> list[str]:
        return self._failures.take_messages()

    async def _settle(self, grading: Awaitable[RewardResult]) -> RewardResult:
        """The sample's grade, or its replacement after a failure."""
        try:
            result = await grading
        except RewardError as error:
            self._failures.tolerate(error)
            return RewardResult(self._failures.failure_value, 0.0, {FAILED_KEY: 1.0})
        return RewardResult(
            result.reward, result.score, {**result.extra_logs, FAILED_KEY: 0.0}, result.seconds
        )


class GradedSingleTurnExecutor(GradedExecutor):
    """Generates single-turn completions, graded by a :class:`Grader` under a
    :class:`FailurePolicy`.

    Without a grader, completions have no grade, and a reward model scores them with their batch.
    """

    def __init__(self, grader: Grader | None, failures: FailurePolicy) -> None:
        super().__init__(failures)
        self._grader = grader
        if grader is not None:
            grader.start()

    async def respond(self, request: GroupRequest, tokenizer: Any, engine: Any) -> list[Response]:
        """See :class:`GradedExecutor`; a prompt that leaves no room is truncated from the left, as
        in OpenRLHF."""
        ids = tokenizer(request.prompt, add_special_tokens=False)["input_ids"]
        sampling = request.sampling
        room = sampling.max_new_tokens or max(1, sampling.max_len - len(ids))
        ids = ids[max(0, len(ids) - (sampling.max_len - room)) :]
        # Only log-probs of the sampled tokens, as one flat list.
        asked = {"max_tokens": room, "detokenize": False, "logprobs": 0, "flat_logprobs": True}
        group = Group(request.samples)
        responses = []
        try:
            for sample in range(request.samples):
                params = engine.sampling_params(sampling, seed=request.seed_of(sample), **asked)
                grade = partial(self._grade, request, group, sample, tokenizer)
                response = self._respond(ids, engine, params, grade)
                responses.append(asyncio.ensure_future(response))
            return await asyncio.gather(*responses)
        finally:
            for future in responses:  # after one has failed, others may wait for it
                future.cancel()

    async def _respond(
        self,
        ids: list[int],
        engine: Any,
        params: Any,
        grade_of: Callable[..., Awaitable[RewardResult | None]],
    ) -> Response:
        completion = (await engine.generate(ids, params)).outputs[0]
        tokens = [*ids, *completion.token_ids]
        grade = await grade_of(tokens, completion)

        start = len(ids)
        versions = [
            (version, start + first, start + end)
            for version, first, end in completion.weight_versions
        ]
        entropies_T = None
        if engine.tells_entropies:  # in place of the ranks (worker_extension)
            entropies_T = np.array(completion.logprobs.ranks, dtype=np.float32)
        response = Response(
            tokens_S=np.array(tokens, dtype=np.int32),
            logprobs_T=np.array(completion.logprobs.logprobs, dtype=np.float32),
            actions=((start, len(tokens)),),
            versions=tuple(versions),
            reward=None,
            score=None,
            truncated=completion.finish_reason == "length",
            extra_logs={},
            entropies_T=entropies_T,
            experts_RLK=completion.routed_experts,
        )
        if grade is None:
            return response
        return replace(
            response, reward=grade.reward, score=grade.score, extra_logs=grade.extra_logs
        ).signed()

    async def _grade(
        self,
        request: GroupRequest,
        group: Group,
        sample: int,
        tokenizer: Any,
        tokens: list[int],
        completion: Any,
    ) -> RewardResult | None:
        if self._grader is None:
            return None
        query = tokenizer.decode(tokens, skip_special_tokens=False)
        text = tokenizer.decode(_without_end(completion), skip_special_tokens=False)
        return await self._settle(
            self._grader.grade(query, request.prompt, request.label, text, group, sample)
        )

    async def aclose(self) -> None:
        if self._grader is not None:
            await self._grader.aclose()


def _without_end(completion: Any) -> list[int]:
    """The tokens of vLLM's completion without the token that ended it: the model's end of text, or
    another stop token."""
    by_token = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
    return list(completion.token_ids)[: -1 if by_token else None]


class SeveralGraders:
    """The executors of several graders by name; each request names one
    (``GroupRequest.grader``)."""

    def __init__(self, executors: Mapping[str | None, GradedSingleTurnExecutor]) -> None:
        self._executors = executors

    async def respond(self, request: GroupRequest, tokenizer: Any, engine: Any) -> list[Response]:
        """See :class:`GradedExecutor`."""
        return await self._executors[request.grader].respond(request, tokenizer, engine)

    def take_failures(self) -> list[str]:
        failures = []
        for executor in self._executors.values():
            failures += executor.take_failures()
        return failures

    async def aclose(self) -> None:
        await asyncio.gather(*(executor.aclose() for executor in self._executors.values()))


def make_executor(options: Reward, more: Iterable[str] = ()) -> Callable[[], Any]:
    """A picklable factory that builds the executor inside the rollout engine's process.

    Without ``reward.remote_url`` the executor does not grade. ``more``: addresses of further
    graders, which requests name.
    """
    graders: dict[str | None, Reward] = {None: options}
    graders |= {address: options.model_copy(update={"remote_url": address}) for address in more}
    return partial(_build, graders)


def open_grader(options: Reward) -> Grader:
    """The grader for ``reward.remote_url``, not started. Raises ValueError."""
    addresses = options.addresses
    if addresses and all(address.startswith(("http://", "https://")) for address in addresses):
        return HttpReward(addresses, timeout_s=options.timeout_s)
    if len(addresses) == 1 and addresses[0].endswith(".py"):
        return RewardPool(options)
    raise ValueError(
        "--reward.remote_url must be one Python file (.py) or http(s) addresses separated by "
        f"commas, got {redacted(addresses)}"
    )


def _build(graders: Mapping[str | None, Reward]) -> SeveralGraders:
    executors = {}
    for name, options in graders.items():
        grader = None if options.remote_url is None else open_grader(options)
        policy = FailurePolicy(options.max_failures, options.failure_value)
        executors[name] = GradedSingleTurnExecutor(grader, policy)
    return SeveralGraders(executors)
