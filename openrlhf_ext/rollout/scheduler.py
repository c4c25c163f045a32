"""vLLM's scheduler, except that a completion's log-probs, entropies, and experts leave it in one
array at the completion's end.

vLLM sends three small arrays for every token from the scheduler to the caller, which costs more
than anything else that its Python code does for a token (docs/performance.md), and a fourth if it
reports routed experts. Token ids still leave at every step: the engine uses them to count which
weights sampled which token (`response.TokenVersions`).

vLLM imports this module in the engine's own process (`scheduler_cls`, by name). The data travel as
bytes in the output's ``routed_experts``, the only array that a finished completion of vllm 0.32.0
can carry (v1/engine/output_processor.py:468): the six numbers of `_Header`, fp32 log-probs, fp32
entropies if the engine reports them (`worker_extension`), and the experts that routers chose if it
reports those (`vllm_moe.telling_experts`), uint8 or uint16. vLLM itself puts the experts there at
every step. Rows that have left a step are those of its weights, whatever comes later; a prompt's
rows leave with its first sampled token.
"""

from __future__ import annotations

from array import array
from math import prod
from typing import Any, NamedTuple

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import LogprobsLists

from openrlhf_ext.patches.vllm_moe import asks_first_runner

QUALIFIED_NAME = "openrlhf_ext.rollout.scheduler.make_scheduler"
_KEY = "logprobs_at_end"


def ask_at_end(params: SamplingParams) -> None:
    """Requests the log-probs of the sampled tokens, if there are any, in one array, and experts
    with them. Stop strings end a request outside of the scheduler
    (v1/engine/output_processor.py:768), which then does not notice the end: such a request reports
    as usual."""
    if params.logprobs is not None and not params.stop:
        params.extra_args = {**(params.extra_args or {}), _KEY: True}


def unpack(
    completion: CompletionOutput, params: SamplingParams, prompt: int, experts: bool = False
) -> None:
    """Moves the data of the end to vLLM's own fields: log-probs, flat or not, according to
    ``params``; entropies in place of ranks; no token texts. With ``experts``, ``routed_experts``
    always becomes (rows, layers, top-k) uint8 or uint16: a row for each of the ``prompt`` tokens,
    from ``params.routed_experts_prompt_start`` on, and for each sampled token but the last, which
    no router has seen. Raises RuntimeError if rows are missing or left over."""
    tokens = list(completion.token_ids)
    if (params.extra_args or {}).get(_KEY):
        header, told = _read(completion.routed_experts, len(tokens))
        logprobs, entropies, rows = np.split(
            told, np.cumsum([4 * header.logprobs, 4 * header.entropies])
        )
        ranks = entropies.view(np.float32).tolist() if header.entropies else [None] * len(tokens)
        _put_logprobs(
            completion, logprobs.view(np.float32).tolist(), ranks, flat=params.flat_logprobs
        )
        completion.routed_experts = header.shaped(rows) if header.rows else None
    start = params.routed_experts_prompt_start
    expected = prompt - start + len(tokens) - 1 if experts and tokens else 0
    found = 0 if completion.routed_experts is None else len(completion.routed_experts)
    if found != expected:
        raise RuntimeError(
            f"vLLM told {found} rows of routed experts, should be {expected}: of {prompt} tokens "
            f"of the prompt, from {start} on, and {len(tokens)} that it sampled, without the last"
        )


class _Header(NamedTuple):
    """The header of a completion's data: how many numbers follow, and the shape of the experts."""

    logprobs: int
    entropies: int
    rows: int
    layers: int
    topk: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Size of all data, the header included."""
        experts = self.rows * self.layers * self.topk * self.itemsize
        return _HEADER_BYTES + 4 * (self.logprobs + self.entropies) + experts

    def shaped(self, experts: np.ndarray) -> np.ndarray:
        return experts.view(np.dtype(f"u{self.itemsize}")).reshape(
            self.rows, self.layers, self.topk
        )


_HEADER_BYTES = 4 * len(_Header._fields)


def _read(told: np.ndarray | None, tokens: int) -> tuple[_Header, np.ndarray]:
    """Returns header and data. Raises RuntimeError if our scheduler did not write them, or if they
    do not cover this number of tokens."""
    whose = f"was it {QUALIFIED_NAME}?"
    if told is None or told.ndim != 1 or told.dtype != np.uint8 or len(told) < _HEADER_BYTES:
        what = "nothing" if told is None else f"{told.dtype} {told.shape}"
        raise RuntimeError(
            f"vLLM sampled {tokens} tokens and told {what} of them at their end: {whose}"
        )
    header = _Header(*told[:_HEADER_BYTES].view(np.int32).tolist())
    if (
        header.logprobs != tokens
        or header.entropies not in (0, tokens)
        or header.nbytes != len(told)
    ):
        raise RuntimeError(
            f"vLLM sampled {tokens} tokens and told {header.logprobs} log-probs and "
            f"{header.entropies} entropies of them, in {len(told)} bytes, should be "
            f"{header.nbytes}: {whose}"
        )
    return header, told[_HEADER_BYTES:]


def _put_logprobs(
    completion: CompletionOutput, logprobs: list[float], ranks: list[Any], flat: bool
) -> None:
    tokens = list(completion.token_ids)
    if flat:
        starts, ends = list(range(len(tokens))), list(range(1, len(tokens) + 1))
        completion.logprobs = FlatLogprobs(
            starts, ends, tokens, logprobs, ranks, [None] * len(tokens)
        )
    else:
        completion.logprobs = [
            {token: Logprob(*numbers)}
            for token, *numbers in zip(tokens, logprobs, ranks, strict=True)
        ]


class _Kept:
    """The data of an unfinished request."""

    __slots__ = ("entropies", "experts", "logprobs", "row")

    def __init__(self) -> None:
        self.logprobs, self.entropies = array("f"), array("f")
        # copy to bytes: vLLM's arrays of a token are views, and each would keep its whole step
        # alive
        self.experts, self.row = bytearray(), (0, 0, 0)

    def add_experts(self, rows: np.ndarray) -> None:
        """Adds (n, layers, top-k) experts of the step's computed tokens."""
        self.experts += rows.tobytes()
        self.row = (*rows.shape[1:], rows.itemsize)

    def packed(self) -> np.ndarray:
        rows = len(self.experts) // prod(self.row) if self.experts else 0
        header = _Header(len(self.logprobs), len(self.entropies), rows, *self.row)
        parts: list[Any] = [np.array(header, np.int32), self.logprobs, self.entropies, self.experts]
        return np.frombuffer(b"".join(parts), np.uint8)


