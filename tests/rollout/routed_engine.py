"""vLLM's schedulers around a made-up mixture of experts, run as on a GPU: a step is computed while
the next one is being scheduled, prompts are cut into chunks and found in the prefix cache, and
requests lose their blocks to others."""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import Qwen3MoeConfig
from vllm import EngineArgs, SamplingParams
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector import worker
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

from tests.rollout import engine_steps
from tests.rollout.engine_steps import Collector, Engine

LAYERS, TOPK, AT_ONCE = 3, 2, 64


def config(experts: int) -> Any:
    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=1024,
        hidden_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=16384,
        num_experts=experts,
        num_experts_per_tok=TOPK,
    )


def mixed(*numbers: int) -> int:
    return zlib.crc32(np.array(numbers, np.int64).tobytes())


def experts_of(version: int, tokens: Sequence[int], count: int) -> np.ndarray:
    """(LAYERS, TOPK): what the weights of a version choose for the last of the tokens, a matter of
    all of them."""
    return np.random.default_rng(mixed(version, *tokens)).integers(0, count, (LAYERS, TOPK))


class RoutedEngine(Engine):
    """``version`` is of the weights. Tokens and log-probs are a matter of their request and place,
    and of ``version``.
    ``seen``: what has happened, for a test to know that it did."""

    def __init__(
        self, folder: str, *, ours: bool, asynchronous: bool, experts: int, blocks: int
    ) -> None:
        arguments = partial(EngineArgs, enable_return_routed_experts=True)
        with (
            # of a second runner, as a GPU has it
            patch.object(VllmConfig, "_verify_aux_output_compatibility"),
            patch.object(engine_steps, "LlamaConfig", lambda **_: config(experts)),
            patch.object(
                engine_steps,
                "EngineArgs",
                lambda **m: arguments(**m | {"max_num_batched_tokens": AT_ONCE}),
            ),
            patch.object(
                engine_steps, "KVCacheConfig", lambda _, *more: KVCacheConfig(blocks, *more)
            ),
        ):
            super().__init__(folder, 8, asynchronous, ours)
        with (
            patch.object(worker, "bind_routed_experts_capturer"),
            patch.object(worker, "get_tp_group", lambda: SimpleNamespace(is_first_rank=True)),
        ):
            self._connector: Any = worker.get_aux_output_connector(None, self.config, self.cache)
        self.experts, self._ahead, self.version = experts, int(asynchronous), 1
        self._under_way: deque[tuple[Any, ModelRunnerOutput, Any]] = deque()
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
                while self._under_way:  # a pause of vLLM's engine ends when nothing is under way
                    self._finish_step()
                self.version += 1
                assert self.scheduler.reset_prefix_cache(reset_running_requests=True)
            self._advance()
            step += 1

    def _advance(self) -> None:
        scheduled = self.scheduler.schedule()
        if scheduled.total_num_scheduled_tokens:
            self._under_way.append((scheduled, *self._compute(scheduled)))
        else:
            self._connector.begin_step(scheduled.aux_output_connector_metadata)
        if not self._under_way or (
            len(self._under_way) <= self._ahead and scheduled.total_num_scheduled_tokens
        ):
            return
        self._finish_step()

    def _finish_step(self) -> None:
        scheduled, made, told = self._under_way.popleft()
        made.aux_output_connector_output = told.process_output()
        for batch in self.scheduler.update_from_output(scheduled, made).values():
            came = self._decoder.decode([bytes(part) for part in self._encoder.encode(batch)])
            self.processor.process_outputs(came.outputs, came.timestamp, None)

    def _compute(self, scheduled: Any) -> tuple[ModelRunnerOutput, Any]:
        """As a model runner: of the tokens that it has sampled itself, vLLM tells it nothing. With
        what the connector makes of the experts."""
        self._connector.begin_step(scheduled.aux_output_connector_metadata)
        cached = scheduled.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        for name in [new.req_id for new in scheduled.scheduled_new_reqs] + list(
            cached.resumed_req_ids
        ):
            request = self.scheduler.requests[name]
            self.tokens[name] = list(request.all_token_ids)
            self.versions.setdefault(name, [])
            self._see(resumed=name in cached.resumed_req_ids, cached=computed[name])
        rows, sampled = [], []
        for name, count in scheduled.num_scheduled_tokens.items():
            places, tokens = range(computed[name], computed[name] + count), self.tokens[name]
            self._see(chunked=places.stop < len(tokens))
            rows += [
                experts_of(self.version, tokens[: place + 1], self.experts) for place in places
            ]
            sampled.append(self._sample(name) if places.stop == len(tokens) else [])
        names = list(scheduled.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=self._logprobs(names),
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        return output, self._told(scheduled.num_scheduled_tokens, computed, rows, sampled)

    def _told(
        self, counts: dict[str, int], computed: dict[str, int], rows: Any, sampled: list[list[int]]
    ) -> Any:
        self._connector._capturer.device_buffer[: len(rows)] = torch.from_numpy(np.array(rows))
        ends = np.cumsum([0, *counts.values()])
        told = self._connector.prepare_output(
            SimpleNamespace(
                req_ids=list(counts),
                query_start_loc_np=ends,
                num_computed_tokens_np=np.array([computed[name] for name in counts]),
            )
        )
        told.enqueue_cpu_copy(
            np.array([len(tokens) for tokens in sampled]), np.zeros(len(counts), int)
        )
        return told

    def _see(self, **what: Any) -> None:
        self.seen |= {name for name, happened in what.items() if happened}

    def _sample(self, name: str) -> list[int]:
        token = 5 + mixed(*name.encode(), len(self.tokens[name]), self.version) % 1000
        self.tokens[name].append(token)
        self.versions[name].append(self.version)
        return [token]

    def _logprobs(self, names: list[str]) -> LogprobsLists:
        """The sampled token's log-prob is less by the version than its place, so that it says
        both."""
        last = [self.tokens[name][-1] for name in names]
        logprobs = [
            -len(self.tokens[name]) - self.versions[name][-1] / 8 if self.versions[name] else 0
            for name in names
        ]
        return LogprobsLists(
            np.array(last, np.int32)[:, None], np.float32(logprobs)[:, None], np.float32(last)
        )

    def truth(self, name: str, prompt: int) -> np.ndarray:
        """Of a request that has ended: rows are those of the weights that sampled the token after
        them, those of a prompt of the weights that sampled the first."""
        tokens, versions = self.tokens[name], self.versions[name]
        made = [
            experts_of(versions[max(0, i - prompt + 1)], tokens[: i + 1], self.experts)
            for i in range(len(tokens) - 1)
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
