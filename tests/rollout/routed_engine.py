"""vLLM's schedulers around a made-up mixture of experts, run as on a GPU: a step is computed while the next one is
being scheduled, prompts are cut into chunks and found in the prefix cache, and requests lose their blocks to others."""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
from transformers import Qwen3MoeConfig
from vllm import EngineArgs, SamplingParams
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput, RoutedExpertsLists

from benchmarks import engine_steps
from benchmarks.engine_steps import BLOCK, Collector, Engine

LAYERS, TOPK, AT_ONCE = 3, 2, 64


def config(experts: int) -> Any:
    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"], vocab_size=1024, hidden_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=16384, num_experts=experts,
        num_experts_per_tok=TOPK,
    )  # fmt: skip


def mixed(*numbers: int) -> int:
    return zlib.crc32(np.array(numbers, np.int64).tobytes())


def experts_of(version: int, tokens: Sequence[int], count: int) -> np.ndarray:
    """(LAYERS, TOPK): what the weights of a version choose for the last of the tokens, a matter of all of them."""
    return np.random.default_rng(mixed(version, *tokens)).integers(0, count, (LAYERS, TOPK))


class RoutedEngine(Engine):
    """``version`` is of the weights. Tokens and log-probs are a matter of their request and place, and of ``version``.
    ``seen``: what has happened, for a test to know that it did."""

    def __init__(self, folder: str, *, ours: bool, asynchronous: bool, experts: int, blocks: int) -> None:
        arguments = partial(EngineArgs, enable_return_routed_experts=True)
        with (
            patch.object(engine_steps, "LlamaConfig", lambda **_: config(experts)),
            patch.object(engine_steps, "EngineArgs", lambda **m: arguments(**m | {"max_num_batched_tokens": AT_ONCE})),
            patch.object(engine_steps, "KVCacheConfig", lambda _, *more: KVCacheConfig(blocks, *more)),
        ):
            super().__init__(folder, 8, asynchronous, ours)
        self.experts, self._ahead, self.version = experts, int(asynchronous), 1
        self._under_way: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.collectors: dict[str, Collector] = {}
        self.tokens: dict[str, list[int]] = {}
        self.versions: dict[str, list[int]] = {}
        self.seen: set[str] = set()

    def ask(self, name: str, prompt: list[int], params: SamplingParams) -> None:
        self.collectors[name] = self.add(name, prompt, params)

    def run(self, updates: Sequence[int] = ()) -> None:
        """Until all requests have ended; before these steps the weights are replaced."""
        step = 0
        while self.scheduler.get_num_unfinished_requests():
            if step in updates:
                self.version += 1
                assert self.scheduler.reset_prefix_cache(reset_running_requests=True)
            self._advance()
            step += 1

    def _advance(self) -> None:
        scheduled = self.scheduler.schedule()
        if scheduled.total_num_scheduled_tokens:
            self._under_way.append((scheduled, self._compute(scheduled)))
        if not self._under_way or (len(self._under_way) <= self._ahead and scheduled.total_num_scheduled_tokens):
            return
        for batch in self.scheduler.update_from_output(*self._under_way.popleft()).values():
            came = self._decoder.decode([bytes(part) for part in self._encoder.encode(batch)])
            self.processor.process_outputs(came.outputs, came.timestamp, None)

    def _compute(self, scheduled: Any) -> ModelRunnerOutput:
        """As a model runner: of the tokens that it has sampled itself, vLLM tells it nothing."""
        cached = scheduled.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        for name in [new.req_id for new in scheduled.scheduled_new_reqs] + list(cached.resumed_req_ids):
            request = self.scheduler.requests[name]
            self.tokens[name] = list(request.all_token_ids)
            dropped = len(self.versions.get(name, [])) - request.num_output_tokens
            self.versions[name] = self.versions.get(name, [])[: request.num_output_tokens]
            self._see(resumed=name in cached.resumed_req_ids, cached=computed[name], dropped=dropped)
        rows, slots, sampled = [], [], []
        for name, count in scheduled.num_scheduled_tokens.items():
            places, tokens = range(computed[name], computed[name] + count), self.tokens[name]
            self._see(chunked=places.stop < len(tokens))
            (blocks,) = self.scheduler.kv_cache_manager.get_blocks(name).get_block_ids()
            rows += [experts_of(self.version, tokens[: place + 1], self.experts) for place in places]
            slots += [blocks[place // BLOCK] * BLOCK + place % BLOCK for place in places]
            sampled.append(self._sample(name) if places.stop == len(tokens) else [])
        names = list(scheduled.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled, logprobs=self._logprobs(names), prompt_logprobs_dict={}, pooler_output=[],
            routed_experts=RoutedExpertsLists(np.array(rows, np.int32), np.array(slots)),
        )  # fmt: skip

    def _see(self, **what: Any) -> None:
        self.seen |= {name for name, happened in what.items() if happened}

    def _sample(self, name: str) -> list[int]:
        token = 5 + mixed(*name.encode(), len(self.tokens[name]), self.version) % 1000
        self.tokens[name].append(token)
        self.versions[name].append(self.version)
        return [token]

    def _logprobs(self, names: list[str]) -> LogprobsLists:
        """The sampled token's log-prob is less by the version than its place, so that it says both."""
        last = [self.tokens[name][-1] for name in names]
        logprobs = [
            -len(self.tokens[name]) - self.versions[name][-1] / 8 if self.versions[name] else 0 for name in names
        ]
        return LogprobsLists(np.array(last, np.int32)[:, None], np.float32(logprobs)[:, None], np.float32(last))

    def truth(self, name: str, prompt: int) -> np.ndarray:
        """Of a request that has ended: rows are those of the weights that sampled the token after them, those of a
        prompt of the weights that sampled the first."""
        tokens, versions = self.tokens[name], self.versions[name]
        made = [
            experts_of(versions[max(0, i - prompt + 1)], tokens[: i + 1], self.experts) for i in range(len(tokens) - 1)
        ]
        return np.array(made)


def scenario(seed: int) -> list[tuple[str, list[int], int]]:
    """(name, prompt, tokens to sample): groups share prompts."""
    chance = random.Random(seed)
    asked = []
    for group in range(3):
        prompt = [3 + group] * chance.choice([1, 15, 16, 17, 40, 90])
        asked += [(f"{group}{each}", prompt, chance.choice([1, 2, 20, 70])) for each in range(3)]
    return asked
