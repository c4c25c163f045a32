"""The importance correction agrees with OpenRLHF's PolicyLoss, whose semantics it takes over."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch

from openrlhf_ext.algorithms import get_algorithm
from openrlhf_ext.algorithms.importance import parse_correction
from tests.algorithms.helpers import padded
from tests.algorithms.test_invariants import mixed_groups, to_batch


@pytest.fixture(scope="module")
def upstream():
    """`openrlhf/models/loss.py` loaded alone, without the package around it."""
    spec = importlib.util.find_spec("openrlhf")
    if spec is None:
        pytest.skip("openrlhf is not installed")
    folder = Path(spec.submodule_search_locations[0]) / "models"
    package = types.ModuleType("_upstream_models")
    package.__path__ = [str(folder)]
    utils = types.ModuleType("_upstream_models.utils")

    def masked_mean(tensor, mask, dim=None):
        return (tensor * mask).sum(dim) / mask.sum(dim)

    utils.masked_mean = masked_mean
    sys.modules.update({"_upstream_models": package, "_upstream_models.utils": utils})
    loss_spec = importlib.util.spec_from_file_location("_upstream_models.loss", folder / "loss.py")
    module = importlib.util.module_from_spec(loss_spec)
    loss_spec.loader.exec_module(module)
    yield module
    for name in ("_upstream_models", "_upstream_models.utils"):
        sys.modules.pop(name)


@pytest.mark.parametrize(
    ("level", "mode", "gating", "threshold"),
    [
        ("token", "mask", "ratio", (0.8, 1.3)),
        ("token", "clip", "ratio", (0.8, 1.3)),
        ("seq", "mask", "ratio", (0.9, 1.1)),
        ("token", "mask", "binary_kl", (0.0, 0.02)),
        ("seq", "mask", "binary_kl", (0.0, 0.02)),
        ("token", "mask", "tv", (0.0, 0.1)),
        ("seq", "mask", "tv", (0.0, 0.1)),
        ("off", "mask", "ratio", (0.5, 5.0)),
    ],
)
@pytest.mark.parametrize("dual_clip", [None, 1.2])
def test_dapo_with_a_correction_is_upstreams_policy_loss(
    upstream, level, mode, gating, threshold, dual_clip
) -> None:
    batch, new, _ = to_batch(mixed_groups(8, groups=4, max_size=6, max_length=10))
    correction = {"level": level, "mode": mode, "gating": gating, "threshold": list(threshold)}
    algorithm = get_algorithm("dapo", correction=correction, dual_clip=dual_clip)
    shaped = algorithm.shape(batch)
    ours = algorithm.loss(new, shaped)
    policy_loss = upstream.PolicyLoss(
        clip_eps_low=0.2,
        clip_eps_high=0.28,
        dual_clip=dual_clip,
        is_correction_level=level,
        is_correction_mode=mode,
        is_correction_gating=gating,
        is_correction_threshold=threshold,
    )
    table, old, advantages, rollout, mask = (
        padded(values, batch.lengths)
        for values in (
            new,
            batch.old_logprobs,
            shaped.advantages,
            batch.rollout_logprobs,
            torch.ones_like(new) > 0,
        )
    )
    theirs, clip_ratio, ppo_kl, vllm_kl, filtered = policy_loss(
        table, old, advantages, action_mask=mask, rollout_log_probs=rollout
    )
    assert ours.value.item() == pytest.approx(theirs.item(), abs=1e-12)
    assert torch.allclose(
        *(torch.autograd.grad(value, new)[0] for value in (ours.value, theirs)), atol=1e-12
    )
    assert ours.metrics["policy_kl"].item() == pytest.approx(ppo_kl.item())
    if level != "off":
        assert shaped.metrics["rollout_kl"].item() == pytest.approx(vllm_kl.item())
    if level == "token":
        assert shaped.metrics["correction_filtered"].item() == pytest.approx(filtered.item())
    if dual_clip is None:
        assert ours.metrics["clip_fraction"].item() == pytest.approx(clip_ratio.item())


def test_completions_of_a_guide_are_neither_corrected_nor_counted() -> None:
    batch, _, _ = to_batch(mixed_groups(2))
    guided = torch.arange(len(batch.rewards)) % 2 == 0
    batch = dataclasses.replace(batch, from_guide=guided, rollout_logprobs=batch.old_logprobs - 9.0)
    shaped = get_algorithm("mixed_policy_dapo", correction={"level": "token"}).shape(batch)
    assert torch.equal(shaped.correction, batch.segments.spread(guided).double())
    own = batch.lengths[~guided].sum() / batch.lengths.sum()
    assert shaped.metrics["correction_filtered"].item() == pytest.approx(own.item())


def test_a_single_threshold_is_the_upper_end() -> None:
    assert parse_correction({"gating": "tv", "threshold": 0.1}).threshold == (0.0, 0.1)
    assert parse_correction({"gating": "tv", "threshold": [0.1]}).threshold == (0.0, 0.1)
    assert parse_correction({"level": "off"}) is None
    assert parse_correction(None) is None


def test_a_correction_needs_the_samplers_logprobs() -> None:
    batch, _, _ = to_batch(mixed_groups(1))
    algorithm = get_algorithm("dapo", correction={"level": "token"})
    with pytest.raises(
        ValueError, match="an importance correction needs RolloutBatch.rollout_logprobs"
    ):
        algorithm.shape(dataclasses.replace(batch, rollout_logprobs=None))
