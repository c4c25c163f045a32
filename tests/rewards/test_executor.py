from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from openrlhf_ext.options.sections import Reward
from openrlhf_ext.rewards.executor import (
    GradedSingleTurnExecutor,
    HttpReward,
    make_executor,
    open_grader,
)
from openrlhf_ext.rewards.grading import (
    FailurePolicy,
    RewardFailureLimit,
    RewardImportError,
    RewardResult,
)
from openrlhf_ext.rewards.pool import RewardPool
from openrlhf_ext.rollout.response import GroupRequest, Sampling
from tests.models import make_reward_model, make_tiny_policy
from tests.patience import PATIENCE_S, until

TAGGED = Path(__file__).parents[2] / "examples/python/reward_tagged_maths.py"
REWARD_FILE = """
def reward_func(queries, prompts, labels, **kwargs):
    completion = queries[0][len(prompts[0]):]
    if "!" in completion:
        raise ValueError("cannot parse")
    correct = float(labels[0] in completion)
    return {"rewards": correct + 0.5, "scores": correct, "extra_logs": {"length": len(completion)}}
"""


class CharTokenizer:
    """One token per character; ``$`` stands for the end-of-sequence token."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(map(chr, ids))


def request(
    samples: int = 1, prompt: str = "2+2=", label: str = "4", max_new_tokens: int | None = 16
) -> GroupRequest:
    return GroupRequest(prompt, label, samples, Sampling(0.5, 0.9, max_new_tokens, max_len=64))


@dataclass
class FakeEngine:
    """Answers each prompt with the next completion, as vLLM's request output."""

    completions: list[str]
    delay_s: float = 0.0
    slower_first: bool = False  # the last of those asked for is the first that ends
    tokenizer: Any = None  # of the completions; by default one token per character
    prompts: list[list[int]] = field(default_factory=list)
    params: list[SimpleNamespace] = field(default_factory=list)

    tells_entropies = False

    def sampling_params(self, sampling: Sampling, **arguments: Any) -> SimpleNamespace:
        return SimpleNamespace(temperature=sampling.temperature, top_p=sampling.top_p, **arguments)

    async def generate(self, prompt_ids: list[int], params: SimpleNamespace) -> SimpleNamespace:
        self.prompts.append(prompt_ids)
        self.params.append(params)
        tokenize = self.tokenizer or CharTokenizer()
        ids = tokenize(self.completions.pop(0), add_special_tokens=False)["input_ids"]
        await asyncio.sleep(self.delay_s + 0.02 * len(self.completions) * self.slower_first)
        logprobs = [{i: SimpleNamespace(logprob=-0.25)} for i in ids]
        if getattr(params, "flat_logprobs", False):
            logprobs = SimpleNamespace(logprobs=[-0.25] * len(ids))
        end = ord("$") if self.tokenizer is None else self.tokenizer.eos_token_id
        stopped = "stop" if ids[-1] == end else "length"
        output = SimpleNamespace(
            token_ids=ids,
            text="",
            finish_reason=stopped,
            stop_reason=None,
            logprobs=logprobs,
            weight_versions=[(3, 0, len(ids))],
            routed_experts=None,
        )
        return SimpleNamespace(outputs=[output])


class FakeGrader:
    """Grades with a Python function, after a pause."""

    def __init__(self, function: Callable[[str], dict[str, float]], delay_s: float = 0.0) -> None:
        self.function, self.delay_s, self.started = function, delay_s, 0

    def start(self) -> None:
        self.started += 1

    async def grade(self, query: str, *_: Any) -> RewardResult:
        await asyncio.sleep(self.delay_s)
        return RewardResult(1.0, 1.0, self.function(query))

    async def aclose(self) -> None: ...


def respond(executor: GradedSingleTurnExecutor, engine: FakeEngine, count: int) -> list[Any]:
    """Groups of one, so that one that fails does not hide the others."""

    async def run() -> list[Any]:
        groups = [executor.respond(request(), CharTokenizer(), engine) for _ in range(count)]
        answers = await asyncio.gather(*groups, return_exceptions=True)
        return [answer if isinstance(answer, Exception) else answer[0] for answer in answers]

    return asyncio.run(run())


@pytest.fixture
def reward_path(tmp_path: Path) -> Path:
    path = tmp_path / "reward.py"
    path.write_text(REWARD_FILE)
    return path


def graded_run(reward_path: Path, completions: list[str], **settings: float) -> list[Any]:
    factory = make_executor(Reward(remote_url=str(reward_path), num_workers=1, **settings))
    executor = pickle.loads(pickle.dumps(factory))()
    try:
        return respond(executor, FakeEngine(list(completions)), len(completions))
    finally:
        asyncio.run(executor.aclose())


