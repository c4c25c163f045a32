"""An OpenAI-compatible endpoint in front of a rollout engine: an agent of any framework that takes
an address trains without classes of ours.

The agent's file defines ``run_agent(prompt, label, base_url)``. Each episode has an address of its
own, so a call belongs to it whatever thread, event loop or process it comes from. The server runs
in the engine's event loop, which alone talks to the engine; agents run beside it, so that code of
theirs that blocks stops no engine.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any
from uuid import uuid4

from aiohttp import web

from openrlhf_ext.compat import AgentExecutorBase
from openrlhf_ext.rewards.conversation import UNTRAINED_KEY, BadRequest, Call, Episode
from openrlhf_ext.rewards.grading import InvalidAnswer
from openrlhf_ext.user_code import coroutine_place, thread_place

_HOST = "127.0.0.1"
_MODEL = "policy"
_LARGEST_REQUEST = 2**26  # bytes


RunAgent = Callable[[str, Any, str], Any]
"""``run_agent(prompt, label, base_url)``, a coroutine function or a plain one."""


class EndpointAgent(AgentExecutorBase):
    """``run_agent`` as an executor of OpenRLHF's."""

    def __init__(self, run_agent: RunAgent) -> None:
        self._run_agent = run_agent
        self._endpoint = _Endpoint()

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
    ) -> dict[str, Any]:
        """One episode, in the form of OpenRLHF's executors. Raises InvalidAnswer: the agent made no
        call; what the engine raised, even if the agent lives with it; and what the agent raises."""
        episode = Episode(hf_tokenizer, llm_engine, sampling_params, max_length)
        run_agent = self._of_episode(sampling_params, max_length, hf_tokenizer)
        answer = await self._endpoint.run(episode, run_agent, prompt, label)
        if episode.error is not None:
            raise episode.error
        try:
            response = episode.response()
        except LookupError:
            raise InvalidAnswer(
                "run_agent made no call to its base_url, so there is nothing to train on"
            ) from None
        return {**response, **_graded(answer, response["extra_logs"])}

    def _of_episode(self, sampling_params: Any, max_length: int, tokenizer: Any) -> RunAgent:
        """A subclass makes another one for each episode."""
        return self._run_agent

    def place(self, task: asyncio.Task[Any]) -> str:
        """Where in its file the agent is, whose :meth:`execute` that task runs."""
        return self._endpoint.places.get(task, lambda: "before run_agent")()

    async def aclose(self) -> None:
        """End the server; episodes have ended."""
        await self._endpoint.aclose()


