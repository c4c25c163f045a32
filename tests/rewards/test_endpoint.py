from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from openrlhf_ext.rewards.agent import GradedAgentExecutor, load_agent
from openrlhf_ext.rewards.grading import FailurePolicy, RewardFailureLimit
from openrlhf_ext.rollout.response import EngineDied, GroupRequest, Response, Sampling
from tests.models import CHAT_TEMPLATE
from tests.patience import PATIENCE_S
from tests.rewards.test_agent import Said
from tests.rewards.test_executor import byte_tokenizer

END = "<|im_end|>"
# like Qwen3's: what was thought in an earlier turn is gone, and the rest stripped
FORGETFUL = CHAT_TEMPLATE.replace(
    "message['content'] +", "message['content'].split('</think>')[-1].strip() +"
)
SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
    f"Face{END}\n"
)
ASSISTANT = "<|im_start|>assistant\n"


class Episode:
    """One episode of an agent whose file has this text, with a policy that says these texts."""

    def __init__(
        self,
        path: Path,
        file: str,
        *texts: str,
        engine: Any = None,
        template: str | None = CHAT_TEMPLATE,
        tolerated: int = 0,
        timeout_s: float = PATIENCE_S,
        max_len: int = 600,
        prompt: str = "17*23?",
    ) -> None:
        path = path / "agent.py"
        path.write_text(dedent(file))
        self.tokenizer = byte_tokenizer(END)
        self.tokenizer.chat_template = template
        self.engine = engine or Said(list(texts), tokenizer=self.tokenizer)
        agent = load_agent(path)
        executor = GradedAgentExecutor(
            agent, timeout_s, FailurePolicy(tolerated, failure_value=-1.0)
        )
        asked = GroupRequest(prompt, "391", 1, Sampling(1.0, 1.0, None, max_len))

        async def run() -> Response:
            try:
                (response,) = await executor.respond(asked, self.tokenizer, self.engine)
                return response
            finally:
                await agent.aclose()

        self.response = asyncio.run(run())
        self.failures = executor.take_failures()

    @property
    def parts(self) -> list[str]:
        """The texts of the sequence in turn: what was given, what the policy said, what was given,
        ..."""
        ends = [
            0,
            *(end for span in self.response.actions for end in span),
            len(self.response.tokens_S),
        ]
        pieces = zip(ends, ends[1:], strict=False)
        return [self.tokenizer.decode(self.response.tokens_S[a:b]) for a, b in pieces if a < b]


CLIENTS = {
    "an asynchronous client": """
        from openai import AsyncOpenAI
        async def run_agent(prompt, label, base_url):
            said = [{"role": "user", "content": prompt}]
            async with AsyncOpenAI(base_url=base_url, api_key="any") as client:
                for feedback in ("391", None):
                    answer = await client.chat.completions.create(model="any", messages=said)
                    said += [answer.choices[0].message, {"role": "user", "content": feedback}]
            return {"rewards": 2.0, "scores": 1.0, "extra_logs": {"turns": 2}}
        """,
    "a client that blocks, of a function": """
        from openai import OpenAI
        def run_agent(prompt, label, base_url):
            client = OpenAI(base_url=base_url, api_key="any", max_retries=0)
            said = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
            for feedback in ("391", None):
                answer = client.chat.completions.create(model="any", messages=said, n=1, temperature=1)
                said += [answer.choices[0].message.model_dump(), {"role": "user", "content": feedback}]
            return {"rewards": 2.0, "scores": 1.0, "extra_logs": {"turns": 2}}
        """,
    "another process": """
        import subprocess, sys, textwrap
        CALLS = textwrap.dedent('''
        import json, sys, urllib.request
        said = [{"role": "user", "content": sys.argv[1]}]
        for feedback in ("391", None):
            body = json.dumps({"messages": said}).encode()
            answer = json.load(urllib.request.urlopen(urllib.request.Request(sys.argv[2] + "/chat/completions", body)))
            said += [answer["choices"][0]["message"], {"role": "user", "content": feedback}]
        ''')
        async def run_agent(prompt, label, base_url):
            subprocess.run([sys.executable, "-c", CALLS, prompt, base_url], check=True)
            return {"rewards": 2.0, "scores": 1.0, "extra_logs": {"turns": 2}}
        """,
}


