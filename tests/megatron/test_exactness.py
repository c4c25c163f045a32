"""Loss, metrics and every gradient of every algorithm do not depend on layout, micro-batches,
packing or head."""

from __future__ import annotations

import pytest

from tests.launch import launch
from tests.megatron.exactness import (
    OWN,
    SUPERVISED,
    TEMPERATURE,
    algorithms,
    chosen,
    make_batch,
    truths,
)
from tests.models import make_tiny_model

TOLERANCE = 1e-5

# every other algorithm, where two layouts share the algorithms (docs/layouts.md): each one is in
# one of them
FIRST = (*tuple(algorithms())[::2], SUPERVISED, f"{OWN[0]}, of the update")
SECOND = (*tuple(algorithms())[1::2], SUPERVISED, f"{OWN[1]}, of the update")
# one whose loss the head makes token by token, one that needs whole sequences
FEW = ("grpo with KL", "gspo", SUPERVISED)
# (model, layout) by number of ranks; what is left of the ranks is data-parallel. "tied": tied
# embeddings, 2 key-value heads, a vocabulary that 2 and 4 do not divide; "untied": query and key
# norms, the same otherwise. As few micro-batches as show that there are several, three or four
# where stages have to reach their steady state: on two cores messages take nearly all of the time
LAYOUTS = {
    1: [
        ("tied", {"micro_batch_size": 1}),
        ("untied", {"micro_batch_size": 12}),
        ("tied", {"max_tokens": 25}),
        ("untied", {"micro_batch_size": 5, "head": "two_pass"}),
        ("tied", {"micro_batch_size": 5, "head": "two_pass"}),
    ],
    4: [
        ("untied", {"micro_batch_size": 1, "algorithms": FIRST}),
        ("untied", {"micro_batch_size": 7, "lopsided": True, "algorithms": SECOND}),
        ("untied", {"tp": 2, "max_tokens": 40, "algorithms": FIRST}),
        ("untied", {"tp": 4, "sp": True, "max_tokens": 70, "algorithms": SECOND}),
        (
            "tied",
            {"tp": 2, "pp": 2, "ends": (1, 3), "sp": True, "max_tokens": 45, "algorithms": FIRST},
        ),
        (
            "untied",
            {"tp": 2, "pp": 2, "head": "two_pass", "micro_batch_size": 4, "algorithms": SECOND},
        ),
        ("tied", {"pp": 2, "vp": 2, "max_tokens": 40, "lopsided": True, "algorithms": SECOND}),
        ("untied", {"pp": 2, "micro_batch_size": 3, "algorithms": FIRST}),
        ("tied", {"pp": 2, "ends": (None, 1), "max_tokens": 25, "algorithms": SECOND}),
        ("untied", {"tp": 2, "cp": 2, "sp": True, "max_tokens": 35, "algorithms": FIRST}),
        (
            "tied",
            {"tp": 2, "cp": 2, "head": "two_pass", "micro_batch_size": 6, "algorithms": SECOND},
        ),
        ("tied", {"pp": 2, "vp": 2, "cp": 2, "max_tokens": 60, "algorithms": FIRST}),
        ("untied", {"cp": 2, "max_tokens": 20, "algorithms": FIRST}),
        ("untied", {"cp": 4, "micro_batch_size": 6, "algorithms": SECOND}),
        ("tied", {"pp": 4, "max_tokens": 34, "algorithms": FEW}),
    ],
    8: [("tied", {"tp": 2, "pp": 2, "cp": 2, "sp": True, "max_tokens": 20, "algorithms": FEW})],
}


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """Name -> (path, truth of every algorithm)."""
    batch, made = make_batch(61), {}
    for name, family, tied, layers in [("tied", "qwen2", True, 4), ("untied", "qwen3", False, 2)]:
        path = tmp_path_factory.mktemp(name)
        made[name] = (
            str(path),
            truths(make_tiny_model(path, family, tied=tied, layers=layers), batch),
        )
    return made


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_every_algorithm_in_every_layout(problems, world_size):
    cases = [
        {"name": name, "model": problems[name][0], "temperature": TEMPERATURE, **layout}
        for name, layout in LAYOUTS[world_size]
    ]
    ranks = launch(
        "tests.megatron.exactness",
        "run_layouts",
        world_size,
        cases=cases,
        world_size=world_size,
        batch=make_batch(61),
        problems={n: p[1] for n, p in problems.items()},
    )
    wrong = []
    for number, case in enumerate(cases):
        for name, truth in chosen(case, problems[case["name"]][1]).items():
            metrics, errors = ranks[0][number][name]
            where = f"{name} in {case}"
            assert all(rank[number][name][0] == metrics for rank in ranks), (
                f"{where}: metrics differ between ranks"
            )
            assert set(errors) == set(truth.grads), where
            wrong += [
                f"{where}: gradient of {n} is off by {e:.1e}"
                for n, e in errors.items()
                if not e < TOLERANCE
            ]
            assert set(metrics) - {"loss/policy"} == set(truth.metrics), where
            for metric, expected in {"loss/policy": truth.value, **truth.metrics}.items():
                if metrics[metric] != pytest.approx(expected, rel=TOLERANCE, abs=1e-6):
                    wrong.append(f"{where}: {metric} is {metrics[metric]}, not {expected}")
    assert not wrong, "\n".join(wrong)
