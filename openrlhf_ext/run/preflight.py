"""What any trainer looks at before it starts, beyond the rules of its options."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from openrlhf_ext.config.files import dataset_refs, inputs_of, is_hub_name
from openrlhf_ext.config.model_rules import local_shape
from openrlhf_ext.config.trained import TrainedConfig
from openrlhf_ext.megatron.layers.lora import adapters_of
from openrlhf_ext.megatron.model.shape import read_model_shape
from openrlhf_ext.megatron.settings import layer_converters
from openrlhf_ext.options import Violation, value_of
from openrlhf_ext.patches.base import installed_version
from openrlhf_ext.patches.environment import gpu_names, has_module

# with these, gradients of gated delta nets are wrong on Hopper (flash-linear-attention's issue 640,
# whose release 0.6.0 raises in the first backward pass)
_WRONG_TRITON, _RIGHT_TRITON = (3, 4), (3, 7, 1)
_HOPPER = re.compile(r"\bG?H\d{2,3}\b")


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


def gpus_here() -> list[str]:
    return glob.glob("/dev/nvidia[0-9]*")


def kernel_violations(config: TrainedConfig) -> Iterator[Violation]:
    """What the models' kinds of attention need on GPUs is installed, if this machine has some."""
    needed: dict[tuple[str, str], str] = {}
    for option in config.model_options if gpus_here() else ():
        shape, _ = local_shape(option, value_of(config, option))
        for kind in shape.attention_counts if shape is not None else ():
            if kind.gpu_module is not None:
                needed.setdefault(kind.gpu_module, option)
    for (module, requirement), option in needed.items():
        if not has_module(module):
            yield Violation(
                (option,),
                f"{option}: layers of this model need {requirement} on GPUs, which is not "
                f"installed: pip install {requirement}",
            )
    triton = installed_version("triton") or "0"
    version = tuple(int(part) for part in re.findall(r"\d+", triton)[:3])
    if needed and _WRONG_TRITON <= version < _RIGHT_TRITON and _HOPPER.search(str(gpu_names())):
        option = next(iter(needed.values()))
        yield Violation(
            (option,),
            f"{option}: layers of this model need Triton 3.7.1 or newer on this machine's GPUs, "
            f"whose gradients {triton} computes wrong: pip install triton==3.7.1",
        )
