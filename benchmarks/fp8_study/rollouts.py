"""A vLLM engine outside of a run, with a random checkpoint, in BF16 or as the runs' FP8 engines
are: vLLM's
``fp8_per_block`` on a GPU, emulated on a CPU."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.fp8_study.cells import BF16
from tests.gpu.kit import Machine

_GPU_SHARE = 0.5
_ROUNDS = 2


def measure(machine: Machine, way: str, study: dict[str, Any]) -> dict[str, Any]:
    """Seconds to start, of the first batch (kernels are compiled), and of the same one again;
    tokens a second of prefill and of decoding.

    Args:
        way: 'bf16' or 'blockwise', the only one that engines have.
    """
    settings = study["engine"]
    prompt, new = settings["prompt_tokens"], settings["new_tokens"]
    with tempfile.TemporaryDirectory() as folder:
        _random_checkpoint(machine, Path(folder), study)
        started = time.perf_counter()
        llm = _engine(machine, folder, way, prompt + new, settings["sequences"])
        found: dict[str, Any] = {"start_seconds": time.perf_counter() - started}
        prompts = _prompts(settings, study["layers"]["vocabulary"])
        found["first_batch_seconds"] = _generated(llm, prompts, new)
        whole = min(_generated(llm, prompts, new) for _ in range(_ROUNDS))
        prefill = min(_generated(llm, prompts, 1) for _ in range(_ROUNDS))
        return found | {
            "again_seconds": whole,
            "prefill_tokens_per_second": len(prompts) * prompt / prefill,
            "decode_tokens_per_second": len(prompts) * (new - 1) / max(whole - prefill, 1e-9),
        }


def _engine(machine: Machine, folder: str, way: str, length: int, sequences: int) -> Any:
    from openrlhf_ext.options.sections import Vllm
    from openrlhf_ext.rollout.launch import engine_env, offline_engine_args

    os.environ |= engine_env(use_gpu=machine.on_gpu, model_path=folder)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # errors have a traceback here
    dtype = "bfloat16" if machine.on_gpu else "float32"
    options = Vllm(max_num_seqs=sequences, kv_cache_mib=64)
    arguments = offline_engine_args(
        folder, dtype, length, options, _GPU_SHARE if machine.on_gpu else None, {}
    )
    arguments.pop("in_process", None)
    arguments |= {
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
    }
    if way != BF16:
        from openrlhf_ext.rollout.quantized import with_quantized_layers

        arguments = with_quantized_layers(arguments, [])
    from vllm import LLM

    llm = LLM(**arguments)
    if way != BF16:
        llm.apply_model(_require_fp8)
    return llm


def _require_fp8(model: torch.nn.Module) -> None:
    from openrlhf_ext.rollout.quantized import require_fp8

    require_fp8(model, [])


def _random_checkpoint(machine: Machine, folder: Path, study: dict[str, Any]) -> None:
    """Qwen2 with the sizes of the layers, and as many as the engine's."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes, length = (
        study["layers"],
        study["engine"]["prompt_tokens"] + study["engine"]["new_tokens"],
    )
    config = Qwen2Config(
        vocab_size=sizes["vocabulary"],
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["mlp"],
        num_hidden_layers=study["engine"]["num_layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        max_position_embeddings=length,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with machine.device:
        model = Qwen2ForCausalLM(config).to(torch.bfloat16 if machine.on_gpu else torch.float32)
    model.save_pretrained(folder)
    del model
    if machine.on_gpu:
        torch.cuda.empty_cache()


def _prompts(settings: dict[str, Any], vocabulary: int) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    size = (settings["sequences"], settings["prompt_tokens"])
    return [
        {"prompt_token_ids": row}
        for row in torch.randint(2, vocabulary, size, generator=generator).tolist()
    ]


def _generated(llm: Any, prompts: list[dict[str, list[int]]], tokens: int) -> float:
    """Seconds of so many tokens for each prompt."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    counts = {len(output.outputs[0].token_ids) for output in outputs}
    assert counts == {tokens}, f"{tokens} tokens were asked for, there are {counts}"
    return seconds
