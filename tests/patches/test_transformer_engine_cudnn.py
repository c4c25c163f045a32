from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from openrlhf_ext.patches import transformer_engine_cudnn
from openrlhf_ext.patches.base import PatchRefused
from tests.patience import PATIENCE_S

ENGINE = """
import ctypes
ctypes.CDLL("{wheel}/libcudnn.so.9", mode=ctypes.RTLD_GLOBAL)  # what torch has loaded
VERSION = ctypes.CDLL("{core}").version()
"""
RUN = """
from pathlib import Path
from openrlhf_ext.patches import transformer_engine_cudnn as patch
patch.has_cuda = lambda: {patched}
patch.wheel_folder = lambda name: Path("{wheel}").parent
object.__setattr__(patch.PATCH, "require_known_version", lambda: None)
patch.PATCH.install()
import transformer_engine
print(transformer_engine.VERSION)
mapped = {{line.split()[-1] for line in open("/proc/self/maps") if "libcudnn_" in line}}
print(sorted(path.removeprefix("{wheel}") for path in mapped))
"""


def compiled(file: Path, source: str, *needed: Path) -> Path:
    """A shared library that calls itself as its file does, and needs others by plain names, called
    or not."""
    file.parent.mkdir(parents=True, exist_ok=True)
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-o",
        str(file),
        f"-Wl,-soname,{file.name}",
        "-x",
        "c",
        "-",
        "-x",
        "none",
    ]
    command += ["-Wl,--no-as-needed", *map(str, needed)]
    subprocess.run(command, input=source, text=True, check=True, timeout=PATIENCE_S)
    return file


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cuDNN twice, in wheel/lib and in system, and a core that names one of its libraries by plain
    name."""
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc here")
    folder = tmp_path_factory.mktemp("libraries")
    for place, version in (("wheel/lib", 919), ("system", 914)):
        compiled(folder / place / "libcudnn.so.9", "")
        graph = compiled(
            folder / place / "libcudnn_graph.so.9", f"int graph(void) {{ return {version}; }}"
        )
        text = "int graph(void); int ops(void) { return graph(); }"
        ops = compiled(folder / place / "libcudnn_ops.so.9", text, graph)
        adv = "int ops(void); int adv(void) { return ops(); }"
        # the first by name needs the others
        compiled(folder / place / "libcudnn_adv.so.9", adv, ops, graph)
    core = "int graph(void); int version(void) { return graph(); }"
    compiled(folder / "core.so", core, folder / "system/libcudnn_graph.so.9")
    (folder / "site/transformer_engine").mkdir(parents=True)
    text = ENGINE.format(wheel=folder / "wheel/lib", core=folder / "core.so")
    (folder / "site/transformer_engine/__init__.py").write_text(text)
    return folder


@pytest.mark.parametrize(("patched", "version"), [(False, "914"), (True, "919")])
def test_the_core_gets_the_libraries_of_the_wheel(
    libraries: Path, patched: bool, version: str
) -> None:
    paths = {"PYTHONPATH": f"{libraries / 'site'}:{os.environ.get('PYTHONPATH', '')}"}
    paths["LD_LIBRARY_PATH"] = str(libraries / "system")
    program = RUN.format(patched=patched, wheel=libraries / "wheel/lib")
    command = [sys.executable, "-c", program]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, env=os.environ | paths
    )
    assert run.returncode == 0, run.stderr
    got, mapped = run.stdout.splitlines()
    assert got == version
    if patched:  # LD_LIBRARY_PATH counts more than a wheel's own path
        assert mapped == str([f"/libcudnn_{name}.so.9" for name in ("adv", "graph", "ops")]), (
            "one copy of each"
        )


def test_it_is_needed_with_a_gpu_and_the_wheel_only(
    libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformer_engine_cudnn, "has_cuda", lambda: False)
    assert transformer_engine_cudnn.PATCH.need()[1].startswith("no CUDA device")
    monkeypatch.setattr(transformer_engine_cudnn, "has_cuda", lambda: True)
    monkeypatch.setattr(transformer_engine_cudnn, "wheel_folder", lambda name: None)
    assert transformer_engine_cudnn.PATCH.need() == (
        False,
        "torch's cuDNN is not of NVIDIA's wheel",
    )
    monkeypatch.setattr(transformer_engine_cudnn, "wheel_folder", lambda name: libraries / "wheel")
    assert transformer_engine_cudnn.PATCH.need()[0]
    monkeypatch.setattr("openrlhf_ext.patches.base.installed_version", lambda _: "2.12.0")
    with pytest.raises(PatchRefused, match=r"transformer-engine 2\.11\.0, found 2\.12\.0"):
        with transformer_engine_cudnn._with_the_cudnn_of_torch(ModuleType("transformer_engine")):
            pytest.fail("entered")
