"""Agent files written for earlier releases of OpenRLHF, each form by a small adapter of its own.

| form | releases | adapter |
|---|---|---|
| an environment whose ``__init__`` is a coroutine function | 0.8.7 to 0.10.0 | :func:`awaited_init` |
| the OpenAI server executor of OpenRLHF's examples | 0.9.7 to 0.11.2 | ``ServerExecutor`` |

An executor whose ``execute`` has no ``images`` (up to 0.9.10) needs none: it is given the arguments
that it names.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

from openrlhf_ext.rewards.endpoint import EndpointAgent, RunAgent
from openrlhf_ext.rewards.grading import InvalidAnswer


def awaited_init(instance_class: type) -> Callable[[Any], Any] | None:
    """Such an ``__init__``, to be awaited before ``reset``: Python itself refuses to make an object
    by it."""
    init = instance_class.__init__  # type: ignore[misc]  # of the class itself
    return init if inspect.iscoroutinefunction(init) else None


class ServerExecutor(EndpointAgent):
    """Runs the file's ``run_agent`` on an endpoint of ours in the place of its own server, which
    keeps the engine of the first episode and asks it from a thread and an event loop of its own."""

    def __init__(self, executor: Any) -> None:
        super().__init__(executor.run_agent)
        self._executor = executor

    def _of_episode(self, sampling_params: Any, max_length: int, tokenizer: Any) -> RunAgent:
        """Raises InvalidAnswer when called: ``run_agent`` returned no reward, as OpenRLHF's own
        does not."""
        from openai import AsyncOpenAI  # as the file itself does

        own = copy.copy(self._executor)
        own.sampling_params, own.max_length, own.hf_tokenizer = (
            sampling_params,
            max_length,
            tokenizer,
        )
        own.model_name = getattr(tokenizer, "name_or_path", "policy")

        async def run_agent(prompt: str, label: Any, base_url: str) -> dict[str, Any]:
            async with AsyncOpenAI(base_url=base_url, api_key="none", timeout=None) as own.client:
                answer = await own.run_agent(prompt, label, session_id="")
            if not isinstance(answer, dict) or answer.get("reward") is None:
                raise InvalidAnswer(
                    f"AgentExecutor.run_agent returned {answer!r:.80}, and must return "
                    "{'reward': number}, with 'scores' and 'extra_logs' if there are any: "
                    "OpenRLHF's own leaves the reward open"
                )
            return {
                "rewards": answer["reward"],
                **{key: answer.get(key) for key in ("scores", "extra_logs")},
            }

        return run_agent
