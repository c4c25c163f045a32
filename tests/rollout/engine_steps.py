"""vLLM's scheduler, messages, and output processor with no model between them. Importing vLLM takes
seconds."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig
from vllm import EngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

from openrlhf_ext.rollout.scheduler import QUALIFIED_NAME, ask_at_end

BLOCK = 16


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
        out = 0
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
        for batch in self.scheduler.update_from_output(scheduled, made).values():
            came = self._decoder.decode([bytes(part) for part in self._encoder.encode(batch)])
            self.processor.process_outputs(came.outputs, came.timestamp, None)
            out += len(came.outputs)
        return out


def params_of(tokens: int, way: str) -> SamplingParams:
    """As `GradedSingleTurnExecutor` and `RolloutEngine.generate` ask; ``way``: log-probs ``step``
    by step as vLLM sends them, at the ``end``, or ``none``."""
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
