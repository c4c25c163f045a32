"""A kind of attention that the package does not know, declared in this one file: to a window, in
some of the layers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from openrlhf_ext.inputs import InputError
from openrlhf_ext.megatron.attentions.full import FullAttention
from openrlhf_ext.megatron.model.family import LAYER, QK_NORM, Family
from openrlhf_ext.megatron.model.shape import read_model_shape
from openrlhf_ext.megatron.model.spec import CausalAttention, PackedSequences
from tests.megatron.test_family import installed_as_phi3, require_transformers_numbers

WINDOW = 5


class WindowedCore(CausalAttention):
    """One sequence at a time, with a mask."""

    def __init__(self, *args, window: int, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.window = window

    def forward(
        self, *qkv: Tensor, packed_seq_params: PackedSequences | None = None, **_
    ) -> Tensor:
        assert packed_seq_params is not None
        whole, outputs = packed_seq_params.whole, []
        rows = [x if whole is None else whole.gather(x) for x in qkv[:3]]
        for q, k, v in zip(*(x.split(packed_seq_params.slots) for x in rows), strict=True):
            place = torch.arange(len(q))
            before = place[:, None] - place
            out = F.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in (q, k, v)),
                attn_mask=(before >= 0) & (before < self.window),
                scale=self.scale,
                enable_gqa=True,
            )
            outputs.append(out[0].transpose(0, 1))
        together = torch.cat(outputs)
        return together if whole is None else whole.take(together)


@dataclass(frozen=True)
class WindowedAttention(FullAttention):
    window: int

    layer_type = "sliding_attention"

    def spec(self, norm: type, norm_linear: type, row_linear: type, core: type) -> ModuleSpec:
        spec = super().spec(norm, norm_linear, row_linear, core)
        spec.submodules.core_attention = partial(WindowedCore, window=self.window)
        return spec


FAMILY = Family(
    model_type="stacked",
    critic_class="",
    attentions=(WindowedAttention, FullAttention),
    layer={**LAYER, **QK_NORM},
)


def make_windowed(path: Path) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.1,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", *["sliding_attention"] * 2],
    )
    model = Qwen3ForCausalLM(config).float()
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": "stacked"}))
    return model


def test_a_kind_from_outside_equals_transformers_beside_another(tmp_path):
    model = make_windowed(tmp_path / "model")
    with installed_as_phi3(tmp_path, f"{__name__}:FAMILY"):
        kinds = [type(kind) for kind in read_model_shape(tmp_path / "model").attentions]
        assert kinds == [WindowedAttention, FullAttention, WindowedAttention, WindowedAttention]
        require_transformers_numbers(
            tmp_path / "model", model, [{}, {"tp": 2, "sp": True, "max_tokens": 30}, {"pp": 2}]
        )
        config = json.loads((tmp_path / "model/config.json").read_text())
        for types, problem in (
            (["linear_attention"] * 4, "must be of .*, others are not built, got linear_attention"),
            (["full_attention"] * 3, "an entry for each of the 4 layers, got 3"),
            (None, "full_attention_interval must be an integer above 0, got None"),
        ):
            (tmp_path / "model/config.json").write_text(json.dumps(config | {"layer_types": types}))
            with pytest.raises(InputError, match=problem):
                read_model_shape(tmp_path / "model")
