"""The rollout actor: OpenRLHF's vLLM actor with weight sync by buckets, deadlines, seeds, and a
probe. The driver imports this module for the class; the engine's own process imports vLLM in the
constructor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from packaging import version as packaging_version

from openrlhf_ext import compat
from openrlhf_ext.exact.walk import Digests
from openrlhf_ext.imports import without_collection
from openrlhf_ext.patches.vllm_moe import telling_experts
from openrlhf_ext.rollout.process import answer_where, describe_process, log_tail
from openrlhf_ext.rollout.response import (
    EngineDied,
    EngineStartError,
    GenerationTimeout,
    GroupRequest,
    InvalidWeights,
    Response,
    Sampling,
    TokenVersions,
    count_tokens,
)
from openrlhf_ext.rollout.sync.base import Link
from openrlhf_ext.rollout.sync.plan import BucketPlan, Receipt, together

if TYPE_CHECKING:
    import vllm
    from vllm import SamplingParams

_ANSWER_S = 5.0
"""Time within which an engine that is not stuck answers a short call."""
_FIRST = -2
"""Priority of the probe; ordinary requests have 0 and run in the order of their arrival."""


class OverlapTimer:
    """Measures the length of the union of intervals, in seconds. Not thread-safe: one event loop,
    one clock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._running = 0
        self._since = 0.0
        self._total = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        if self._running == 0:
            self._since = self._now()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self._total += self._now() - self._since

    @property
    def count(self) -> int:
        return self._running

    def take(self) -> float:
        """Returns the seconds since the last `take`, including an activity still in progress."""
        now = self._now()
        total = self._total + (now - self._since if self._running else 0.0)
        self._total, self._since = 0.0, now
        return total


class _Request(NamedTuple):
    output: Any
    params: SamplingParams


