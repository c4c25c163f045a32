"""The calls of one episode of an agent that talks to :mod:`openrlhf_ext.rewards.endpoint`, and the
one sequence of tokens that is trained.

A call goes on from an earlier one where its messages are that call's messages, then what the policy
answered, then more; or where its text begins with that call's text and answer. Its prompt is then
that call's tokens as they were sampled, followed by what the chat template writes after the answer:
the policy never sees a history that was tokenized anew, whatever the template makes of it. Any
other call begins a conversation of its own.

Shape suffixes: S = tokens of a sequence, T = its completion tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

Chat = list[dict[str, Any]]
UNTRAINED_KEY = "untrained_tokens"
"""In ``extra_logs``: tokens that the policy wrote in calls outside of the conversation that is
trained."""

_LIMITS = ("max_tokens", "max_completion_tokens")
_SAMPLED = ("temperature", "top_p")
_READ = {
    "messages",
    "prompt",
    "stop",
    "tools",
    "logprobs",
    "chat_template_kwargs",
    *_SAMPLED,
    *_LIMITS,
}
_NO_MATTER = {
    "model",
    "user",
    "metadata",
    "store",
    "service_tier",
    "session_id",
    "stream_options",
    "parallel_tool_calls",
    "safety_identifier",
    "prompt_cache_key",
}
_ASKS_FOR_NOTHING: dict[str, list[Any]] = {
    "n": [1],
    "best_of": [1],
    "top_logprobs": [1],
    "tool_choice": ["none", "auto"],
    "response_format": [{"type": "text"}],
}
"""Each unless it is null, 0, false or empty."""


class BadRequest(ValueError):
    """A call that cannot be answered: which field of it, the rule, and what to do."""


@dataclass(frozen=True, eq=False)
class Call:
    """One answered call.

    Attributes:
        asked: messages, or a text.
        text: what the policy answered, without the token or text that ended it.
        prompt_S: tokens before the answer.
        sampled_T, logprobs_T: the answer as it was sampled.
        end: the sampled text behind ``text``: of the token that ended it, or the ``stop`` that was
        asked for.
        truncated: at the length limit.
        before: the call that this one goes on from.
    """

    asked: Chat | str
    text: str
    prompt_S: list[int]
    sampled_T: list[int]
    logprobs_T: list[float]
    end: str
    truncated: bool
    before: Call | None

    @property
    def chain(self) -> Iterator[Call]:
        """This call and those that it goes on from, the newest first."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.before

    @property
    def tokens_S(self) -> list[int]:
        return self.prompt_S + self.sampled_T


