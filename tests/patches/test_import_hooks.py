from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from openrlhf_ext.patches.import_hooks import PatchFinder


@pytest.fixture
def finder() -> Iterator[PatchFinder]:
    finder = PatchFinder()
    yield finder
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package `hooked` with a module `leaf`, importable and forgotten afterwards."""
    folder = tmp_path / "hooked"
    folder.mkdir()
    (folder / "__init__.py").write_text("value = 1\n")
    (folder / "leaf.py").write_text("import sys\nseen = 'lent' in sys.modules\nvalue = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in ("hooked", "hooked.leaf", "lent"):
        sys.modules.pop(name, None)


@contextmanager
def lend_and_mark(module: ModuleType) -> Iterator[None]:
    sys.modules["lent"] = ModuleType("lent")
    yield
    del sys.modules["lent"]
    module.marked = True


class DoublingLoader(SourceFileLoader):
    def source_to_code(self, data, path, *, _optimize=-1):
        return super().source_to_code(
            data.replace(b"value = 1", b"value = 2"), path, _optimize=_optimize
        )


def test_wrapper_surrounds_the_module_body(finder: PatchFinder, package: Path) -> None:
    finder.run_around("hooked.leaf", lend_and_mark)
    leaf = importlib.import_module("hooked.leaf")
    assert leaf.seen and leaf.marked
    assert "lent" not in sys.modules
    assert not hasattr(sys.modules["hooked"], "marked")


def test_loader_and_wrapper_act_together(finder: PatchFinder, package: Path) -> None:
    finder.run_around("hooked.leaf", lend_and_mark)
    finder.load_with("hooked", DoublingLoader)
    leaf = importlib.import_module("hooked.leaf")
    assert (sys.modules["hooked"].value, leaf.value, leaf.marked) == (2, 2, True)
    assert "value = 1" in inspect.getsource(leaf)


def test_other_packages_and_missing_modules_are_left_alone(
    finder: PatchFinder, package: Path
) -> None:
    finder.load_with("hooked", DoublingLoader)
    assert finder.find_spec("hooked_too") is None
    with pytest.raises(ModuleNotFoundError, match=r"hooked\.absent"):
        importlib.import_module("hooked.absent")


def test_a_failing_import_leaves_the_wrapper_and_raises(finder: PatchFinder, package: Path) -> None:
    (package / "leaf.py").write_text("raise ValueError('broken')\n")
    left = []

    @contextmanager
    def wrapper(module: ModuleType) -> Iterator[None]:
        try:
            yield
        finally:
            left.append(module.__name__)

    finder.run_around("hooked.leaf", wrapper)
    with pytest.raises(ValueError, match="broken"):
        importlib.import_module("hooked.leaf")
    assert left == ["hooked.leaf"]
