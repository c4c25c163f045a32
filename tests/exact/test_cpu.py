"""The result of a row is the same bits whatever else is in the batch, operation by operation.

Shape suffixes: ``openrlhf_ext.exact.operations``; B = blocks of vLLM's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from openrlhf_ext.exact import NotExact
from openrlhf_ext.exact.cpu import (
    PAGE,
    ROWS,
    CpuOperations,
    attention_isa,
)
from openrlhf_ext.exact.limits import longest_sequence, processor_problem
from openrlhf_ext.exact.operations import rotary_table

if (_PROBLEM := processor_problem()) is not None:
    pytest.skip(_PROBLEM, allow_module_level=True)

TYPES = (torch.float32, torch.bfloat16)
MOST = 130  # rows: four blocks and two rows
SHAPES = ((263, 128), (263, 576), (263, 1536))  # N, K of products
HEADS = ((4, 2), (9, 3), (8, 1))  # of queries, of keys


@pytest.fixture(scope="module")
def operations() -> CpuOperations:
    return CpuOperations()


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Also of zeros of either sign, and of NaN."""
    integers = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return torch.equal(one.contiguous().view(integers), other.contiguous().view(integers))


def parts_of_rows() -> Iterator[slice]:
    """Every number of rows from the first on, and a few rows from every place in a block on."""
    yield from (slice(0, rows) for rows in range(1, MOST + 1))
    for start in range(ROWS + 1):
        yield from (slice(start, start + rows) for rows in (1, 2, ROWS, MOST - ROWS - 1))


def assert_alone(function: Callable[[Tensor], Tensor], x_MK: Tensor) -> None:
    """Each part of the rows gives the bits that these rows have in the whole."""
    whole = function(x_MK)
    wrong = [
        part
        for part in parts_of_rows()
        if not same_bits(function(x_MK[part].contiguous()), whole[part])
    ]
    assert not wrong, f"{len(wrong)} parts differ, the first ones {wrong[:5]}"


# ---- rows


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_row_of_a_product_does_not_depend_on_the_others(operations, dtype, n, k, biased):
    x_MK, weight_NK = random(0, MOST, k, dtype=dtype), random(1, n, k, dtype=dtype) / k**0.5
    bias_N = random(2, n, dtype=dtype) if biased else None
    product = operations.product(weight_NK)
    assert_alone(lambda x: product(x, bias_N), x_MK)
    truth = x_MK.double() @ weight_NK.double().t() + (0 if bias_N is None else bias_N.double())
    near = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(product(x_MK, bias_N).double(), truth, rtol=near, atol=near)


def test_a_product_does_not_follow_its_weight(operations):
    """Which is why ``begin_schedule`` forgets it."""
    weight_NK, x_MK = random(0, 64, 128), random(1, 5, 128)
    product = operations.product(weight_NK)
    before = product(x_MK)
    weight_NK.data.add_(1.0)
    assert same_bits(product(x_MK), before)
    assert not same_bits(operations.product(weight_NK)(x_MK), before)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("n", "k"), [(263, 128), (1000, 576)])
