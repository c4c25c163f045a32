"""What the ranks of the cross-check with mbridge run."""

from __future__ import annotations

from dataclasses import replace

import torch
from megatron.core import parallel_state
from megatron.core.transformer.enums import ModelType

from openrlhf_ext.megatron.distributed import initialize_distributed
from openrlhf_ext.megatron.model.shape import read_model_shape
from openrlhf_ext.megatron.model.spec import block_spec
from openrlhf_ext.megatron.policy import MegatronPolicy
from tests.megatron.parity import settings
from tests.patience import PATIENCE_S


def mbridge_parameters(path: str) -> dict[str, torch.Tensor]:
    """This rank's parameters as mbridge 0.15.1 loads them, on our layer spec."""
    from mbridge import AutoBridge
    from mbridge.models.qwen2 import Qwen2Bridge

    # megatron-core 0.19 has no such kind of model any more; mbridge compares with it
    # (mbridge/core/util.py:83)
    ModelType.encoder_and_decoder = None
    # a tied model edits this class-level map for all later ones (mbridge/models/qwen2.py:58)
    Qwen2Bridge._DIRECT_MAPPING = dict(Qwen2Bridge._DIRECT_MAPPING)
    bridge = AutoBridge.from_pretrained(path, dtype=torch.float32)
    # transformers 5 keeps it in rope_parameters; mbridge reads the old attribute
    # (mbridge/core/llm_bridge.py:124)
    bridge.hf_config.rope_theta = bridge.hf_config.rope_parameters["rope_theta"]
    bridge.set_extra_args(
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        bf16=False,
    )
    bridge.has_vp_stage = True
    bridge._get_transformer_layer_spec = lambda vp_stage=None: block_spec(
        bridge.config, read_model_shape(path)
    )
    (model,) = bridge.get_model(weight_path=path, bf16=False, use_cpu_initialization=True)
    return {name.removeprefix("module."): p.detach() for name, p in model.named_parameters()}


def compare(models: list[str], ranks: int, tp: int, pp: int) -> list[list[str]]:
    """For each model, the parameters that differ between mbridge and us on this rank."""
    differences = []
    for path in models:
        policy_settings = replace(
            settings({"model": path, "tp": tp, "pp": pp}, ranks), optimizer=None
        )
        initialize_distributed(policy_settings.layout, PATIENCE_S, 1234)
        ours = dict(MegatronPolicy(policy_settings).chunks[0].named_parameters())
        theirs = mbridge_parameters(path)
        assert set(ours) == set(theirs), set(ours) ^ set(theirs)
        differences.append(
            [name for name in ours if not torch.equal(ours[name].detach(), theirs[name])]
        )
        parallel_state.destroy_model_parallel()
    return differences
