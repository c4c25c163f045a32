"""Agent files in the forms of earlier releases, in words of our own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from openrlhf_ext.rewards.agent import GradedAgentExecutor, load_agent
from openrlhf_ext.rewards.grading import FailurePolicy, RewardImportError
from openrlhf_ext.rollout.response import GroupRequest, Sampling
from tests.patience import PATIENCE_S
from tests.rewards.test_agent import Said, episode
from tests.rewards.test_endpoint import END, Episode
from tests.rewards.test_executor import byte_tokenizer

COUNTS = """
import torch
from openrlhf.utils.agent import {base}, AgentInstanceBase

class Twice(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.turns = 0

    async def step(self, states, **kwargs):
        self.turns += 1
        done = self.turns == 2
        return {{
            "rewards": torch.tensor([float(self.turns)]), "scores": torch.tensor(1.0), "done": done,
            "environment_feedback": "" if done else " so ", "extra_logs": {{"turns": torch.tensor(self.turns)}},
            "sampling_params": states.get("sampling_params"),
        }}
"""
OF_0_9_4 = """
class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Twice)
"""
OF_0_8_10 = """
class AgentExecutor(AgentExecutorBase):
    def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):
        super().__init__(Twice, max_steps, max_length, llm_engine, hf_tokenizer, result_queue)

    async def execute(self, prompt, label, sampling_params):
        return await super().execute(prompt, label, sampling_params)
"""


def test_an_environment_with_an_awaited_init_runs(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text(COUNTS.format(base="AgentExecutorBase") + OF_0_8_10)
    with pytest.raises(
        ValueError, match="with a result_queue is of OpenRLHF 0.8.7 to 0.9.0, and is not run"
    ):
        load_agent(path)
    path.write_text(COUNTS.format(base="MultiTurnAgentExecutor") + OF_0_9_4)
    for _ in range(2):
        response, (own, environment), _ = episode(path, "", "one", "two")
        assert (own, environment) == ("one<end>two<end>", " so ")
        assert (response.reward, response.score, response.extra_logs["turns"]) == (3.0, 1.0, 2.0)
        assert response.versions == tuple((3, *span) for span in response.actions)


OWN_SERVER = """
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    def _init_server(self, llm_engine, hf_tokenizer):
        raise AssertionError("no server of its own is needed")

    async def run_agent(self, prompt, label, session_id):
        answer = await self.client.chat.completions.create(
            model=self.model_name, messages=[{"role": "user", "content": prompt}], logprobs=True, top_logprobs=1,
            max_tokens=self.sampling_params.max_tokens, temperature=self.sampling_params.temperature,
            extra_body={"session_id": session_id},
        )
        return RESULT

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        raise AssertionError("nor this")
"""


def test_the_openai_server_executor_runs_on_the_endpoint(tmp_path: Path) -> None:
    answer = '{"reward": len(answer.choices[0].message.content), "scores": 1}'
    ran = Episode(tmp_path, OWN_SERVER.replace("RESULT", answer), "four")
    assert (ran.response.reward, ran.response.score, ran.parts[-1]) == (4.0, 1.0, f"four{END}")
    open_reward = Episode(tmp_path, OWN_SERVER.replace("RESULT", "{}"), "four", tolerated=1)
    assert "run_agent returned {}, and must return {'reward': number}" in open_reward.failures[0]


KEEPS = """
import asyncio, threading
from copy import deepcopy
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    engine = None

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        tokens = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        ENGINE
        end = len(tokens) + len(answer.token_ids)
        return {"observation_tokens": tokens + answer.token_ids, "action_ranges": [(len(tokens), end)],
                "rollout_log_probs": None, "reward": 1.0}
"""


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        (
            """await asyncio.to_thread(asyncio.run, llm_engine.generate(tokens, sampling_params))""",
            "called generate from another thread or event loop than that of execute; .* define "
            "run_agent",
        ),
        (
            """self.engine = self.engine or llm_engine
        for _ in range(2):
            answer = (await self.engine.generate(tokens, deepcopy(sampling_params))).outputs[0]""",
            "called generate on the llm_engine of an episode that has ended; .* define run_agent",
        ),
    ],
)
def test_calls_that_belong_to_no_episode_end_the_run(
    tmp_path: Path, engine: str, says: str
) -> None:
    path = tmp_path / "agent.py"
    path.write_text(KEEPS.replace("ENGINE", engine))
    with pytest.raises(RewardImportError, match=says):
        run_twice(path)


def run_twice(path: Path) -> None:
    """Two episodes of the same executor, one after the other."""
    tokenizer = byte_tokenizer(END)
    executor = GradedAgentExecutor(load_agent(path), PATIENCE_S, FailurePolicy(5))
    engine = Said(["b", "c", "d"], tokenizer=tokenizer)

    async def both() -> None:
        for _ in range(2):
            await executor.respond(
                GroupRequest("a", "", 1, Sampling(1.0, 1.0, None, 60)), tokenizer, engine
            )

    asyncio.run(both())


def test_images_are_refused_not_dropped(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    shows = COUNTS.replace('"done": done,', '"done": done, "environment_images": [object()],')
    path.write_text(shows.format(base="MultiTurnAgentExecutor") + OF_0_9_4)
    with pytest.raises(
        RewardImportError,
        match="the agent returned environment_images, and images are not supported",
    ):
        run_twice(path)
