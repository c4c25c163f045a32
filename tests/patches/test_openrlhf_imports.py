from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

from openrlhf_ext.patches import openrlhf_imports
from openrlhf_ext.patches.base import PatchRefused
from openrlhf_ext.patches.openrlhf_imports import DeferredName
from tests.patience import PATIENCE_S

HEAVY = (
    "vllm",
    "deepspeed",
    "peft",
    "datasets",
    "transformers",
    "sympy",
    "megatron.core",
    "openrlhf.models",
)
LIGHT = (
    "compat",
    "rollout.launch",
    "ranks.policy",
    "ranks.auxiliary",
    "driver.job",
    "driver.loop",
    "driver.processes",
    "driver.placement",
)


def test_the_driver_starts_actors_before_it_imports_what_takes_long() -> None:
    modules = ", ".join(f"openrlhf_ext.{name}" for name in LIGHT)
    code = f"import sys, {modules}; print([name for name in {HEAVY} if name in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "[]"


def test_deferred_names_act_as_what_they_stand_for() -> None:
    name = DeferredName("collections", "OrderedDict")
    assert name(a=1) == {"a": 1}
    assert name.fromkeys("a") == {"a": None}
    assert isinstance(name(), name) and not isinstance({}, name)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        DeferredName("no_such_module", "name")()


def test_only_the_named_imports_of_the_body_are_deferred() -> None:
    module = ModuleType("importer")
    with openrlhf_imports.deferring(openrlhf_imports.PATCH, ("fractions", "decimal"), module):
        exec("import math, fractions\nfrom decimal import Decimal", vars(module))
        exec("def get():\n    from fractions import Fraction\n    return Fraction", vars(module))
    import fractions
    import math

    assert module.math is math and module.fractions is not fractions
    assert module.fractions.Fraction(1, 2) == fractions.Fraction(1, 2)
    assert str(module.Decimal("1.5")) == "1.5"
    assert module.get() is fractions.Fraction


def test_another_openrlhf_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openrlhf_ext.patches.base.installed_version", lambda _: "0.12.0")
    with pytest.raises(PatchRefused, match="openrlhf 0.11.2, found 0.12.0"):
        with openrlhf_imports.deferring(openrlhf_imports.PATCH, (), ModuleType("importer")):
            pytest.fail("entered")