def test_a_row_of_logits_and_log_probs_does_not_depend_on_the_others(operations, dtype, n, k):
    head = operations.head_product(random(1, n, k, dtype=dtype) / k**0.5)
    hidden_MK = random(0, MOST, k, dtype=dtype)
    assert_alone(lambda x: operations.logits(x, head), hidden_MK)
    logits_MV = operations.logits(hidden_MK, head)
    for temperature in (1.0, 0.7):
        assert_alone(lambda x, t=temperature: CpuOperations().logprobs(x, t), logits_MV)
        truth = (logits_MV.double() / temperature).log_softmax(-1)
        torch.testing.assert_close(
            CpuOperations().logprobs(logits_MV, temperature).double(), truth, rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("k", [128, 576])
def test_a_row_of_a_norm_does_not_depend_on_the_others(operations, dtype, k):
    weight_K = 1 + 0.1 * random(1, k, dtype=dtype)
    for of_sum, x_MK in ((False, random(0, MOST, k, dtype=dtype)), (True, random(0, MOST, k))):
        assert_alone(lambda x, s=of_sum: operations.norm(x, weight_K, 1e-6, of_sum=s), x_MK)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_of_an_activation_or_a_sum_does_not_depend_on_the_others(operations, dtype):
    assert_alone(operations.silu_times, random(0, MOST, 2 * 384, dtype=dtype))
    branch_MK = random(1, MOST, 576, dtype=dtype)
    residual_MK = random(2, MOST, 576)
    whole = operations.add(residual_MK, branch_MK)
    for part in parts_of_rows():
        assert same_bits(operations.add(residual_MK[part], branch_MK[part]), whole[part]), part


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [32, 64, 128])
def test_a_rotated_row_does_not_depend_on_the_others(operations, dtype, size):
    query, key = random(0, MOST, 4, size, dtype=dtype), random(1, MOST, 2, size, dtype=dtype)
    table = rotary_table(10_000.0 ** -(torch.arange(0, size, 2) / size), 2 * MOST, dtype)
    positions = torch.randperm(2 * MOST, generator=torch.Generator().manual_seed(2))[:MOST]
    whole = operations.rotate(positions, query, key, table)
    for part in parts_of_rows():
        found = operations.rotate(positions[part], query[part], key[part], table)
        assert all(same_bits(a, b[part]) for a, b in zip(found, whole, strict=True)), part


def test_a_position_behind_the_rotary_table_is_refused(operations):
    table = rotary_table(10_000.0 ** -(torch.arange(0, 32, 2) / 32), 128, torch.float32)
    query, key = random(0, 2, 4, 32), random(1, 2, 2, 32)
    operations.rotate(torch.tensor([0, 127]), query, key, table)
    with pytest.raises(NotExact, match="position 128 is behind the rotary table of 128 positions"):
        operations.rotate(torch.tensor([0, 128]), query, key, table)


# ---- attention


