"""Any cutting of a tensor into blocks and pieces is read back by any other."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from safetensors.torch import load_file

from openrlhf_ext.checkpoints import (
    Block,
    BlockRange,
    CheckpointError,
    TensorIndex,
    TensorReader,
    write_pieces,
)

KEY = "layer.weight"


def grid(shape: tuple[int, ...], parts: tuple[int, ...]) -> list[Block]:
    """The boxes of a tensor that is cut into ``parts`` along each dimension."""
    sizes = [n // p for n, p in zip(shape, parts, strict=True)]
    places = itertools.product(*(range(p) for p in parts))
    return [
        Block(KEY, shape, tuple(i * n for i, n in zip(place, sizes, strict=True)), tuple(sizes))
        for place in places
    ]


def part_of(whole: torch.Tensor, block: Block) -> torch.Tensor:
    return whole[tuple(slice(o, o + n) for o, n in zip(block.offset, block.shape, strict=True))]


def ranges(block: Block, cuts: list[int]) -> list[BlockRange]:
    edges = [0, *cuts, block.numel]
    return [BlockRange(block, a, b) for a, b in itertools.pairwise(edges) if a < b]


def write(folder, whole: torch.Tensor, pieces: list[BlockRange], files: int = 2) -> TensorIndex:
    """Deals the pieces to files, as ranks do."""
    entries = []
    for n in range(files):
        mine = pieces[n::files]
        data = [(p, part_of(whole, p.block).reshape(-1)[p.start : p.end]) for p in mine]
        write_pieces(folder, f"{n}.safetensors", data)
        entries += [(p, "F32", f"{n}.safetensors") for p in mine]
    index = TensorIndex.build(entries)
    index.write(folder, "index.json")
    return TensorIndex.read(folder / "index.json")


@pytest.mark.parametrize("seed", range(12))
def test_every_layout_reads_every_other(tmp_path, seed):
    chance = random.Random(seed)
    shape = (4, 12, 6)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    saved = grid(
        shape, (chance.choice([1, 2, 4]), chance.choice([1, 2, 3, 4]), chance.choice([1, 2, 3]))
    )
    pieces = [
        p
        for b in saved
        for p in ranges(b, sorted(chance.sample(range(1, b.numel), chance.choice([0, 1, 3]))))
    ]
    chance.shuffle(pieces)
    reader = TensorReader(tmp_path, write(tmp_path, whole, pieces))
    for parts in ((1, 1, 1), (2, 1, 3), (4, 4, 1), (1, 6, 2)):
        for block in grid(shape, parts):
            low, high = sorted(chance.sample(range(block.numel + 1), 2))
            expected = part_of(whole, block).reshape(-1)
            assert reader.read(BlockRange.whole(block), torch.float32).equal(expected)
            assert reader.read(BlockRange(block, low, high), torch.float32).equal(
                expected[low:high]
            )


def test_a_padded_dimension_may_grow_and_shrink(tmp_path):
    whole = torch.randn(6, 3)
    reader = TensorReader(
        tmp_path, write(tmp_path, whole, [BlockRange.whole(b) for b in grid((6, 3), (2, 1))])
    )
    longer = BlockRange.whole(Block(KEY, (8, 3), (4, 0), (4, 3)))
    assert (
        reader.read(longer, torch.float32, padded=True)
        .view(4, 3)
        .equal(torch.cat([whole[4:], torch.zeros(2, 3)]))
    )
    shorter = BlockRange.whole(Block(KEY, (5, 3), (0, 0), (5, 3)))
    assert reader.read(shorter, torch.float32, padded=True).view(5, 3).equal(whole[:5])
    with pytest.raises(
        CheckpointError, match=r"layer\.weight has the shape \(6, 3\) .* needs \(8, 3\)"
    ):
        reader.read(longer, torch.float32)


def test_what_does_not_fit_is_refused_by_name(tmp_path):
    block = Block(KEY, (6, 3), (0, 0), (6, 3))
    reader = TensorReader(tmp_path, write(tmp_path, torch.randn(6, 3), [BlockRange.whole(block)]))
    with pytest.raises(CheckpointError, match=r"layer\.weight has the type F32 .* needs BF16"):
        reader.read(BlockRange.whole(block), torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"holds no tensor other"):
        reader.read(BlockRange.whole(Block("other", (1,), (0,), (1,))), torch.float32)
    (tmp_path / "0.safetensors").write_bytes(b"\x80\x04 no safetensors")
    with pytest.raises(CheckpointError, match=r"0\.safetensors cannot be read as safetensors"):
        TensorReader(tmp_path, reader.index).read(BlockRange.whole(block), torch.float32)


def test_holes_and_overlaps_are_found_when_saving():
    half = [BlockRange(b, 0, b.numel) for b in grid((4, 2), (2, 1))]
    with pytest.raises(CheckpointError, match="hold 4 elements"):
        TensorIndex.build([(half[0], "F32", "0")])
    with pytest.raises(CheckpointError, match="hold 12 elements"):
        TensorIndex.build([(p, "F32", "0") for p in (*half, half[0])])


def test_files_are_ordinary_safetensors(tmp_path):
    values = torch.randn(4, 2).to(torch.bfloat16)
    block = Block(KEY, (4, 2), (0, 0), (4, 2))
    write_pieces(
        tmp_path,
        "x.safetensors",
        [(BlockRange.whole(block), values), (BlockRange(block, 2, 5), values.view(-1)[2:5])],
    )
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded["layer.weight@0.0+0"].equal(values) and loaded["layer.weight@0.0+2"].equal(
        values.view(-1)[2:5]
    )