class RolloutEngine(compat.RolloutRayActor):
    """One vLLM engine in a Ray actor: OpenRLHF's (`generate`, `pause_generation`, `sleep`, ...)
    with groups of graded completions as flat arrays, weights by buckets, and deadlines. It refuses
    to sample from weights that arrived incompletely."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it, as in OpenRLHF's actor
        self,
        *args: Any,
        executor_factory: Callable[[], Any],
        fast_tokenizer: bool = True,
        bundle_indices: list[int] | None = None,
        num_gpus: float = 0,
        in_process: bool = False,
        bf16_layers: Sequence[int] | None = None,
        adapter: tuple[int, Sequence[str]] | None = None,
        tells_entropies: bool = False,
        routed_experts: bool = False,
        request_timeout_s: float,
        **engine_args: Any,
    ) -> None:
        """Raises EngineStartError, with the error text of the process that failed.

        Args:
            executor_factory: picklable; makes a `rewards.executor.GradedExecutor`.
            bundle_indices, num_gpus, *args, **engine_args: as in OpenRLHF's actor.
            in_process: run the engine on a thread of this process, not in its own (needs one worker
                per engine and VLLM_ENABLE_V1_MULTIPROCESSING=0).
            bf16_layers: quantize all linear layers except in these decoder layers, and check that
                now and after every update (`rollout.quantized`); None: quantize nothing.
            adapter: rank and modules of the adapters that updates bring on top of the weights from
                disk, which stay (`adapters`); None: updates bring all weights.
            tells_entropies: completions include the entropy of each sampled token's distribution.
            routed_experts: completions include the experts that routers chose
                (`Response.experts_RLK`).
        """
        answer_where()
        with without_collection():
            import vllm

            from openrlhf_ext.rollout import adapters, quantized, scheduler, worker_extension

        self._configure_device_env(
            engine_args.get("distributed_executor_backend"), bundle_indices, num_gpus
        )
        self._configure_vllm_env(packaging_version, vllm, full_determinism=False)
        self.executor = executor_factory()
        self._tokenizer = compat.get_tokenizer(engine_args["model"], use_fast=fast_tokenizer)
        self.kwargs = {
            "worker_extension_cls": worker_extension.QUALIFIED_NAME,
            "scheduler_cls": scheduler.QUALIFIED_NAME,
            "scheduling_policy": "priority",
            **engine_args,
        }
        if bf16_layers is not None:
            self.kwargs = quantized.with_quantized_layers(self.kwargs, bf16_layers)
        if adapter is not None:
            self.kwargs = adapters.with_adapter(self.kwargs, *adapter)
        self._routed_experts = routed_experts
        if routed_experts:
            self.kwargs |= telling_experts()
        self._keeps_base = adapter is not None
        self._in_process, self.tells_entropies = in_process, tells_entropies
        # for images, which are not supported; OpenRLHF's `generate` reads it
        self._mm_pad_token_ids = None
        self._request_timeout_s = request_timeout_s
        self._begin()
        self.llm = await _start(vllm.AsyncEngineArgs(*args, **self.kwargs), in_process, bf16_layers)
        if adapter is not None:
            await self.llm.collective_rpc("hold_adapter")
            self.llm = adapters.AdaptedEngine(self.llm, lambda: self._weight_version)
        if tells_entropies:
            await self.llm.collective_rpc("tell_entropies")

    def _begin(self) -> None:
        """Sets the initial state: nothing is generated, and the weights are those from disk."""
        self._generating = OverlapTimer()
        self._responding = OverlapTimer()
        self._num_tokens = 0
        self._num_sequences = 0
        self._drafts = self._accepted = 0
        self._last_finished = time.monotonic()
        self._weight_version = 0
        self._versions = TokenVersions()
        self._weight_error: str | None = None
        self._probe_tokens: tuple[int, ...] = ()
        self._queued_probe: tuple[_Request, _Request] | None = None
        self._updating, self._resumes = asyncio.Lock(), True

    # ---- generation

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        multi_modal_data: Any = None,
    ) -> vllm.RequestOutput:
        """Returns vLLM's output, with log-probs of only the sampled tokens if any are requested.
        Each completion has ``weight_versions`` (`TokenVersions`), and ``routed_experts`` if the
        engine reports them (`scheduler.unpack`). Raises GenerationTimeout; InvalidWeights if the
        weights are, or became meanwhile, those of an incomplete update; EngineDied."""
        from openrlhf_ext.rollout.scheduler import unpack

        self._require_valid_weights()
        params = _final_only(sampling_params)
        begun_with = self._weight_version
        with self._generating.running():
            output = await self._finish(
                super().generate(list(prompt_token_ids), params, multi_modal_data), params
            )
        for completion in output.outputs:
            unpack(completion, params, len(output.prompt_token_ids), experts=self._routed_experts)
        self._note_versions(output, begun_with)
        self._require_valid_weights()
        self._last_finished = time.monotonic()
        self._num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        for completion in output.outputs:
            if (told := completion.spec_decode_metrics) is not None:
                self._drafts += sum(told.histogram)
                self._accepted += sum(n * times for n, times in enumerate(told.histogram))
        self._num_sequences += len(output.outputs)
        return output

    def _note_versions(self, output: Any, begun_with: int) -> None:
        lengths = [len(completion.token_ids) for completion in output.outputs]
        spans = self._versions.take(output.request_id, begun_with, max(lengths, default=0))
        for completion, length in zip(output.outputs, lengths, strict=True):
            # a request with several completions reports only the oldest possible version
            completion.weight_versions = spans if len(lengths) == 1 else [(begun_with, 0, length)]

    def sampling_params(
        self, sampling: Sampling, *, max_tokens: int | None, **more: Any
    ) -> SamplingParams:
        """Returns sampling parameters with `min_tokens` 0. OpenRLHF's `min_tokens` of 1 makes vLLM
        exclude EOS from the first token's distribution, which is then not the policy's; a
        completion has at least its EOS anyway."""
        from vllm import SamplingParams

        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=max_tokens,
            min_tokens=0,
            skip_special_tokens=False,
            **more,
        )

    async def generate_group(
        self, request: GroupRequest
    ) -> list[Response] | tuple[list[Response], list[Any]]:
        """Returns the graded completions. If the engine reports experts, returns two values: the
        second is ``experts_RLK`` of the completions, of which the caller needs only the reference
        (`Response.experts_at`)."""
        with self._responding.running():
            responses = await self.executor.respond(request, self._tokenizer, self)
        if not self._routed_experts:
            return responses
        return [replace(response, experts_RLK=None) for response in responses], [
            r.experts_RLK for r in responses
        ]

    async def _finish(
        self, generation: Awaitable[vllm.RequestOutput], params: SamplingParams
    ) -> vllm.RequestOutput:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await asyncio.wait_for(generation, self._request_timeout_s)
        except TimeoutError as error:
            raise GenerationTimeout(await self._describe_stall(params)) from error
        except EngineDeadError as error:
            raise EngineDied(
                f"the vLLM engine of this actor died; the end of its log:\n{log_tail()}"
            ) from error

    async def _describe_stall(self, params: SamplingParams) -> str:
        try:
            paused = (
                "paused"
                if await asyncio.wait_for(self.llm.is_paused(), _ANSWER_S)
                else "not paused"
            )
        except TimeoutError:
            paused = f"in an unknown state (vLLM's process does not answer within {_ANSWER_S:g} s)"
        return (
            f"a request (max_tokens = {params.max_tokens}) did not finish within "
            f"{self._request_timeout_s:g} s; {self._generating.count} requests were waiting, the "
            f"last one finished {time.monotonic() - self._last_finished:.1f} s ago, generation "
            f"is {paused}, the weights are of version {self._weight_version}. The engine hangs "
            "or is overloaded; otherwise raise request_timeout_s"
        )

    # ---- weights

    async def discard_weights(self) -> None:
        """Frees all memory without a copy of the weights; refuses generation until an update is
        complete. vLLM saves the buffers, which no update brings (vllm 0.32.0
        v1/worker/gpu_worker.py:299). If updates bring adapters, copies the weights to the host, and
        with them the layers' adapter: all lies in the pool that vLLM saves (gpu_worker.py:589)."""
        self._weight_error = "its weights were given up for an update, which has not come"
        self._resumes = False  # wake_up resumes it
        await self.sleep(level=1 if self._keeps_base else 2)

    async def sleep(self, level: int = 1) -> None:
        """Raises ValueError at level 2 if the engine would lose weights that no update brings
        back."""
        if level == 2 and self._keeps_base:
            raise ValueError(
                "an engine whose updates bring adapters cannot sleep at level 2: its base would "
                "be lost"
            )
        await super().sleep(level)

    async def wake_weights(self) -> None:
        """Holds memory for the weights and none for the KV cache, as a sync of a colocated engine
        needs; works asleep or awake."""
        if not await self.llm.is_sleeping():
            await self.discard_weights()
        await self.wake_up(tags=["weights"])

    async def connect_weight_sync(self, plan: BucketPlan, link: Link) -> None:
        await self.llm.collective_rpc("connect_weight_receiver", args=(plan.to_wire(), vars(link)))

    async def receive_weights(self, version: int) -> Receipt:
        """Loads every tensor, then clears the cache that the old weights computed. Requests in
        flight pause meanwhile and continue with the new weights, from recomputed keys and values.
        If the update does not complete (WeightSyncError), they stay paused, and generation is
        refused, until an update completes. If `probe_logprobs` was called before, queues the same
        probe in front of the requests: a probe queued after they resume would wait until one of
        them ends."""
        async with self._updating:
            if self._weight_error is None:  # otherwise a failed update has paused it
                self._resumes = not await self.llm.is_paused()
            self._weight_error = f"update to version {version} is not complete"
            self._queued_probe = None
            await self.llm.pause_generation(mode="keep", clear_cache=False)
            try:
                receipt = await self._load(version)
            except Exception as error:
                self._weight_error = f"update to version {version} failed: {error}"
                raise
            if self._resumes:
                if self._probe_tokens:
                    self._queued_probe = await self._queue_probe()
                await self.llm.resume_generation()
            return receipt

    async def _load(self, version: int) -> Receipt:
        load_s, sums = zip(
            *await self.llm.collective_rpc("replace_weights", args=(version,)), strict=True
        )
        await self.reset_prefix_cache()
        await self._change_version(version)
        self._weight_error = None
        return together(load_s, sums)

    async def _change_version(self, version: int) -> None:
        """Sets the new version. The engine is paused, so the counts are final: an engine in another
        process has answered two calls after the tokens that it sampled before."""
        tokens = await self.sampled_tokens()
        self._weight_version = version
        if self._generating.count == 0:
            self._versions.forget_all()
        self._versions.change(version, tokens)

    async def sampled_tokens(self) -> dict[str, int]:
        """Returns the number of tokens of every unfinished request so far, by request id."""
        if self._in_process:
            return await self.llm.count_tokens()
        return count_tokens(self.llm.output_processor)

    async def reset_prefix_cache(self) -> None:
        """Clears all cached keys and values, including those of unfinished requests, which are
        recomputed."""
        if not await self.llm.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM could not reset its prefix cache: blocks are still in use")

    async def weight_version(self) -> int:
        """Returns the version of the weights in use; 0 for those from disk."""
        return self._weight_version

    async def probe_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Returns the log-prob of every token but the first, at temperature 1. All but the last
        come from a computation of the whole prompt, for which vLLM does not read its prefix cache.
        The last one is computed on top of the cache, as in generation."""
        self._require_valid_weights()
        if self._probe_tokens != tuple(token_ids):
            self._probe_tokens, self._queued_probe = tuple(token_ids), None
        probe, self._queued_probe = self._queued_probe or await self._queue_probe(), None
        answers: list[Any] = [
            await self._finish(request.output.get(), request.params) for request in probe
        ]
        last, whole = answers
        scored = zip(token_ids[1:-1], whole.prompt_logprobs[1:-1], strict=True)
        return [entry[token].logprob for token, entry in scored] + [
            last.outputs[0].logprobs[0][token_ids[-1]].logprob
        ]

    async def continuation(
        self, token_ids: Sequence[int], length: int, seed: int
    ) -> tuple[list[int], list[float]]:
        """Returns the model's own continuation of a text, past an end of sequence too: (length,)
        tokens at temperature 1, and their log-probs."""
        said = {
            "max_tokens": length,
            "ignore_eos": True,
            "temperature": 1.0,
            "seed": seed,
            "logprobs": 0,
        }
        request = await self._add_request(list(token_ids), _FIRST, **said)
        output: Any = await self._finish(request.output.get(), request.params)
        (completion,) = output.outputs
        logprobs = [
            at[token].logprob
            for token, at in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
        return list(completion.token_ids), logprobs

    async def walk(self, token_ids: Sequence[int]) -> list[Digests]:
        """Returns what each worker's modules compute for a text (`openrlhf_ext.exact.walk`), as
        digests. No other request may be in progress."""
        await self.llm.collective_rpc("begin_walk")
        # log-probs of a prompt make vLLM compute it whole, without its prefix cache
        request = await self._add_request(
            list(token_ids), _FIRST, max_tokens=1, temperature=0.0, prompt_logprobs=0
        )
        await self._finish(request.output.get(), request.params)
        return await self.llm.collective_rpc("end_walk", args=(len(token_ids),))

    async def _queue_probe(self) -> tuple[_Request, _Request]:
        """Queues the request that reads the prefix cache, then the one that fills it."""
        *prefix, final = self._probe_tokens
        greedy: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0}
        last = await self._add_request(
            prefix, _FIRST, logprobs=1, logprob_token_ids=[final], **greedy
        )
        return last, await self._add_request(
            [*prefix, final], _FIRST + 1, prompt_logprobs=0, **greedy
        )

    async def _add_request(self, token_ids: list[int], priority: int, **params: Any) -> _Request:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind
        from vllm.utils import random_uuid

        asked = SamplingParams(detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, **params)
        prompt = TokensPrompt(prompt_token_ids=token_ids)
        return _Request(
            await self.llm.add_request(random_uuid(), prompt, asked, priority=priority), asked
        )

    def _require_valid_weights(self) -> None:
        if self._weight_error is not None and not self._updating.locked():
            raise InvalidWeights(f"this engine must not be sampled from: {self._weight_error}")

    # ---- calls of the controller

    async def rollout_stats(self) -> dict[str, Any]:
        """Returns counts since the last call. generation_s: time with at least one request in
        progress; exposed_grading_s: time in which responses were pending and nothing was being
        generated; reward_failures: messages of failed gradings."""
        generation_s, response_s = self._generating.take(), self._responding.take()
        stats = {
            "generated_tokens": self._num_tokens,
            "generated_sequences": self._num_sequences,
            "drafts": self._drafts,
            "accepted": self._accepted,
            "generation_s": generation_s,
            "exposed_grading_s": max(0.0, response_s - generation_s),
            "reward_failures": self.executor.take_failures(),
        }
        self._num_tokens = self._num_sequences = self._drafts = self._accepted = 0
        return stats

    async def ping(self) -> None:
        """Returns once the engine has started; raises if it has died."""
        await self.llm.is_sleeping()

    async def process_info(self) -> dict[str, Any]:
        return describe_process()


def _final_only(asked: SamplingParams) -> SamplingParams:
    """Returns the same parameters for a request with one output, at its end, and no alternatives to
    its tokens. Beside a request with `logprob_token_ids`, the probe, vLLM fills the columns of
    alternatives with token 0 at -inf (vllm 0.32.0 v1/sample/sampler.py:197), which hides a sampled
    token 0. `logprobs=0` has no such column."""
    from vllm.sampling_params import RequestOutputKind

    from openrlhf_ext.rollout.scheduler import ask_at_end

    params = asked.clone()
    # this request's own: OpenRLHF's `generate`, the engine, and vLLM would each copy it deeply
    params.skip_clone = True
    params.output_kind = RequestOutputKind.FINAL_ONLY
    if params.logprobs is not None:
        params.logprobs = 0
        ask_at_end(params)
    return params


async def _start(
    engine_args: vllm.AsyncEngineArgs, in_process: bool, bf16_layers: Sequence[int] | None
) -> Any:
    try:
        from openrlhf_ext.rollout.in_process import start_engine

        llm = await start_engine(engine_args, in_process)
        if bf16_layers is not None:
            await llm.collective_rpc("prove_quantized", args=(list(bf16_layers),))
        return llm
    except Exception as error:
        log = "" if in_process else f"\nThe end of this process's log:\n{log_tail()}"
        raise EngineStartError(
            f"vLLM did not start: {type(error).__name__}: {error}{log}"
        ) from error
