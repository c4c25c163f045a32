"""Files that appear whole or not at all."""

from __future__ import annotations

import os

import pytest

from openrlhf_ext.outputs import in_one_piece


def test_a_file_is_written_in_one_piece_and_nothing_takes_the_place_of_what_is_no_file(tmp_path):
    target = tmp_path / "new" / "page"
    for text in ("one", "two"):
        with in_one_piece(target) as partial:
            partial.write_text(text)
            assert partial != target and (not target.exists() or target.read_text() == "one")
        assert target.read_text() == text
    with pytest.raises(ZeroDivisionError), in_one_piece(target) as partial:
        partial.write_text(str(1 / 0))
    assert target.read_text() == "two" and [*target.parent.iterdir()] == [target]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with in_one_piece(pipe) as partial:
        assert partial == pipe
    assert pipe.is_fifo()
