"""Agent files written for earlier releases of OpenRLHF, each form by a small adapter of its own.

| form | releases | adapter |
|---|---|---|
| an environment whose ``__init__`` is a coroutine function | 0.8.7 to 0.10.0 | :func:`awaited_init` |
| an executor made of five arguments, which fills a ``result_queue`` | 0.8.7 to 0.9.0 | ``QueueExecutor`` |
| the OpenAI server executor of OpenRLHF's examples | 0.9.7 to 0.11.2 | ``ServerExecutor`` |

An executor whose ``execute`` has no ``images`` (up to 0.9.10) needs none: it is given the arguments that it names.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import types
from collections.abc import Callable
from typing import Any

from openrlhf_ext.compat import AgentExecutorBase, MultiTurnAgentExecutor
from openrlhf_ext.rewards.endpoint import EndpointAgent, RunAgent
from openrlhf_ext.rewards.grading import InvalidAnswer

_MOST_STEPS = 10_000  # as OpenRLHF 0.9.0 had it: the length of an episode is bounded by data.max_len
_AT_A_TIME = 128  # the same


def adapted(executor_class: type[AgentExecutorBase], checked: Callable[[Any], Any]) -> AgentExecutorBase | None:
    """An executor in today's form, or None if the class has it. ``checked`` is applied to an environment's class."""
    parameters = inspect.signature(executor_class).parameters
    if {"llm_engine", "result_queue"} <= parameters.keys():
        return QueueExecutor(executor_class, checked)
    if hasattr(executor_class, "run_agent") and hasattr(executor_class, "_init_server"):
        return ServerExecutor(executor_class())
    return None


def awaited_init(instance_class: type) -> Callable[[Any], Any] | None:
    """Such an ``__init__``, to be awaited before ``reset``: Python itself refuses to make an object by it."""
    init = instance_class.__init__  # type: ignore[misc]  # of the class itself
    return init if inspect.iscoroutinefunction(init) else None


class QueueExecutor(AgentExecutorBase):
    """Makes the file's executor anew for each episode, whose engine and queue it then keeps."""

    def __init__(self, executor_class: type[AgentExecutorBase], checked: Callable[[Any], Any]) -> None:
        bases = (executor_class, _QueueBase)  # where the file calls super(), OpenRLHF 0.9.0's base class answers
        members = {"checked": staticmethod(checked)}
        self._class: Any = types.new_class(executor_class.__name__, bases, exec_body=lambda body: body.update(members))

    async def execute(
        self, prompt: str, label: Any, sampling_params: Any, max_length: int, hf_tokenizer: Any, llm_engine: Any
    ) -> Any:
        """Raises InvalidAnswer: nothing was put into the queue."""
        queue: asyncio.Queue[Any] = asyncio.Queue()
        executor: Any = self._class(
            max_steps=_MOST_STEPS, max_length=max_length, llm_engine=llm_engine, hf_tokenizer=hf_tokenizer,
            result_queue=queue,
        )  # fmt: skip
        await executor.execute(prompt, label, sampling_params)
        if queue.empty():
            raise InvalidAnswer("put no response into result_queue")
        return queue.get_nowait()


class _QueueBase(AgentExecutorBase):
    """``AgentExecutorBase`` of OpenRLHF 0.9.0, but that the environment is no Ray actor."""

    checked: Callable[[Any], Any]

    def __init__(
        self, agent_instance_cls: type, max_steps: int, max_length: int, llm_engine: Any, hf_tokenizer: Any,
        result_queue: asyncio.Queue[Any],
    ) -> None:  # fmt: skip
        self.agent_instance_cls = agent_instance_cls
        self.max_steps, self.max_length = max_steps, max_length
        self.llm_engine, self.hf_tokenizer, self.result_queue = llm_engine, hf_tokenizer, result_queue
        self.semaphore = asyncio.Semaphore(_AT_A_TIME)

    async def generate(self, prompt_ids: list[int], sampling_params: Any) -> Any:
        return await self.llm_engine.generate(prompt_ids, sampling_params)

    async def execute(self, prompt: str, label: Any, sampling_params: Any) -> None:  # type: ignore[override]
        turns = MultiTurnAgentExecutor(type(self).checked(self.agent_instance_cls))
        given = (prompt, label, sampling_params, self.max_length, self.hf_tokenizer, self.llm_engine)
        await self.result_queue.put(await turns.execute(*given))


class ServerExecutor(EndpointAgent):
    """Runs the file's ``run_agent`` on an endpoint of ours in the place of its own server, which keeps the engine of
    the first episode and asks it from a thread and an event loop of its own."""

    def __init__(self, executor: Any) -> None:
        super().__init__(executor.run_agent)
        self._executor = executor

    def _of_episode(self, sampling_params: Any, max_length: int, tokenizer: Any) -> RunAgent:
        """Raises InvalidAnswer when called: ``run_agent`` returned no reward, as OpenRLHF's own does not."""
        from openai import AsyncOpenAI  # as the file itself does

        own = copy.copy(self._executor)
        own.sampling_params, own.max_length, own.hf_tokenizer = sampling_params, max_length, tokenizer
        own.model_name = getattr(tokenizer, "name_or_path", "policy")

        async def run_agent(prompt: str, label: Any, base_url: str) -> dict[str, Any]:
            async with AsyncOpenAI(base_url=base_url, api_key="none", timeout=None) as own.client:
                answer = await own.run_agent(prompt, label, session_id="")
            if not isinstance(answer, dict) or answer.get("reward") is None:
                raise InvalidAnswer(
                    f"AgentExecutor.run_agent returned {answer!r:.80}, and must return {{'reward': number}}, with "
                    "'scores' and 'extra_logs' if there are any: OpenRLHF's own leaves the reward open"
                )
            return {"rewards": answer["reward"], **{key: answer.get(key) for key in ("scores", "extra_logs")}}

        return run_agent
