"""What a policy rank and an engine need of the GPU that they share."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openrlhf_ext.megatron import policy as megatron_policy
from openrlhf_ext.ranks import policy
from openrlhf_ext.ranks.shared_gpu import SharedGpu, SharedGpuTooSmall, state_bytes

GIB = 1 << 30
# a rank of configs/recipes/qwen2.5_32b_gtpo_entropy.yaml on an H100: 32.8e9 parameters over TP8 PP2, four copies
RECIPE = SharedGpu(80 * GIB, 0.8, state_bytes(2_050_000_000, 2, 4), 2 * (512 << 20), True, True)


def test_states_of_a_rank_by_hand() -> None:
    assert state_bytes(100, 2, 4) == 200 + 400 + 300 and state_bytes(100, 4, 1) == 400 + 400 + 800


def test_the_recipe_fits() -> None:
    RECIPE.check()


@pytest.mark.parametrize(
    ("change", "doing", "advice"),
    [
        ({"engine": 0.96}, "sampling: they need 80.8 of 80.0 GiB", "--weight_sync.bucket_mib, or lay the policy out"),
        ({"policy_sleeps": False}, "sampling: they need 85.2", "add --ds.enable_sleep, or lay"),
        ({"engine_sleeps": False, "policy_sleeps": False}, "sampling: they", "add --ds.enable_sleep and --vllm.enable"),
        ({"engine_sleeps": False, "engine": 0.75}, "activations: they need 81.2", "add --vllm.enable_sleep, or"),
        ({"states": 75 * GIB}, "training, without activations: they need 81.0", "lay the policy out over more ranks"),
        ({"staging": 14 * GIB}, "sampling: they need 81.0", "Lower --vllm.gpu_memory_utilization"),
    ],
)
def test_what_does_not_fit_is_added_up(change: dict, doing: str, advice: str) -> None:
    with pytest.raises(SharedGpuTooSmall) as caught:
        replace(RECIPE, **change).check()
    assert doing in str(caught.value) and advice in str(caught.value), caught.value
    assert "GiB  buffers of the weight sync" in str(caught.value)


class FakePolicy:
    """Of 6 float32 parameters."""

    def __init__(self, _settings: Any) -> None:
        self.chunks, self.models, self.optimizer = [torch.nn.Linear(2, 2)], [torch.nn.Linear(2, 2)], None
        self.settings = SimpleNamespace(optimizer=None, layout=None, megatron=None, converters=())
        self.config, self.kept_bytes = SimpleNamespace(finalize_model_grads_func=len), 0
        self.device = torch.device("cpu")


class FakePublisher:
    def __init__(self, *_: Any) -> None:
        self.plan = SimpleNamespace(largest_frame=1 << 20)
        self.connected = False

    def connect(self) -> None:
        self.connected = True


@pytest.mark.parametrize(("device", "fits"), [(4 * GIB, False), (80 * GIB, True)])
def test_a_rank_looks_at_its_gpu_before_it_connects_to_the_engine(device: int, fits: bool, monkeypatch) -> None:
    monkeypatch.setattr(policy.PolicyActor, "join", lambda *_: {})
    monkeypatch.setattr(policy, "device_bytes", lambda: device)
    monkeypatch.setattr(policy, "WeightPublisher", FakePublisher)
    monkeypatch.setattr(megatron_policy, "MegatronPolicy", FakePolicy)
    actor = policy.PolicyActor.__new__(policy.PolicyActor)
    start = (SimpleNamespace(host_copies={}), None, 1, [], policy.SleepModes(engine_share=0.5))
    if fits:
        actor.init_model(*start)
    else:
        with pytest.raises(SharedGpuTooSmall, match=r"while sampling: they need 5\.[^\0]*of 4\.0 GiB"):
            actor.init_model(*start)
    assert actor.publisher.connected == fits
