from __future__ import annotations

import asyncio
import pickle
import re
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from openrlhf_ext.compat import AgentExecutorBase
from openrlhf_ext.rewards.agent import GradedAgentExecutor, agent_executor, load_agent, try_agent
from openrlhf_ext.rewards.grading import FailurePolicy, RewardFailureLimit, RewardImportError
from openrlhf_ext.rollout.response import GroupRequest, Sampling
from tests.patience import PATIENCE_S
from tests.rewards.test_executor import CharTokenizer, FakeEngine, byte_tokenizer, request

AGENT_FILE = """
from openrlhf_ext.compat import AgentExecutorBase
class AgentExecutor(AgentExecutorBase):
    async def execute(self, *_, **__): ...
"""

DECORATED_AGENT = """
from functools import partial, wraps
from openrlhf_ext.compat import AgentExecutorBase
def logged(function):
    return wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))
class AgentExecutor(AgentExecutorBase):
    @logged
    async def execute(self, *_, **__): ...
"""


class TwoTurns(AgentExecutorBase):
    """Generates twice, with an ``=`` from the environment between; the label says what goes wrong
    before or after."""

    started = 0

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> Any:
        self.started += 1
        if label == "raise at once" or (label == "raise once" and self.started == 1):
            raise KeyError("no environment")
        tokens = [ord(letter) for letter in prompt]
        ranges, logprobs = [], [0.0] * len(tokens)
        for turn in range(2):
            output = await llm_engine.generate(tokens, deepcopy(sampling_params))
            action = output.outputs[0].token_ids
            ranges.append((len(tokens), len(tokens) + len(action)))
            logprobs += [-0.25] * len(action)
            tokens = tokens + action
            if turn == 0:
                if label == "raise":
                    raise ZeroDivisionError("the environment broke")
                if label == "hang":
                    await asyncio.sleep(3600)
                tokens, logprobs = [*tokens, ord("=")], [*logprobs, 0.0]
        reward = {"none": None, "nan": float("nan"), "text": "good"}.get(label, 1.5)
        answer = {
            "observation_tokens": tokens,
            "action_ranges": ranges,
            "rollout_log_probs": logprobs,
            "reward": reward,
            "scores": 1.0,
            "truncated": False,
            "extra_logs": {"turns": 2},
        }
        return {
            key: value
            for key, value in answer.items()
            if (label, key) != ("incomplete", "action_ranges")
        }


def run(
    *labels: str, tolerated: int = 10, timeout_s: float = PATIENCE_S, engine: Any = None
) -> tuple[GradedAgentExecutor, list]:
    executor = GradedAgentExecutor(
        TwoTurns(), timeout_s, FailurePolicy(tolerated, failure_value=-1.0)
    )
    engine = engine or FakeEngine(["ab", "cd$"] * len(labels))

    async def everything() -> list:
        asked = [request(prompt="2+", label=label) for label in labels]
        return [(await executor.respond(each, CharTokenizer(), engine))[0] for each in asked]

    return executor, asyncio.run(everything())


def test_a_response_leaves_as_the_agent_made_it() -> None:
    executor, (response,) = run("good")
    assert (response.reward, response.score) == (1.5, 1.0)
    assert response.extra_logs == {"turns": 2.0, "reward_failed": 0.0}
    assert response.actions == ((2, 4), (5, 8)) and (response.sampled, response.span) == (5, 6)
    assert (
        response.versions == ((3, 2, 4), (3, 5, 8)) and response.logprobs_T.tolist() == [-0.25] * 5
    )
    assert executor.take_failures() == []


def test_what_exceeds_the_longest_sequence_is_cut() -> None:
    executor = GradedAgentExecutor(TwoTurns(), PATIENCE_S, FailurePolicy(0))
    asked = GroupRequest("2+", "good", 1, Sampling(1.0, 1.0, 4, max_len=6))
    (cut,) = asyncio.run(executor.respond(asked, CharTokenizer(), FakeEngine(["ab", "cd$"])))
    assert cut.tokens_S.tolist() == [ord(c) for c in "2+ab=c"] and cut.actions == ((2, 4), (5, 6))
    assert len(cut.logprobs_T) == cut.sampled == 3 and cut.versions == ((3, 2, 4), (3, 5, 6))


