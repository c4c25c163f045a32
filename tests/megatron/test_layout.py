"""Who belongs to which replica, stage and tensor group."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from openrlhf_ext.megatron.distributed import fake_rank
from openrlhf_ext.megatron.layout import ParallelLayout, RankPlace
from openrlhf_ext.megatron.model.build import transformer_config
from openrlhf_ext.megatron.model.shape import read_model_shape
from openrlhf_ext.options.sections import Megatron

ROOT = Path(__file__).resolve().parents[2]

LAYOUT = ParallelLayout(
    24, tensor_parallel_size=2, pipeline_parallel_size=3, context_parallel_size=2
)
EXPERTS = (  # the last has its stages last
    replace(LAYOUT, expert_parallel_size=4),
    replace(LAYOUT, expert_parallel_size=2, expert_tensor_parallel_size=2),
    replace(
        LAYOUT, pipeline_parallel_size=1, expert_parallel_size=3, expert_tensor_parallel_size=4
    ),
    replace(LAYOUT, expert_parallel_size=8),
)


@pytest.mark.parametrize("rank", [0, 5, 14, 23])
@pytest.mark.parametrize("layout", [LAYOUT, *EXPERTS])
def test_places_are_those_that_megatron_gives(layout, rank):
    with fake_rank(layout, rank):
        found = RankPlace(
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_context_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_data_parallel_rank(),
        )
    assert layout.place(rank) == found


def test_experts_and_stages_decide_the_order():
    assert [layout.order for layout in (LAYOUT, *EXPERTS)] == ["tp-cp-ep-pp-dp"] * 4 + [
        "tp-cp-ep-dp-pp"
    ]
    assert EXPERTS[-1].ranks(stage=0) == tuple(range(8))
    assert EXPERTS[-1].ranks(stage=1, replica=1) == (12, 13, 14, 15)


def test_ranks_by_coordinates():
    assert LAYOUT.ranks(replica=1) == tuple(range(12, 24))
    assert LAYOUT.ranks(context=0, replica=0) == (0, 1, 4, 5, 8, 9)
    assert LAYOUT.ranks(tensor=1, stage=2) == (9, 11, 21, 23)
    assert [rank for rank in range(24) if LAYOUT.answers_for_replica(rank)] == [0, 12]


def test_interleaved_chunks_take_turns():
    assert ParallelLayout(2, pipeline_parallel_size=2, virtual_pipeline_size=2).chunk_layers(8) == {
        (0, 0): range(0, 2),
        (1, 0): range(2, 4),
        (0, 1): range(4, 6),
        (1, 1): range(6, 8),
    }
    last = ParallelLayout(3, pipeline_parallel_size=3, decoder_last_pipeline_num_layers=2)
    assert last.chunk_layers(8) == {(0, 0): range(0, 3), (1, 0): range(3, 6), (2, 0): range(6, 8)}


ends = st.none() | st.integers(1, 12)


@given(
    layers=st.integers(1, 24),
    stages=st.integers(2, 5),
    chunks=st.integers(1, 3),
    first=ends,
    last=ends,
)
def test_layers_are_on_the_stages_where_megatron_builds_them(layers, stages, chunks, first, last):
    layout = ParallelLayout(stages, 1, stages, 1, False, chunks, first, last)
    try:
        places = layout.chunk_layers(layers)
    except ValueError:
        with pytest.raises((AssertionError, ValueError)):
            built(layout, layers)
    else:
        assert built(layout, layers) == places


def built(layout: ParallelLayout, layers: int) -> dict[tuple[int, int], range]:
    """What Megatron says of our configuration."""
    shape = replace(read_model_shape(ROOT / "configs/models/qwen2.5-0.5b"), num_layers=layers)
    config, found = transformer_config(shape, layout, torch.float32, Megatron()), {}
    for stage, chunk in itertools.product(
        range(layout.pipeline_parallel_size), range(layout.virtual_pipeline_size)
    ):
        number = chunk if layout.virtual_pipeline_size > 1 else None
        start = get_transformer_layer_offset(config, number, stage)
        found[stage, chunk] = range(start, start + get_num_layers_to_build(config, number, stage))
    return found


def test_what_cannot_be_arranged_says_so_in_the_words_of_the_user():
    assert list(LAYOUT.problems()) == []
    (problem,) = replace(LAYOUT, expert_parallel_size=3).problems()
    assert problem[0][:2] == ("expert_parallel_size", "expert_tensor_parallel_size") and problem[
        1
    ] == (
        "expert_tensor_parallel_size * expert_parallel_size must divide the ranks of a pipeline "
        "stage: got 1 * 3 = 3 and 8 ranks; use a smaller expert_parallel_size"
    )
    broken = ParallelLayout(8, 1, 1, 3, True, 2, decoder_last_pipeline_num_layers=3)
    options, texts = zip(*broken.problems(lambda field: f"--{field}"), strict=True)
    assert options[0][0] == "--world_size" and options[1] == (
        "--virtual_pipeline_size",
        "--pipeline_parallel_size",
    )
    assert "got 8 ranks, 1 * 1 * 3 = 3; use 6 or 9 ranks" in texts[0]
    assert (
        texts[1]
        == "--virtual_pipeline_size needs --pipeline_parallel_size > 1: got 2 and 1; set it to 1"
    )
    assert texts[2] == "--sequence_parallel needs --tensor_parallel_size > 1: got 1; switch it off"
    assert texts[3] == (
        "--decoder_last_pipeline_num_layers needs --pipeline_parallel_size > 1: got 3 and 1; "
        "leave it out"
    )
