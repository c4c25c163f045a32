"""What vllm_imports and transformers_imports leave for later."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from openrlhf_ext.patches import transformers_imports, vllm_imports
from openrlhf_ext.patches.base import Patch
from openrlhf_ext.patches.openrlhf_imports import deferring
from tests.patience import PATIENCE_S

TOKENIZERS = """
import sys
from openrlhf_ext import patches
patches.apply()
from transformers import AutoTokenizer
from transformers.models.auto import auto_factory
assert "torch._dynamo" not in sys.modules and "transformers.generation.utils" not in sys.modules
import torch
class Remote(torch.nn.Module):
    def prepare_inputs_for_generation(self): ...
mixed = auto_factory.add_generation_mixin_to_remote_model(type("PreTrainedRemote", (Remote,), {}))
from transformers import GenerationMixin
assert issubclass(mixed, GenerationMixin) and issubclass(mixed, Remote), mixed.__mro__
"""
IMPORTERS = vllm_imports.DEFERRED | {
    f"transformers.loss.loss_{name}": ("scipy.optimize",) for name in transformers_imports._LOSSES
}
IMPORTERS["transformers.configuration_utils"] = ("transformers.modeling_gguf_pytorch_utils",)


def test_commands_come_without_what_generates() -> None:
    run = subprocess.run(
        [sys.executable, "-c", TOKENIZERS], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    "patch", [transformers_imports.PATCH, vllm_imports.PATCH], ids=lambda patch: patch.name
)
@pytest.mark.parametrize(("version", "state"), [("99.0", "not needed"), (None, "not installed")])
def test_another_version_is_left_as_it_is(
    patch: Patch, version: str | None, state: str, monkeypatch
) -> None:
    monkeypatch.setattr("openrlhf_ext.patches.base.installed_version", lambda _: version)
    replace(patch, install=lambda: pytest.fail("installed")).apply()
    assert patch.status().state == state


@pytest.mark.parametrize(("importer", "modules"), IMPORTERS.items())
def test_each_module_has_the_statement(importer: str, modules: tuple[str, ...]) -> None:
    package, *inner = importer.split(".")
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0], *inner)
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            # one dot: of the module's own package, which all here are or are directly in
            found.add(f"{package}.{node.module}" if node.level else node.module)
            found.add(f"{importer}.{node.module}" if node.level else node.module)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    assert set(modules) <= found


def test_a_module_inside_a_package_comes_with_its_first_use() -> None:
    module = ModuleType("importer")
    sys.modules.pop("xml.dom.minidom", None)
    with deferring(vllm_imports.PATCH, ("xml.dom.minidom",), module):
        exec("import xml.dom.minidom as dom", vars(module))
    assert "xml.dom.minidom" not in sys.modules
    assert module.dom.parseString("<a/>").documentElement.tagName == "a"


@pytest.mark.parametrize("disabled", ["1", "0"])
@pytest.mark.parametrize(("importer", "hidden"), vllm_imports.HIDDEN.items())
def test_modules_are_absent_only_where_nothing_is_compiled(
    importer: str, hidden: str, disabled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "TORCHDYNAMO_DISABLE", disabled)
    monkeypatch.delitem(sys.modules, hidden, raising=False)
    with vllm_imports._without(hidden, ModuleType(importer)):
        assert (hidden in sys.modules) == (disabled == "1")
        if disabled == "1":
            with pytest.raises(ImportError):
                importlib.import_module(hidden)
    assert hidden not in sys.modules