@pytest.mark.parametrize("client", CLIENTS)
def test_a_conversation_is_one_sequence_of_what_was_sampled_whoever_calls(
    tmp_path: Path, client: str
) -> None:
    episode = Episode(tmp_path, CLIENTS[client], "<calc>17*23</calc>", "It is 391")
    assert episode.parts == [
        f"{SYSTEM}<|im_start|>user\n17*23?{END}\n{ASSISTANT}",
        f"<calc>17*23</calc>{END}",
        f"\n<|im_start|>user\n391{END}\n{ASSISTANT}",
        f"It is 391{END}",
    ]
    response = episode.response
    assert (response.reward, response.score, response.truncated) == (2.0, 1.0, False)
    assert response.extra_logs == {"turns": 2.0, "untrained_tokens": 0.0, "reward_failed": 0.0}
    assert response.logprobs_T.tolist() == [-0.25] * response.sampled
    assert response.versions == tuple((3, *span) for span in response.actions)
    room = [600 - start for start, _ in response.actions]
    assert [params.max_tokens for params in episode.engine.params] == room


def test_a_template_that_rewrites_the_history_changes_no_sampled_token(tmp_path: Path) -> None:
    file = CLIENTS["an asynchronous client"].replace("answer.choices[0].message,", ASKED_STRIPPED)
    for text in (CLIENTS["an asynchronous client"], file):
        episode = Episode(tmp_path, text, "  <think>hard</think> <calc>", "391", template=FORGETFUL)
        _, first, between, second = episode.parts
        assert (first, second) == (f"  <think>hard</think> <calc>{END}", f"391{END}")
        assert (
            between == f"\n<|im_start|>user\n391{END}\n{ASSISTANT}"
            and episode.response.extra_logs["turns"] == 2
        )


WITH_TOOLS = """
import json
from openai import OpenAI
def run_agent(prompt, label, base_url):
    client = OpenAI(base_url=base_url, api_key="any", max_retries=0)
    tools = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}}}]
    said = [{"role": "user", "content": prompt}]
    ask = lambda **more: client.chat.completions.create(model="any", messages=said, **more).choices[0].message
    text = ask(tools=tools, tool_choice="auto").content
    call = {"id": "1", "type": "function", "function": {"name": "calc", "arguments": "{}"}}
    said += [{"role": "assistant", "content": text, "tool_calls": [call]}]
    said += [{"role": "tool", "tool_call_id": "1", "content": "391"}]
    ask(tools=tools)
    ask()  # without tools it is another conversation
    return 1.0
"""


def test_tools_go_through_a_chat_template_that_shows_them(tmp_path: Path) -> None:
    """What was sampled stays, although the template would write the call of the history in its own
    way."""
    shown = "{% if tools %}{{ tools[0].function.name }}! {% endif %}" + CHAT_TEMPLATE.replace(
        "message['content'] +", "message['content'] + (message.tool_calls | default('') | string) +"
    )
    episode = Episode(tmp_path, WITH_TOOLS, "<call>17*23</call>", "It is 391", "x", template=shown)
    assert episode.parts == [
        f"calc! {SYSTEM}<|im_start|>user\n17*23?{END}\n{ASSISTANT}",
        f"<call>17*23</call>{END}",
        f"\n<|im_start|>tool\n391{END}\n{ASSISTANT}",
        f"It is 391{END}",
    ]
    assert episode.response.extra_logs["untrained_tokens"] == 2, "x and its end"


ASKED_STRIPPED = '{"role": "assistant", "content": answer.choices[0].message.content.strip()},'


def test_the_agent_of_the_documentation_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/agents.md").read_text()
    (file,) = re.findall(
        r"^```python\n(.*?)^```",
        page.partition("## Files for OpenRLHF")[0],
        re.DOTALL | re.MULTILINE,
    )
    episode = Episode(tmp_path, file, "390", "It is 391")
    assert (
        episode.parts[1::2] == [f"390{END}", f"It is 391{END}"] and episode.response.reward == 1.0
    )


