"""vLLM's scheduler, but the log-probs of a completion leave it in one array, at the completion's end.

vLLM sends three small arrays for every token from the scheduler to whoever asked, which costs more than anything else
that its Python does for a token (docs/performance.md). Token ids still go out at every step: by them the engine counts
which weights sampled which (`response.TokenVersions`).

vLLM imports this module in the engine's own process (`scheduler_cls`, by name). What travels is an fp32 array of
(tokens, 1 or 2): log-prob, and entropy where the engine tells it (`worker_extension`), in the output's
``routed_experts``, the one array for which vllm 0.29.0 has a place in a finished completion
(v1/engine/output_processor.py:428); engines here do not return experts.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import LogprobsLists

QUALIFIED_NAME = "openrlhf_ext.rollout.scheduler.make_scheduler"
_KEY = "logprobs_at_end"


def ask_at_end(params: SamplingParams) -> None:
    """Asks for the log-probs of the sampled tokens, if for any, in one array. Stop strings end a request outside of the
    scheduler (v1/engine/output_processor.py:695), which then does not know of an end: there they come as usual."""
    if params.logprobs is not None and not params.stop:
        params.extra_args = {**(params.extra_args or {}), _KEY: True}


def unpack(completion: CompletionOutput, params: SamplingParams) -> None:
    """Puts what came at the end where vLLM has log-probs, flat or not, as ``params`` say; entropies in the place of
    ranks, no ranks and no texts of tokens. Raises RuntimeError: it is not one for every token."""
    if not (params.extra_args or {}).get(_KEY):
        return
    told_TK, tokens = completion.routed_experts, list(completion.token_ids)
    if told_TK is None or len(told_TK) != len(tokens):
        count = 0 if told_TK is None else len(told_TK)
        raise RuntimeError(f"vLLM sampled {len(tokens)} tokens and told {count} log-probs: was it {QUALIFIED_NAME}?")
    completion.routed_experts = None
    logprobs, *more = told_TK.T.tolist()
    ranks = more[0] if more else [None] * len(tokens)
    if params.flat_logprobs:
        starts, ends = list(range(len(tokens))), list(range(1, len(tokens) + 1))
        completion.logprobs = FlatLogprobs(starts, ends, tokens, logprobs, ranks, [None] * len(tokens))
    else:
        completion.logprobs = [
            {token: Logprob(*numbers)} for token, *numbers in zip(tokens, logprobs, ranks, strict=True)
        ]


class _Step:
    """In the place of a step's `LogprobsLists`: what vLLM cuts out for a request of ``kept`` is added there, and
    nothing leaves; the others get theirs."""

    def __init__(self, told: LogprobsLists, requests: list[str], kept: dict[str, tuple[array, array]]) -> None:
        self._told, self._requests, self._kept = told, requests, kept
        self._logprobs = array("f", told.logprobs[:, 0].astype(np.float32).tobytes())  # the sampled token's is first
        entropies = told.sampled_token_ranks.dtype.kind == "f"  # ranks are integers
        self._entropies = array("f", told.sampled_token_ranks.astype(np.float32).tobytes() if entropies else b"")

    def slice_request(self, index: int, count: int) -> LogprobsLists | None:
        kept = self._kept.get(self._requests[index])
        if kept is None:
            return self._told.slice_request(index, count)
        starts = self._told.cu_num_generated_tokens
        start = index if starts is None else starts[index]
        kept[0].extend(self._logprobs[start : start + count])
        kept[1].extend(self._entropies[start : start + count])
        return None


class _AtEnd:
    """Mixed into a scheduler of vLLM."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept: dict[str, tuple[array, array]] = {}

    def add_request(self, request: Any) -> None:
        super().add_request(request)  # type: ignore[misc]
        if request.sampling_params is not None and (request.sampling_params.extra_args or {}).get(_KEY):
            self._kept[request.request_id] = (array("f"), array("f"))

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        if model_runner_output.logprobs is not None and self._kept:
            told, requests = model_runner_output.logprobs, model_runner_output.req_ids
            model_runner_output.logprobs = _Step(told, requests, self._kept)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for batch in outputs.values():
            for output in batch.outputs:
                if output.finish_reason is not None and output.request_id in self._kept:
                    logprobs, entropies = self._kept.pop(output.request_id)
                    columns = [logprobs, entropies] if entropies else [logprobs]
                    output.routed_experts = np.array(columns, dtype=np.float32).T.copy()
        return outputs

    def finish_requests(self, *args: Any, **kwargs: Any) -> list[Any]:
        ended = super().finish_requests(*args, **kwargs)  # type: ignore[misc]
        for request in ended:
            self._kept.pop(request.request_id, None)
        return ended


class _Scheduler(_AtEnd, Scheduler): ...


class _AsyncScheduler(_AtEnd, AsyncScheduler): ...


def make_scheduler(**arguments: Any) -> Scheduler:
    """Of the class that vLLM would have taken (vllm 0.29.0 config/scheduler.py:201)."""
    asynchronous = arguments["vllm_config"].scheduler_config.async_scheduling
    return (_AsyncScheduler if asynchronous else _Scheduler)(**arguments)
