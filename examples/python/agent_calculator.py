"""An agent that lets the model use a calculator (--train.agent_func_path).

The model writes <calc>17 * 23</calc> and ends its turn; the environment answers
<result>391</result>, the model goes on. The last number of a turn without a calculation is the
answer, and is compared with the label, or with what follows "####" in it, as GSM8K's have it.
"""

import ast
import operator
import re

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

TURNS = 4
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(text):
    """The value of an expression of numbers and + - * /, or what is wrong with it; nothing else is
    evaluated."""

    def value(node):
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        return OPERATORS[type(node.op)](value(node.left), value(node.right))

    try:
        return f"{value(ast.parse(text.strip(), mode='eval').body):.12g}"
    except (SyntaxError, AttributeError, KeyError, ArithmeticError, ValueError):
        return "cannot be calculated"


class Calculator(AgentInstanceBase):
    def __init__(self):
        self.turns = 0

    async def step(self, states):
        self.turns += 1
        asked = re.findall(r"<calc>(.*?)</calc>", states["action_text"], re.DOTALL)
        if asked and self.turns < TURNS:
            feedback = f"\n<result>{calculate(asked[-1][:200])}</result>\n"
            return {"rewards": 0.0, "environment_feedback": feedback, "done": False}
        numbers = re.findall(r"-?\d+(?:\.\d+)?", states["action_text"])
        correct = float(numbers[-1:] == [str(states["label"]).split("####")[-1].strip()])
        logs = {"turns": float(self.turns)}
        return {
            "rewards": correct,
            "scores": correct,
            "environment_feedback": "",
            "done": True,
            "extra_logs": logs,
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Calculator)