class Cache:
    """Keys and values of one sequence in pages, as an engine has them: tokens are written and
    queried in parts, beside other sequences."""

    def __init__(self, operations: CpuOperations, keys_TGD: Tensor, values_TGD: Tensor) -> None:
        self.kernels, self.dtype = operations._kernels, keys_TGD.dtype
        count, self.groups, self.size = keys_TGD.shape
        self.isa = attention_isa(self.dtype, self.size)
        pages = -(-count // PAGE)
        cache = torch.zeros(pages, self.groups, 2 * PAGE, self.size, dtype=self.dtype)
        self.keys, self.values = cache.chunk(2, dim=2)
        # its pages in another order than its tokens
        self.table_B = torch.arange(pages).flip(0).int()
        slots_T = self.table_B.long().repeat_interleave(PAGE)[:count] * PAGE
        slots_T += torch.arange(count) % PAGE
        self.kernels.cpu_attn_reshape_and_cache(
            keys_TGD, values_TGD, self.keys, self.values, slots_T, self.isa
        )

    def attend(self, parts: Sequence[tuple[Tensor, int]], scale: float) -> list[Tensor]:
        """Of several requests at once: queries of the last tokens, and how many tokens there are.
        All see this sequence."""
        queries = torch.cat([query for query, _ in parts])
        counts = [len(query) for query, _ in parts]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        lengths = torch.tensor([length for _, length in parts]).int()
        work = self.kernels.cpu_attn_get_scheduler_metadata(
            num_reqs=len(parts),
            num_heads=queries.shape[1],
            num_kv_heads=self.groups,
            head_dim=self.size,
            seq_lens=lengths,
            dtype=self.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=False,
        )
        out = torch.empty_like(queries)
        self.kernels.cpu_attention_with_kv_cache(
            query=queries,
            key_cache=self.keys,
            value_cache=self.values,
            output=out,
            query_start_loc=starts,
            seq_lens=lengths,
            scale=scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self.table_B.repeat(len(parts), 1),
            softcap=0.0,
            scheduler_metadata=work,
            s_aux=None,
        )
        return list(out.split(counts))


def attended(operations: CpuOperations, sequence: tuple[Tensor, ...], upto: int) -> Tensor:
    """Of the first tokens of a sequence, as a policy computes them."""
    query, key, value = (each[:upto].contiguous() for each in sequence)
    starts = torch.tensor([0, upto]).int()
    return operations.attention(query, key, value, starts, query.shape[-1] ** -0.5)


def sequence_of(dtype: torch.dtype, size: int, heads: tuple[int, int], count: int) -> tuple:
    query, key, value = (heads[0], heads[1], heads[1])
    return tuple(
        random(seed, count, each, size, dtype=dtype)
        for seed, each in enumerate((query, key, value))
    )


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("heads", HEADS)
def test_a_tokens_attention_is_that_of_an_engine_up_to_the_longest_sequence(
    operations, dtype, size, heads
):
    """Token by token, in chunks, and with other requests in the batch."""
    longest = longest_sequence(dtype.itemsize, size)
    sequence = sequence_of(dtype, size, heads, longest)
    whole, scale = attended(operations, sequence, longest), size**-0.5
    cache, query = Cache(operations, *sequence[1:]), sequence[0]
    # every length that can be the first one to differ: at the beginning, around pages, at the end
    lengths = {*range(1, 35), *range(PAGE - 2, PAGE + 3), *range(longest - 34, longest + 1)}
    lengths |= {*range(1, longest, 23)}
    lengths = sorted(length for length in lengths if 1 <= length <= longest)
    for length in lengths:
        (alone,) = cache.attend([(query[length - 1 : length], length)], scale)
        assert same_bits(alone[0], whole[length - 1]), f"generated token {length} of {longest}"
    for chunk in (16, 48, 129, longest - 1):
        for start in range(0, longest, chunk):
            stop = min(start + chunk, longest)
            (part,) = cache.attend([(query[start:stop], stop)], scale)
            assert same_bits(part, whole[start:stop]), f"chunk {start}:{stop}"
    batch = [(query[n - 1 : n], n) for n in lengths[::2]] + [(query[:100], 100), (query[7:70], 70)]
    for (part, stop), found in zip(batch, cache.attend(batch, scale), strict=True):
        assert same_bits(found, whole[stop - len(part) : stop]), f"in a batch, up to {stop}"
    for length in (1, 2, 31, 33, PAGE, PAGE + 1, longest - 33, longest - 1):
        assert same_bits(attended(operations, sequence, length), whole[:length]), length


@pytest.mark.parametrize("dtype", TYPES)
def test_a_pack_has_the_attention_of_each_of_its_sequences(operations, dtype):
    lengths = [1, 5, 130, 64, 128, 33]
    rows = [sequence_of(dtype, 32, (4, 2), length) for length in lengths]
    query, key, value = (torch.cat(each) for each in zip(*rows, strict=True))
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    found = operations.attention(query, key, value, starts, 32**-0.5).split(lengths)
    for row, length, out in zip(rows, lengths, found, strict=True):
        assert same_bits(out, attended(operations, row, length)), length


def test_longer_sequences_than_the_longest_differ_somewhere(operations):
    """The limit is not far below what this processor can do; in fp32, where no rounding hides other
    sums."""
    for size in (32, 64, 128):
        longest = longest_sequence(4, size)
        sequence = sequence_of(torch.float32, size, (4, 2), 2 * longest)
        whole = attended(operations, sequence, 2 * longest)
        shorter = [
            attended(operations, sequence, length)
            for length in range(longest, 2 * longest + 1, longest // 8)
        ]
        differs = [not same_bits(each, whole[: len(each)]) for each in shorter]
        assert any(differs), f"head size {size}: nothing differs up to {2 * longest} tokens"


def test_the_kernel_of_attention_is_vllms_choice():
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    for dtype in TYPES:
        for size in (32, 48, 64, 80, 96, 112, 128, 192, 256):
            assert attention_isa(dtype, size) == _get_attn_isa(dtype, PAGE, size), (dtype, size)
