"""A kind of MLP that the package does not know, declared in this one file: gated by GELU."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import pytest
import torch.nn.functional as F

from openrlhf_ext.inputs import InputError
from openrlhf_ext.megatron.mlps.dense import DenseMLP
from openrlhf_ext.megatron.model.shape import read_model_shape
from tests.megatron.test_family import (
    PHI3,
    installed_as_phi3,
    make_phi3,
    require_transformers_numbers,
)


class GeluMLP(DenseMLP):
    @staticmethod
    def problems(config) -> Iterator[str]:
        if config["hidden_act"] != "gelu":
            yield f"hidden_act must be 'gelu', got {config['hidden_act']!r}"

    def megatron_arguments(self) -> dict:
        return {**super().megatron_arguments(), "activation_func": F.gelu}


FAMILY = dataclasses.replace(PHI3, mlp=GeluMLP)


def test_a_kind_from_outside_equals_transformers(tmp_path):
    model = make_phi3(tmp_path / "model", hidden_act="gelu")
    with installed_as_phi3(tmp_path, f"{__name__}:FAMILY"):
        assert isinstance(read_model_shape(tmp_path / "model").mlp, GeluMLP)
        require_transformers_numbers(
            tmp_path / "model", model, [{}, {"tp": 2, "sp": True, "max_tokens": 30}]
        )
        config = json.loads((tmp_path / "model/config.json").read_text())
        (tmp_path / "model/config.json").write_text(json.dumps(config | {"hidden_act": "silu"}))
        with pytest.raises(InputError, match="hidden_act must be 'gelu', got 'silu'"):
            read_model_shape(tmp_path / "model")
