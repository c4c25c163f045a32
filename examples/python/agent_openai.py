"""An agent that knows nothing of OpenRLHF: it calls the policy at an address, by the openai
package, and computes its sums (--train.agent_func_path).

The model writes its solution as the toy task has it,
"<reasoning>3+4=7;7*2=14</reasoning><answer>14</answer>". Behind every "=" it is stopped, the
calculator writes the value, and the model goes on: it has to know what to compute, and not how much
that is. What the calculator wrote is context, what the model wrote is trained.

Any other package that takes a base URL does as well, also from threads and processes of its own.
"""

import re

from openai import AsyncOpenAI

TURNS = 8
# making one takes 30 ms
CLIENT = AsyncOpenAI(base_url="http://of-the-episode", api_key="none", timeout=None)
SUM = re.compile(r"(\d+)([-+*])(\d+)\Z")


def calculate(text):
    """The value of the sum that the text ends in, or nothing."""
    if (found := SUM.search(text)) is None:
        return ""
    a, operator, b = int(found[1]), found[2], int(found[3])
    return str({"+": a + b, "-": a - b, "*": a * b}[operator])


async def run_agent(prompt, label, base_url):
    policy = CLIENT.with_options(base_url=base_url)
    text, turns = prompt, 0
    while turns < TURNS:
        answer = (await policy.completions.create(model="policy", prompt=text, stop="=")).choices[0]
        text, turns = text + answer.text, turns + 1
        value = calculate(text[len(prompt) :])
        if answer.finish_reason == "length" or not value:
            break
        text += f"={value}"
    said = re.search(r"</reasoning><answer>(-?\d+)</answer>\Z", text)
    correct = float(said is not None and said[1] == str(label).split("####")[-1].strip())
    return {"rewards": correct, "scores": correct, "extra_logs": {"turns": turns}}
