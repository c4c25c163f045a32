"""Concatenated rows; how they are cut into blocks never shows in a result."""

from __future__ import annotations

import pytest
import torch

from openrlhf_ext.algorithms import conflict_mask, segments
from openrlhf_ext.algorithms.segments import Segments, float64_sum, group_blocks
from tests.algorithms.helpers import assert_close, random_groups, to_batch
from tests.algorithms.test_invariants import NAMES, build, run

SCOPES = [
    {},
    {"entropy_scope": "batch"},
    {"norm_scope": "batch"},
    {"entropy_axis": "row"},
    {"normaliser": "geomean"},
]
CASES = [(name, {}) for name in NAMES] + [
    (n, o) for n in ("gtpo_entropy", "grpo_s") for o in SCOPES[1:]
]
CASES = [(n, o) for n, o in CASES if not (n == "grpo_s" and "entropy_axis" in o)]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
@pytest.mark.parametrize("shuffle", [None, 5])
def test_results_do_not_depend_on_the_block_size(
    name: str, options: dict, shuffle: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, new, _ = to_batch(random_groups(11, groups=6, max_length=9), shuffle=shuffle)
    algorithm = build(name, **options)
    shaped, value, grad = run(algorithm, batch, new)
    for elements in (1, 20, 60):
        monkeypatch.setattr(segments, "BLOCK_TOKENS", elements)
        monkeypatch.setattr(conflict_mask, "WINDOW_ELEMENTS", elements)
        other, other_value, other_grad = run(algorithm, batch, new)
        assert_close(other.advantages.tolist(), shaped.advantages.tolist(), 1e-12, "advantages")
        assert_close(other_value, value, 1e-12, "loss")
        assert_close(other_grad.tolist(), grad.tolist(), 1e-12, "grad")
        for quantity in [*shaped.of_rows, *shaped.of_tokens]:
            assert_close(
                other[quantity].nan_to_num().tolist(),
                shaped[quantity].nan_to_num().tolist(),
                1e-12,
                quantity,
            )


def ragged(*lengths: int) -> Segments:
    return Segments(torch.tensor(lengths, dtype=torch.long))


def test_blocks_cover_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "BLOCK_TOKENS", 10)
    assert [*ragged().blocks()] == []
    blocks = [*ragged(3, 7, 1, 25, 4, 4).blocks()]
    assert [(block.rows.start, block.rows.stop) for block in blocks] == [
        (0, 2),
        (2, 3),
        (3, 4),
        (4, 6),
    ]
    assert [(block.tokens.start, block.tokens.stop) for block in blocks] == [
        (0, 10),
        (10, 11),
        (11, 36),
        (36, 44),
    ]


def test_group_blocks_keep_groups_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "BLOCK_TOKENS", 40)
    rows = ragged(*[10] * 17)
    cuts = [cut for cut, _ in group_blocks(rows, torch.arange(17), torch.tensor([3, 1, 9, 2, 2]))]
    assert [(cut.start, cut.stop) for cut in cuts] == [(0, 4), (4, 13), (13, 17)]
    assert group_blocks(ragged(), torch.arange(0), torch.tensor([], dtype=torch.long)) == []


@pytest.mark.parametrize(
    "rows", [[2, 0, 3], torch.tensor([True, False, True, True]), [], slice(1, 3), slice(0, 0)]
)
def test_rows_are_taken_whole(rows) -> None:
    cut, values = ragged(2, 3, 1, 4), torch.arange(10)
    wanted = [part.tolist() for part in values.split([2, 3, 1, 4])]
    index = range(4)[rows] if isinstance(rows, slice) else torch.as_tensor(rows)
    index = index.nonzero().flatten() if getattr(index, "dtype", None) == torch.bool else index
    wanted = [wanted[int(row)] for row in index]
    assert cut.take(values, rows).tolist() == [value for part in wanted for value in part]
    assert cut.select(rows).lengths_B.tolist() == [len(part) for part in wanted]
    assert cut.select(rows).bounds.tolist() == [
        sum(map(len, wanted[:i])) for i in range(len(wanted) + 1)
    ]


def test_a_slice_of_rows_is_a_view() -> None:
    values = torch.arange(10)
    assert ragged(2, 3, 1, 4).take(values, slice(1, 3)).data_ptr() == values[2:].data_ptr()


def test_what_was_taken_is_put_back() -> None:
    cut, values, out = ragged(2, 3, 1, 4), torch.arange(10), torch.full((10,), -1)
    rows = torch.tensor([3, 1])
    cut.put(out, cut.take(values, rows), rows)
    assert out.tolist() == [-1, -1, 2, 3, 4, -1, 6, 7, 8, 9]


@pytest.mark.parametrize("elements", [1, 4, 1 << 18])
def test_row_reductions(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "BLOCK_TOKENS", elements)
    cut, values = ragged(2, 3, 0, 1), torch.arange(6.0).requires_grad_()
    sums = cut.sums(values)
    assert sums.dtype == torch.float64 and sums.tolist() == [1.0, 9.0, 0.0, 5.0]
    (slope,) = torch.autograd.grad((sums * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum(), values)
    assert slope.tolist() == [1.0, 1.0, 2.0, 2.0, 2.0, 4.0]
    assert cut.spread(torch.tensor([1, 2, 3, 4])).tolist() == [1, 1, 2, 2, 2, 4]
    assert ragged(2, 3).maxima(torch.tensor([1.0, -2.0, -3.0, -1.0, -5.0])).tolist() == [1.0, -1.0]
    assert float(float64_sum(values.detach())) == 15.0


def test_places_and_last_tokens() -> None:
    cut = ragged(2, 3, 1)
    assert [cut.place(token) for token in range(6)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (1, 2),
        (2, 0),
    ]
    assert cut.last().tolist() == [1, 4, 5]
    assert cut.block(slice(None)).positions(torch.tensor([0, 10, 20])).tolist() == [
        0,
        1,
        10,
        11,
        12,
        20,
    ]
    assert cut.block(torch.tensor([2, 0])).tokens.tolist() == [5, 0, 1]
