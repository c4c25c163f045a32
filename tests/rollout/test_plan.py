"""Packing tensors into buckets and getting them back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_ext.rollout.sync.plan import ALIGNMENT_BYTES, HEADER_BYTES, BucketPlan, Slot, Spec

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float64]


@st.composite
def spec_lists(draw: st.DrawFn) -> list[Spec]:
    shapes = draw(st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=12))
    return [(f"t{i}", shape, draw(st.sampled_from(DTYPES))) for i, shape in enumerate(shapes)]


def random_tensor(slot: Slot) -> torch.Tensor:
    return (torch.randn(slot.shape, dtype=torch.float64) * 50).to(slot.dtype)


@settings(deadline=None, max_examples=60)
@given(specs=spec_lists(), bucket_bytes=st.integers(1, 2000))
def test_what_is_packed_comes_out_bit_for_bit(specs: list[Spec], bucket_bytes: int) -> None:
    plan = BucketPlan.build(specs, bucket_bytes)
    for bucket in plan.buckets:
        content = torch.full((bucket.nbytes,), 255, dtype=torch.uint8)
        tensors = {slot.name: random_tensor(slot) for slot in bucket.slots}
        for slot in bucket.slots:
            slot.view(content).copy_(tensors[slot.name])
        unpacked = dict(bucket.unpack(content))
        assert unpacked.keys() == tensors.keys()
        assert all(torch.equal(unpacked[name], tensor) for name, tensor in tensors.items())


@settings(deadline=None, max_examples=60)
@given(specs=spec_lists(), bucket_bytes=st.integers(1, 2000))
def test_every_tensor_has_one_aligned_place_in_order(specs: list[Spec], bucket_bytes: int) -> None:
    plan = BucketPlan.build(specs, bucket_bytes)
    assert [(slot.name, slot.shape, slot.dtype) for slot in plan.slots] == specs
    for bucket in plan.buckets:
        assert bucket.nbytes <= bucket_bytes or len(bucket.slots) == 1
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


def test_a_tensor_larger_than_a_bucket_gets_its_own() -> None:
    small, large = ("small", (4,), torch.float32), ("large", (1000,), torch.float32)
    plan = BucketPlan.build([small, large, ("after", (4,), torch.float32)], 256)
    assert [[slot.name for slot in bucket.slots] for bucket in plan.buckets] == [["small"], ["large"], ["after"]]
    assert plan.largest_frame >= HEADER_BYTES + 4000
    assert plan.payload_bytes == 4032


@pytest.mark.parametrize(
    "other", [("b", (2, 3), torch.float32), ("a", (3, 2), torch.float32), ("a", (2, 3), torch.int32)]
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
