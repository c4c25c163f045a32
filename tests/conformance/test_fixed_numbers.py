"""Numbers that other projects' tests have and no package of the index holds: stated here with the
test they are from.

- NeMo-RL 7ea279abf, ``tests/unit/algorithms/test_loss_functions.py`` (the index has only a
  placeholder, nemo-rl 0.0.0)
- slime 624b824a8, ``tests/test_policy_loss.py`` and ``tests/test_cispo_loss.py`` (slime 0.0.0 is a
  placeholder too)
- OpenRLHF 3c3be6234, ``tests/test_loss_aggregation.py`` and ``tests/test_experience.py`` (not in
  its wheels)
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from openrlhf_ext.algorithms import RolloutBatch, get_algorithm
from openrlhf_ext.algorithms.kl import KLPenalty
from openrlhf_ext.algorithms.losses import clipped_surrogate

pytestmark = pytest.mark.conformance


def loss_of(
    name: str,
    advantages: list[float],
    old: list[float],
    new: list[float],
    *,
    lengths: list[int] | None = None,
    correction: Any = None,
    fields: dict[str, list[float]] | None = None,
    rows: slice = slice(None),
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of given advantages, one for each token, its gradient and metrics; of some rows
    their share."""
    lengths = lengths or [len(new)]
    tensors = {name: torch.tensor(values) for name, values in (fields or {}).items()}
    batch = RolloutBatch(
        tokens=torch.zeros(len(new), dtype=torch.int64),
        lengths=torch.tensor(lengths),
        rewards=torch.arange(len(lengths)) % 2 * 1.0,
        group_ids=torch.zeros(len(lengths), dtype=torch.int64),
        old_logprobs=torch.tensor(old),
        **tensors,
    )
    algorithm = get_algorithm(name, correction=correction, warn=False, **options)
    shaped = dataclasses.replace(algorithm.shape(batch), advantages=torch.tensor(advantages))
    chosen = torch.arange(len(lengths))[rows]
    tokens = shaped.segments.spread(torch.isin(torch.arange(len(lengths)), chosen))
    new_N = torch.tensor(new)[tokens].requires_grad_()
    loss = algorithm.loss(new_N, shaped.select(chosen) if len(chosen) < len(lengths) else shaped)
    (grad,) = torch.autograd.grad(loss.value, new_N)
    return loss.value.detach(), grad, loss.metrics


# ---- NeMo-RL

RATIOS = {
    "advantages": [1.0, -1.0, 2.0],
    "old": [-1.0, -1.0, -1.0],
    "new": [-1.69315, -1.0, -0.59453],
}
"""Ratios 0.5, 1 and 1.5, clipped at 0.2."""
SAMPLED = {"rollout_logprobs": [-0.5, -1.5, -0.8]}
PLAIN = {"agg": "token-mean", "clip_low": 0.2, "clip_high": 0.2}


@pytest.mark.parametrize(
    ("name", "correction", "expected"),
    [
        ("grpo", None, -0.6333),  # test_clipped_pg_loss_ppo_clipping
        # ..._on_policy_kl_importance_sampling, its actor loss
        ("grpo", {"level": "token", "mode": "clip", "threshold": [0.0, 10.0]}, -0.2065),
        # ..._on_policy_truncated_importance_sampling, token level
        ("grpo", {"level": "token", "mode": "clip", "threshold": [0.0, 0.8]}, -0.4744),
        # ..._cispo: mean of -A clip(ratio) new = (1.35452 - 1 + 1.426872) / 3
        ("cispo", None, 0.593797),
        # ..._cispo_with_importance_sampling_correction: the same with weights 0.6065, 1.6487,
        # 0.8187
        ("cispo", {"level": "token", "mode": "clip", "threshold": [0.0, 10.0]}, 0.113691),
    ],
)
def test_nemos_clipped_losses(name, correction, expected):
    loss, _, _ = loss_of(name, **RATIOS, fields=SAMPLED, correction=correction, **PLAIN)
    assert loss.item() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("estimator", "free", "bounded"),
    [
        ("k1", [-1.0, 14.0, 29.0], [-1.0, 10.0, 10.0]),
        ("k2", [0.5, 98.0, 420.5], [0.5, 10.0, 10.0]),
        ("k3", [0.7183, 13.0, 28.0], [0.7183, 10.0, 10.0]),
    ],
)
def test_nemos_kl(estimator, free, bounded):
    new, ref, every = (
        torch.full((3,), -1.0),
        torch.tensor([0.0, -15.0, -30.0]),
        torch.ones(3, dtype=torch.bool),
    )
    penalty = KLPenalty(coef=1.0, estimator=estimator)
    for most, expected in ((None, free), (10.0, bounded)):
        assert penalty.in_loss(new, ref, new, every, most).tolist() == pytest.approx(
            expected, rel=1e-3
        )


