"""What notices a fault is looked for where the fault is, and trials of all labs have seeds and
names of their own."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("openrlhf", reason="the labs' processes read data by OpenRLHF's class")

from benchmarks import silent_faults
from benchmarks.silent import lab


def run_of(loss: float, error: str | None = None) -> dict:
    steps = {
        step: {"step": step, "loss/sft": loss + 0.001 * step} for step in range(1, lab.STEPS + 1)
    }
    return {"fault": "", "error": error, "steps": {} if error else steps}


def test_a_fault_is_looked_for_from_where_it_is():
    corridor = silent_faults.corridor_of([run_of(1.0), run_of(1.01), run_of(1.02)])
    assert silent_faults.noticed(run_of(1.01), corridor, 0) == {"by": [], "after": None}
    assert silent_faults.noticed(run_of(2.0), corridor, 0) == {"by": ["loss/sft"], "after": 1}
    late = run_of(1.01)
    late["steps"][2]["loss/sft"] = late["steps"][5]["loss/sft"] = 2.0
    assert silent_faults.noticed(late, corridor, 3)["after"] == 2, "step 2 was clean"
    refused = run_of(1.0, "InputError: the examples begin twice")
    assert silent_faults.noticed(refused, corridor, 0) == {"by": ["InputError"], "after": 1}


@pytest.mark.parametrize("name", ["full", "lora", "sft"])
def test_trials_of_a_lab_have_seeds_of_their_own_and_faults_say_where_they_are_from(name):
    trials = list(silent_faults.trials(name, 40))
    assert len({seed for _, seed, _ in trials}) == len(trials)
    faults = [fault for *_, fault in trials if fault is not None]
    assert len({fault.name for fault in faults}) == len(faults) > 2
    for fault in faults:
        assert re.fullmatch(r"[\w-]+#\d+|arXiv \d{4}\.\d{5}", fault.issue), fault.name
        assert fault.lab == name and fault.at in ("rank", "engine", "driver", "data")
