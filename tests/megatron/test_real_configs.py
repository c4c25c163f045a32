"""Configurations of published models, without their weights: each is built, or refused by what is
missing.

``real_configs.json`` has a model, where its ``config.json`` was found ("from memory": nowhere;
entries that say nothing of the computation are left out), its parameters in billions as its model
card says them, and why it is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from openrlhf_ext.inputs import InputError
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.model.shape import read_model_shape
from openrlhf_ext.planning.memory import entries
from openrlhf_ext.tools.plan.layout_proof import prove_layout

MODELS = json.loads(Path(__file__).with_name("real_configs.json").read_text())
LAYERS = 4  # of the ones that are built: more are alike


def cut(config: dict[str, Any]) -> dict[str, Any]:
    each = {
        name: value[:LAYERS]
        for name, value in config.items()
        if name in ("layer_types", "no_rope_layers")
    }
    return config | each | {"num_hidden_layers": LAYERS}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model["name"])
def test_a_published_model_is_built_or_refused_by_what_is_missing(
    model: dict[str, Any], tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(model["config"]))
    if "refused" in model:
        with pytest.raises(InputError, match=model["refused"]):
            read_model_shape(tmp_path)
        return
    assert entries(read_model_shape(tmp_path)) / 1e9 == pytest.approx(model["billions"], abs=0.005)
    config.write_text(json.dumps(cut(model["config"])))
    # parameters that Megatron builds, and the names and shapes that transformers' class has
    prove_layout(tmp_path, ParallelLayout(2, 1, 2), torch.bfloat16, distributed_optimizer=True)
