"""Models whose layers have unlike kinds of attention: gated delta nets and gated attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen3_5 import modeling_qwen3_5

from openrlhf_ext.delta_rule import Inputs
from openrlhf_ext.megatron import built
from openrlhf_ext.megatron.model.shape import read_model_shape
from openrlhf_ext.megatron.step.batch import SequenceBatch
from tests.megatron.reference import make_batch, reference
from tests.megatron.test_delta_rule import by_definition
from tests.megatron.test_family import require_numbers
from tests.models import make_tiny_model
from tests.sequences import masked_batch

VOCAB = 61


@contextmanager
def computing_in_fp64() -> Iterator[None]:
    """transformers' classes cast to fp32 whatever a model's type is: here they do not, and the rule
    is its definition."""
    to_float, to, wide = Tensor.float, Tensor.to, torch.float64

    def ruled(query, key, value, g, beta, **_: Any) -> tuple[Tensor, None]:
        inputs = Inputs(*(tensor[0] for tensor in (query, key, value, g, beta)))
        return by_definition(inputs, [query.shape[1]])[None], None

    def kept(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        same = self.dtype == wide and torch.float32 in args
        return self if same else to(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", ruled)
        patch.setattr(Tensor, "float", lambda x: x if x.dtype == wide else to_float(x))
        patch.setattr(Tensor, "to", kept)
        yield


def unlike_lengths() -> tuple[SequenceBatch, Tensor]:
    """Sequences of 2 to 700 tokens, several of which have one prompt."""
    generator = torch.Generator().manual_seed(8)
    sequences, masks = [], []
    for prompt, responses in ((1, [1]), (90, [40, 3, 64]), (5, [120]), (640, [60, 1])):
        tokens = torch.randint(2, VOCAB, (prompt,), generator=generator)
        for response in responses:
            own = torch.randint(2, VOCAB, (response,), generator=generator)
            sequences.append(torch.cat([tokens, own]))
            masks.append(torch.tensor([0] * (prompt - 1) + [1] * response))
    batch = masked_batch(sequences, masks)
    return batch, torch.randn(batch.responses.tokens, generator=generator)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> tuple[Path, PreTrainedModel]:
    path = tmp_path_factory.mktemp("hybrid")
    return path, make_tiny_model(path, "qwen3_5_text")


@pytest.mark.parametrize("given", [make_batch(VOCAB), unlike_lengths()], ids=["short", "unlike"])
def test_a_hybrid_equals_transformers_in_fp64(checkpoint, given):
    path, model = checkpoint
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with computing_in_fp64():
        expected = reference(in_fp64(model), *given, steps=1)
    uniform = {"recompute": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    layouts = [
        {},
        {"recompute": {"share_prompts_enable": False}},
        {"tp": 2, "recompute": uniform},
        {"tp": 2, "sp": True, "max_tokens": 300},
        {"pp": 2, "ends": (3, None)},
        {"recompute": {"recompute": "selective", "recompute_modules": ["core_attn", "mlp"]}},
    ]
    # transformers in fp32 is 1.2e-5 from these
    require_numbers(path, layouts, given, expected, before, gradients=5e-5)


def in_fp64(model: PreTrainedModel) -> PreTrainedModel:
    """A copy in fp64."""
    twin = type(model)(model.config)
    twin.load_state_dict(model.state_dict())
    twin.config.use_cache = False
    return twin.double()


def test_a_rank_with_a_gpu_says_which_kernels_it_lacks(checkpoint, monkeypatch):
    path, _ = checkpoint
    monkeypatch.setattr(built, "has_module", lambda name: False)
    model = object.__new__(built.BuiltModel)
    model.shape, model.settings = read_model_shape(path), SimpleNamespace(model_path=str(path))
    model.device = torch.device("cpu")
    model._require_kernels()
    model.device = torch.device("cuda", 0)
    with pytest.raises(ModuleNotFoundError, match="need flash-linear-attention==.* on GPUs: pip"):
        model._require_kernels()
