"""Seeds of requests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.rollout.response import derived_seed

seeds = st.integers(0, 2**63 - 1)


@given(st.lists(seeds, min_size=1, max_size=4), st.lists(seeds, min_size=1, max_size=4))
def test_other_numbers_give_another_seed_and_the_same_ones_the_same(one: list[int], other: list[int]) -> None:
    assert (derived_seed(*one) == derived_seed(*other)) == (one == other)
    assert 0 <= derived_seed(derived_seed(*one), 3) < 2**63


def test_seeds_do_not_change_with_a_release() -> None:
    assert derived_seed(1, 0) == 5983670273984330465