class Episode:
    """Answers the calls of one episode; belongs to the event loop of ``engine``.

    Args:
        engine: its ``generate(prompt_S, params)`` answers as vLLM's engine.
        params: vLLM's sampling parameters of the run; ``max_tokens`` None: as many as there is room
        for.
        max_len: of a whole conversation, in tokens.

    Attributes:
        error: why a call could not be answered that was asked rightly, or None.
    """

    def __init__(self, tokenizer: Any, engine: Any, params: Any, max_len: int) -> None:
        self._tokenizer, self._engine, self._params, self._max_len = (
            tokenizer,
            engine,
            params,
            max_len,
        )
        self._calls: list[Call] = []
        self._tools: dict[Call, Any] = {}  # which a template writes at the beginning
        self.error: Exception | None = None

    async def answer(self, body: Any, *, chat: bool) -> Call:
        """Raises BadRequest, and what the engine raises."""
        if not isinstance(body, dict):
            raise BadRequest(f"the body must be a JSON object: got {body!r:.80}")
        _check_fields(body, self._params, chat)
        asked: Any = _messages(body.get("messages")) if chat else _prompt(body.get("prompt"))
        limit = min(_given([*map(body.get, _LIMITS), self._params.max_tokens]), default=None)
        kwargs = {"tools": body.get("tools") or None} | (body.get("chat_template_kwargs") or {})
        if kwargs["tools"] and self._render(asked, kwargs) == self._render(
            asked, kwargs | {"tools": None}
        ):
            raise BadRequest(
                "the model's chat template does not show tools: describe them in a message"
            )
        before, prompt_S = self._prompt_of(asked, kwargs)
        # cut from the left where it leaves no room, as the prompt of a single turn is
        if before is None:
            room = min(limit or 1, self._max_len - 1)
            prompt_S = prompt_S[max(0, len(prompt_S) - (self._max_len - room)) :]
        limit = min(_given([limit, self._max_len - len(prompt_S)]))
        call = await self._sample(asked, before, prompt_S, limit, _texts(body.get("stop")))
        self._tools[call] = kwargs["tools"]
        self._calls.append(call)
        return call

    async def _sample(
        self, asked: Any, before: Call | None, prompt_S: list[int], limit: int, stop: list[str]
    ) -> Call:
        # an answer of length 0, which an agent can handle, not an error that ends it
        if limit <= 0:
            return Call(
                asked, "", prompt_S[: self._max_len], [], [], end="", truncated=True, before=before
            )
        params = copy.copy(self._params)
        params.max_tokens = limit
        if stop:
            params.stop = stop
        said = (await self._engine.generate(prompt_S, params)).outputs[0]
        sampled_T = list(said.token_ids)
        logprobs_T = [
            logprobs[token].logprob
            for token, logprobs in zip(sampled_T, said.logprobs, strict=True)
        ]
        end, truncated = said.stop_reason, said.finish_reason == "length"
        if not isinstance(end, str):
            end = (
                ""
                if truncated
                else self._tokenizer.decode(sampled_T[-1:], skip_special_tokens=False)
            )
        return Call(asked, said.text, prompt_S, sampled_T, logprobs_T, end, truncated, before)

    def response(self) -> dict[str, Any]:
        """The conversation in which the policy wrote most, in the form of OpenRLHF's executors, not
        graded. Raises LookupError where nothing was sampled."""
        written = {call: sum(len(one.sampled_T) for one in call.chain) for call in self._calls}
        last = max(self._calls, key=written.__getitem__, default=None)  # of equal ones the first
        if last is None or not written[last]:
            raise LookupError("nothing was sampled")
        tokens_S, ranges, logprobs_S = last.tokens_S, [], [0.0] * len(last.tokens_S)
        for call in reversed([*last.chain]):
            start, stop = len(call.prompt_S), len(call.tokens_S)
            if call.sampled_T:
                ranges.append((start, stop))
                logprobs_S[start:stop] = call.logprobs_T
        truncated = last.truncated or any(
            call.truncated and call.before is last for call in self._calls
        )
        return {
            "observation_tokens": tokens_S,
            "action_ranges": ranges,
            "rollout_log_probs": logprobs_S,
            "truncated": truncated,
            "extra_logs": {
                UNTRAINED_KEY: float(
                    sum(len(call.sampled_T) for call in self._calls) - written[last]
                )
            },
        }

    # ---- prompts

    def _prompt_of(
        self, asked: Chat | str, kwargs: Mapping[str, Any]
    ) -> tuple[Call | None, list[int]]:
        """The call that this one goes on from, and all tokens before the answer."""
        for before in sorted(self._calls, key=lambda call: len(call.asked), reverse=True):
            rest = self._after(before, asked, kwargs)
            if rest is not None:  # a template writes the end of an answer too
                return before, before.tokens_S + self._tokenize(rest.removeprefix(before.end))
        return None, self._tokenize(
            asked if isinstance(asked, str) else self._render(asked, kwargs)
        )

    def _after(self, before: Call, asked: Chat | str, kwargs: Mapping[str, Any]) -> str | None:
        """What follows the answer of ``before`` in this call, or None where it does not go on from
        there."""
        if isinstance(asked, str) or isinstance(before.asked, str):
            if not (isinstance(asked, str) and isinstance(before.asked, str)):
                return None
            known = before.asked + before.text
            return asked[len(known) :] if asked.startswith(known) else None
        at = len(before.asked)
        if self._tools[before] != kwargs["tools"] or len(asked) <= at or asked[:at] != before.asked:
            return None
        if asked[at]["role"] != "assistant" or asked[at]["content"].strip() != before.text.strip():
            return None
        # in the place of the answer: how the template would write that does not matter
        mark = uuid4().hex
        marked = [*asked[:at], {"role": "assistant", "content": mark}, *asked[at + 1 :]]
        _, found, rest = self._render(marked, kwargs).rpartition(mark)
        return rest if found else None

    def _render(self, messages: Chat, kwargs: Mapping[str, Any]) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise BadRequest(
                "messages need a model with a chat template, and this one has none: use "
                "/v1/completions"
            )
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **kwargs
            )
        except Exception as error:  # templates raise what they like, and it is about the messages
            raise BadRequest(f"the chat template does not take these messages: {error}") from error

    def _tokenize(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _given(numbers: Iterable[int | None]) -> list[int]:
    return [number for number in numbers if number is not None]


def _check_fields(body: Mapping[str, Any], params: Any, chat: bool) -> None:
    """Every field is one that is read, that does not matter, or that asks for nothing; the policy
    samples as it is trained."""
    known = _READ | _NO_MATTER if chat else (_READ | _NO_MATTER) - {"logprobs", "tools"}
    for name, value in body.items():
        if name in _SAMPLED and value is not None and value != (wanted := getattr(params, name)):
            raise BadRequest(
                f"{name} must be the run's, rollout.{name} (eval.{name} in an evaluation), "
                f"because the policy is trained on what it samples: got {value!r}, it is "
                f"{wanted!r}; leave it out"
            )
        if name not in known and value and value not in _ASKS_FOR_NOTHING.get(name, ()):
            raise BadRequest(
                f"{name} is not supported: got {value!r:.80}; leave it out (docs/agents.md)"
            )
    for name in _LIMITS:
        if (limit := body.get(name)) is not None and not (type(limit) is int and limit > 0):
            raise BadRequest(f"{name} must be a whole number above 0: got {limit!r:.80}")
    if not isinstance(body.get("chat_template_kwargs") or {}, dict):
        raise BadRequest(
            f"chat_template_kwargs must be an object: got {body['chat_template_kwargs']!r:.80}"
        )
    if not all(isinstance(text, str) for text in _texts(body.get("stop"))):
        raise BadRequest(f"stop must be a text or a list of texts: got {body['stop']!r:.80}")


def _texts(stop: Any) -> list[Any]:
    return stop if isinstance(stop, list) else [stop] if stop else []


def _messages(messages: Any) -> Chat:
    if not isinstance(messages, list) or not messages:
        raise BadRequest(f"messages must be a list of at least one message: got {messages!r:.80}")
    return [_message(message) for message in messages]


def _message(message: Any) -> dict[str, Any]:
    """With its content as one text, without what clients fill in as null."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest(f"a message must be an object with role and content: got {message!r:.80}")
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise BadRequest(
            f"content must be a text, or parts of type text (no images): got {content!r:.80}"
        )
    rest = {key: value for key, value in message.items() if value and key != "content"}
    return {**rest, "content": "".join(part["text"] for part in parts)}


def _prompt(prompt: Any) -> str:
    if not isinstance(prompt, str) or not prompt:
        raise BadRequest(f"prompt must be one text: got {prompt!r:.80}")
    return prompt
