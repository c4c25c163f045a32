"""A user's agent under the failure policy of reward functions. The agent's file is imported into
the rollout engine, as OpenRLHF does it: its code waits with ``await`` and is not killable. Code of
an ``AgentExecutor`` that blocks (``time.sleep``, a long computation) stops the engine's event loop,
and the deadline with it."""

from __future__ import annotations

import asyncio
import copy
import inspect
import time
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from openrlhf_ext.compat import AgentExecutorBase, MultiTurnAgentExecutor
from openrlhf_ext.rewards.earlier_agents import ServerExecutor, awaited_init
from openrlhf_ext.rewards.endpoint import EndpointAgent
from openrlhf_ext.rewards.executor import GradedExecutor
from openrlhf_ext.rewards.grading import (
    FAILED_KEY,
    Failure,
    FailurePolicy,
    InvalidAnswer,
    RewardError,
    RewardImportError,
    RewardInvalid,
    RewardRaised,
    RewardResult,
    RewardTimeout,
    finite_number,
    parse_answer,
)
from openrlhf_ext.rollout.response import (
    GroupRequest,
    Response,
    ResponseRecorder,
    RolloutError,
    Sampling,
    graded,
)
from openrlhf_ext.user_code import coroutine_place, import_importable, line_of, told

_STEP_KEYS = ("rewards", "environment_feedback", "done")
_NEEDED = ("prompt", "label", "sampling_params", "max_length", "hf_tokenizer", "llm_engine")
_NEEDED_KEYS = frozenset({"observation_tokens", "action_ranges", "rollout_log_probs", "reward"})
# of an episode that fails before its first word: a sandbox that does not start, a reset over the
# network
_TRIES = 3
_ROOM = 256  # tokens of the episode after the prompt
_DISTRIBUTION = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "bad_words", "logit_bias", "allowed_token_ids", "structured_outputs", "guided_decoding",
    "logits_processors", "thinking_token_budget", "trace_decode_token_ids",
)  # fmt: skip
"""Sampling parameters that change which tokens are sampled. 0 and nothing are neutral but for the
first two, and:"""
_NEUTRAL = {"top_k": -1, "repetition_penalty": 1}
_EPISODE: ContextVar[_EngineProxy] = ContextVar("episode")


