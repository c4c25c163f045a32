"""A decoder layer's gated delta net as a Megatron module.

Heads are divided over tensor-parallel ranks, every part of the projection by itself
(``attentions.delta_net``). Under sequence parallelism ``linear_in`` gathers the pack and
``linear_out`` scatters it.

Shape suffixes as in ``delta_rule``, with this rank's heads and channels; N = output features of
``linear_in`` on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor

from openrlhf_ext.delta_rule import Inputs
from openrlhf_ext.megatron.model.delta_kernels import convolved, ruled
from openrlhf_ext.megatron.model.spec import PackedSequences

_PARTS = ["query", "key", "value", "gate", "beta", "decay"]


@dataclass
class DeltaSubmodules:
    linear_in: ModuleSpec | type
    linear_out: ModuleSpec | type


class DeltaLayer(MegatronModule):
    """The sizes are those of the whole model's layer."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: DeltaSubmodules,
        layer_number: int,
        *,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_width: int,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.tp_group, ranks = pg_collection.tp, pg_collection.tp.size()
        self.value_heads, self.key_dim, self.value_dim = value_heads // ranks, key_dim, value_dim
        keys, values = key_heads // ranks * key_dim, self.value_heads * value_dim
        self.parts = [keys, keys, values, values, self.value_heads, self.value_heads]
        dtype = config.params_dtype
        channels = sum(self.parts[:3])
        self.conv_weight = _of_rank(torch.empty(channels, 1, conv_width, dtype=dtype))
        self.decay_log = _of_rank(torch.empty(self.value_heads, dtype=dtype))
        self.decay_bias = _of_rank(torch.empty(self.value_heads, dtype=dtype))
        self.norm_weight = torch.nn.Parameter(torch.ones(self.value_dim, dtype=dtype))
        common: dict[str, Any] = {
            "config": config,
            "bias": False,
            "is_expert": False,
            "tp_group": pg_collection.tp,
        }
        self.linear_in = build_module(
            submodules.linear_in,
            config.hidden_size,
            sum(self.parts) * ranks,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **common,
        )
        self.linear_out = build_module(
            submodules.linear_out,
            values * ranks,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **common,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSequences | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """(L, 1, hidden) states, a piece of L under sequence parallelism."""
        if attention_mask is not None or packed_seq_params is None:
            raise ValueError("DeltaLayer takes packed sequences and no mask")
        projected_L1N, _bias = self.linear_in(hidden_states)
        out_LHV = self._attended(projected_L1N[:, 0], packed_seq_params)
        return self.linear_out(out_LHV.flatten(1)[:, None])

    def _attended(self, projected_LN: Tensor, pack: PackedSequences) -> Tensor:
        """(L, H, V). A prompt that several sequences share is computed in each of them: the rule is
        a hundredth of a layer's operations."""
        channels, values = sum(self.parts[:3]), self.parts[3]
        mixed_LN, gate_LN, small_LN = projected_LN.split(
            [channels, values, 2 * self.value_heads], -1
        )
        whole = pack.whole
        if whole is not None:
            mixed_LN, small_LN = whole.gather(mixed_LN), whole.gather(small_LN)
        out_LHV = ruled(self._inputs(mixed_LN, small_LN, pack), pack)
        if whole is not None:
            out_LHV = whole.take(out_LHV)
        return self._normed(out_LHV, gate_LN.unflatten(-1, (self.value_heads, self.value_dim)))

    def _inputs(self, mixed_LD: Tensor, small_LN: Tensor, pack: PackedSequences) -> Inputs:
        mixed_LD = convolved(mixed_LD, self.conv_weight, pack)
        query_LD, key_LD, value_LD = mixed_LD.split(self.parts[:3], -1)
        heads = [
            *(x.unflatten(-1, (-1, self.key_dim)) for x in (query_LD, key_LD)),
            value_LD.unflatten(-1, (-1, self.value_dim)),
        ]
        beta_LH, decay_LH = small_LN.chunk(2, -1)
        return Inputs.of_layer(heads, beta_LH, decay_LH, self.decay_log, self.decay_bias)

    def _normed(self, out_LHV: Tensor, gate_LHV: Tensor) -> Tensor:
        """RMS norm in fp32, rounded before the weight, times SiLU of the gate (as transformers
        does). Every rank has the norm's weight, and its gradient is the sum over their heads."""
        weight_V = copy_to_tensor_model_parallel_region(self.norm_weight, group=self.tp_group)
        wide = torch.promote_types(out_LHV.dtype, torch.float32)
        x = out_LHV.to(wide)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.layernorm_epsilon)
        return (weight_V * x.to(out_LHV.dtype) * F.silu(gate_LHV.to(wide))).to(out_LHV.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Every part of the projection and of the convolution is a tensor of its own, which other
        layouts cut elsewhere."""
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        state = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            {"conv_weight": 0, "decay_log": 0, "decay_bias": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        for name, module in self.named_children():
            state |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        for name, count in (("linear_in.weight", 6), ("conv_weight", 3)):
            key = f"{prefix}{name}"
            state[key] = _split_tensor_factory(state[key], self.parts[:count], _PARTS[:count], 0)
        return state


def _of_rank(tensor: Tensor) -> torch.nn.Parameter:
    """A parameter of which this tensor-parallel rank has a shard, with Megatron's marks."""
    parameter = torch.nn.Parameter(tensor)
    set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    return parameter
