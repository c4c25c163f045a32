"""Order statistics and quantiles of masked tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_ext.algorithms.quantiles import order_statistic, upper_threshold


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_order_statistics_are_those_of_a_sort(dtype: torch.dtype, data: st.DataObject) -> None:
    number = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from(
        [0.0, -0.0, 1.0]
    )
    values = data.draw(st.lists(number, min_size=1, max_size=30))
    tensor = torch.tensor([*values, 7.0], dtype=dtype)
    mask = torch.ones_like(tensor, dtype=torch.bool)
    mask[-1] = False
    rank = data.draw(st.integers(0, len(values) - 1))
    value, reached = order_statistic(tensor, mask, rank)
    assert value.item() == sorted(values)[rank]
    assert reached == sum(v <= value.item() for v in values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fraction", [0.2, 0.37, 1.0, 1e-9])
def test_threshold_is_the_interpolated_quantile(dtype: torch.dtype, fraction: float) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(2000, generator=generator, dtype=dtype).round(decimals=2)
    mask = torch.rand(2000, generator=generator) > 0.3
    tau, cut = upper_threshold(values, mask, fraction)
    wanted = torch.quantile(values[mask].double(), 1.0 - fraction, interpolation="linear")
    assert tau.item() == pytest.approx(wanted.item(), abs=1e-12)
    assert torch.equal(values >= cut, values.double() >= tau)


def test_a_threshold_between_neighboring_floats_excludes_the_lower_one() -> None:
    low = torch.tensor(1.0)
    values = torch.stack([low, torch.nextafter(low, torch.tensor(2.0))])
    tau, cut = upper_threshold(values, None, 0.7)
    assert low.double() < tau < values[1].double()
    assert (values >= cut).tolist() == [False, True]


def test_no_entries_give_zero() -> None:
    tau, cut = upper_threshold(torch.ones(4), torch.zeros(4, dtype=torch.bool), 0.2)
    assert tau.item() == 0.0 and cut.item() == 0.0


def test_parts_find_the_statistic_of_the_whole_together() -> None:
    """`total` sums counts over the parts; here the other part is counted on the side."""
    values = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    one, other = values[:300], values[300:]
    counts: list[torch.Tensor] = []
    whole = order_statistic(values, None, 700, lambda tensor: counts.append(tensor) or tensor)
    seen = iter(counts)
    assert order_statistic(one, None, 700, lambda _: next(seen)) == whole
    seen = iter(counts)
    assert order_statistic(other, None, 700, lambda _: next(seen)) == whole