def test_the_example_computes_behind_every_equals_sign(tmp_path: Path) -> None:
    example = (Path(__file__).parents[2] / "examples/python/agent_openai.py").read_text()
    last = "</reasoning><answer>391</answer>"
    stops = Stops(["<reasoning>9*2=", ";18-7=", last], tokenizer=byte_tokenizer(END))
    episode = Episode(tmp_path, example, engine=stops, template=None)
    assert episode.parts == ["17*23?", "<reasoning>9*2=", "18", ";18-7=", "11", f"{last}{END}"]
    assert (episode.response.reward, episode.response.extra_logs["turns"]) == (1.0, 3.0)


class Stops(Said):
    """Stops at the text that was asked for where it says that, as vLLM does it."""

    async def generate(self, prompt_ids: Any, params: Any, multi_modal_data: Any = None) -> Any:
        stopped = next((stop for stop in params.stop if self.completions[0].endswith(stop)), None)
        output = await super().generate(prompt_ids, params)
        if stopped is not None:
            said = output.outputs[0]
            said.text, said.stop_reason = said.text.removesuffix(stopped), stopped
            said.token_ids, said.logprobs = said.token_ids[:-1], said.logprobs[:-1]
        return output


ASIDE = """
from openai import AsyncOpenAI
async def run_agent(prompt, label, base_url):
    async with AsyncOpenAI(base_url=base_url, api_key="any") as client:
        async def ask(*texts):
            roles = ("user", "assistant") * len(texts)
            said = [{"role": role, "content": text} for role, text in zip(roles, texts)]
            return (await client.chat.completions.create(model="any", messages=said)).choices[0].message.content
        one = await ask(prompt)
        await ask("Summarize: " + one)
        await ask(prompt, one, "again")
        await ask(prompt, one + " (edited)", "again")
        return 1
"""


def test_a_conversation_aside_is_answered_and_counted_but_not_trained(tmp_path: Path) -> None:
    episode = Episode(tmp_path, ASIDE, "one", "aside", "more", "edit")
    assert [part for part in episode.parts if part.endswith(END)] == [f"one{END}", f"more{END}"]
    assert episode.response.extra_logs["untrained_tokens"] == len("aside") + 1 + len("edit") + 1


TEXTS = """
import json, urllib.error, urllib.request
def post(base_url, path, **body):
    request = urllib.request.Request(f"{base_url}/{path}", json.dumps(body).encode())
    try:
        return json.load(urllib.request.urlopen(request))
    except urllib.error.HTTPError as error:
        return {"status": error.code, **json.load(error)}
"""


def test_texts_are_completed_and_a_full_sequence_is_an_answer_of_no_length(tmp_path: Path) -> None:
    file = (
        TEXTS
        + """
def run_agent(prompt, label, base_url):
    text, turns = prompt, []
    for _ in range(3):
        answer = post(base_url, "completions", prompt=text, max_tokens=5)
        turns.append(answer["choices"][0])
        text += turns[-1]["text"] + " so: "
    assert turns[-1]["text"] == "" and turns[-1]["finish_reason"] == "length", turns
    assert answer["usage"]["completion_tokens"] == 0
    return 1.0
"""
    )
    episode = Episode(tmp_path, file, "one", "two", max_len=20, template=None)
    assert (
        episode.parts == ["17*23?", f"one{END}", " so: ", f"two{END}"]
        and episode.response.truncated
    )
    long = Episode(tmp_path, TEXTS + CUT, "one", max_len=20, template=None, prompt="x" * 50)
    assert long.parts == ["x" * 15, f"one{END}"], "cut from the left, as other prompts"


CUT = """
def run_agent(prompt, label, base_url):
    return post(base_url, "completions", prompt=prompt, max_tokens=5)["usage"]["completion_tokens"]
"""


def test_a_call_that_cannot_be_answered_as_asked_is_refused_by_name(tmp_path: Path) -> None:
    file = (
        TEXTS
        + """
from pathlib import Path
def run_agent(prompt, label, base_url):
    user = [{"role": "user", "content": "a"}]
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    calls = [
        ("chat/completions", {"messages": user, **more}) for more in
        ({"temperature": 0.2}, {"n": 2}, {"tools": [{}]}, {"stream": True}, {"max_tokens": 0}, {"messages": image})
    ]
    calls += [("completions", {"prompt": ["a", "b"]}), ("responses", {})]
    answers = [post(base_url, path, **body) for path, body in calls]
    Path("answers.json").write_text(json.dumps([[one["status"], one["error"]["message"]] for one in answers]))
    (choice,) = post(base_url, "chat/completions", messages=user, logprobs=True)["choices"]
    return choice["logprobs"]["content"][0]["logprob"]
"""
    )
    file = file.replace('Path("', f'Path("{tmp_path}/')
    episode = Episode(tmp_path, file, "ok")
    assert episode.response.reward == -0.25
    answers = json.loads((tmp_path / "answers.json").read_text())
    assert [status for status, _ in answers] == [400] * 7 + [404]
    wanted = [
        "temperature must be the run's",
        "n is not supported",
        "not show tools",
        "stream is",
        "max_tokens must",
        "no images",
        "prompt must be one text",
        "responses is not served",
    ]
    assert all(want in message for want, (_, message) in zip(wanted, answers, strict=True)), answers


