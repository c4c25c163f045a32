"""Length penalties by hand."""

from __future__ import annotations

import pytest
import torch

from openrlhf_ext.algorithms import RolloutBatch, get_algorithm, with_published_values
from openrlhf_ext.algorithms.length_penalty import dapo_overlong, tan_v1


def test_dapo_by_hand() -> None:
    lengths = torch.tensor([60, 80, 90, 100, 101])
    assert dapo_overlong(lengths, 100, 20).tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert dapo_overlong(lengths, 100, 20, factor=0.5).tolist() == [0.0, 0.0, -0.25, -0.5, -0.5]


def test_tan_v1_jumps_as_printed_and_is_continuous_with_l1() -> None:
    lengths = torch.tensor([60, 70, 100, 101])
    assert tan_v1(lengths, 40, 100).tolist() == [0.0, -0.1, -0.4, -1.0]
    assert tan_v1(lengths, 40, 100, denominator="L1").tolist() == [0.0, -0.25, -1.0, -1.0]


def penalties(
    lengths: list[int], rewards: list[float], name: str = "grpo", **options
) -> list[float]:
    zeros = torch.zeros(sum(lengths), dtype=torch.float64)
    batch = RolloutBatch(
        tokens=zeros.long(),
        lengths=torch.tensor(lengths),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group_ids=torch.zeros(len(lengths), dtype=torch.long),
        old_logprobs=zeros,
        entropies=zeros + 1.0,
    )
    options = with_published_values(
        name, {"length_penalty": {"kind": "grop"}, **options}, max_length=max(lengths)
    )
    shaped = get_algorithm(name, **options).shape(batch)
    assert torch.isclose(shaped.metrics["penalised_reward"], shaped.rewards.mean())
    return (shaped.rewards - batch.rewards).tolist()


@pytest.mark.parametrize("name", ["grpo", "gspo", "gtpo_entropy", "grpo_s"])
def test_grop_easy_prompts_penalise_long_successes(name: str) -> None:
    # Successes 4, 6, 8, failure 20: knee = max((4 + 8)/2, 6) = 6; only length 8 is above: -(8 -
    # 6)/12.
    assert penalties([4, 6, 8, 20], [1, 1, 1, 0], name) == pytest.approx([0.0, 0.0, -2 / 12, 0.0])


def test_grop_hard_prompts_are_left_alone_or_get_dapo() -> None:
    assert penalties([4, 6, 8, 20], [1, 0, 0, 0]) == [0.0] * 4
    hard = {"grop_hard_dapo": {"l_max": 10, "l_cache": 4}}
    assert penalties([4, 6, 8, 20], [1, 0, 0, 0], **hard) == pytest.approx([0.0, 0.0, -0.5, -1.0])


def test_grop_medium_prompts() -> None:
    # All lengths: knee = max((2 + 10)/2, 5.2) = 6.
    lengths = [2, 4, 10, 4, 6]
    assert penalties(lengths, [1, 1, 1, 0, 0]) == pytest.approx([0.0, 0.0, -4 / 12, 0.0, 0.0])
    assert penalties(lengths, [1, 0, 0, 1, 0]) == [0.0] * 5
    other = penalties([2, 4, 13, 4, 6], [1, 0, 0, 1, 0], grop_medium_else="incorrect")
    # knee = max(7.5, 5.8) = 7.5; 13 < 15: -(13 - 7.5)/15.
    assert other == pytest.approx([0.0, 0.0, -5.5 / 15, 0.0, 0.0])


@pytest.mark.parametrize(
    ("right", "size", "gamma1", "wanted"),
    [
        (7, 10, 0.7, "easy"),
        (3, 4, 0.75 + 1e-8, "medium"),  # the same number in float32
        (2, 5, 0.6, "hard"),
        (1, 10, 0.9, "hard"),  # 1/10 is above 1 - 0.9 in float64: what the tolerance is for
        (6, 10, 0.7, "medium"),
        (4, 10, 0.7, "medium"),
        (3, 10, 0.7, "hard"),
    ],
)
def test_grop_classes_at_their_boundaries(
    right: int, size: int, gamma1: float, wanted: str
) -> None:
    # One success of 30, the others of 2, failures of 50: knee 16 of the successes (easy), 26 of all
    # (medium).
    lengths = [2] * (right - 1) + [30] + [50] * (size - right)
    rewards = [1.0] * right + [0.0] * (size - right)
    hard = {"l_max": 40, "l_cache": 20}
    options = {"grop_gamma1": gamma1, "grop_hard_dapo": hard, "grop_medium_else": "incorrect"}
    found = penalties(lengths, rewards, **options)[right - 1]
    medium = -4 / 52 if 2 * right > size else 0.0
    assert found == pytest.approx({"easy": -14 / 32, "medium": medium, "hard": -0.5}[wanted])


def test_grop_ramp_ends_at_one_half() -> None:
    assert penalties([1, 1, 1, 30], [1, 1, 1, 1]) == pytest.approx(
        [0.0, 0.0, 0.0, -(30 - 15.5) / 31]
    )
    assert penalties([1] * 30 + [40], [1.0] * 31)[-1] == pytest.approx(-(40 - 20.5) / 41)
