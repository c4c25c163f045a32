"""What the ranks of the weight tests run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from megatron.core import parallel_state

from openrlhf_ext.megatron.policy import MegatronPolicy, initialize_distributed
from tests.megatron.parity import settings


def round_trips(models: list[str], layouts: list[dict], ranks: int, target: str) -> list[str]:
    """Loads and saves every model in every layout; returns the folders."""
    folders = []
    for model in models:
        for layout in layouts:
            policy_settings = replace(settings({"model": model, **layout}, ranks), optimizer=None)
            initialize_distributed(policy_settings.layout, 60, 1234)
            folder = Path(target) / f"{Path(model).name}-{json.dumps(layout, sort_keys=True)}"
            MegatronPolicy(policy_settings).save_hf(folder)
            folders.append(str(folder))
            parallel_state.destroy_model_parallel()
    return folders
