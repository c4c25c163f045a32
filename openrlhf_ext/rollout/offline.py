"""A vLLM engine of this process, for completions outside a run; the weights stay those of the disk.

Everything that is asked for together is put into the queue before the engine steps, and nothing cached is left from
before: what is batched with what, and so every rounding, depends on the request alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import vllm
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind

from openrlhf_ext.options.sections import Vllm
from openrlhf_ext.rollout.errors import EngineStartError, GenerationTimeout
from openrlhf_ext.rollout.in_process import InProcessEngine
from openrlhf_ext.rollout.launch import batch_limits, cpu_engine_args
from openrlhf_ext.rollout.process import take_down_with_me


@dataclass(frozen=True, kw_only=True)
class OfflineSettings:
    """How the engine is started; ``launch.engine_env`` has to be in the environment before this module is imported.

    Attributes:
        max_model_len: longest prompt plus completion, tokens.
        gpu_memory_utilization: share of each GPU for vLLM; without effect on CPU.
        kv_cache_mib: KV cache per worker on CPU, MiB; a GPU's follows from ``gpu_memory_utilization``.
        start_timeout_s: deadline for loading the model, seconds.
        stall_timeout_s: longest time in which no completion finishes, seconds.
    """

    model_path: str
    dtype: str
    max_model_len: int
    tensor_parallel_size: int
    gpu_memory_utilization: float
    kv_cache_mib: int
    use_gpu: bool
    start_timeout_s: float
    stall_timeout_s: float


class OfflineEngine:
    """Completes prompts given as tokens. Use it from one event loop; :meth:`close` it."""

    def __init__(self, llm: Any, stall_timeout_s: float) -> None:
        self._llm, self._stall_timeout_s, self._asked = llm, stall_timeout_s, 0

    @classmethod
    async def start(cls, settings: OfflineSettings) -> OfflineEngine:
        """Load the model. Raises EngineStartError: vLLM failed, with its error text; or the deadline passed."""
        try:
            llm = await asyncio.wait_for(_start(settings), settings.start_timeout_s)
        except TimeoutError as error:
            raise EngineStartError(
                f"vLLM did not load {settings.model_path} within {settings.start_timeout_s:g} s (--engine_timeout_s)"
            ) from error
        except Exception as error:
            raise EngineStartError(f"vLLM did not start: {type(error).__name__}: {error}") from error
        return cls(llm, settings.stall_timeout_s)

    async def complete(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], *, temperature: float, top_p: float, max_tokens: int,
        stop_token_ids: list[int],
    ) -> list[list[int]]:  # fmt: skip
        """Sample one completion for each of these prompts.

        Args:
            seeds: of each completion, below 2**63.
            temperature, top_p, max_tokens, stop_token_ids: as vLLM's.

        Returns:
            Sampled token ids, in the given order, the one that ended a completion included.

        Raises:
            GenerationTimeout: nothing finished for ``stall_timeout_s``.
            EngineDied: the engine stopped working.
        """
        params = [
            vllm.SamplingParams(
                temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed, stop_token_ids=stop_token_ids,
                detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for seed in seeds
        ]  # fmt: skip
        try:
            requests = await asyncio.wait_for(self._queue(prompts, params), self._stall_timeout_s)
        except TimeoutError as error:
            raise GenerationTimeout(
                f"vLLM did not take {len(prompts)} requests within {self._stall_timeout_s:g} s: the engine hangs"
            ) from error
        outputs = [asyncio.ensure_future(request.get()) for request in requests]
        for number, finished in enumerate(asyncio.as_completed(outputs)):
            try:
                await asyncio.wait_for(finished, self._stall_timeout_s)
            except TimeoutError as error:
                raise GenerationTimeout(
                    f"no completion finished for {self._stall_timeout_s:g} s, {len(outputs) - number} of "
                    f"{len(outputs)} are missing: the engine hangs, or --engine_timeout_s is too short for "
                    f"{max_tokens} tokens"
                ) from error
        return [list(output.result().outputs[0].token_ids) for output in outputs]

    async def _queue(self, prompts: Sequence[list[int]], params: Sequence[Any]) -> list[Any]:
        await self._llm.pause_generation(mode="keep", clear_cache=True)
        requests = []
        for prompt, each in zip(prompts, params, strict=True):
            self._asked += 1
            prompt_tokens = TokensPrompt(prompt_token_ids=prompt)
            requests.append(await self._llm.add_request(str(self._asked), prompt_tokens, each))
        await self._llm.resume_generation()
        return requests

    def close(self) -> None:
        self._llm.shutdown()


async def _start(settings: OfflineSettings) -> Any:
    options = Vllm(tensor_parallel_size=settings.tensor_parallel_size, kv_cache_mib=settings.kv_cache_mib)
    engine_args = {
        "model": settings.model_path,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enable_prefix_caching": True,  # a problem's samples share its prompt
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **batch_limits(settings.use_gpu, options, settings.max_model_len),
    }
    if settings.use_gpu:
        engine_args["gpu_memory_utilization"] = settings.gpu_memory_utilization
    else:
        engine_args |= {"enforce_eager": True, **cpu_engine_args(options)}
    if engine_args.pop("in_process", False):
        return await InProcessEngine.start(vllm.AsyncEngineArgs(**engine_args))
    llm = vllm.AsyncLLMEngine.from_engine_args(vllm.AsyncEngineArgs(**engine_args))
    take_down_with_me()  # else its processes outlive a command that is killed
    return llm