def test_a_call_after_the_end_of_its_episode_is_refused(tmp_path: Path) -> None:
    file = (
        TEXTS
        + """
import asyncio
late = []
async def run_agent(prompt, label, base_url):
    late.append(base_url)
    body = {"messages": [{"role": "user", "content": "a"}]}
    answer = await asyncio.to_thread(post, late[0], "chat/completions", **body)
    if len(late) > 1:
        assert answer["status"] == 410 and "has ended" in answer["error"]["message"], answer
        await asyncio.to_thread(post, base_url, "chat/completions", **body)
    return 1.0
"""
    )
    path = tmp_path / "agent.py"
    path.write_text(file)
    agent, tokenizer = load_agent(path), byte_tokenizer(END)
    tokenizer.chat_template = CHAT_TEMPLATE
    executor = GradedAgentExecutor(agent, PATIENCE_S, FailurePolicy(0))
    asked = GroupRequest("a", "", 1, Sampling(1.0, 1.0, None, 600))

    async def both() -> list[float]:
        engine = Said(["b", "c"], tokenizer=tokenizer)
        return [(await executor.respond(asked, tokenizer, engine))[0].reward for _ in range(2)]

    assert asyncio.run(both()) == [1.0, 1.0]


def test_an_engine_that_fails_ends_the_episode_even_if_the_agent_lives_with_it(
    tmp_path: Path,
) -> None:
    class Dead(Said):
        async def generate(self, *_: Any, **__: Any) -> Any:
            raise self.completions[0]

    file = (
        TEXTS
        + """
def run_agent(prompt, label, base_url):
    post(base_url, "completions", prompt=prompt)
    return 0.0
"""
    )
    for error in (EngineDied("the engine died"), ValueError("a prompt that it does not take")):
        with pytest.raises(type(error), match=str(error)):
            Episode(tmp_path, file, engine=Dead([error]), tolerated=5)


def test_failures_of_the_agent_are_those_of_rewards_and_generation_is_no_idleness(
    tmp_path: Path,
) -> None:
    def file(last: str) -> str:
        call = 'post(base_url, "completions", prompt=prompt)'
        return (
            f"{TEXTS}import time\ndef run_agent(prompt, label, base_url):\n    {call}\n    {last}\n"
        )

    tokenizer = byte_tokenizer(END)
    slow = Said(["long"], tokenizer=tokenizer, delay_s=3.2)
    raised = Episode(
        tmp_path, file("raise KeyError('no tool')"), engine=slow, timeout_s=3.0, tolerated=1
    )
    assert raised.parts == ["17*23?", f"long{END}"] and raised.response.reward == -1.0
    (message,) = raised.failures
    assert f'File "{tmp_path}/agent.py", line ' in message and "KeyError: 'no tool'" in message, (
        message
    )
    nothing = Episode(tmp_path, file("return {'reward': 1}"), "a", tolerated=1)
    assert (
        "RewardInvalid: the agent returned rewards = \"{'reward': 1}\" (dict)"
        in nothing.failures[0]
    )
    hangs = Episode(tmp_path, file("time.sleep(20)"), "a", timeout_s=2.0, tolerated=1)
    assert "did nothing with the engine for 2 s (--reward.timeout_s)" in hangs.failures[0]
    assert "agent.py" in hangs.failures[0].partition("it was here")[2], hangs.failures[0]
    with pytest.raises(RewardFailureLimit, match="run_agent made no call to its base_url"):
        Episode(tmp_path, "def run_agent(prompt, label, base_url):\n    return 1.0\n", tolerated=2)