class GradedAgentExecutor(GradedExecutor):
    """Runs an agent, with a deadline for its own code, and lets no response leave without a finite
    reward.

    A reward that is not a finite number, and an agent that raises or spends more than ``timeout_s``
    outside of ``generate`` at a stretch, are failures, which get ``failures.failure_value``; where
    there is no response, the last turn that was generated takes its place. An episode that fails
    before the policy has written a word is tried again, ``_TRIES`` times in all, each of which
    counts; then its response is empty, and the driver drops its group.
    """

    def __init__(self, agent: AgentExecutorBase, timeout_s: float, failures: FailurePolicy) -> None:
        GradedExecutor.__init__(self, failures)
        self._agent = agent
        self._named = _named(agent.execute)
        self._timeout_s = timeout_s

    async def respond(self, request: GroupRequest, tokenizer: Any, engine: Any) -> list[Response]:
        """See :class:`GradedExecutor`. Raises RewardImportError for an agent that needs what there
        is not."""
        return await asyncio.gather(
            *(
                self._respond(request, sample, tokenizer, engine)
                for sample in range(request.samples)
            )
        )

    async def _respond(
        self, request: GroupRequest, sample: int, tokenizer: Any, engine: Any
    ) -> Response:
        for _ in range(_TRIES):
            try:
                return await self._episode(request, sample, tokenizer, engine)
            except _Unstarted as unstarted:
                self._failures.tolerate(unstarted.error)
        ids = tokenizer(request.prompt, add_special_tokens=False)["input_ids"]
        return Response.empty(ids, self._failures.failure_value, {FAILED_KEY: 1.0})

    async def _episode(
        self, request: GroupRequest, sample: int, tokenizer: Any, engine: Any
    ) -> Response:
        """Raises _Unstarted: the episode failed before the policy had written a word."""
        recorder = ResponseRecorder(engine, request.seed_of(sample))
        proxy = _EngineProxy(recorder)
        _EPISODE.set(proxy)  # for its environment, whose steps run in tasks made here
        answer: dict[str, Any] = {}

        def completion() -> str:
            return tokenizer.decode(proxy.generated, skip_special_tokens=False)

        async def graded() -> RewardResult:
            try:
                answer.update(
                    _checked(await self._run(proxy, **self._arguments(request, tokenizer, proxy)))
                )
                return _reward_of(answer)
            except Failure as failure:
                proxy.raise_engine_error()
                error = failure.kind(str(failure), request.prompt, completion(), request.label)
                if not answer and not proxy.generated:
                    raise _Unstarted(error) from failure
                raise error from failure.__cause__

        try:
            result = await self._settle(graded())
        finally:
            proxy.close()
        graded_answer = {
            "truncated": proxy.truncated,
            **(answer or proxy.last_response()),
            **proxy.done,
            "reward": result.reward,
            "scores": result.score,
            "extra_logs": result.extra_logs,
        }
        return Response.of_agent(recorder.annotate(graded_answer), request.sampling.max_len)

    def _arguments(self, request: GroupRequest, tokenizer: Any, engine: Any) -> dict[str, Any]:
        """What OpenRLHF gives an agent's ``execute``. An agent without need of ``text`` says so by
        ``needs_text``."""
        sampling, needs_text = request.sampling, getattr(self._agent, "needs_text", True)
        params = engine.sampling_params(
            sampling, max_tokens=sampling.max_new_tokens, detokenize=needs_text, logprobs=1
        )
        engine.run_params = copy.copy(params)  # an environment may change its own
        given = {
            "prompt": request.prompt,
            "label": request.label,
            "sampling_params": params,
            "images": None,
            "max_length": sampling.max_len,
            "hf_tokenizer": tokenizer,
            "llm_engine": engine,
        }
        return {name: given[name] for name in self._named}

    async def _run(self, proxy: _EngineProxy, **arguments: Any) -> Any:
        task = asyncio.create_task(self._agent.execute(**arguments))
        try:
            while not task.done():
                left = self._timeout_s - proxy.idle_seconds
                if left <= 0:
                    place = coroutine_place(task.get_coro())
                    if isinstance(self._agent, EndpointAgent):
                        place = self._agent.place(task)
                    raise Failure(
                        RewardTimeout,
                        f"the agent did nothing with the engine for {self._timeout_s:g} s "
                        f"(--reward.timeout_s); it was here: {place}",
                    )
                await asyncio.wait(
                    [task, proxy.broken], timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
                if proxy.broken.done():
                    proxy.broken.result()
            return task.result()
        except (Failure, RolloutError, RewardImportError):
            raise
        except InvalidAnswer as error:
            raise Failure(RewardInvalid, f"the agent, {error}") from None
        except Exception as error:
            raise Failure(RewardRaised, f"the agent raised:\n{told(error)}") from error
        finally:
            task.cancel()


_REWRITE = (
    "; a server of one's own, or an engine that is kept, cannot say whose call it is: define "
    "run_agent(prompt, label, base_url) in the place of AgentExecutor, which gets an address "
    "for each episode (docs/agents.md)"
)
_NOT_FROM_ITS_LOOP = (
    f"the agent called generate from another thread or event loop than that of execute{_REWRITE}"
)
_OTHER_SAMPLING = (
    "the agent asked for {0} {1}, and the run has {0} {2}: the policy is trained on what it "
    "samples, as if all were sampled by the run's parameters (rollout.*). Leave {0} as it is "
    "(docs/agents.md)"
)
_NOT_OF_THIS_EPISODE = (
    f"the agent called generate on the llm_engine of an episode that has ended{_REWRITE}"
)


class _Unstarted(Exception):
    """An episode without a word of the policy, and why."""

    def __init__(self, error: RewardError) -> None:
        error.message = f"the agent failed before the policy had written anything: {error.message}"
        super().__init__(str(error))
        self.error = error


class _EngineProxy:
    """Stands in for the engine while one response is made: whose turn it is, and what was generated
    last. ``broken`` ends the episode by an error that is none of the agent's, even if the agent
    lives with it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self.broken: asyncio.Future[None] = self._loop.create_future()
        self._closed = False
        self._waiting = 0
        self._idle_since = time.monotonic()
        self._error: Exception | None = None
        self._prompt: list[int] = []
        self._logprobs: list[float] = []
        self.run_params: Any = None
        self.truncated = False
        self.done: dict[str, bool] = {}  # as the environment's last step told it
        self.generated: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def idle_seconds(self) -> float:
        """How long the agent has been at it since its last request ended; 0 while one is under
        way."""
        return 0.0 if self._waiting else time.monotonic() - self._idle_since

    async def generate(
        self, prompt_token_ids: Any, sampling_params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Raises RewardImportError: asked in a way in which nobody knows for which episode, or for
        tokens of another distribution than the one that is trained."""
        misuse = _NOT_OF_THIS_EPISODE if self._closed else ""
        for name in _DISTRIBUTION:
            asked, wanted = (
                getattr(params, name, None) for params in (sampling_params, self.run_params)
            )
            neutral = asked is None or (not asked and name not in _DISTRIBUTION[:2])
            if not neutral and asked not in (wanted, _NEUTRAL.get(name)):
                misuse = _OTHER_SAMPLING.format(name, asked, wanted)
        if asyncio.get_running_loop() is not self._loop:
            misuse = _NOT_FROM_ITS_LOOP
        if misuse:
            error = RewardImportError(misuse)
            self._loop.call_soon_threadsafe(self._break, error)
            raise error
        sampling_params.logprobs = sampling_params.logprobs or 1
        self._waiting += 1
        try:
            output = await self._engine.generate(prompt_token_ids, sampling_params, *args, **kwargs)
        except Exception as error:
            self._error = error
            if isinstance(error, RolloutError):
                self._break(error)
            raise
        finally:
            self._waiting -= 1
            self._idle_since = time.monotonic()
        completion = output.outputs[0]
        self._prompt, self.generated = list(prompt_token_ids), list(completion.token_ids)
        self.truncated = completion.finish_reason == "length"
        pairs = zip(self.generated, completion.logprobs, strict=True)
        self._logprobs = [logprobs[token].logprob for token, logprobs in pairs]
        return output

    def _break(self, error: Exception) -> None:
        if not self.broken.done():
            self.broken.set_exception(error)
            # read, so that nobody warns where the episode ends by something else
            self.broken.exception()

    def close(self) -> None:
        """The episode has ended."""
        self._closed = True

    def raise_engine_error(self) -> None:
        """An engine that fails is no failure of the agent, whatever the agent made of it."""
        if self._error is not None:
            raise self._error

    def last_response(self) -> dict[str, Any]:
        """The last turn as a response of its own, in OpenRLHF's form, without a reward."""
        tokens = self._prompt + self.generated
        return {
            "observation_tokens": tokens,
            "action_ranges": [(len(self._prompt), len(tokens))],
            "rollout_log_probs": [0.0] * len(self._prompt) + self._logprobs,
        }


def agent_executor(
    path: str, timeout_s: float, max_failures: int, failure_value: float
) -> GradedAgentExecutor:
    """Loads the agent's file: in the rollout engine's process."""
    return GradedAgentExecutor(
        load_agent(Path(path)), timeout_s, FailurePolicy(max_failures, failure_value)
    )


def load_agent(path: Path) -> AgentExecutorBase:
    """The file's class ``AgentExecutor``, as OpenRLHF 0.9.1 to 0.11.2 have it, or else its function
    ``run_agent``. What a ``MultiTurnAgentExecutor``'s ``step`` returns as ``rewards`` and
    ``scores`` may be any number, not only the tensor that OpenRLHF asks for
    (openrlhf/utils/agent.py:131). Raises ValueError: there is none that can be called."""
    module = import_importable(path, "agent_module")
    executor_class, run_agent = (
        getattr(module, "AgentExecutor", None),
        getattr(module, "run_agent", None),
    )
    if executor_class is None and run_agent is not None:
        _check_run_agent(run_agent, path)
        return EndpointAgent(run_agent)
    if not (isinstance(executor_class, type) and issubclass(executor_class, AgentExecutorBase)):
        raise ValueError(
            f"{path} must define a class AgentExecutor, a subclass of AgentExecutorBase or "
            "MultiTurnAgentExecutor of openrlhf.utils.agent, or a function run_agent(prompt, "
            "label, base_url) (docs/agents.md)"
        )
    return _made(executor_class, path)


def _made(executor_class: type[AgentExecutorBase], path: Path) -> AgentExecutorBase:
    if "result_queue" in inspect.signature(executor_class).parameters:
        raise ValueError(
            f"{path}: an AgentExecutor with a result_queue is of OpenRLHF 0.8.7 to 0.9.0, and is "
            "not run: make it a subclass of MultiTurnAgentExecutor (docs/agents.md)"
        )
    if hasattr(executor_class, "run_agent") and hasattr(executor_class, "_init_server"):
        return ServerExecutor(executor_class())
    _check_execute(executor_class, path)
    agent = executor_class()
    if isinstance(agent, MultiTurnAgentExecutor):
        if not hasattr(agent, "agent_instance_cls"):
            raise ValueError(
                f"{path}: AgentExecutor.__init__ must call super().__init__ with the "
                "environment's class"
            )
        agent.agent_instance_cls = _checked_environment(agent.agent_instance_cls, path)
    return agent


def _check_run_agent(run_agent: Any, path: Path) -> None:
    try:
        inspect.signature(run_agent).bind("prompt", "label", "base_url")
    except TypeError as error:
        raise ValueError(
            f"{line_of(run_agent, path)}: run_agent must take prompt, label, base_url: {error}"
        ) from None


def _check_execute(executor_class: type[AgentExecutorBase], path: Path) -> None:
    # what a decorator has around it is the user's affair
    execute = inspect.unwrap(executor_class.execute)
    wrong = "" if inspect.iscoroutinefunction(execute) else "it is not async"
    try:
        inspect.signature(execute).bind(None, **dict.fromkeys(_named(execute)))
    except TypeError as error:
        wrong = str(error)
    if wrong:
        raise ValueError(
            f"{line_of(execute, path)}: AgentExecutor.execute must be async and take "
            f"{', '.join(_NEEDED)}: {wrong}"
        )


def _named(execute: Callable[..., Any]) -> list[str]:
    """What ``execute`` is given: those of earlier releases had no ``images``."""
    return [*_NEEDED, *{"images"} & inspect.signature(execute).parameters.keys()]


def _checked_environment(instance_class: Any, path: Path) -> Any:
    """The user's environment, whose answers are complete and have numbers with ``item``, as
    OpenRLHF calls it."""
    name = instance_class.__name__
    if missing := sorted(instance_class.__abstractmethods__):
        raise ValueError(f"{path}: {name} must define {' and '.join(missing)} (docs/agents.md)")
    try:
        inspect.signature(instance_class).bind()
    except TypeError as error:
        raise ValueError(
            f"{path}: {name} is made anew for each episode, without arguments: {error}"
        ) from None

    earlier_init = awaited_init(instance_class)

    class Checked(instance_class):
        def __init__(self) -> None:
            if earlier_init is None:
                super().__init__()

        async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            try:
                if earlier_init is not None:
                    await earlier_init(self)
                answer = await _awaitable(super().reset(states, **kwargs))
                if not isinstance(answer, dict) or not isinstance(answer.get("observation"), str):
                    raise InvalidAnswer("must return states with the text 'observation'")
                return answer
            except InvalidAnswer as error:
                raise InvalidAnswer(f"{path}: {name}.reset {error}") from None

        async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            try:
                answer = _checked_step(await _awaitable(super().step(state_dict, **kwargs)))
            except InvalidAnswer as error:
                raise InvalidAnswer(f"{path}: {name}.step {error}") from None
            for params in (state_dict.get("sampling_params"), answer.get("sampling_params")):
                # OpenRLHF's executor would keep none of the turn
                if params is not None and params.logprobs is None:
                    params.logprobs = 1
            _EPISODE.get().done["done"] = bool(answer["done"])
            return answer

    Checked.__name__ = Checked.__qualname__ = name
    return Checked


def _awaitable(result: Any) -> Any:
    if not inspect.isawaitable(result):
        raise InvalidAnswer(f"is not async, it returned {type(result).__name__}: write async def")
    return result


def _checked_step(answer: Any) -> dict[str, Any]:
    if missing := [key for key in _STEP_KEYS if not isinstance(answer, dict) or key not in answer]:
        raise InvalidAnswer(f"returned {type(answer).__name__} without {missing}")
    if not isinstance(text := answer["environment_feedback"], str):
        raise InvalidAnswer(
            f"returned environment_feedback = {text!r:.80}, which must be a text, '' for none"
        )
    if isinstance(done := answer["done"], str) or done is None:
        raise InvalidAnswer(f"returned done = {done!r:.80}, which must be True or False")
    if answer.get("environment_images"):
        raise RewardImportError(
            "the agent returned environment_images, and images are not supported: text only"
        )
    numbers = {
        key: np.float64(finite_number(answer[key], key))
        for key in ("rewards", "scores")
        if key in answer
    }
    return {**answer, **numbers}


def _checked(answer: Any) -> dict[str, Any]:
    missing = (
        sorted(_NEEDED_KEYS - answer.keys()) if isinstance(answer, dict) else sorted(_NEEDED_KEYS)
    )
    if missing:
        raise Failure(
            RewardInvalid, f"the agent returned {type(answer).__name__} without {missing}"
        )
    if not any(stop > start for start, stop in answer["action_ranges"]):
        raise Failure(
            RewardInvalid, "the agent returned action_ranges without a token of the policy"
        )
    return answer


def _reward_of(response: dict[str, Any]) -> RewardResult:
    logs = response.get("extra_logs") or None
    try:
        return parse_answer(
            {"rewards": response["reward"], "scores": response.get("scores"), "extra_logs": logs}
        )
    except InvalidAnswer as error:
        raise Failure(RewardInvalid, f"the agent {error}") from None


def try_agent(
    agent: AgentExecutorBase,
    model: str,
    prompt: str,
    label: Any,
    completion: str,
    timeout_s: float,
    temperature: float,
    top_p: float,
) -> str:
    """What came out of one episode with a made engine, which says ``completion`` at every turn.
    Raises RewardError; RewardImportError for an agent that the run would refuse."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    length = len(tokenizer(prompt, add_special_tokens=False)["input_ids"]) + _ROOM
    request = GroupRequest(prompt, label, 1, Sampling(temperature, top_p, _ROOM // 2, length))
    executor = GradedAgentExecutor(agent, timeout_s, _NoFailure(0))
    response = asyncio.run(_one_episode(executor, agent, request, tokenizer, completion))
    reward, score = graded(response.reward), graded(response.score)
    return (
        f"{completion!r} made as the answer to the first prompt, at each turn: turns "
        f"{len(response.actions)}, reward {reward:g}, score {score:g}, "
        f"{int((~response.sampled_T).sum())} tokens of the environment"
    )


async def _one_episode(
    executor: GradedAgentExecutor,
    agent: AgentExecutorBase,
    request: GroupRequest,
    tokenizer: Any,
    completion: str,
) -> Response:
    try:
        (response,) = await executor.respond(request, tokenizer, _MadeEngine(tokenizer, completion))
        return response
    finally:
        if (aclose := getattr(agent, "aclose", None)) is not None:
            await aclose()


class _NoFailure(FailurePolicy):
    """The first failure is the answer."""

    def tolerate(self, error: RewardError) -> None:
        raise error


class _MadeEngine:
    """What executors know of an engine."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        self._text = text
        self._ids = [
            *tokenizer(text, add_special_tokens=False)["input_ids"],
            tokenizer.eos_token_id,
        ]

    def sampling_params(self, sampling: Sampling, **arguments: Any) -> SimpleNamespace:
        return SimpleNamespace(
            temperature=sampling.temperature, top_p=sampling.top_p, seed=None, **arguments
        )

    async def generate(
        self, prompt_token_ids: list[int], sampling_params: Any, **_: Any
    ) -> SimpleNamespace:
        ids = self._ids[: sampling_params.max_tokens]
        completion = SimpleNamespace(
            token_ids=ids,
            text=self._text,
            finish_reason="stop" if len(ids) == len(self._ids) else "length",
            stop_reason=None,
            logprobs=[{token: SimpleNamespace(logprob=-1.0)} for token in ids],
            weight_versions=[(0, 0, len(ids))],
            routed_experts=None,
        )
        return SimpleNamespace(prompt_token_ids=prompt_token_ids, outputs=[completion])