@pytest.mark.parametrize("label", ["none", "nan", "text"])
def test_a_response_without_a_finite_reward_gets_the_value_of_a_failure(label: str) -> None:
    executor, (_, response) = run("good", label)
    assert (response.reward, response.score) == (-1.0, 0.0)
    assert response.extra_logs == {"reward_failed": 1.0}
    assert response.actions == ((2, 4), (5, 8)), "the response itself is whole"
    (message,) = executor.take_failures()
    assert "RewardInvalid: the agent returned rewards" in message and "prompt: '2+'" in message, (
        message
    )


@pytest.mark.parametrize(
    ("label", "says"),
    [
        (
            "raise",
            r"RewardRaised: the agent raised:(.|\n)*ZeroDivisionError: the environment broke",
        ),
        ("incomplete", r"RewardInvalid: the agent returned dict without \['action_ranges'\]"),
    ],
)
def test_an_agent_that_gives_no_response_leaves_its_last_turn(label: str, says: str) -> None:
    executor, (_, response) = run("good", label)
    (message,) = executor.take_failures()
    assert re.search(says, message) and "prompt: '2+'" in message, message
    assert response.reward == -1.0 and response.extra_logs["reward_failed"] == 1.0
    text = "".join(map(chr, response.tokens_S))
    start, end = response.actions[0]
    assert (text, text[start:end]) == {"raise": ("2+ab", "ab"), "incomplete": ("2+ab=cd$", "cd$")}[
        label
    ]
    assert response.logprobs_T.tolist() == [-0.25] * (end - start)
    assert repr(text[start:end]) in message, "the completion"


def test_an_agent_that_hangs_passes_its_deadline_and_generation_does_not_count() -> None:
    slow = FakeEngine(["ab", "cd$"] * 2, delay_s=1.1)
    executor, (good, hung) = run("good", "hang", timeout_s=1.0, engine=slow)
    assert good.reward == 1.5 and hung.reward == -1.0
    (message,) = executor.take_failures()
    assert (
        "for 1 s (--reward.timeout_s); it was here: " in message and "test_agent.py" in message
    ), message


def test_one_failure_too_many_ends_the_run() -> None:
    with pytest.raises(
        RewardFailureLimit, match=r"2 samples could not be graded(.|\n)*--reward.max_failures"
    ):
        run("none", "none", tolerated=1)


def test_an_agent_that_fails_before_it_generates_is_tried_again_and_leaves_nothing_to_train_on() -> (
    None
):
    executor, (good, empty) = run("good", "raise at once", tolerated=3)
    messages = executor.take_failures()
    assert len(messages) == 3 and all(
        "before the policy had written anything" in m for m in messages
    ), "each counts"
    assert "no environment" in messages[0] and "prompt: '2+'" in messages[0]
    assert good.reward == 1.5 and (empty.sampled, empty.reward, empty.score) == (0, -1.0, 0.0)
    assert (
        empty.extra_logs == {"reward_failed": 1.0} and bytes(empty.tokens_S.astype("u1")) == b"2+"
    )
    with pytest.raises(
        RewardFailureLimit, match=r"3 samples could not be graded(.|\n)*no environment(.|\n)*'2\+'"
    ):
        run("raise at once", tolerated=2)


def test_an_agent_that_fails_before_it_generates_may_work_the_next_time() -> None:
    executor, (response,) = run("raise once", tolerated=1)
    assert response.reward == 1.5 and response.extra_logs["reward_failed"] == 0.0
    assert len(executor.take_failures()) == 1


def test_a_failing_engine_is_no_failure_of_the_agent() -> None:
    class Dead(FakeEngine):
        async def generate(self, *_: Any, **__: Any) -> Any:
            raise ConnectionError("the engine died")

    with pytest.raises(ConnectionError, match="the engine died"):
        run("good", engine=Dead([]))


