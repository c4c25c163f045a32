from __future__ import annotations

from openrlhf_ext.megatron.step.schedule import schedule_order


def test_without_interleaving_micro_batches_come_in_turn():
    assert schedule_order(3, 1, 2) == [(0, 0), (1, 0), (2, 0)]


def test_interleaved_rounds_go_through_all_chunks():
    """As many micro-batches as stages go through a chunk before the next chunk starts (Narayanan et
    al. 2021)."""
    assert schedule_order(4, 2, 2) == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
        (2, 0),
        (3, 0),
        (2, 1),
        (3, 1),
    ]