def test_a_completion_is_flat_arrays_and_its_grade(reward_path: Path) -> None:
    (got,) = graded_run(reward_path, ["4$"])
    assert got.tokens_S.tolist() == [ord(c) for c in "2+2=4$"] and got.tokens_S.dtype == np.int32
    assert got.logprobs_T.tolist() == [-0.25] * 2 and got.logprobs_T.dtype == np.float32
    assert got.actions == ((4, 6),) and got.versions == ((3, 4, 6),) and not got.truncated
    assert (got.reward, got.score, got.sampled, got.span) == (1.5, 1.0, 2, 2)
    assert got.extra_logs == {"length": 2.0, "reward_failed": 0.0}


def test_without_a_grader_a_completion_waits_for_a_reward_model() -> None:
    executor = pickle.loads(pickle.dumps(make_executor(Reward())))()
    (got,) = respond(executor, FakeEngine(["4$"]), 1)
    asyncio.run(executor.aclose())
    assert (got.reward, got.score, got.extra_logs) == (None, None, {}) and got.actions == ((4, 6),)
    assert executor.take_failures() == []


@pytest.mark.parametrize(
    "end", ["<|im_end|>", "<|eot_id|>", "<|endoftext|>", "</s>", "<end_of_turn>"]
)
def test_the_end_of_a_completion_is_the_one_that_its_tokenizer_has(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The official reward wants the answer to end the text: with Llama's end it gave 1.5 instead of
    20."""
    monkeypatch.setenv("REWARD_TAGGED_MODE", "official")
    written = "<reasoning>48+24=72</reasoning><answer>72</answer>"
    tokenizer = byte_tokenizer(end)
    settings = Reward(remote_url=str(TAGGED), num_workers=1, environment=("REWARD_TAGGED_MODE",))
    executor = make_executor(settings)()
    try:
        engine = FakeEngine([written + end, written], tokenizer=tokenizer)
        asked = request(prompt="48+24, in e\u0301tapes?", label="#### 72", max_new_tokens=60)
        groups = [asyncio.run(executor.respond(asked, tokenizer, engine)) for _ in range(2)]
    finally:
        asyncio.run(executor.aclose())
    assert [response.reward for (response,) in groups] == [20.0, 20.0]
    assert [response.truncated for (response,) in groups] == [False, True]


def byte_tokenizer(end: str) -> PreTrainedTokenizerFast:
    """Of bytes, composing accents as Qwen2's does, with one special token."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [], trainers.BpeTrainer(special_tokens=[end], initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end)


def test_a_group_has_one_prompt_and_the_engine_is_asked_as_told(reward_path: Path) -> None:
    executor = GradedSingleTurnExecutor(FakeGrader(lambda _: {}), FailurePolicy(0))
    engine = FakeEngine(["4$", "5", "6$"])
    group = asyncio.run(executor.respond(request(samples=3), CharTokenizer(), engine))
    assert [response.truncated for response in group] == [False, True, False]
    assert engine.prompts == [[ord(c) for c in "2+2="]] * 3
    assert all((p.max_tokens, p.temperature, p.logprobs) == (16, 0.5, 0) for p in engine.params)
    engine = FakeEngine(["4$", "4$"])
    asyncio.run(executor.respond(request(max_new_tokens=None), CharTokenizer(), engine))
    asyncio.run(executor.respond(request(prompt="x" * 60), CharTokenizer(), engine))
    assert engine.params[0].max_tokens == 60, "what data.max_len leaves"
    assert len(engine.prompts[1]) == 48, "cut from the left to leave room for the completion"
    engine = FakeEngine(["$"])
    asyncio.run(
        executor.respond(request(prompt="x" * 70, max_new_tokens=None), CharTokenizer(), engine)
    )
    assert (len(engine.prompts[0]), engine.params[0].max_tokens) == (63, 1), (
        "one token of room is always left"
    )


def test_a_failure_is_logged_counted_and_never_none(
    reward_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outputs = graded_run(reward_path, ["4$", "!$", "5$"], failure_value=-1.0)
    assert [output.reward for output in outputs] == [1.5, -1.0, 0.5]
    assert [output.score for output in outputs] == [1.0, 0.0, 0.0]
    assert [output.extra_logs["reward_failed"] for output in outputs] == [0.0, 1.0, 0.0]
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    # another test may end now
    (record,) = [each for each in errors if each.name.startswith("openrlhf_ext")]
    for part in ("ValueError: cannot parse", "'2+2='", "'!'"):
        assert part in record.getMessage()


def test_the_run_stops_after_too_many_failures(reward_path: Path) -> None:
    outputs = graded_run(reward_path, ["4$", "!$", "!$", "!$"], max_failures=2)
    assert outputs[0].reward == 1.5
    (error,) = [output for output in outputs if isinstance(output, Exception)]
    assert isinstance(error, RewardFailureLimit)
    for part in ("3 samples", "tolerates 2", "--reward.max_failures", "cannot parse", "'!'"):
        assert part in str(error)


def test_a_broken_reward_file_stops_the_run_at_once(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text("import no_such_package")
    outputs = graded_run(path, ["4$"])
    assert isinstance(outputs[0], RewardImportError) and "no_such_package" in str(outputs[0])


def test_log_keys_may_differ_from_sample_to_sample() -> None:
    keys = iter([{"a": 1.0}, {"b": 1.0}])
    executor = GradedSingleTurnExecutor(FakeGrader(lambda _: next(keys)), FailurePolicy(0))
    first, second = respond(executor, FakeEngine(["4$", "4$"]), 2)
    assert [*first.extra_logs] == ["a", "reward_failed"] and [*second.extra_logs] == [
        "b",
        "reward_failed",
    ]


BREVITY = """
def brevity(completions, prompts, solution, **kwargs):
    assert prompts == ["2+2="] * len(completions) and solution == ["4"] * len(completions)
    if "!" in completions:
        raise ValueError("cannot parse")
    return [len(one) == min(map(len, completions)) if one != "no" else None for one in completions]
"""


def test_trls_function_gets_the_group_in_its_order(tmp_path: Path) -> None:
    """Completions end in another order than they were asked for; what fails the call fails all of
    it, None its own."""
    path = tmp_path / "trl.py"
    path.write_text(BREVITY)
    executor = make_executor(
        Reward(remote_url=str(path), num_workers=1, max_failures=9, failure_value=-1.0)
    )()

    async def groups() -> list[list[float]]:
        made = [["444$", "4$", "44$"], ["4$", "no$", "44$"], ["4$", "!$", "44$"]]
        engines = [FakeEngine(texts, slower_first=True) for texts in made]
        answers = [
            await executor.respond(request(3), CharTokenizer(), engine) for engine in engines
        ]
        await executor.aclose()
        return [[one.reward for one in group] for group in answers]

    assert asyncio.run(groups()) == [[0, 1, 0], [1, -1, 0], [-1, -1, -1]]
    assert len(executor.take_failures()) == 1 + 3


def test_a_completion_that_does_not_come_ends_the_wait_of_its_group(tmp_path: Path) -> None:
    path = tmp_path / "trl.py"
    path.write_text(BREVITY)
    executor = make_executor(Reward(remote_url=str(path), num_workers=1))()

    async def group() -> None:
        with pytest.raises(IndexError):  # the engine has no third completion
            await executor.respond(request(3), CharTokenizer(), FakeEngine(["4$", "44$"]))
        left = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait_for(asyncio.gather(*left, return_exceptions=True), PATIENCE_S)
        await executor.aclose()

    asyncio.run(group())


# ---- what grades


def test_a_python_file_gives_a_pool(tmp_path: Path) -> None:
    assert isinstance(open_grader(Reward(remote_url=str(tmp_path / "reward.py"))), RewardPool)


def test_addresses_give_the_http_grader() -> None:
    settings = Reward(remote_url="http://a/x, https://b/y")
    assert settings.addresses == ("http://a/x", "https://b/y")
    assert isinstance(open_grader(settings), HttpReward)


@pytest.mark.parametrize("url", ["reward.txt", "a.py,b.py", "http://a,b.py", "ftp://a"])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="--reward.remote_url must be one Python file"):
        open_grader(Reward(remote_url=url))


def test_settings_name_the_option_that_is_wrong() -> None:
    with pytest.raises(ValueError, match="--reward.remote_url"):
        open_grader(Reward(remote_url=" , "))


# ---- OpenRLHF's own reward server


def test_openrlhfs_reward_server_grades(tmp_path: Path) -> None:
    """``openrlhf.cli.serve_rm`` as it is installed, and a whole response graded by it."""
    make_tiny_policy(tmp_path / "policy")
    model = make_reward_model(tmp_path / "rm", tmp_path / "policy").to(torch.bfloat16)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    words = [
        "--reward.model_name_or_path",
        tmp_path / "rm",
        "--ds.attn_implementation",
        "eager",
        "--host",
        "127.0.0.1",
    ]
    command = [
        sys.executable,
        "-m",
        "tests.rewards.serve_rm",
        *map(str, words),
        "--port",
        str(port),
    ]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as server,
    ):
        try:
            text = (tmp_path / "log").read_text
            until(
                lambda: "Uvicorn running" in text() or server.poll() is not None,
                "the reward server is up",
            )
            tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
            (got,) = asyncio.run(graded_by_server(f"http://127.0.0.1:{port}/get_reward", tokenizer))
        finally:
            server.terminate()
    tokens = torch.from_numpy(got.tokens_S).long()[None]
    with torch.no_grad():
        score = model.score(model.model(tokens).last_hidden_state[0, -1]).item()
    assert got.reward == got.score == pytest.approx(score, abs=0.05), text()
    assert got.extra_logs == {"dummy_scores": got.reward, "reward_failed": 0.0}


async def graded_by_server(url: str, tokenizer: Any) -> list[Any]:
    executor = make_executor(Reward(remote_url=url))()
    try:
        return await executor.respond(
            request(), tokenizer, FakeEngine(["4<|im_end|>"], tokenizer=tokenizer)
        )
    finally:
        await executor.aclose()
