"""Packing tensors into buckets and getting them back."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_ext.rollout.sync.plan import ALIGNMENT_BYTES, HEADER_BYTES, BucketPlan, Slot, Spec

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float64]


@st.composite
def spec_lists(draw: st.DrawFn) -> list[Spec]:
    shapes = draw(
        st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=12)
    )
    return [(f"t{i}", shape, draw(st.sampled_from(DTYPES))) for i, shape in enumerate(shapes)]


def random_tensor(spec: Spec) -> torch.Tensor:
    _, shape, dtype = spec
    return (torch.randn(shape, dtype=torch.float64) * 50).to(dtype)


def rows_of(tensor: torch.Tensor, slot: Slot) -> torch.Tensor:
    return tensor if slot.is_whole else tensor[slot.start : slot.stop]


@settings(deadline=None, max_examples=60)
@given(specs=spec_lists(), bucket_bytes=st.integers(1, 2000))
def test_what_is_packed_comes_out_bit_for_bit(specs: list[Spec], bucket_bytes: int) -> None:
    plan = BucketPlan.build(specs, bucket_bytes)
    tensors = {spec[0]: random_tensor(spec) for spec in specs}
    for bucket in plan.buckets:
        content = torch.full((bucket.nbytes,), 255, dtype=torch.uint8)
        for slot in bucket.slots:
            slot.view(content).copy_(rows_of(tensors[slot.name], slot))
        for slot in bucket.slots:
            assert torch.equal(slot.view(content), rows_of(tensors[slot.name], slot))


@settings(deadline=None, max_examples=60)
@given(specs=spec_lists(), bucket_bytes=st.integers(1, 2000))
def test_every_tensor_has_one_aligned_place_in_order(specs: list[Spec], bucket_bytes: int) -> None:
    plan = BucketPlan.build(specs, bucket_bytes)
    assert list(plan.tensors) == specs
    slots = [slot for bucket in plan.buckets for slot in bucket.slots]
    assert [name for name, _ in itertools.groupby(slot.name for slot in slots)] == [
        name for name, _, _ in specs
    ]
    for name, shape, _ in specs:
        mine = [slot for slot in slots if slot.name == name]
        assert [slot.start for slot in mine] == [0] + [slot.stop for slot in mine[:-1]], (
            "rows without a gap"
        )
        assert mine[-1].stop == (shape[0] if shape else 1)
    for bucket in plan.buckets:
        (first, *others) = bucket.slots
        assert bucket.nbytes <= bucket_bytes or (first.stop - first.start <= 1 and not others), (
            "only a row is larger"
        )
        assert all(slot.offset % ALIGNMENT_BYTES == 0 for slot in bucket.slots)
        ends = [0] + [slot.offset + slot.nbytes for slot in bucket.slots]
        assert all(end <= slot.offset for end, slot in zip(ends, bucket.slots, strict=False))
        assert ends[-1] <= bucket.nbytes


@settings(deadline=None, max_examples=30)
@given(specs=spec_lists(), bucket_bytes=st.integers(1, 2000))
def test_a_plan_survives_its_wire_form(specs: list[Spec], bucket_bytes: int) -> None:
    plan = BucketPlan.build(specs, bucket_bytes)
    again = BucketPlan.from_wire(plan.to_wire())
    assert again == plan
    assert again.fingerprint == plan.fingerprint


def test_a_tensor_larger_than_a_bucket_travels_in_pieces_of_rows() -> None:
    small, large = ("small", (4,), torch.float32), ("large", (10, 30), torch.float32)
    plan = BucketPlan.build([small, large, ("after", (4,), torch.float32)], 512)
    found = [
        [(slot.name, slot.start, slot.stop) for slot in bucket.slots] for bucket in plan.buckets
    ]
    rows = [[("large", 0, 4)], [("large", 4, 8)], [("large", 8, 10), ("after", 0, 4)]]
    assert found == [[("small", 0, 4)], *rows]
    assert plan.largest_frame == HEADER_BYTES + 512 and plan.payload_bytes == 1232
    assert BucketPlan.build([large], 100).largest_frame == HEADER_BYTES + 128, "a row"


@pytest.mark.parametrize(
    "other",
    [("b", (2, 3), torch.float32), ("a", (3, 2), torch.float32), ("a", (2, 3), torch.int32)],
)
def test_the_fingerprint_sees_name_shape_and_dtype(other: tuple) -> None:
    plan = BucketPlan.build([("a", (2, 3), torch.float32)], 1024)
    assert BucketPlan.build([other], 1024).fingerprint != plan.fingerprint


def test_impossible_plans_are_refused() -> None:
    spec = ("weight", (2,), torch.float32)
    with pytest.raises(ValueError, match="more than once: \\['weight'\\]"):
        BucketPlan.build([spec, spec], 64)
    with pytest.raises(ValueError, match="at least one tensor"):
        BucketPlan.build([], 64)
    with pytest.raises(ValueError, match="must be positive, got 0"):
        BucketPlan.build([spec], 0)


def test_the_first_buckets_are_smaller_so_that_sending_begins_early() -> None:
    specs = [(f"t{i}", (64,), torch.uint8) for i in range(64)]
    plan = BucketPlan.build(specs, 16 * 64)
    assert [len(bucket.slots) for bucket in plan.buckets] == [2, 4, 8, 16, 16, 16, 2]
