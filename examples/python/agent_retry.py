"""An agent that says what was wrong and lets the model try again (--train.agent_func_path).

The label is the answer, or ends in "#### answer" as GSM8K's. A right answer at the first try is
worth 1, at the second 0.5, at the third 0.25. What the environment says is in the completion, but
carries no loss: the model is trained on what it wrote itself.
"""

import re

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

TRIES = 3


class Retry(AgentInstanceBase):
    def __init__(self):
        self.tries = 0

    async def step(self, states):
        self.tries += 1
        numbers = re.findall(r"-?\d+(?:\.\d+)?", states["action_text"])
        correct = numbers[-1:] == [str(states["label"]).split("####")[-1].strip()]
        done = correct or self.tries == TRIES
        return {
            "rewards": 0.5 ** (self.tries - 1) if correct else 0.0,
            "scores": float(correct),
            "environment_feedback": "" if done else f"\n{self._why(numbers)} Try again.\n",
            "done": done,
            "extra_logs": {"tries": float(self.tries)},
        }

    def _why(self, numbers):
        return f"{numbers[-1]} is not right." if numbers else "There is no number in your answer."


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Retry)
