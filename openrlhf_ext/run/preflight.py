"""What any trainer looks at before it starts, beyond the rules of its options."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from openrlhf_ext.config.files import dataset_refs, inputs_of, is_hub_name
from openrlhf_ext.config.trained import TrainedConfig
from openrlhf_ext.megatron.layers.lora import adapters_of
from openrlhf_ext.megatron.model.shape import read_model_shape
from openrlhf_ext.megatron.settings import layer_converters
from openrlhf_ext.options import value_of


def unseen_inputs(config: TrainedConfig) -> list[str]:
    """Hub names of models and data sets that are not on this machine, with their options;
    configs/models has the config.json of some models, and no more."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    models = [(option, str(value_of(config, option) or "")) for option in config.model_options]
    inputs = [
        (name, ref.path)
        for name in config.data_options
        for ref in dataset_refs(inputs_of(config, name))
    ]
    return [
        f"{option} {name}"
        for kind, named in (("model", models), ("dataset", inputs))
        for option, name in named
        if is_hub_name(name)
        and not Path(
            HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type=kind), "snapshots"
        ).exists()
    ]


def trained_model(config: TrainedConfig) -> dict[str, Any]:
    """The same of the model under training."""
    folder = config.model_path or ""
    if not os.path.isdir(folder):
        return {}
    shape = read_model_shape(folder)
    model = {"shape": asdict(shape), "param_dtype": config.megatron.param_dtype}
    lora = adapters_of(layer_converters(config, shape.family))
    return model if lora is None else model | {"adapters": lora.adapter.options}