class _Endpoint:
    """Serves the episodes under way on this machine's own address, each below a path that nobody
    can guess.

    Attributes:
        places: of the task of each episode, what says where its agent is.
    """

    def __init__(self) -> None:
        self.places: dict[asyncio.Task[Any] | None, Callable[[], str]] = {}
        self._episodes: dict[str, Episode] = {}
        self._starting = asyncio.Lock()
        self._server: web.AppRunner | None = None
        self._address = ""
        self._agents: asyncio.AbstractEventLoop | None = None

    async def run(self, episode: Episode, run_agent: RunAgent, prompt: str, label: Any) -> Any:
        """What the agent returns; raises what it raises."""
        async with self._starting:
            if self._server is None:
                self._server = await self._start()
        task, name = asyncio.current_task(), uuid4().hex
        self._episodes[name] = episode
        try:
            begin = self._coroutine if inspect.iscoroutinefunction(run_agent) else _thread
            running, self.places[task] = begin(
                partial(run_agent, prompt, label, f"{self._address}/{name}/v1")
            )
            return await asyncio.wrap_future(running)
        finally:
            del self._episodes[name]
            self.places.pop(task, None)

    async def aclose(self) -> None:
        if self._server is not None:
            await self._server.cleanup()
        if self._agents is not None:
            self._agents.call_soon_threadsafe(self._agents.stop)

    def _coroutine(self, call: Callable[[], Any]) -> tuple[Future[Any], Callable[[], str]]:
        """In the event loop of all agents that are coroutine functions: clients may be shared
        between episodes."""
        if self._agents is None:
            self._agents = asyncio.new_event_loop()
            threading.Thread(target=self._agents.run_forever, name="agents", daemon=True).start()
        coroutine = call()
        return asyncio.run_coroutine_threadsafe(coroutine, self._agents), partial(
            coroutine_place, coroutine
        )

    async def _start(self) -> web.AppRunner:
        for name in ("no_proxy", "NO_PROXY"):  # a cluster's proxy would be asked for this address
            os.environ[name] = ",".join(filter(None, [os.environ.get(name), _HOST]))
        app = web.Application(client_max_size=_LARGEST_REQUEST)
        app.add_routes(
            [
                web.post("/{episode}/v1/chat/completions", partial(self._respond, _chat_body)),
                web.post("/{episode}/v1/completions", partial(self._respond, _text_body)),
                web.get("/{episode}/v1/models", self._models),
                web.route("*", "/{rest:.*}", self._unknown),
            ]
        )
        server = web.AppRunner(app, access_log=None)
        await server.setup()
        site = web.TCPSite(server, _HOST, 0)
        await site.start()
        self._address = f"http://{_HOST}:{server.addresses[0][1]}"
        return server

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": _MODEL, "object": "model", "owned_by": ""}]}
        )

    async def _unknown(self, request: web.Request) -> web.Response:
        return _refusal(
            404,
            f"{request.method} {request.path} is not served: POST chat/completions or completions",
        )

    async def _respond(
        self, written: Callable[[Call, bool], dict[str, Any]], request: web.Request
    ) -> web.Response:
        episode = self._episodes.get(request.match_info["episode"])
        if episode is None:
            return _refusal(410, "this episode has ended, or there was none of this address")
        try:
            body = await request.json()
            call = await episode.answer(body, chat=written is _chat_body)
        except (BadRequest, json.JSONDecodeError) as error:
            return _refusal(400, str(error))
        # for the episode; the client gets an answer, and may make of it what it likes
        except Exception as error:
            episode.error = error
            return _refusal(500, f"{type(error).__name__}: {error}")
        return web.json_response(
            {
                "id": f"call-{uuid4().hex}",
                "created": int(time.time()),
                "model": body.get("model") or _MODEL,
                "usage": {
                    "prompt_tokens": len(call.prompt_S),
                    "completion_tokens": len(call.sampled_T),
                    "total_tokens": len(call.tokens_S),
                },
                **written(call, bool(body.get("logprobs"))),
            }
        )


def _thread(call: Callable[[], Any]) -> tuple[Future[Any], Callable[[], str]]:
    """In a thread of its own, which cannot be ended, and does not hold up the end of the
    process."""
    answer: Future[Any] = Future()
    answer.set_running_or_notify_cancel()

    def run() -> None:
        try:
            value = call()
            # of a decorated one
            answer.set_result(asyncio.run(value) if asyncio.iscoroutine(value) else value)
        except BaseException as error:  # raised again where the answer is awaited
            answer.set_exception(error)

    thread = threading.Thread(target=run, name="agent", daemon=True)
    thread.start()
    return answer, partial(thread_place, thread)


def _graded(answer: Any, logs: dict[str, float]) -> dict[str, Any]:
    """The agent's number, or a reward function's dictionary; what is wrong with them is found where
    all rewards are."""
    if not (isinstance(answer, dict) and "rewards" in answer):
        return {"reward": answer, "scores": None}
    own = answer.get("extra_logs") or {}
    if isinstance(own, dict):
        if UNTRAINED_KEY in own:
            raise InvalidAnswer(
                f"returned extra_logs with {UNTRAINED_KEY!r}, which is taken; rename it"
            )
        own = {**logs, **own}
    return {"reward": answer["rewards"], "scores": answer.get("scores"), "extra_logs": own}


def _chat_body(call: Call, with_logprobs: bool) -> dict[str, Any]:
    """Log-probs are those of the sampled tokens, which vLLM names so too; no others are known."""
    pairs = zip(call.sampled_T, call.logprobs_T, strict=True)
    logprobs: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in pairs
    ]
    message = {"role": "assistant", "content": call.text}
    return _choice(
        "chat.completion",
        call,
        message=message,
        logprobs={"content": logprobs} if with_logprobs else None,
    )


def _text_body(call: Call, _: bool) -> dict[str, Any]:
    return _choice("text_completion", call, text=call.text, logprobs=None)


def _choice(kind: str, call: Call, **what: Any) -> dict[str, Any]:
    reason = "length" if call.truncated else "stop"
    return {"object": kind, "choices": [{"index": 0, "finish_reason": reason, **what}]}


def _refusal(status: int, message: str) -> web.Response:
    """OpenAI's form of an error; its client is told not to try again, because that would change
    nothing."""
    error = {
        "message": message,
        "type": "invalid_request_error" if status < 500 else "server_error",
    }
    return web.json_response({"error": error}, status=status, headers={"x-should-retry": "false"})
