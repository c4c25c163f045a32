"""vLLM's engine on a thread of the rollout actor, and engines for completions outside of a run.

vLLM's AsyncLLM always spawns a second process, which imports everything once more: 8 to 10 seconds
of CPU at start, which buys nothing without CUDA and with one worker per engine. `InProcessEngine`
steps vLLM's synchronous `LLMEngine` and offers the part of AsyncLLM's interface that is used here;
its errors have a traceback in this process.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import traceback
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from vllm import AsyncEngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind

from openrlhf_ext.rollout.process import take_down_with_me
from openrlhf_ext.rollout.response import (
    EngineDied,
    EngineStartError,
    GenerationTimeout,
    count_tokens,
)

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class InProcessEngine:
    """One vLLM engine, touched by one thread only; all methods are to be called from one event
    loop."""

    _engine: LLMEngine

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._outputs: dict[str, Future[RequestOutput]] = {}
        self._is_built = False
        self._paused = False
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)

    @classmethod
    async def start(cls, engine_args: EngineArgs) -> InProcessEngine:
        self = cls()
        self._thread.start()

        def build() -> None:
            self._engine = LLMEngine.from_engine_args(engine_args)
            self._is_built = True

        await self._call(build)
        return self

    @property
    def output_processor(self) -> Any:
        return self._engine.output_processor

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the finished output, once. A request whose consumer goes away is aborted."""
        try:
            yield await (
                await self.add_request(
                    request_id, prompt, sampling_params, lora_request=lora_request
                )
            ).get()
        finally:
            if self._outputs.pop(request_id, None) is not None:
                self._commands.put(_Command(lambda: self._engine.abort_request([request_id])))

    async def add_request(
        self,
        request_id: str,
        prompt: Any,
        sampling_params: SamplingParams,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> PendingOutput:
        """Return when the request is in the engine's queue, in front of those of a larger
        ``priority``."""
        params = sampling_params.clone()
        params.output_kind = RequestOutputKind.FINAL_ONLY
        finished: Future[RequestOutput] = Future()
        finished.set_running_or_notify_cancel()
        self._outputs[request_id] = finished
        more: dict[str, Any] = {"priority": priority, "lora_request": lora_request}
        await self._call(lambda: self._engine.add_request(request_id, prompt, params, **more))
        return PendingOutput(finished)

    async def count_tokens(self) -> dict[str, int]:
        return await self._call(lambda: count_tokens(self._engine.output_processor))

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        return await self._call(lambda: self._engine.collective_rpc(method, timeout, args, kwargs))

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return await self._call(lambda: self._engine.reset_prefix_cache(reset_running_requests))

    async def pause_generation(self, *, mode: str = "keep", clear_cache: bool = True) -> None:
        """Stop stepping; requests stay where they are and new ones queue up."""
        if mode != "keep":
            raise ValueError(
                f"an in-process engine can be paused with mode='keep' only, got {mode!r}"
            )

        def pause() -> None:
            self._paused = True
            if clear_cache:
                self._engine.reset_prefix_cache(reset_running_requests=True)

        await self._call(pause)

    async def resume_generation(self) -> None:
        def resume() -> None:
            self._paused = False

        await self._call(resume)

    async def is_paused(self) -> bool:
        return self._paused or await self.is_sleeping()

    async def is_sleeping(self) -> bool:
        return await self._call(lambda: self._engine.is_sleeping())

    async def sleep(self, level: int = 1) -> None:
        await self._call(lambda: self._engine.sleep(level))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Undo `sleep`; as in vLLM, an engine that is wholly awake is not paused any more."""

        def wake() -> None:
            self._engine.wake_up(tags)
            self._paused = self._paused and self._engine.is_sleeping()

        await self._call(wake)

    def shutdown(self) -> None:
        self._commands.put(None)

    async def _call(self, function: Callable[[], _T]) -> _T:
        command = _Command(function)
        self._commands.put(command)
        return await asyncio.wrap_future(command.result)

    def _run(self) -> None:
        try:
            while self._serve_commands():
                if self._has_work():
                    self._deliver(self._engine.step())
        except Exception:
            self._refuse_all(
                EngineDied(f"the vLLM engine stopped working:\n{traceback.format_exc()}")
            )

    def _has_work(self) -> bool:
        return self._is_built and not self._paused and self._engine.has_unfinished_requests()

    def _serve_commands(self) -> bool:
        """Run what is queued; without work, wait for something. False: stop."""
        wait = not self._has_work()
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            command.run()
            wait = False

    def _deliver(self, outputs: Sequence[Any]) -> None:
        for output in outputs:
            finished = self._outputs.pop(output.request_id, None)
            if finished is not None:
                finished.set_result(output)

    def _refuse_all(self, reason: EngineDied) -> None:
        """Fail what is waiting, and everything that is still asked."""
        logger.error("%s", reason)
        for finished in list(self._outputs.values()):
            if not finished.done():
                finished.set_exception(reason)
        while (command := self._commands.get()) is not None:
            command.result.set_exception(reason)


class PendingOutput:
    def __init__(self, finished: Future[RequestOutput]) -> None:
        self._finished = finished

    async def get(self) -> RequestOutput:
        return await asyncio.wrap_future(self._finished)


class _Command:
    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.result: Future[Any] = Future()
        self.result.set_running_or_notify_cancel()

    def run(self) -> None:
        try:
            self.result.set_result(self._function())
        except Exception as error:
            self.result.set_exception(error)


async def start_engine(engine_args: AsyncEngineArgs, in_process: bool) -> Any:
    """An engine on a thread of this process, or in processes that end with this one; raises what
    vLLM raises."""
    if in_process:
        return await InProcessEngine.start(engine_args)
    from vllm import AsyncLLMEngine  # with what only its own process needs

    llm = AsyncLLMEngine.from_engine_args(engine_args)
    await llm.is_sleeping()
    take_down_with_me()
    return llm


class OfflineEngine:
    """Completes prompts with the weights of the disk. What is asked for together is queued before
    the engine steps, and nothing cached is left from before: what is batched with what, and so
    every rounding, depends on the request alone."""

    def __init__(self, llm: Any, stall_timeout_s: float) -> None:
        self._llm, self._stall_timeout_s, self._asked = llm, stall_timeout_s, 0

    @classmethod
    async def start(cls, engine_args: dict[str, Any], timeout_s: float) -> OfflineEngine:
        """Load the model with `launch.offline_engine_args`; `launch.engine_env` has to be in the
        environment before this module is imported. ``timeout_s`` also is the longest time in which
        no completion finishes. Raises EngineStartError."""
        in_process, model = engine_args.pop("in_process", False), engine_args["model"]
        try:
            llm = await asyncio.wait_for(
                start_engine(AsyncEngineArgs(**engine_args), in_process), timeout_s
            )
        except TimeoutError as error:
            raise EngineStartError(
                f"vLLM did not load {model} within {timeout_s:g} s (--engine_timeout_s)"
            ) from error
        except Exception as error:
            raise EngineStartError(
                f"vLLM did not start: {type(error).__name__}: {error}"
            ) from error
        return cls(llm, timeout_s)

    async def complete(
        self,
        prompts: Sequence[list[int]],
        seeds: Sequence[int],
        *,
        temperature: float,
        top_p: float,
        max_tokens: int,
        stop_token_ids: list[int],
    ) -> list[list[int]]:
        """Sampled token ids of one completion for each prompt, in order, the one that ended it
        included; seeds are below 2**63. Raises GenerationTimeout: nothing finished for
        ``stall_timeout_s``; EngineDied."""
        params = [
            SamplingParams(
                temperature=temperature,
                top_p=top_p,
                max_tokens=max_tokens,
                seed=seed,
                stop_token_ids=stop_token_ids,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for seed in seeds
        ]
        try:
            requests = await asyncio.wait_for(self._queue(prompts, params), self._stall_timeout_s)
        except TimeoutError as error:
            raise GenerationTimeout(
                f"vLLM did not take {len(prompts)} requests within {self._stall_timeout_s:g} s: "
                "the engine hangs"
            ) from error
        outputs = [asyncio.ensure_future(request.get()) for request in requests]
        for number, finished in enumerate(asyncio.as_completed(outputs)):
            try:
                await asyncio.wait_for(finished, self._stall_timeout_s)
            except TimeoutError as error:
                raise GenerationTimeout(
                    f"no completion finished for {self._stall_timeout_s:g} s, "
                    f"{len(outputs) - number} of {len(outputs)} are missing: the engine hangs, "
                    f"or --engine_timeout_s is too short for {max_tokens} tokens"
                ) from error
        return [list(output.result().outputs[0].token_ids) for output in outputs]

    async def _queue(self, prompts: Sequence[list[int]], params: Sequence[Any]) -> list[Any]:
        await self._llm.pause_generation(mode="keep", clear_cache=True)
        requests = []
        for prompt, each in zip(prompts, params, strict=True):
            self._asked += 1
            prompt_tokens = TokensPrompt(prompt_token_ids=prompt)
            requests.append(await self._llm.add_request(str(self._asked), prompt_tokens, each))
        await self._llm.resume_generation()
        return requests

    def close(self) -> None:
        self._llm.shutdown()
