"""vLLM's scheduler, messages and output processor with no model between them, and what we make of
their completions (engine_side.py). Imports vLLM, which takes seconds."""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
from transformers import LlamaConfig
from vllm import EngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

from openrlhf_ext.rewards.executor import GradedSingleTurnExecutor
from openrlhf_ext.rewards.grading import FailurePolicy
from openrlhf_ext.rollout.response import GroupRequest, Sampling
from openrlhf_ext.rollout.scheduler import QUALIFIED_NAME, ask_at_end, unpack
from openrlhf_ext.rollout.worker_extension import entropies

BLOCK, PROMPT, LONG = 16, 256, 8192


class Clock:
    """CPU seconds of this thread by part."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.thread_time()
        yield
        self.seconds[name] += time.thread_time() - start


class Collector:
    """In the place of vLLM's queue of one request."""

    def put(self, output: Any) -> None:
        self.output = output


class Engine:
    """vLLM's scheduler and output processor with no model between them, one request for each
    collector."""

    def __init__(
        self, folder: str, sequences: int, asynchronous: bool = False, ours: bool = True
    ) -> None:
        LlamaConfig(
            architectures=["LlamaForCausalLM"],
            vocab_size=1024,
            hidden_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=16384,
        ).save_pretrained(folder)
        self.config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            max_model_len=16384,
            max_num_seqs=sequences,
            max_num_batched_tokens=max(8192, sequences),
            scheduling_policy="priority",
            enable_prefix_caching=True,
            scheduler_cls=QUALIFIED_NAME if ours else None,
            disable_log_stats=True,
            dtype="bfloat16",
            block_size=BLOCK,
        ).create_engine_config()
        self.config.scheduler_config.async_scheduling = asynchronous
        blocks = self.config.cache_config.num_gpu_blocks = sequences * 16384 // BLOCK
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=4, head_size=16, dtype=torch.bfloat16
        )
        self.cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        self.scheduler: Any = self.config.scheduler_config.get_scheduler_cls()(
            vllm_config=self.config,
            kv_cache_config=self.cache,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK,
            log_stats=False,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.processor = OutputProcessor(None, log_stats=False)
        self._encoder, self._decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        self.clock = Clock()

    def add(self, name: str, prompt: list[int], params: SamplingParams) -> Collector:
        asked = EngineCoreRequest(
            name, prompt, None, params, None, 0.0, None, None, None, external_req_id=name
        )
        collector: Any = Collector()
        self.processor.add_request(asked, None, None, 0, collector)
        self.scheduler.add_request(Request.from_engine_core_request(asked, self._hasher))
        return collector

    def step(self, tokens: Any, told: Any) -> int:
        """One step; ``tokens`` and ``told`` of the requests' names: what the model sampled (1 token
        each), and its `LogprobsLists`. Returns how many tokens came out."""
        clock, out = self.clock, 0
        with clock.part("schedule"):
            scheduled = self.scheduler.schedule()
        names = list(scheduled.num_scheduled_tokens)
        made = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=tokens(names),
            logprobs=told(names),
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        with clock.part("update"):
            outputs = self.scheduler.update_from_output(scheduled, made)
        for batch in outputs.values():
            with clock.part("encode"):
                sent = [bytes(part) for part in self._encoder.encode(batch)]
            with clock.part("decode"):
                came = self._decoder.decode(sent)
            with clock.part("outputs"):
                self.processor.process_outputs(came.outputs, came.timestamp, None)
            out += len(came.outputs)
        return out


def params_of(tokens: int, way: str) -> SamplingParams:
    """As `GradedSingleTurnExecutor` and `RolloutEngine.generate` ask; ``way``: of
    engine_side.WAYS."""
    params = SamplingParams(
        max_tokens=tokens,
        min_tokens=0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **({} if way == "none" else {"logprobs": 0, "flat_logprobs": True}),
    )
    if way == "end":
        ask_at_end(params)
    return params


def run(way: str, sequences: int, length: int, group: int) -> tuple[Engine, list[Collector]]:
    """Completions from their prompts to their ends, side by side; each ``group`` has a prompt of
    its own."""
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(folder, sequences, ours=way == "end")
    params = params_of(length, way)
    collectors = [
        engine.add(str(number), prompt_of(number // group), params) for number in range(sequences)
    ]

    def told(names: list[str]) -> LogprobsLists | None:
        count = len(names)
        if way == "none":
            return None
        return LogprobsLists(
            np.full((count, 1), 7, np.int32),
            np.full((count, 1), -0.5, np.float32),
            np.full(count, 1.5, np.float32),
        )

    while engine.scheduler.get_num_unfinished_requests():
        engine.step(lambda names: [[7] for _ in names], told)
        if way != "none":
            with engine.clock.part("entropies"):
                entropies(torch.zeros(sequences, 2))
    return engine, collectors


def prompt_of(group: int) -> list[int]:
    return [3 + group] * PROMPT


def measure(way: str, sequences: int, length: int, group: int) -> dict[str, float]:
    """Microseconds for each token by part: of steps, with ``length`` tokens of each sequence; of
    responses, with one group of LONG tokens each."""
    gc.collect()
    gc.freeze()  # as vLLM's engine does
    engine, _ = run(way, sequences, length, group)
    found = {
        name: seconds / (sequences * length) * 1e6 for name, seconds in engine.clock.seconds.items()
    }
    if way != "none":  # there is nothing to make a response of
        _, collectors = run(way, group, LONG, group)
        seconds = carry(collectors, params_of(LONG, way))
        found |= {name: value / (group * LONG) * 1e6 for name, value in seconds.items()}
    gc.unfreeze()
    return found


def carry(collectors: list[Collector], params: SamplingParams) -> Counter[str]:
    """CPU seconds of making a group's responses and of their way through Ray."""
    clock, outputs = Clock(), iter([collector.output for collector in collectors])

    async def generate(prompt: list[int], asked: Any) -> Any:
        output = next(outputs)
        unpack(output.outputs[0], params, PROMPT)
        output.outputs[0].weight_versions = [(0, 0, len(output.outputs[0].token_ids))]
        return output

    engine = SimpleNamespace(
        generate=generate, sampling_params=lambda *_, **__: params, tells_entropies=True
    )
    request = GroupRequest("", None, len(collectors), Sampling(1.0, 1.0, params.max_tokens, 16384))
    executor = GradedSingleTurnExecutor(None, FailurePolicy(0, 0.0))
    with clock.part("responses"):
        made = asyncio.run(
            executor.respond(request, lambda *_, **__: {"input_ids": prompt_of(0)}, engine)
        )
    with clock.part("ray"):
        came = ray.get(ray.put(made))
    if not all(
        np.array_equal(one.tokens_S, other.tokens_S) for one, other in zip(made, came, strict=True)
    ):
        raise RuntimeError("Ray brought other responses than were made")
    return clock.seconds
