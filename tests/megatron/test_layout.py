"""Who belongs to which replica, stage and tensor group."""

from __future__ import annotations

import pytest
from megatron.core import parallel_state

from openrlhf_ext.megatron.distributed import fake_rank
from openrlhf_ext.megatron.layout import ParallelLayout, RankPlace

LAYOUT = ParallelLayout(24, tensor_parallel_size=2, pipeline_parallel_size=3, context_parallel_size=2)


@pytest.mark.parametrize("rank", [0, 5, 14, 23])
def test_places_are_those_that_megatron_gives(rank):
    with fake_rank(LAYOUT, rank):
        found = RankPlace(
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_context_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(),
        )
    assert LAYOUT.place(rank) == found


def test_ranks_by_coordinates():
    assert LAYOUT.ranks(replica=1) == tuple(range(12, 24))
    assert LAYOUT.ranks(context=0, replica=0) == (0, 1, 4, 5, 8, 9)
    assert LAYOUT.ranks(tensor=1, stage=2) == (9, 11, 21, 23)
    assert [rank for rank in range(24) if LAYOUT.answers_for_replica(rank)] == [0, 12]


def test_what_cannot_be_arranged_says_so_in_the_words_of_the_user():
    assert list(LAYOUT.problems()) == []
    broken = ParallelLayout(8, 1, 1, 3, sequence_parallel=True, virtual_pipeline_size=2)
    options, texts = zip(*broken.problems(lambda field: f"--{field}"), strict=True)
    assert options[0][0] == "--world_size" and options[1] == ("--virtual_pipeline_size", "--pipeline_parallel_size")
    assert "got 8 ranks, 1 * 1 * 3 = 3; use 6 or 9 ranks" in texts[0]
    assert texts[1] == "--virtual_pipeline_size needs --pipeline_parallel_size > 1: got 2 and 1; set it to 1"
    assert texts[2] == "--sequence_parallel needs --tensor_parallel_size > 1: got 1; switch it off"
