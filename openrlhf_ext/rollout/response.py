"""Requests to an engine and their responses, groups of graded completions as flat arrays; and the
errors of rollout.

Importable without Ray, vLLM, and torch; every error keeps its message on its way through Ray. Shape
suffixes: S = tokens of a sequence, T = its completion tokens, R = its first tokens, which routers
have seen, L = layers, K = experts of a token.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

Span = tuple[int, int, int]
"""(version of the weights, first token, end)"""
SPANS_KEY = "weight_versions"
"""Key of a response for the spans of its whole token sequence; they leave out tokens that were not
sampled."""
ROUTING_KEY = "routed_experts"
"""Key of a response for rows of experts, for the first tokens of its whole sequence."""


class RolloutError(RuntimeError):
    """A rollout engine cannot do what a call requests."""


class EngineStartError(RolloutError):
    """An engine did not start. The message holds its own error; ``engines`` holds positions among
    the engines that the caller waited for."""

    def __init__(self, message: str, engines: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.engines = tuple(engines)


class EngineDied(RolloutError):
    """The engine inside a rollout actor stopped working; the message holds the end of its log."""


class NotFP8(RolloutError):
    """Linear layers of an engine that should compute in FP8 do not, or other layers do."""


class InvalidWeights(RolloutError):
    """A weight update did not complete; the engine refuses to sample until a later update does."""


class GenerationTimeout(RolloutError):
    """A request did not finish before its deadline; the message says what the engine was doing."""


class TokenVersions:
    """Records which weights sampled each token when they change in the middle of requests (not in
    vLLM 0.32).

    The engine is paused at every update: the tokens that an unfinished request has by then were
    sampled with the old weights, the rest with the new ones. A completion's versions are spans
    ``(version, start, end)`` of its tokens, in order, without gaps. A request that was made but had
    not reached vLLM when an update ended counts as begun with the old weights: its tokens may be
    younger than stated, never older.
    """

    def __init__(self) -> None:
        # request -> (tokens by then, new version)
        self._changes: dict[str, list[tuple[int, int]]] = {}

    def change(self, version: int, tokens: Mapping[str, int]) -> None:
        """Changes the weights to ``version``; ``tokens``: the number of tokens of every unfinished
        request so far, by request id."""
        for request, count in tokens.items():
            self._changes.setdefault(request, []).append((count, version))

    def take(self, request: str, begun_with: int, num_tokens: int) -> list[Span]:
        """Returns and removes the spans of a finished request that began with the weights
        ``begun_with``."""
        spans, version, start = [], begun_with, 0
        for count, next_version in self._changes.pop(request, ()):
            if count > start:
                spans.append((version, start, count))
            version, start = next_version, count
        return [*spans, (version, start, num_tokens)] if num_tokens > start else spans

    def forget_all(self) -> None:
        self._changes.clear()


def count_tokens(output_processor: Any) -> dict[str, int]:
    """Returns the tokens so far of every unfinished request of vLLM's output processor, by the id
    of its creation."""
    return {
        state.external_req_id: state.detokenizer.num_output_tokens()
        for state in output_processor.request_states.values()
        if state.detokenizer is not None
    }


def derived_seed(*numbers: int) -> int:
    """Returns a seed below 2**63 that is a function of these numbers: a group's seed comes from the
    run's seed and the group's number, a completion's from its group's seed and its place, a later
    turn's from its completion's seed. A group that is requested again draws the same samples."""
    digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}q", *numbers), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class Sampling:
    """How to sample completions. ``max_new_tokens`` None: the rest of ``max_len``, which limits
    prompt and completion together."""

    temperature: float
    top_p: float
    max_new_tokens: int | None
    max_len: int


@dataclass(frozen=True)
class GroupRequest:
    """A request for ``samples`` graded completions of one prompt. An engine makes all of them; a
    guide's engine makes the ``guide_samples`` (``driver.rollouts.GuidedRequests``). ``seed``:
    numbers that give, with a completion's own number, its seed; None: the engine's own random
    numbers. ``grader``: as reward.remote_url, None = the run's."""

    prompt: str
    label: Any
    samples: int
    sampling: Sampling
    seed: tuple[int, ...] | None = None
    guide_samples: int = 0
    grader: str | None = None

    def seed_of(self, sample: int) -> int | None:
        return None if self.seed is None else derived_seed(*self.seed, sample)


