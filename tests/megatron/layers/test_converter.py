"""A converter that no other file names reaches log-probs, gradients, frozen copies and
checkpoints."""

from __future__ import annotations

import torch

from tests.launch import launch
from tests.megatron.reference import make_batch
from tests.models import make_tiny_model

LAYOUTS = [{"tp": 2, "sp": True}, {"pp": 2}]


def test_a_converter_needs_one_file(tmp_path):
    model = tmp_path / "model"
    make_tiny_model(model)
    batch, weights_N = make_batch(61)
    cases = [{"model": str(model), **layout} for layout in LAYOUTS]
    ranks = launch(
        "tests.megatron.layers.ranks",
        "run_cases",
        2,
        cases=cases,
        folder=tmp_path,
        batch=batch,
        weights_N=weights_N,
    )
    for rank in ranks:
        for found in rank:
            assert torch.equal(found[None], found[1.0])
            assert (found[2.0] - found[1.0]).abs().max() > 1e-4
            assert all(found["gradients"])
            assert torch.equal(found["frozen"], found[2.0]) and not torch.equal(
                found["trained"], found[2.0]
            )
            assert torch.equal(found["loaded"], found["trained"]), (
                "the factor comes with the checkpoint"
            )
    whole, stages = ([rank[case]["state"] for rank in ranks] for case in range(2))
    assert whole == [[f"scaled.layers.{number}.factor" for number in (1, 2, 3)]] * 2
    assert stages == [
        ["scaled.layers.1.factor"],
        ["scaled.layers.2.factor", "scaled.layers.3.factor"],
    ]
