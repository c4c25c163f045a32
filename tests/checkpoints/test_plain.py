"""Plain state survives a round trip bit for bit, and nothing else is accepted."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
import torch

from openrlhf_ext.checkpoints import CheckpointError
from openrlhf_ext.checkpoints.files import read_plain, write_plain


def round_trip(folder, state):
    write_plain(folder, "state.json", state)
    return read_plain(folder / "state.json")


def test_values_come_back_with_their_types(tmp_path):
    state = {
        "none": None,
        "flag": True,
        "number": 3,
        "text": "ä\n",
        "float": 0.1,
        "tiny": 5e-324,
        "infinite": -math.inf,
        "list": [1, (2, "three", [4])],
        "bytes": b"\x00\xff",
        7: "a number as key",
        ("a", 1): "a tuple as key",
        "nested": {"!": "the key that marks kinds", "x": {}},
    }
    assert round_trip(tmp_path, state) == state
    assert math.isnan(round_trip(tmp_path, [math.nan])[0])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
)
def test_tensors_come_back_bit_for_bit(tmp_path, dtype):
    for tensor in (
        torch.randn(3, 5).to(dtype),
        torch.zeros(0, 2, dtype=dtype),
        torch.ones((), dtype=dtype),
    ):
        back = round_trip(tmp_path, {"t": tensor})["t"]
        assert back.dtype == dtype and back.shape == tensor.shape and back.equal(tensor)
    strided = torch.arange(12).view(3, 4).T
    assert round_trip(tmp_path, strided).equal(strided)


def test_random_generators_go_on_where_they_were(tmp_path):
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    expected = random.random(), np.random.rand(), torch.rand(())
    back = round_trip(tmp_path, states)
    random.setstate(back["python"])
    np.random.set_state(back["numpy"])
    torch.set_rng_state(back["torch"])
    assert (random.random(), np.random.rand(), torch.rand(())) == expected


def test_what_cannot_be_plain_is_refused_with_its_place(tmp_path):
    with pytest.raises(TypeError, match=r"state\['a'\]\[1\] is a object"):
        write_plain(tmp_path, "state.json", {"a": [1, object()]})


@pytest.mark.parametrize(
    "text", ["", "{", '{"!": "code"}', '{"!": "tensor", "dtype": "load", "shape": [], "data": ""}']
)
def test_foreign_files_are_refused_with_their_name(tmp_path, text):
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(
        CheckpointError, match=r"state\.json is not a state written by this program"
    ):
        read_plain(tmp_path / "state.json")


def test_the_file_is_plain_json(tmp_path):
    write_plain(tmp_path, "state.json", {"t": torch.arange(2)})
    assert json.loads((tmp_path / "state.json").read_text())["t"]["dtype"] == "int64"
