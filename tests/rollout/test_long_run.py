"""75 updates of a bf16 model of a real vocabulary: no false alarm, and an alarm where something is
wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import launch
from tests.rollout import wide_model

UPDATES = 75


@pytest.mark.e2e
@pytest.mark.slow
def test_the_proof_of_a_wide_model_gives_no_false_alarm_and_finds_what_checksums_cannot(
    tmp_path: Path,
) -> None:
    wide_model.save_checkpoint(tmp_path)
    (found,) = launch("tests.rollout.wide_model", "run", 1, path=str(tmp_path), updates=UPDATES)
    assert found["random"] < -15, "logits are as wide as a real model's"
    assert found["entropy"][1] < found["entropy"][0] / 2, "the policy has sharpened"
    assert len(found["gauges"]) == UPDATES + 1 and found["warned"] == 0
    assert 0 < min(found["gauges"]) and max(found["gauges"]) < wide_model.TOLERANCE
    assert "do not sample from the policy's weights" in found["temperature"]
    assert "do not sample from the policy's weights" in found["cache"]
    assert found["proved again"]
    assert found["lengths"] == [200] * 4
    assert all(len(spans) == 2 for spans in found["spans"]), "a request was not in mid-flight"
    assert (
        found["own"] > 0
        and "the vLLM engine of this actor died; the end of its log" in found["died"]
    )