@dataclass(frozen=True)
class Response:
    """One completion and its grade.

    Attributes:
        tokens_S: int32 prompt and completion, and for agents the observations in between.
        logprobs_T: fp32 log-probs with which the engine sampled the completion tokens; None if it
            does not report them.
        entropies_T: fp32 entropies (nats) of the distributions that it sampled them from; None if
            not requested.
        actions: [start, stop) ranges of the completion tokens in ``tokens_S``, in order.
        versions: which weights sampled which ranges of ``tokens_S``; empty if unknown.
        reward, score: None until a reward model has scored the batch; any other grade comes with
            the completion.
        truncated: cut at the length limit without end of sequence.
        extra_logs: the reward function's own numbers, and ``reward_failed``.
        from_guide: sampled by the guide, whose weights have no relevant versions.
        experts_RLK: uint8 or uint16 numbers of the experts that every layer's router chose, in the
            router's order, for the first R tokens of ``tokens_S``, without gaps; None if not
            requested. A sampled token's experts come from the weights that sampled the next token;
            an earlier token's come from the weights that saw it first. R covers all tokens but the
            last of the completion: no router has seen that one, nor what an environment wrote after
            it. R is smaller only if an agent changed sampled tokens: not even the engine has seen
            what comes after the change.
        experts_at: replaces ``experts_RLK`` outside of the engine: a reference to a list of such
            arrays, and this completion's index. They are fetched where they are used.
        receipt: checksum of tokens and reward (``signed``) from the time of grading; None: a reward
            model grades.
    """

    tokens_S: np.ndarray
    logprobs_T: np.ndarray | None
    actions: tuple[tuple[int, int], ...]
    versions: tuple[Span, ...]
    reward: float | None
    score: float | None
    truncated: bool
    extra_logs: dict[str, float]
    from_guide: bool = False
    entropies_T: np.ndarray | None = None
    experts_RLK: np.ndarray | None = None
    experts_at: tuple[Any, int] | None = None
    receipt: int | None = None

    def signed(self) -> Response:
        """Returns the response with a receipt, which lets training check that tokens and reward
        belong together."""
        return replace(self, receipt=self._sum)

    def check_logprobs(self) -> None:
        """Raises RolloutError if the engine's log-probs are not finite."""
        if self.logprobs_T is not None and not np.isfinite(self.logprobs_T).all():
            raise RolloutError(
                "an engine sampled with log-probs that are not finite: it does not compute the "
                "policy"
            )

    def check_reward(self) -> None:
        """Raises RolloutError if the reward is not the one that these tokens were graded with."""
        if self.receipt not in (None, self._sum):
            raise RolloutError(
                f"a completion of {self.sampled} tokens came with the reward {self.reward}, "
                "which is not the one that it was graded with: completions or rewards changed "
                "places on their way from the engine"
            )

    @property
    def _sum(self) -> int:
        return zlib.crc32(
            self.tokens_S.tobytes(), zlib.crc32(struct.pack("<d", graded(self.reward)))
        )

    @property
    def sampled(self) -> int:
        return sum(stop - start for start, stop in self.actions)

    @property
    def span(self) -> int:
        """Tokens from the first to the last one of the completion, including observations in
        between."""
        return self.actions[-1][1] - self.actions[0][0] if self.actions else 0

    @property
    def written(self) -> int:
        """Tokens from the first of the completion to the last of all, including what the
        environment wrote."""
        return len(self.tokens_S) - self.actions[0][0] if self.actions else 0

    @property
    def sampled_T(self) -> np.ndarray:
        """Bool mask of the ``written`` tokens: True for the completion, False for an agent's
        environment."""
        sampled_S = np.zeros(len(self.tokens_S), dtype=bool)
        for start, stop in self.actions:
            sampled_S[start:stop] = True
        return sampled_S[len(self.tokens_S) - self.written :]

    @classmethod
    def empty(
        cls, prompt_ids: Iterable[int], reward: float, extra_logs: dict[str, float]
    ) -> Response:
        """Returns the response of an episode in which nothing was sampled; its group is not trained
        on."""
        tokens_S = np.array([*prompt_ids], dtype=np.int32)
        return cls(tokens_S, np.zeros(0, np.float32), (), (), reward, 0.0, False, extra_logs)

    @classmethod
    def of_agent(cls, answer: Mapping[str, Any], max_len: int) -> Response:
        """Makes a response from the form of OpenRLHF's executors, cut after ``max_len`` tokens. It
        is truncated, too, if the policy's tokens are cut, or if other tokens fill ``max_len`` and
        do not end an episode that is ``done``: OpenRLHF's executor ends without a flag when no
        token is left."""
        last, length = (
            max(stop for _, stop in answer["action_ranges"]),
            len(answer["observation_tokens"]),
        )
        done = answer.get("done", last == length)  # only an environment reports it
        is_full = last > max_len or (length >= max_len and not done)
        tokens_S = np.asarray(answer["observation_tokens"][:max_len], dtype=np.int32)
        actions = tuple(_cut(answer["action_ranges"], len(tokens_S)))
        logprobs = answer["rollout_log_probs"]
        if logprobs is not None:
            kept = [np.asarray(logprobs[start:stop], dtype=np.float32) for start, stop in actions]
            logprobs = np.concatenate([np.zeros(0, np.float32), *kept])
        versions = (
            (version, *span)
            for version, first, end in answer.get(SPANS_KEY, ())
            for span in _cut([(first, end)], len(tokens_S))
        )
        experts_RLK = answer.get(ROUTING_KEY)
        return cls(
            tokens_S,
            logprobs,
            actions,
            tuple(versions),
            float(answer["reward"]),
            float(answer["scores"]),
            bool(answer.get("truncated", False)) or is_full,
            {name: float(value) for name, value in answer["extra_logs"].items()},
            experts_RLK=None if experts_RLK is None else experts_RLK[: len(tokens_S) - 1],
        ).signed()


