"""Sums of bits: equal where the same entries are held in whatever order and pieces, unequal where
an entry differs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from openrlhf_ext.rollout.sync import plan
from openrlhf_ext.rollout.sync.plan import (
    BucketPlan,
    Receipt,
    SentSums,
    WeightSyncMismatch,
    bit_sum,
    bit_sums,
    check_receipts,
    words,
)
from tests.rollout.test_plan import DTYPES, random_tensor, rows_of, spec_lists

MODULUS = 1 << 64


def sum_of(tensor: Tensor, shape: tuple[int, ...] | None = None, workers: int = 1) -> int:
    found = words(tensor, shape or tensor.shape, workers)
    assert found is not None
    return int(bit_sum(found))


def same(first: int, second: int) -> bool:
    return (first - second) % MODULUS == 0


@settings(deadline=None, max_examples=40)
@given(specs=spec_lists(), bucket_bytes=st.integers(1, 1000))
def test_what_is_sent_in_pieces_has_the_sum_of_the_whole(specs: list, bucket_bytes: int) -> None:
    plan = BucketPlan.build(specs, bucket_bytes)
    tensors = {spec[0]: random_tensor(spec) for spec in specs}
    sums = SentSums(plan, 1)
    for bucket in plan.buckets:
        content = torch.zeros(bucket.nbytes, dtype=torch.uint8)
        for slot in bucket.slots:
            slot.view(content).copy_(rows_of(tensors[slot.name], slot))
        sums.add(bucket, content)
    assert all(
        same(ours, sum_of(tensor))
        for ours, tensor in zip(sums.take(), tensors.values(), strict=True)
    )


def test_a_bucket_of_experts_is_summed_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """18,432 experts were as many launches, in the sender and in every worker."""
    specs = [(f"experts.{number}.weight", (3, 128), torch.bfloat16) for number in range(200)]
    specs[100] = ("norm.weight", (60,), torch.bfloat16)  # other words, and a gap behind it
    agreed = BucketPlan.build(specs, 1 << 21)
    tensors = {spec[0]: random_tensor(spec) for spec in specs}
    singly = [sum_of(tensor) for tensor in tensors.values()]
    passes, mixed = [], plan._mixed
    monkeypatch.setattr(plan, "_mixed", lambda words: passes.append(len(words)) or mixed(words))
    sums = SentSums(agreed, 1)
    for bucket in agreed.buckets:
        content = torch.zeros(bucket.nbytes, dtype=torch.uint8)
        for slot in bucket.slots:
            slot.view(content).copy_(tensors[slot.name])
        sums.add(bucket, content)
    assert len(agreed.buckets) == 1 and sorted(passes) == [60, 99 * 6, 100 * 6]
    assert all(same(ours, theirs) for ours, theirs in zip(sums.take(), singly, strict=True))


def test_parts_of_other_storages_and_empty_ones_are_no_neighbors() -> None:
    one, other = torch.randn(8, 128).bfloat16(), torch.randn(4, 128).bfloat16()
    parts = [
        words(part, (8, 128), 1) for part in (one[:3], one[3:3], one[3:], other, one[:2], one[3:5])
    ]
    assert bit_sums(parts).tolist() == [int(bit_sum(part)) for part in parts]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [24, 256])
def test_shards_of_rows_and_of_columns_add_up(
    dtype: torch.dtype, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(plan._AT_A_TIME, "cpu", 50)
    whole = random_tensor(("w", (48, columns), dtype))
    for dim in (0, 1):
        shards = [shard.contiguous() for shard in whole.chunk(4, dim)]
        sums = [sum_of(shard, whole.shape, workers=4) for shard in shards]
        assert same(sum(sums), sum_of(whole, workers=4)) and not same(
            sum(sums[1:]), sum_of(whole, workers=4)
        )


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    changed=st.integers(1, 6),
)
def test_the_smallest_steps_of_a_few_entries_never_cancel(
    seed: int, dtype: torch.dtype, changed: int
) -> None:
    """Steps up and down in equal numbers leave a plain sum of the bits as it was."""
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(16, 20, generator=generator).to(dtype)
    bits = old.clone().view({2: torch.int16, 4: torch.int32}[dtype.itemsize]).view(-1)
    places = torch.randperm(bits.numel(), generator=generator)[: 2 * changed]
    bits[places[:changed]] += 1
    bits[places[changed:]] -= 1
    new = bits.view(dtype).view(old.shape)
    assert not torch.equal(old, new) and not same(sum_of(old), sum_of(new))


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 10**6), share=st.sampled_from([0.02, 0.5]))
def test_the_smallest_steps_of_many_entries_of_blocks_never_cancel(seed: int, share: float) -> None:
    """Steps up and down within a block may cancel, not all those of a tensor."""
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(32, 128, generator=generator).bfloat16()
    steps = torch.randint(0, 2, old.shape, generator=generator) * 2 - 1
    steps *= torch.rand(old.shape, generator=generator) < share
    new = (old.view(torch.int16) + steps.short()).view(torch.bfloat16)
    assert words(old, old.shape, 1).dim() == 2 and not same(sum_of(old), sum_of(new))


def test_padding_of_zeros_counts_nothing() -> None:
    values = torch.randn(10, 64)
    assert same(sum_of(torch.cat([values, torch.zeros(6, 64)])), sum_of(values))


def test_a_shard_that_cannot_be_read_in_the_words_of_the_whole_says_so() -> None:
    whole = torch.randn(4, 128).bfloat16()
    assert words(whole, whole.shape, 1).shape == (8, 16) and words(whole, whole.shape, 4).shape == (
        512,
    )
    assert (
        words(whole[:, :33].contiguous(), whole.shape, 1) is None
        and words(whole.t(), whole.shape, 1) is None
    )


def test_engines_and_tensors_that_differ_are_named() -> None:
    plan = BucketPlan.build(
        [("q", (4, 4), torch.float32), ("k", (4,), torch.float32), ("v", (4,), torch.float32)], 64
    )
    good = Receipt(0.1, [5 * 3, 7, 2 * 9], [16 * 3, 4, 8], 0)
    check_receipts(plan, [5, 7, 9], [good, good], 3)
    check_receipts(plan, [5, 7, 9 - MODULUS], [good], 3)
    for field, value, named in (
        ("sums", [5 * 3, 9, 2 * 9], "1 of 3: k$"),
        ("sums", [5, 9, 2 * 9], "2 of 3: q, k$"),
        ("entries", [16 * 3, 4, 7], r"1 of 3: v \(7 of 4 entries held\)$"),
        ("entries", [16 * 3, 0, 8], r"1 of 3: k \(0 of 4 entries held\)$"),
    ):
        with pytest.raises(
            WeightSyncMismatch,
            match=rf"weight sync 3 engines do not hold(.|\n)*- engine 1: {named}",
        ):
            check_receipts(plan, [5, 7, 9], [good, good._replace(**{field: value})], 3)
