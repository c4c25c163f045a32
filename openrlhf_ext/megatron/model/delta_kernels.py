"""The operations of a gated delta net over a pack, chosen by device: ``openrlhf_ext.delta_rule`` on
a CPU and in fp32, flash-linear-attention's kernels in half precision on a GPU, where they have not
run yet (call 1 of tests/gpu compares them with the rule).

Shape suffixes as in ``openrlhf_ext.delta_rule``; G = key heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from openrlhf_ext.delta_rule import Inputs, causal_convolution, gated_delta_rule
from openrlhf_ext.megatron.model.spec import PackedSequences

_FORMATS = (torch.bfloat16, torch.float16)


def convolved(mixed_LD: Tensor, weight_D1W: Tensor, pack: PackedSequences) -> Tensor:
    """(L, D) SiLU of the causal convolution."""
    if not _uses_kernels(mixed_LD):
        gaps = pack.gaps(weight_D1W.shape[-1])
        return F.silu(causal_convolution(mixed_LD, weight_D1W, gaps))
    from fla.modules.causal_conv1d import causal_conv1d

    out_1LD, _state = causal_conv1d(
        mixed_LD[None],
        weight_D1W[:, 0],
        activation="silu",
        cu_seqlens=pack.long_boundaries,
        cu_seqlens_cpu=pack.host_boundaries,
    )
    return out_1LD[0]


def ruled(inputs: Inputs, pack: PackedSequences) -> Tensor:
    """(L, H, V) outputs of the gated delta rule."""
    if not _uses_kernels(inputs.v_LHV):
        return gated_delta_rule(inputs, pack.chunks)
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    out_1LHV, _state = chunk_gated_delta_rule(
        *(tensor[None] for tensor in inputs),
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=pack.long_boundaries,
        cu_seqlens_cpu=pack.host_boundaries,
    )
    return out_1LHV[0]


def _uses_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype in _FORMATS