class _Step:
    """Replaces a step's `LogprobsLists`: adds what vLLM slices for a request of ``kept`` to it and
    returns nothing; other requests get their slice."""

    def __init__(self, told: LogprobsLists, requests: list[str], kept: dict[str, _Kept]) -> None:
        self._told, self._requests, self._kept = told, requests, kept
        # column 0 holds the sampled token
        self._logprobs = array("f", told.logprobs[:, 0].astype(np.float32).tobytes())
        entropies = told.sampled_token_ranks.dtype.kind == "f"  # ranks are integers
        self._entropies = array(
            "f", told.sampled_token_ranks.astype(np.float32).tobytes() if entropies else b""
        )

    def slice_request(self, index: int, count: int) -> LogprobsLists | None:
        kept = self._kept.get(self._requests[index])
        if kept is None:
            return self._told.slice_request(index, count)
        starts = self._told.cu_num_generated_tokens
        start = index if starts is None else starts[index]
        kept.logprobs.extend(self._logprobs[start : start + count])
        kept.entropies.extend(self._entropies[start : start + count])
        return None


class _AtEnd:
    """Mixed into a vLLM scheduler, which provides the first attributes."""

    vllm_config: VllmConfig
    num_spec_tokens: int
    running: list[Any]
    aux_output_connector: AuxOutputSchedulerConnector | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if asks_first_runner(self.vllm_config):
            self.aux_output_connector = AuxOutputSchedulerConnector()
        self._kept: dict[str, _Kept] = {}
        self._of_tokens: set[str] = set()

    def add_request(self, request: Any) -> None:
        super().add_request(request)  # type: ignore[misc]
        if request.sampling_params is not None and request.sampling_params.logprob_token_ids:
            self._of_tokens.add(request.request_id)
        if request.sampling_params is not None and (request.sampling_params.extra_args or {}).get(
            _KEY
        ):
            self._kept[request.request_id] = _Kept()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedules a step without drafts while a request wants the log-probs of given tokens (the
        probe): a step with drafts has none of them, and ends vLLM's first runner (vllm 0.32.0
        v1/sample/rejection_sampler.py:201)."""
        if not (self._of_tokens and self.num_spec_tokens):
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        for request in self.running:
            request.spec_token_ids = []
        drafts, self.num_spec_tokens = self.num_spec_tokens, 0  # nor in a request's first step
        try:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.num_spec_tokens = drafts

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        if model_runner_output.logprobs is not None and self._kept:
            told, requests = model_runner_output.logprobs, model_runner_output.req_ids
            model_runner_output.logprobs = _Step(told, requests, self._kept)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if self.aux_output_connector is not None:
            self._keep_experts(outputs)
        for batch in outputs.values():
            for output in batch.outputs:
                if output.finish_reason is None:
                    continue
                self._of_tokens.discard(output.request_id)
                if output.request_id in self._kept:
                    output.routed_experts = self._kept.pop(output.request_id).packed()
        return outputs

    def _keep_experts(self, outputs: dict[int, Any]) -> None:
        for batch in outputs.values():
            for output in batch.outputs:
                kept = self._kept.get(output.request_id)
                if kept is not None and output.routed_experts is not None:
                    kept.add_experts(output.routed_experts)
                    output.routed_experts = None

    def finish_requests(self, *args: Any, **kwargs: Any) -> list[Any]:
        ended = super().finish_requests(*args, **kwargs)  # type: ignore[misc]
        for request in ended:
            self._kept.pop(request.request_id, None)
            self._of_tokens.discard(request.request_id)
        return ended


class _Scheduler(_AtEnd, Scheduler): ...


class _AsyncScheduler(_AtEnd, AsyncScheduler): ...


def make_scheduler(**arguments: Any) -> Scheduler:
    """Returns a scheduler of the class that vLLM would choose (vllm 0.32.0
    config/scheduler.py:228)."""
    asynchronous = arguments["vllm_config"].scheduler_config.async_scheduling
    return (_AsyncScheduler if asynchronous else _Scheduler)(**arguments)
