from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from openrlhf_ext.patches import flash_attn_shim
from openrlhf_ext.patches.base import PatchRefused

pytestmark = pytest.mark.skipif(flash_attn_shim.has_module("flash_attn"), reason="the real flash-attn is installed")


def test_openrlhf_is_importable_and_its_borrowed_names_raise() -> None:
    from openrlhf.models import ring_attn_utils

    for function in ("index_first_axis", "pad_input", "rearrange", "unpad_input", "all_gather"):
        with pytest.raises(RuntimeError, match=rf"{function} was called, but flash-attn is not installed"):
            getattr(ring_attn_utils, function)()


def test_nobody_else_comes_to_believe_in_flash_attn() -> None:
    import openrlhf.models  # noqa: F401
    from transformers.utils import is_flash_attn_2_available

    assert importlib.util.find_spec("flash_attn") is None
    assert not is_flash_attn_2_available()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn")


def test_shims_have_specs_while_they_are_lent() -> None:
    with flash_attn_shim._lend_shims(ModuleType("importer")):
        for name in flash_attn_shim.SHIMMED_NAMES:
            assert importlib.util.find_spec(name) is sys.modules[name].__spec__
    assert not any(name.startswith("flash_attn") for name in sys.modules)


def test_another_openrlhf_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openrlhf_ext.patches.base.installed_version", lambda _: "0.12.0")
    with pytest.raises(PatchRefused, match="openrlhf 0.11.2, found 0.12.0"):
        with flash_attn_shim._lend_shims(ModuleType("importer")):
            pytest.fail("entered")
