"""Reward servers reached over HTTP, in OpenRLHF's request and answer format."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import aiohttp

from openrlhf_ext.redaction import redact, redacted
from openrlhf_ext.rewards.grading import (
    InvalidAnswer,
    RewardError,
    RewardInvalid,
    RewardPoolClosed,
    RewardResult,
    RewardServerError,
    RewardTimeout,
    parse_answer,
)

logger = logging.getLogger(__name__)
_BUSY_STATUSES = frozenset({408, 425, 429})
_BODY_SHOWN = 500


class _Retryable(Exception):
    """A request that may succeed when it is sent again; holds the error to raise when it does not."""

    def __init__(self, kind: type[RewardError], message: str) -> None:
        super().__init__(message)
        self.kind = kind


class HttpReward:
    """Grades samples on reward servers, one request per sample, servers taken in turn.

    A request posts ``{"query": [query], "prompts": [prompt], "labels": [label]}`` and is answered by the dict a reward
    function returns. Requests that time out, cannot connect or are answered 5xx, 408, 425 or 429 go to the next server
    after a pause that doubles. Bound to the event loop that first grades with it.

    Args:
        timeout_s: deadline of one request, connecting included.
        retries: further requests after a failed one.
        pause_s: the first pause between two requests.
    """

    def __init__(self, urls: Sequence[str], timeout_s: float = 30.0, retries: int = 4, pause_s: float = 0.5) -> None:
        if not urls or timeout_s <= 0 or retries < 0:
            raise ValueError(f"HttpReward: urls={redacted(urls)}, timeout_s={timeout_s}, retries={retries}: give an "
                             "address, a positive deadline, a number of retries of at least 0")  # fmt: skip
        self._urls = cycle(urls)
        self._timeout_s = timeout_s
        self._retries = retries
        self._pause_s = pause_s
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    def start(self) -> None:
        """Nothing takes time before the first sample."""

    async def grade(self, query: str, prompt: str, label: Any, completion: str | None = None) -> RewardResult:
        """Grade one sample; arguments as of ``Grader.grade``. Servers get OpenRLHF's three, not the completion.

        Raises:
            RewardServerError: no server gave an answer, or one refused the request.
            RewardTimeout: the last request passed the deadline.
            RewardInvalid: the answer is not a finite reward in the agreed form.
        """
        sample = (prompt, query.removeprefix(prompt) if completion is None else completion, label)
        payload = {"query": [query], "prompts": [prompt], "labels": [label]}
        for attempt in range(self._retries + 1):
            url = next(self._urls)
            try:
                return await self._request(url, payload, sample)
            except _Retryable as failure:
                if attempt == self._retries:
                    raise failure.kind(f"{failure} (request {attempt + 1}, the last)", *sample) from failure
                logger.warning("%s (request %d of %d)", failure, attempt + 1, self._retries + 1)
            await asyncio.sleep(self._pause_s * 2**attempt)
        raise AssertionError("unreachable: the last request returned or raised")

    async def aclose(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def _request(self, url: str, payload: dict[str, Any], sample: tuple[str, str, Any]) -> RewardResult:
        started, shown = time.perf_counter(), redact(url)
        try:
            async with self._open_session().post(url, json=payload) as response:
                await _check_status(response, shown, sample)
                answer = await response.json(content_type=None)
        except TimeoutError:
            message = f"reward server {shown} did not answer within {self._timeout_s:g} s (--reward.timeout_s)"
            raise _Retryable(RewardTimeout, message) from None
        except aiohttp.ClientError as error:
            message = f"reward server {shown}: {type(error).__name__}: {redact(str(error))}"
            raise _Retryable(RewardServerError, message) from None  # its own text may have the whole address
        except ValueError as error:
            message = f"reward server {shown} answered something that is not JSON: {error}"
            raise RewardInvalid(message, *sample) from error
        try:
            return parse_answer(answer, time.perf_counter() - started)
        except InvalidAnswer as error:
            raise RewardInvalid(f"reward server {shown} {error}", *sample) from error

    def _open_session(self) -> aiohttp.ClientSession:
        if self._closed:
            raise RewardPoolClosed("the connections to the reward servers are closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._timeout_s))
        return self._session


async def _check_status(response: aiohttp.ClientResponse, url: str, sample: tuple[str, str, Any]) -> None:
    if response.status < 400:
        return
    body = (await response.text())[:_BODY_SHOWN]
    message = f"reward server {url} answered {response.status} {response.reason}: {body}"
    if response.status >= 500 or response.status in _BUSY_STATUSES:
        raise _Retryable(RewardServerError, message)
    raise RewardServerError(message, *sample)
