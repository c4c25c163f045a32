"""Every rank's part in publishing weights, in every layout, against the tensors of the
checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import launch
from tests.models import make_tiny_model


@pytest.mark.slow
def test_what_arrives_is_the_checkpoint_and_a_lost_engine_is_told_to_every_rank(
    tmp_path: Path,
) -> None:
    tied, untied = str(tmp_path / "tied"), str(tmp_path / "untied")
    make_tiny_model(tmp_path / "tied", "qwen2", tied=True, vocab=67)
    make_tiny_model(tmp_path / "untied", "qwen3", vocab=67)
    # workers of an engine: one and two meet one, two and four streams, with and without shared
    # memory
    cases = [
        {"model": tied, "streams": 4, "shared": True, "workers": (1,)},
        {"model": tied, "tp": 2, "pp": 2, "streams": 2, "shared": True, "workers": (2,)},
        {"model": untied, "tp": 2, "streams": 2, "shared": True, "workers": (1,)},
        # a stage holds layers 0 and 2
        {"model": tied, "tp": 2, "pp": 2, "vp": 2, "streams": 2, "shared": False, "workers": (2,)},
        {"model": untied, "pp": 2, "cp": 2, "streams": 4, "shared": True, "workers": (2,)},
        # two of the ranks share a key-value head
        {"model": untied, "tp": 4, "streams": 1, "shared": False, "workers": (1, 2)},
    ]
    for rank, problems in enumerate(
        launch("tests.ranks.publisher_worker", "publish", 4, cases=cases, ranks=4)
    ):
        assert not problems, f"rank {rank}: {problems}"
