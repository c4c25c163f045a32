"""The two sides of exact mode outside of a run: an engine that samples and a policy that computes
the log-probs again. Each in a process of its own (``benchmarks/exact.py``), because an engine is
exact by the environment of its process.
"""

from __future__ import annotations

import json
import os
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

TYPES = {"fp32": ("float32", {}), "bf16": ("bfloat16", {"head_dtype": "float32"})}  # as in a run
TEMPERATURES = (1.0, 0.7)
LONGEST, COMMON = 320, 140  # tokens of a sequence at most, of the beginnings that prompts share
JOIN_S = 600.0


def sample(given: dict[str, Any]) -> dict[str, Any]:
    """Prompts, what was sampled for them at each temperature, and CPU seconds of it."""
    # vLLM reads it when it is imported; several workers need a process that waits for them
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(given["tp"] - 1)
    from vllm import LLM, SamplingParams

    from openrlhf_ext.rollout.worker_extension import QUALIFIED_NAME

    dtype, overrides = TYPES[given["type"]]
    llm = LLM(
        given["model"],
        dtype=dtype,
        hf_overrides=overrides,
        tensor_parallel_size=given["tp"],
        distributed_executor_backend="uni" if given["tp"] == 1 else "mp",
        max_model_len=LONGEST,
        kv_cache_memory_bytes=256 << 20,
        enable_chunked_prefill=given["engine"]["max_num_batched_tokens"] < LONGEST,
        enforce_eager=True,
        logprobs_mode="processed_logprobs",
        skip_tokenizer_init=True,
        worker_extension_cls=QUALIFIED_NAME,
        **given["engine"],
    )
    tokens_of = partial(
        random.Random(given["engine"]["seed"]).choices, range(llm.model_config.get_vocab_size())
    )
    common, prompts, limits = tokens_of(k=COMMON), [], []
    while sum(limits) < given["tokens"]:
        prompts.append(common * (len(prompts) % 3 == 0) + tokens_of(k=1 + 7 * len(prompts) % 60))
        limits.append(1 + 11 * len(prompts) % 96)
    batches, started = [], time.process_time()
    for temperature in TEMPERATURES:
        settings = partial(
            SamplingParams, temperature=temperature, logprobs=0, ignore_eos=True, detokenize=False
        )
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [settings(max_tokens=limit) for limit in limits],
            use_tqdm=False,
        )
        sampled = [output.outputs[0] for output in outputs]
        logprobs = [
            each[token].logprob
            for one in sampled
            for each, token in zip(one.logprobs, one.token_ids, strict=True)
        ]
        batches.append([temperature, [[*one.token_ids] for one in sampled], logprobs])
    return {"prompts": prompts, "batches": batches, "cpu_s": time.process_time() - started}


def policy_of(
    given: dict[str, Any], exact: bool, rows: int, share: bool = True, tokens: int = 0
) -> Any:
    """A policy on all ranks, with micro-batches of so many rows or tokens."""
    from megatron.core import parallel_state

    from openrlhf_ext.megatron.distributed import initialize_distributed
    from openrlhf_ext.megatron.layers.exact import ExactLayers
    from openrlhf_ext.megatron.layout import ParallelLayout
    from openrlhf_ext.megatron.policy import MegatronPolicy
    from openrlhf_ext.megatron.settings import ModelSettings
    from openrlhf_ext.options.sections import Actor, Megatron, Rollout, Train

    layout = ParallelLayout(given["tp"], given["tp"])
    if not parallel_state.model_parallel_is_initialized():
        initialize_distributed(layout, JOIN_S, 1)
    limits = {"micro_batch_size": rows, "max_tokens_per_gpu": tokens or 1}
    settings = ModelSettings(
        given["model"],
        layout,
        Megatron(param_dtype=given["type"], share_prompts_enable=share),
        Rollout(**limits),
        Train(dynamic_batch_enable=tokens > 0, **limits),
        (ExactLayers(LONGEST),) * exact,
        optimizer=Actor(),
        max_len=LONGEST,
    )
    return MegatronPolicy(settings)


def batch_of(prompts: list[list[int]], rows: list[list[int]]) -> Any:
    import numpy as np

    from openrlhf_ext.megatron.step.batch import sequence_batch

    whole = [np.int32(prompt + row) for prompt, row in zip(prompts, rows, strict=True)]
    spans = [[(len(p), len(tokens))] for p, tokens in zip(prompts, whole, strict=True)]
    return sequence_batch(whole, spans)


def score(given: dict[str, Any]) -> list[dict[str, float]]:
    """How a policy's log-probs differ from those of files of ``sample``, for each packing."""
    import torch

    found = []
    for packing in given["packings"]:
        policy, gaps, differ = policy_of(given, given["exact"], **packing), [], 0
        for path in given["files"]:
            sampled = json.loads(Path(path).read_text())
            for temperature, rows, logprobs in sampled["batches"]:
                out = policy.logprobs(batch_of(sampled["prompts"], rows), temperature=temperature)
                ours_N, theirs_N = out.logprobs_N.float(), torch.tensor(logprobs)
                differ += int((ours_N.view(torch.int32) != theirs_N.view(torch.int32)).sum())
                gaps.append((ours_N.double() - theirs_N.double()).abs())
        gap_N = torch.cat(gaps)
        sizes = {"tokens": len(gap_N), "mean": gap_N.mean().item(), "largest": gap_N.max().item()}
        found.append({"packing": packing, "differ": differ} | sizes)
    return found


def make_products(policy: Any) -> None:
    """Those of all weights, as the first pass after an update does."""
    from openrlhf_ext.exact.table import device_operations
    from openrlhf_ext.megatron.layers.exact_modules import ExactLinear

    table = device_operations()
    for module in policy.chunks[0].modules():
        if isinstance(module, ExactLinear):
            table.product(module.weight)
    table.head_product(policy.output_embedding())
