"""vLLM's numbers of the families that are most their own there: Granite has factors, SmolLM3 is
transformers' class, wrapped by vLLM. Log-probs are transformers', from the disk and after an
update."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from openrlhf_ext.megatron.model.positions import engine_overrides
from openrlhf_ext.megatron.model.shape import read_model_shape
from openrlhf_ext.options.sections import Vllm
from openrlhf_ext.rollout import launch
from tests.models import make_tiny_policy
from tests.patience import PATIENCE_S
from tests.rollout import tiny
from tests.rollout.updates import fill_with, send_together, two_senders

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TEXT = [7 + i * 31 % 240 for i in range(150)]


SCALED: dict[str, dict[str, Any]] = {
    "granite": {},
    "smollm3": {},
    "qwen2": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.9,
    },
    "phi3": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0] * 12,
        "long_factor": [1.0 + n for n in range(12)],
        "attention_factor": 1.25,
    },
}
"""Rotary settings of the families' models: 64 tokens of 150."""


def start(folder: Path, family: str) -> Any:
    scaled: dict[str, Any] = (
        {"rope_parameters": {"rope_theta": 5000.0, **SCALED[family]}} if SCALED[family] else {}
    )
    if family == "phi3":  # whose class has 4096, which comes before that of the settings
        scaled |= {"original_max_position_embeddings": 64}
    # of SmolLM3's the last has no rotary embedding
    make_tiny_policy(folder, family, num_hidden_layers=4, **scaled)
    options = Vllm(dtype="fp32", enable_prefix_caching=True, kv_cache_mib=32, max_requests=4)
    return launch.create_rollout_engines(
        str(folder),
        options,
        seed=3,
        max_model_len=256,
        request_timeout_s=PATIENCE_S,
        use_gpu=False,
        executor_factory=partial(tiny.CountingExecutor, 0.0),
        hf_overrides=engine_overrides(read_model_shape(folder).rotary),
    )[0]


def difference(engine: Any, model: PreTrainedModel) -> float:
    told = torch.as_tensor(ray.get(engine.probe_logprobs.remote(tuple(TEXT)), timeout=PATIENCE_S))
    return float((told - tiny.logprobs(model, TEXT)).abs().max())


def test_log_probs_from_the_disk_and_after_an_update_are_those_of_transformers(
    ray_session: None, tmp_path: Path
) -> None:
    engines = {family: start(tmp_path / family, family) for family in SCALED}
    launch.wait_until_ready([*engines.values()], PATIENCE_S)
    for family, engine in engines.items():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / family, dtype=torch.float32).eval()
        assert difference(engine, model) < 1e-4, family
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(0.9 if "norm" in name else 1.1)
        tensors = {
            name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"
        }
        assert difference(engine, model) > 0.01, f"{family}: the update must be seen"
        send_together(two_senders(tensors, 200_000, [engine]), fill_with(tensors), 1)
        assert difference(engine, model) < 1e-4, family
