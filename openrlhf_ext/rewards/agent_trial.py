"""An agent tried on one prompt with a made engine, which says the same at every turn."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from openrlhf_ext.compat import AgentExecutorBase
from openrlhf_ext.rewards.agent import GradedAgentExecutor
from openrlhf_ext.rewards.errors import FailurePolicy, RewardError
from openrlhf_ext.rollout.response import GroupRequest, Sampling

_ROOM = 256  # tokens of the episode after the prompt


def try_agent(agent: AgentExecutorBase, model: str, prompt: str, label: Any, completion: str, timeout_s: float) -> str:
    """One episode; says what came out of it.

    Args:
        completion: what the model says at every turn.

    Raises:
        RewardError: the episode ended without a reward that can be taken.
        RewardFailureLimit: the agent failed before it had generated anything.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    length = len(tokenizer(prompt, add_special_tokens=False)["input_ids"]) + _ROOM
    request = GroupRequest(prompt, label, 1, Sampling(1.0, 1.0, _ROOM // 2, length))
    executor = GradedAgentExecutor(agent, timeout_s, _NoFailure(0))
    (response,) = asyncio.run(executor.respond(request, tokenizer, _MadeEngine(tokenizer, completion)))
    return (
        f"{completion!r} made as the answer to the first prompt, at each turn: turns {len(response.actions)}, reward "
        f"{response.reward:g}, score {response.score:g}, {int((~response.sampled_T).sum())} tokens of the environment"
    )


class _NoFailure(FailurePolicy):
    """The first failure is the answer."""

    def tolerate(self, error: RewardError) -> None:
        raise error


class _MadeEngine:
    """What executors know of an engine."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        self._text = text
        self._ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    def sampling_params(self, sampling: Sampling, **arguments: Any) -> SimpleNamespace:
        return SimpleNamespace(temperature=sampling.temperature, top_p=sampling.top_p, seed=None, **arguments)

    async def generate(self, prompt_token_ids: list[int], sampling_params: Any, **_: Any) -> SimpleNamespace:
        ids = self._ids[: sampling_params.max_tokens]
        completion = SimpleNamespace(
            token_ids=ids, text=self._text, finish_reason="stop" if len(ids) == len(self._ids) else "length",
            stop_reason=None, logprobs=[{token: SimpleNamespace(logprob=-1.0)} for token in ids],
            weight_versions=[(0, 0, len(ids))],
        )  # fmt: skip
        return SimpleNamespace(prompt_token_ids=prompt_token_ids, outputs=[completion])
