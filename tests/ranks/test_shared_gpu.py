"""What a policy rank and an engine need of the GPU that they share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from openrlhf_ext.ranks.shared_gpu import SharedGpu, SharedGpuTooSmall, state_bytes

GIB = 1 << 30
# a rank of configs/recipes/qwen2.5_32b_gtpo_entropy.yaml on an H100: 32.8e9 parameters over TP8
# PP2, four copies
RECIPE = SharedGpu(
    80 * GIB, 0.8, state_bytes(2_050_000_000, 2, 4, False), 2 * (512 << 20), True, True
)


def test_states_of_a_rank_by_hand() -> None:
    assert (
        state_bytes(100, 2, 4, False) == 200 + 400 + 300
        and state_bytes(100, 4, 1, False) == 400 + 400 + 800
    )
    assert state_bytes(100, 2, 4, True) == 200 + 400, "Adam's are in host memory"


def test_the_recipe_fits() -> None:
    RECIPE.check()


@pytest.mark.parametrize(
    ("change", "doing", "advice"),
    [
        (
            {"engine": 0.96},
            "sampling: they need 80.8 of 80.0 GiB",
            "--weight_sync.bucket_mib, or lay the policy out",
        ),
        ({"policy_sleeps": False}, "sampling: they need 85.2", "add --ds.enable_sleep, or lay"),
        (
            {"engine_sleeps": False, "policy_sleeps": False},
            "sampling: they",
            "add --ds.enable_sleep and --vllm.enable",
        ),
        (
            {"engine_sleeps": False, "engine": 0.75},
            "activations: they need 81.2",
            "add --vllm.enable_sleep, or",
        ),
        (
            {"states": 75 * GIB},
            "training, without activations: they need 81.0",
            "lay the policy out over more ranks",
        ),
        ({"staging": 14 * GIB}, "sampling: they need 81.0", "Lower --vllm.gpu_memory_utilization"),
    ],
)
def test_what_does_not_fit_is_added_up(change: dict, doing: str, advice: str) -> None:
    with pytest.raises(SharedGpuTooSmall) as caught:
        replace(RECIPE, **change).check()
    assert doing in str(caught.value) and advice in str(caught.value), caught.value
    assert "GiB  buffers of the weight sync" in str(caught.value)