def graded(number: float | None) -> float:
    """Returns a completion's reward or score. Raises ValueError if a reward model has yet to score
    it."""
    if number is None:
        raise ValueError(
            "a completion is not graded: a reward model scores whole batches, before they are "
            "shaped"
        )
    return number


def _cut(spans: Iterable[tuple[int, int]], length: int) -> Iterable[tuple[int, int]]:
    return ((int(start), min(int(stop), length)) for start, stop in spans if start < length)


class _Text(NamedTuple):
    """A request's prompt and completion, and rows of experts of its tokens from ``first`` on,
    except the last token."""

    tokens_S: np.ndarray
    first: int
    experts_RLK: np.ndarray


class RoutedTexts:
    """Collects the rows of experts of one response from its requests. A request continues where
    others ended, and adds the missing rows: of their last token, of an environment's tokens, and of
    the tokens that it samples."""

    def __init__(self) -> None:
        self._texts: list[_Text] = []

    def add(self, tokens: Iterable[int], experts_RLK: np.ndarray) -> None:
        """Adds the rows of all tokens but the last; known rows at the start may be missing."""
        tokens_S = np.fromiter(tokens, np.int32)
        self._texts.append(_Text(tokens_S, len(tokens_S) - 1 - len(experts_RLK), experts_RLK))

    def known(self, tokens: Iterable[int]) -> list[np.ndarray]:
        """Returns the known rows of the first of these tokens. A router has seen all tokens before
        its own, so a row belongs to this text only if all of these are the same."""
        if not self._texts:
            return []
        tokens_S, have, parts = np.fromiter(tokens, np.int32), 0, []
        for text in self._texts:
            stop = min(_same(text.tokens_S, tokens_S), len(text.tokens_S) - 1)
            if text.first <= have < stop:
                parts.append(text.experts_RLK[have - text.first : stop - text.first])
                have = stop
        return parts


def _same(one_S: np.ndarray, other_S: np.ndarray) -> int:
    """Returns the length of the common prefix of two texts."""
    length = min(len(one_S), len(other_S))
    differs = one_S[:length] != other_S[:length]
    return int(differs.argmax()) if differs.any() else length


class ResponseRecorder:
    """Replaces the engine while one response is made, then reports which weights sampled its tokens
    and which experts the tokens took. ``seed`` is the response's; every request without a seed gets
    its own, derived from it."""

    def __init__(self, engine: Any, seed: int | None = None) -> None:
        self._engine, self._seed, self._turns = engine, seed, 0
        self._sampled: list[tuple[list[int], list[Span]]] = []
        self._routed = RoutedTexts()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, prompt_token_ids: Any, sampling_params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self._seed is not None and sampling_params.seed is None:
            sampling_params = sampling_params.clone()
            sampling_params.seed = derived_seed(self._seed, self._turns)
        self._turns += 1
        prompt = list(prompt_token_ids)
        if known := sum(map(len, self._routed.known(prompt))):
            sampling_params = sampling_params.clone()
            # vLLM requires at least one token
            sampling_params.routed_experts_prompt_start = min(known, len(prompt) - 1)
        output = await self._engine.generate(prompt_token_ids, sampling_params, *args, **kwargs)
        for completion in output.outputs:
            self._sampled.append((list(completion.token_ids), completion.weight_versions))
            if completion.routed_experts is not None:
                self._routed.add([*prompt, *completion.token_ids], completion.routed_experts)
        return output

    def annotate(self, response: Any) -> Any:
        """Adds ``SPANS_KEY``, and ``ROUTING_KEY`` if the engine reports experts, to a response in
        OpenRLHF's form; leaves other forms alone. An action whose tokens no request returned counts
        as sampled with the oldest weights of the whole response."""
        if isinstance(response, dict) and "action_ranges" in response and self._sampled:
            oldest = min(
                (version for _, spans in self._sampled for version, _, _ in spans), default=0
            )
            tokens = response["observation_tokens"]
            response[SPANS_KEY] = [
                (version, start + first, start + end)
                for start, stop in response["action_ranges"]
                for version, first, end in self._spans_of(list(tokens[start:stop]), oldest)
            ]
            if parts := self._routed.known(tokens):
                response[ROUTING_KEY] = np.concatenate(parts)
        return response

    def _spans_of(self, tokens: list[int], oldest: int) -> list[Span]:
        for index, (sampled, spans) in enumerate(self._sampled):
            if sampled[: len(tokens)] == tokens:
                del self._sampled[index]
                return [
                    (v, start, min(end, len(tokens)))
                    for v, start, end in spans
                    if start < len(tokens)
                ]
        return [(oldest, 0, len(tokens))] if tokens else []
