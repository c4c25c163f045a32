"""How tensors are cut into blocks never shows in a result."""

from __future__ import annotations

import pytest
import torch

from openrlhf_ext.algorithms import blocks, conflict_mask
from openrlhf_ext.algorithms.blocks import group_blocks, row_blocks, row_counts, row_sums
from tests.algorithms.helpers import assert_close, random_groups, to_batch
from tests.algorithms.test_invariants import NAMES, build, run

SCOPES = [{}, {"entropy_scope": "batch"}, {"norm_scope": "batch"}, {"entropy_axis": "row"}, {"normaliser": "geomean"}]
CASES = [(name, {}) for name in NAMES] + [(n, o) for n in ("gtpo_entropy", "grpo_s") for o in SCOPES[1:]]
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
        monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", elements)
        monkeypatch.setattr(conflict_mask, "WINDOW_ELEMENTS", elements)
        other, other_value, other_grad = run(algorithm, batch, new)
        assert_close(other.advantages.tolist(), shaped.advantages.tolist(), 1e-12, "advantages")
        assert_close(other_value, value, 1e-12, "loss")
        assert_close(other_grad.tolist(), grad.tolist(), 1e-12, "grad")
        for quantity in shaped.exposed:
            assert_close(other[quantity].nan_to_num().tolist(), shaped[quantity].nan_to_num().tolist(), 1e-12, quantity)


def test_row_blocks_cover_all_rows() -> None:
    assert [*row_blocks(0, 5)] == []
    assert [i for rows in row_blocks(1000, 1000) for i in range(rows.start, rows.stop)] == list(range(1000))
    assert len([*row_blocks(3, 1 << 20)]) == 3


def test_group_blocks_keep_groups_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 40)
    cuts = group_blocks(torch.tensor([3, 1, 9, 2, 2]), 10)
    assert [(cut.start, cut.stop) for cut in cuts] == [(0, 4), (4, 13), (13, 17)]
    assert group_blocks(torch.tensor([], dtype=torch.long), 10) == []


def test_row_reductions() -> None:
    values = torch.tensor([[1.0, float("nan")], [2.0, 3.0]])
    mask = torch.tensor([[True, False], [True, True]])
    assert row_sums(values, mask).tolist() == [1.0, 5.0]
    assert row_counts(mask).tolist() == [1, 2]
