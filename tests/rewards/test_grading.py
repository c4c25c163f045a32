from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.rewards.grading import (
    RESERVED_LOG_KEYS,
    InvalidAnswer,
    finite_number,
    parse_answer,
)

WRAPPERS = [
    float,
    np.float64,
    np.array,
    torch.tensor,
    lambda x: [x],
    lambda x: torch.tensor([x]),
    lambda x: torch.tensor([[x]]),
    lambda x: [torch.tensor(x)],
    lambda x: np.array([[x]]),
]


@given(st.floats(-(2**49), 2**49, width=32), st.sampled_from(WRAPPERS))
def test_every_form_of_a_number_means_the_same(value: float, wrap: object) -> None:
    assert finite_number(wrap(value), "rewards") == value


@given(st.sampled_from([math.nan, math.inf, -math.inf]), st.sampled_from(WRAPPERS))
def test_no_form_hides_a_number_that_is_not_finite(value: float, wrap: object) -> None:
    with pytest.raises(InvalidAnswer, match="finite"):
        finite_number(wrap(value), "rewards")


@pytest.mark.parametrize(
    "value", [None, "1", [], [1, 2], {}, torch.ones(2), np.ones((0,)), 1j, object(), [[1.0]]]
)
def test_what_is_not_one_number_is_refused(value: object) -> None:
    with pytest.raises(InvalidAnswer, match="rewards = .*one real number"):
        finite_number(value, "rewards")


def test_bf16_and_bool_tensors_count_as_numbers() -> None:
    answer = {"rewards": torch.tensor(0.5, dtype=torch.bfloat16), "scores": torch.tensor([True])}
    assert (parse_answer(answer).reward, parse_answer(answer).score) == (0.5, 1.0)


@pytest.mark.parametrize("key", sorted(RESERVED_LOG_KEYS))
def test_keys_of_upstream_are_reserved(key: str) -> None:
    with pytest.raises(InvalidAnswer, match=f"reserved keys .*{key}"):
        parse_answer({"rewards": 1.0, "extra_logs": {key: 0.0}})