def test_an_agent_file_must_define_an_executor(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text("class AgentExecutor: pass\n")
    with pytest.raises(ValueError, match="must define a class AgentExecutor"):
        load_agent(path)
    path.write_text(AGENT_FILE)
    factory = pickle.loads(pickle.dumps(partial(agent_executor, str(path), 1.0, 0, 0.0)))
    assert isinstance(factory(), GradedAgentExecutor)


# ---- agents of docs/agents.md, and what may be written instead

EXAMPLES = Path(__file__).parents[2] / "examples/python"


class Said(FakeEngine):
    """Says one text after the other, as the multi-turn executor asks for it, and ends each."""

    async def generate(self, prompt_ids: Any, params: Any, multi_modal_data: Any = None) -> Any:
        text = self.completions[0]
        self.completions[0] += self.tokenizer.eos_token
        output = await super().generate(prompt_ids, params)
        output.outputs[0].text = text
        return output


def episode(
    path: Path, label: Any, *texts: str, tolerated: int = 0
) -> tuple[Any, list[str], list[str]]:
    """The response; what the policy and what the environment wrote; messages of failures."""
    tokenizer = byte_tokenizer("<end>")
    executor = GradedAgentExecutor(load_agent(path), PATIENCE_S, FailurePolicy(tolerated))
    asked = GroupRequest("17*23=", label, 1, Sampling(1.0, 1.0, 400, max_len=400))
    (response,) = asyncio.run(
        executor.respond(asked, tokenizer, Said(list(texts), tokenizer=tokenizer))
    )
    own = response.sampled_T
    written = response.tokens_S[-len(own) :]
    turns = [tokenizer.decode(written[own == flag]) for flag in (True, False)]
    return response, turns, executor.take_failures()


def test_a_calculator_answers_between_turns() -> None:
    agent = EXAMPLES / "agent_calculator.py"
    response, (own, environment), _ = episode(
        agent, "391", "<calc>17 * 23</calc>", "<calc>2 **</calc>", "It is 391"
    )
    assert own == "<calc>17 * 23</calc><end><calc>2 **</calc><end>It is 391<end>"
    assert environment == "\n<result>391</result>\n\n<result>cannot be calculated</result>\n"
    assert (response.reward, response.score, response.extra_logs["turns"]) == (1.0, 1.0, 3.0)
    wrong, _, _ = episode(agent, "391", *["<calc>__import__('os')</calc>"] * 4)
    assert (wrong.reward, len(wrong.actions)) == (0.0, 4), "nothing is run, and there is an end"


def test_a_wrong_answer_may_be_tried_again() -> None:
    response, (_, environment), _ = episode(
        EXAMPLES / "agent_retry.py", 391, "don't know", "390", "391"
    )
    assert (
        environment
        == "\nThere is no number in your answer. Try again.\n\n390 is not right. Try again.\n"
    )
    assert (response.reward, response.score, response.extra_logs["tries"]) == (0.25, 1.0, 3.0)
    assert response.logprobs_T.tolist() == [-0.25] * response.sampled, (
        "of the policy's tokens alone"
    )


STEP = """
import numpy, torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
class Once(AgentInstanceBase):
    def __init__(self): ...
    async def step(self, states):
        return {answer}
class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Once)
"""


@pytest.mark.parametrize(
    "number", ["1", "1.0", "True", "numpy.float32(1)", "torch.tensor(1.0)", "torch.tensor([1.0])"]
)
def test_a_reward_is_any_number(tmp_path: Path, number: str) -> None:
    path = tmp_path / "agent.py"
    answer = (
        f"{{'rewards': {number}, 'scores': {number}, 'environment_feedback': '', 'done': True}}"
    )
    path.write_text(STEP.format(answer=answer))
    response, _, _ = episode(path, "", "x")
    assert (response.reward, response.score) == (1.0, 1.0)


def test_an_agents_file_may_have_a_dataclass_and_annotations_of_later(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    head = (
        "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass "
        "Kept: turns: int\n"
    )
    answer = "{'rewards': Kept(1).turns, 'scores': 1, 'environment_feedback': '', 'done': True}"
    path.write_text(head + STEP.format(answer=answer))
    assert episode(path, "", "x")[0].reward == 1


def test_what_is_wrong_with_a_step_is_said_by_name(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    for answer, says in (
        ("{'rewards': 1.0, 'environment_feedback': ''}", ".step returned dict without ['done']"),
        (
            "{'rewards': 'good', 'environment_feedback': '', 'done': True}",
            ".step returned rewards = 'good'",
        ),
        (
            "{'rewards': 1, 'environment_feedback': None, 'done': True}",
            "environment_feedback = None, which must be",
        ),
        (
            "{'rewards': 1, 'environment_feedback': '', 'done': 'False'}",
            "done = 'False', which must be True or False",
        ),
        ("states['labels']", f"""File "{path}", line 7, in step\n    return states['labels']"""),
    ):
        path.write_text(STEP.format(answer=answer))
        _, _, (message,) = episode(path, "", "x", tolerated=1)
        assert says in message and "openrlhf/utils/agent.py" not in message, message


@pytest.mark.parametrize(
    ("was", "now", "says"),
    [
        ("    def __init__(self): ...\n", "", "Once must define __init__"),
        (
            "(self): ...",
            "(self, label): ...",
            "Once is made anew for each episode, without arguments: ",
        ),
        (
            "super().__init__(Once)",
            "pass",
            "AgentExecutor.__init__ must call super().__init__ with the environment's",
        ),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused_with_its_file(
    tmp_path, was, now, says
) -> None:
    path = tmp_path / "agent.py"
    path.write_text(STEP.replace(was, now))
    with pytest.raises(ValueError, match=re.escape(f"{path}: {says}")):
        load_agent(path)


def test_a_step_may_be_a_function_that_returns_what_is_awaited_and_nothing_else(
    tmp_path: Path,
) -> None:
    path = tmp_path / "agent.py"
    answer = "{'rewards': 1.0, 'environment_feedback': '', 'done': True}"
    path.write_text(STEP.format(answer=answer).replace("async def step", "def step"))
    _, _, (message,) = episode(path, "", "x", tolerated=1)
    assert f"{path}: Once.step is not async, it returned dict: write async def" in message
    helper = f"    async def answer(self):\n        return {answer}\nclass AgentExecutor"
    step = STEP.format(answer="self.answer()").replace("async def step", "def step")
    path.write_text(step.replace("class AgentExecutor", helper))
    response, _, _ = episode(path, "", "x")
    assert response.reward == 1.0


def test_a_reset_without_an_observation_is_named(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text(
        STEP.replace(
            "    async def step", "    async def reset(self, states): ...\n    async def step"
        )
    )
    with pytest.raises(
        RewardFailureLimit, match=r"Once.reset must return states with the text 'observation'"
    ):
        episode(path, "", "x", tolerated=1)


def test_an_agent_that_cannot_be_called_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text(AGENT_FILE.replace("*_, **__", "prompt, label"))
    with pytest.raises(
        ValueError, match=r"agent.py, line 4: AgentExecutor.execute must be async and take prompt"
    ):
        load_agent(path)
    path.write_text(AGENT_FILE.replace("async ", ""))
    with pytest.raises(ValueError, match="it is not async"):
        load_agent(path)
    path.write_text(DECORATED_AGENT)
    assert load_agent(path)
    path.write_text(DECORATED_AGENT.replace("*_, **__", "prompt, label"))
    with pytest.raises(
        ValueError, match=r"agent.py, line 7: AgentExecutor.execute must be async and take prompt"
    ):
        load_agent(path)


ENVIRONMENT = """
from types import SimpleNamespace
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
class Environment(AgentInstanceBase):
    def __init__(self): self.turn = 0
    async def step(self, states):
        self.turn += 1
        params = states["sampling_params"]
        {change}
        done = self.turn == {turns}
        return {{"rewards": 1.0, "environment_feedback": {words}, "done": done, "sampling_params": params}}
class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self): super().__init__(Environment)
"""


def with_room(path: Path, max_len: int, *texts: str) -> Any:
    """The response of an agent with so many tokens; the prompt is one, and each text one token more
    than letters."""
    tokenizer = byte_tokenizer("<end>")
    executor = GradedAgentExecutor(load_agent(path), PATIENCE_S, FailurePolicy(0))
    asked = GroupRequest("?", "", 1, Sampling(1.0, 1.0, None, max_len))
    return asyncio.run(executor.respond(asked, tokenizer, Said(list(texts), tokenizer=tokenizer)))[
        0
    ]


@pytest.mark.parametrize(
    ("words", "turns", "max_len", "truncated"),
    [
        # the end of the last words is cut: the episode was done
        ("'=='", 2, 9, False),
        ("'=='", 2, 10, False),
        ("'=='", 9, 9, True),
        ("'=='", 9, 8, True),
        ("''", 9, 7, True),
        ("''", 2, 7, False),
        ("'=='", 2, 7, True),  # the policy's own words are
    ],
)
def test_an_episode_that_did_not_end_by_itself_is_truncated(
    tmp_path, words, turns, max_len, truncated
) -> None:
    """? ab<end> == cd<end> ==: OpenRLHF's executor has no flag where no token is left for a
    turn."""
    path = tmp_path / "agent.py"
    path.write_text(ENVIRONMENT.format(change="", words=words, turns=turns))
    response = with_room(path, max_len, "ab", "cd", "ef", "gh")
    assert (response.truncated, len(response.tokens_S) <= max_len) == (truncated, True)


def test_an_executor_of_ones_own_that_does_not_say_so_is_truncated_where_its_last_turn_is() -> None:
    class Silent(TwoTurns):
        async def execute(self, *arguments: Any, **named: Any) -> Any:
            answer = await super().execute(*arguments, **named)
            return {key: value for key, value in answer.items() if key != "truncated"}

    for last, truncated in (("cd$", False), ("cd", True)):
        executor = GradedAgentExecutor(Silent(), PATIENCE_S, FailurePolicy(0))
        engine = FakeEngine(["ab", last])
        (response,) = asyncio.run(
            executor.respond(request(prompt="2+", label="good"), CharTokenizer(), engine)
        )
        assert response.truncated is truncated


@pytest.mark.parametrize(
    "change",
    [
        "params.temperature = 0.3",
        "params.top_p = 0.9",
        "params.top_k = 20",
        "params.min_p = 0.1",
        "params.presence_penalty = 0.5",
        "params.frequency_penalty = -0.5",
        "params.repetition_penalty = 1.2",
        "params.min_tokens = 4",
        "params.bad_words = ['x']",
        "params.logit_bias = {5: 1.0}",
        "params.allowed_token_ids = [5]",
        "params.structured_outputs = SimpleNamespace(json='{}')",
        "params = SimpleNamespace(temperature=0, stop=None, logprobs=None, max_tokens=4)",
    ],
)
def test_an_environment_that_samples_from_another_distribution_is_refused_by_name(
    tmp_path: Path, change: str
) -> None:
    path = tmp_path / "agent.py"
    path.write_text(ENVIRONMENT.format(change=change, words="''", turns=3))
    name = re.findall(r"(\w+) ?=", change)[change.startswith("params =")]
    with pytest.raises(RewardImportError, match=f"asked for {name} .*, and the run has {name} "):
        with_room(path, 99, "a", "b", "c")


def test_neutral_parameters_pass_and_log_probs_are_always_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    neutral = (
        "temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, presence_penalty=0.0, "
        "repetition_penalty=1.0"
    )
    others = "min_tokens=0, bad_words=[], logit_bias=None, stop=['x'], logprobs=None, max_tokens=9"
    change = f"params = SimpleNamespace({neutral}, {others})"
    path.write_text(ENVIRONMENT.format(change=change, words="'='", turns=3))
    response = with_room(path, 99, "a", "b", "c")
    assert len(response.actions) == 3 and response.logprobs_T.tolist() == [-0.25] * response.sampled


def test_the_trial_of_an_agent_refuses_what_the_run_would(tmp_path: Path) -> None:
    path, policy = tmp_path / "agent.py", tmp_path / "policy"
    byte_tokenizer("<end>").save_pretrained(policy)
    path.write_text(
        ENVIRONMENT.format(change="params.temperature = 0.3", words="' Again: '", turns=3)
    )
    trial = [str(policy), "?", "", "0", PATIENCE_S]
    with pytest.raises(
        RewardImportError, match="asked for temperature 0.3, and the run has temperature 1.0"
    ):
        try_agent(load_agent(path), *trial, 1.0, 1.0)
    assert "turns 3" in try_agent(load_agent(path), *trial, 0.3, 1.0), "the run's own"