def test_nemos_kl_penalty():
    zeros = [0.0, 0.0, 0.0]
    loss, _, _ = loss_of(
        "grpo",
        zeros,
        zeros,
        [0.0, -1.0, -2.0],
        fields={"ref_logprobs": [-1.0] * 3},
        kl_coef=0.1,
        agg="token-mean",
    )
    assert loss.item() == pytest.approx(0.0362, rel=1e-3)


# ---- slime


def test_slimes_dual_clip():
    log_ratio = torch.tensor([2.0, 2.0, 0.5]).log()
    objective, _ = clipped_surrogate(log_ratio, torch.tensor([2.0, -2.0, 2.0]), 0.2, 0.2, 1.5)
    torch.testing.assert_close(-objective, torch.tensor([-2.4, 3.0, -1.0]))


@pytest.mark.parametrize(
    ("low", "high", "ratios", "clipped"),
    [
        (0.2, 0.28, [1.0, 1.14, 1.56, 0.4], [1.0, 1.14, 1.28, 0.8]),
        (1.0, 4.0, [1.0, 3.0, 9.0, 0.4], [1.0, 3.0, 5.0, 0.4]),
    ],
)
def test_slimes_cispo(low, high, ratios, clipped):
    advantages, new = [1.0, -0.5, 2.0, -1.0], [-0.7, -1.2, -0.4, -2.1]
    old = [logprob - math.log(ratio) for logprob, ratio in zip(new, ratios, strict=True)]
    loss, grad, metrics = loss_of(
        "cispo", advantages, old, new, clip_low=low, clip_high=high, agg="token-mean"
    )
    terms = [-c * a * n for c, a, n in zip(clipped, advantages, new, strict=True)]
    assert loss.item() == pytest.approx(sum(terms) / 4, rel=1e-5)
    assert grad.tolist() == pytest.approx(
        [-c * a / 4 for c, a in zip(clipped, advantages, strict=True)], rel=1e-5
    )
    changed = sum(c != r for c, r in zip(clipped, ratios, strict=True)) / 4
    assert metrics["clip_fraction"].item() == changed


# ---- OpenRLHF

RAGGED = {
    "advantages": [1.0, -0.5, 0.3, -1.2, 0.5, 1.5],
    "lengths": [2, 3, 1],
    "new": [-0.20, -0.40, -0.70, -0.30, -0.20, -0.60],
    "old": [-0.23, -0.36, -0.72, -0.35, -0.17, -0.64],
}
SHARES = [slice(0, 2), slice(2, 3)]


@pytest.mark.parametrize("agg", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("name", ["group_norm", "reinforce_baseline"])
def test_shares_of_uneven_length_add_up(name, agg):
    """..._aggregation_matches_verl_dp_average, ..._matches_full_batch,
    test_grad_accum_global_norm_...: our shares are added where DeepSpeed's are averaged, so nothing
    is multiplied by the number of ranks."""
    whole, grad, metrics = loss_of(name, **RAGGED, agg=agg)
    shares = [loss_of(name, **RAGGED, agg=agg, rows=rows) for rows in SHARES]
    torch.testing.assert_close(shares[0][0] + shares[1][0], whole)
    torch.testing.assert_close(torch.cat([shares[0][1], shares[1][1]]), grad)
    torch.testing.assert_close(
        shares[0][2]["policy_kl"] + shares[1][2]["policy_kl"], metrics["policy_kl"]
    )
    alone = []
    for tokens, rows in ((slice(0, 5), SHARES[0]), (slice(5, 6), SHARES[1])):
        part = {key: values[rows if key == "lengths" else tokens] for key, values in RAGGED.items()}
        alone.append(loss_of(name, **part, agg=agg)[0])
    assert not torch.isclose(sum(alone) / 2, whole), "a mean of means is another number"


def test_the_kl_metric_is_of_the_ratio_and_not_clamped():
    """test_policy_kl_metric_uses_policy_ratio_when_vllm_correction_is_enabled,
    ..._is_not_clamped."""
    correction = {"level": "token", "mode": "clip", "threshold": [0.1, 10.0]}
    old, sampled = [-0.3, -0.1], [-1.3, -1.1]
    _, _, metrics = loss_of(
        "group_norm",
        [1.0, 1.0],
        old,
        [-0.2, -0.4],
        correction=correction,
        fields={"rollout_logprobs": sampled},
    )
    assert metrics["policy_kl"].item() == pytest.approx(0.1)
    _, _, metrics = loss_of("group_norm", [1.0], [-100.0], [-1e-9])
    assert metrics["policy_kl"].item() == pytest.approx(-100.0)
