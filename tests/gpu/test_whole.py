"""The bundle of a whole run: what a GPU machine says of one that is not for it, unpacks once, and
finds in it.

`bash tests/run.sh -m whole_bundle` makes a real one. A Python 3.12 with the machine's torch, named
by OPENRLHF_EXT_GPU_PYTHON, then loads vLLM's extensions and imports an engine's modules, without a
GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import bundle as bundles
from tests.gpu.bundle import ROOT, WHOLE, BundleError, read_manifest, write_manifest
from tests.gpu.whole import here, make, symbols

HERE = "{}.{}".format(*sys.version_info)
LOCK = (ROOT / "requirements/gpu.lock").read_text().splitlines()


def bundle(folder: Path, text: str = "VALUE = 1\n", **other: Any) -> Path:
    """A whole bundle of one module and a toy, for this Python, this torch and a GPU of compute
    capability 9.0."""
    source = folder.with_name("source")
    for name, content in {
        "site/module.py": text,
        "toy/start/config.json": "{}",
        "toy/data/train.jsonl": "",
    }.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(content)
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "DICTIONARY_BYTES", 1 << 16)  # a real one takes a second to allocate
        patch.setattr(make, "PART_BYTES", 200)
        make._pack(source, folder)
    facts = {
        "kind": bundles.WHOLE_KIND,
        "packages": {name: bundles.pinned(name) for name in WHOLE},
        "architectures": (90,),
        "host": ["json", "google.protobuf"],
    }
    write_manifest(folder, HERE, torch.__version__, **(facts | other))
    shutil.rmtree(source)
    return folder


@pytest.fixture
def carried(tmp_path, monkeypatch) -> Path:
    """A bundle on a machine for which it was made: only the GPU is claimed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(here, "SHM_BYTES", 0)
    monkeypatch.setenv("OPENRLHF_EXT_SITE", str(tmp_path / "unpacked"))
    return bundle(tmp_path / "carried")


def said(capsys: pytest.CaptureFixture, carried: Path) -> tuple[int, list[str]]:
    """Exit status and lines of the problems."""
    code = here.main([str(carried)])
    return code, capsys.readouterr().err.strip().splitlines()


def change(carried: Path, **facts: Any) -> None:
    path = carried / bundles.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


BREAKS: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], Any], str]] = {
    "versions": (
        lambda carried, patch: change(
            carried, packages=read_manifest(carried)["packages"] | {"vllm": "0.28.0"}
        ),
        "other versions than requirements/gpu.lock .*: vllm 0.28.0 instead of "
        f"{bundles.pinned('vllm')}",
    ),
    "a package less": (
        lambda carried, patch: change(
            carried, packages={"x": "1", **read_manifest(carried)["packages"]}
        ),
        "x 1 instead of none",
    ),
    "part missing": (
        lambda carried, patch: (carried / "part-01").unlink(),
        r"1 of \d files .* among them part-01",
    ),
    "part damaged": (
        lambda carried, patch: (carried / "part-00").write_bytes(b"x" * 200),
        r"1 of \d files .* among them part-00",
    ),
    "manifest damaged": (
        lambda carried, patch: (carried / "manifest.json").write_text('{"kind": '),
        "is no bundle",
    ),
    "manifest missing": (
        lambda carried, patch: (carried / "manifest.json").unlink(),
        "is no bundle",
    ),
    "python": (
        lambda carried, patch: change(carried, python="3.10"),
        f"for Python 3.10, .* --python {HERE}",
    ),
    "torch": (
        lambda carried, patch: change(carried, torch="2.9.0+cu128"),
        f"for torch 2.9.0.*--torch {re.escape(torch.__version__)}",
    ),
    "gpu": (
        lambda carried, patch: patch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0)),
        "compute capability 9.0, NVIDIA A100 has 8.0",
    ),
    "no gpu": (
        lambda carried, patch: patch.setattr(torch.cuda, "is_available", lambda: False),
        "sees no GPU",
    ),
    "shm": (
        lambda carried, patch: patch.setattr(here, "SHM_BYTES", 1 << 60),
        r"/dev/shm has \d+ MiB free",
    ),
    "no shm": (
        lambda carried, patch: (
            patch.setattr(here, "SHM", Path("/no")),
            patch.setattr(here, "SHM_BYTES", 1),
        ),
        "/no has 0 MiB free",
    ),
    "compiler": (lambda carried, patch: patch.setenv("PATH", "/nowhere"), "neither gcc nor clang"),
    "compiler by name": (
        lambda carried, patch: patch.setenv("CC", "no-such-cc"),
        r"there is no no-such-cc \(CC\)",
    ),
    "headers": (
        lambda carried, patch: patch.setattr(here.sysconfig, "get_path", lambda *_: "/no/include"),
        "there is no /no/include/Python.h",
    ),
    "host": (
        lambda carried, patch: change(carried, host=["json", "no_such", "no_such.at_all"]),
        "lacks what a bundle does not bring: no_such, no_such.at_all;",
    ),
    "something there": (
        lambda carried, patch: (carried.parent / "unpacked/my").mkdir(parents=True),
        "holds something else .* OPENRLHF_EXT_SITE=",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_wrong_is_named_in_one_line_before_anything_is_unpacked(
    name, carried, monkeypatch, capsys
):
    wreck, expected = BREAKS[name]
    wreck(carried, monkeypatch)
    code, lines = said(capsys, carried)
    assert code == 1 and len(lines) == 1 and re.search(expected, lines[0]), lines
    assert not (carried.parent / "unpacked/site").exists()


def test_all_that_is_wrong_is_named_at_once(carried, monkeypatch, capsys):
    together = ("versions", "part missing", "python", "torch", "gpu", "shm", "compiler", "host")
    for name in together:
        BREAKS[name][0](carried, monkeypatch)
    code, lines = said(capsys, carried)
    assert code == 1 and len(lines) == len(together)
    for (_, expected), line in zip((BREAKS[name] for name in together), lines, strict=True):
        assert re.search(expected, line)


def test_it_is_unpacked_once_and_again_when_it_is_another(carried, capsys, tmp_path):
    target = tmp_path / "unpacked"
    assert here.main([str(carried)]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    assert {path.name for path in target.iterdir()} == {"site", "toy", here.STAMP}
    (compiled,) = (target / "site/__pycache__").glob("module.*.pyc")
    assert str(target / "site/module.py").encode() in compiled.read_bytes()

    for part in carried.glob("part-*"):  # a later call need not carry them
        part.unlink()
    (target / "site/mark").touch()
    assert here.main([str(carried)]) == 0 and (target / "site/mark").exists()

    other = bundle(tmp_path / "other", "VALUE = 2\n")
    assert here.main([str(other)]) == 0 and not (target / "site/mark").exists()
    assert (target / "site/module.py").read_text() == "VALUE = 2\n" and not (
        tmp_path / "unpacked.new"
    ).exists()


def test_a_module_that_cannot_be_compiled_is_named_and_nothing_is_left_for_a_bundle(
    carried, capsys, tmp_path
):
    code, lines = said(capsys, bundle(tmp_path / "broken", "def ("))
    assert code == 1 and "cannot compile" in lines[0] and any("module.py" in line for line in lines)
    assert not (tmp_path / "unpacked").exists()


_CLAIMING_A_GPU = """
import sys, torch
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda: (9, 0)
from tests.gpu.whole import here
here.SHM_BYTES = 0
sys.exit(here.main(sys.argv[1:]))
"""


def test_a_command_of_the_kit_unpacks_it_and_has_all_in_its_environment(tmp_path):
    folder, target = bundle(tmp_path / "carried"), tmp_path / "unpacked"
    python = tmp_path / "python"
    real = f'exec {sys.executable} "$@"'
    asked = f'[[ "$2" != tests.gpu.whole.here ]] || exec {sys.executable} -c "$CLAIM" "${{@:3}}"'
    python.write_text(f"#!/usr/bin/env bash\n{asked}\n{real}\n")
    python.chmod(0o755)
    show = "import module, os, json; print(json.dumps([module.__file__, dict(os.environ)]))"
    line = f'source tests/gpu/environment.sh "$@"; "$python" -c \'{show}\''
    environment = {
        "PYTHON": str(python),
        "CLAIM": _CLAIMING_A_GPU,
        "OPENRLHF_EXT_SITE": str(target),
    }
    environment |= {"NVTE_CUDA_INCLUDE_DIR": "/no", "CUDNN_HOME": "/no"}  # else it looks for them
    done = subprocess.run(
        ["bash", "-c", line, "run.sh", "--bundle", str(folder)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    module, found = json.loads(done.stdout)
    assert module == str(target / "site/module.py") and "unpacked in" in done.stderr
    assert (
        found["OPENRLHF_EXT_TOY"] == str(target / "toy")
        and (target / "toy/start/config.json").exists()
    )
    assert found["PYTHONPATH"].split(":")[:2] == [str(ROOT), str(target / "site")]
    for name in ("VLLM_USE_FLASHINFER_SAMPLER", "VLLM_USE_DEEP_GEMM", "RAY_USAGE_STATS_ENABLED"):
        assert found[name] == "0"


def test_a_command_of_the_kit_ends_where_a_bundle_cannot_be_used(tmp_path):
    folder = bundle(tmp_path / "carried")
    (folder / "manifest.json").unlink()  # its parts tell what it was to be
    done = subprocess.run(
        [
            "bash",
            "tests/gpu/run.sh",
            "--bundle",
            str(folder),
            "--output",
            str(tmp_path / "gpu.json"),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and re.fullmatch(
        r"tests/gpu/run.sh: .* is no bundle .*\n", done.stderr
    ), done.stderr
    assert not (tmp_path / "gpu.json").exists()


# ---- what is in it


def test_every_package_is_in_the_lock_and_none_is_there_twice():
    for name in (
        *WHOLE,
        *({"openai_harmony": "oss-harmony"}.get(name, name) for name in bundles.STAND_INS),
    ):
        assert f"{name}=={bundles.pinned(name)}" in LOCK, name
    names = [*WHOLE, *bundles.STAND_INS, *bundles.OF_THE_HOST]
    assert len(names) == len(set(names))


def python(code: str, path: Path, **environment: str) -> str:
    """What a new process with this folder on its path prints."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    own = {"PYTHONPATH": f"{path}:{ROOT}", **environment}
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_stand_ins_have_every_name_and_do_nothing(tmp_path):
    make._add_ours(tmp_path)
    code = """
        import openai_harmony, xgrammar, llguidance.torch, llguidance
        from xgrammar.of.any import Name
        class Mine(Name.Inner): pass
        assert Name.anything.at_all is Name and Mine(1, two=3) and isinstance(Mine(), Name)
        assert not hasattr(xgrammar, "__version__") and xgrammar.of.any.Other
        try:
            openai_harmony.Encoding().render
        except NotImplementedError as error:
            print(error)
    """
    assert (
        python(code, tmp_path)
        == "render of openai_harmony, for which this bundle has only a stand-in"
    )


def fake_torch(folder: Path, version: str, argument: str) -> None:
    """A torch of which only what is changed is there."""
    files = {
        "torch/__init__.py": f"__version__ = {version!r}",
        "torch/nn/__init__.py": "",
        "torch/nn/attention/__init__.py": "",
        "torch/nn/attention/varlen.py": f"def varlen_attn(query{argument}): return query",
        "torch/distributed/__init__.py": "from .distributed_c10d import Work",
        "torch/distributed/distributed_c10d.py": "class Work:\n    def exception(self): raise TypeError",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


_USE = """
import sys
assert "torch" not in sys.modules
{before}
import torch.distributed, torch.nn.attention.varlen as varlen
try:
    error = torch.distributed.Work().exception()
except TypeError:
    error = "TypeError"
print(error, varlen.varlen_attn(7, enable_gqa=True))
"""


@pytest.mark.parametrize("way", ["every process of a whole bundle", "a check"])
@pytest.mark.parametrize(
    "version, argument, expected",
    [("2.11.0+cu130", "", "None 7"), ("2.13.0", ", enable_gqa=False", "TypeError 7")],
)
def test_what_torch_lacks_is_added_once_it_is_imported(way, version, argument, expected, tmp_path):
    fake_torch(tmp_path, version, argument)
    before = "from tests.gpu import older_torch; older_torch.adapt()"
    if way != "a check":
        make._add_ours(tmp_path)
        before = ""
    assert python(_USE.format(before=before), tmp_path) == expected


def compiled(path: Path, source: str) -> Path:
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(path)],
        input=source.encode(),
        check=True,
    )
    return path


_CALLS = """
void torch_there(); void torch_gone(); void cuInit(); void cublasHgemm(); void PyLong_FromLong(); void PyNone();
void weak() __attribute__((weak)); void *memcpy(void *, void *, long);
int extension(char *a, char *b, long n) {
    torch_there(); torch_gone(); cuInit(); cublasHgemm(); PyLong_FromLong(); PyNone(); weak(); memcpy(a, b, n);
}
"""


def test_symbols_that_the_machines_torch_lacks_are_named(tmp_path):
    (tmp_path / "vllm").mkdir()
    library = compiled(tmp_path / "vllm/_C.so", _CALLS)
    known = {"torch_there", "GLIBC_2.28"}
    assert sorted(symbols.missing(library, known)) == ["PyNone", "torch_gone"]
    assert "memcpy@GLIBC_2.14" in symbols.missing(library, {"torch_there", "GLIBC_2.9"})
    with pytest.raises(BundleError, match=r"vllm/_C.so: .*torch_gone"):
        make._prove_symbols(tmp_path, known)


_NAMES_OPS = """
def route(scores):
    torch.ops._moe_C.topk_softmax(scores)
    torch.ops._C.rms_norm.default
    torch.ops._C.of_cpus(scores)  # defined nowhere: not a matter of what is left out
"""


@pytest.fixture
def with_ops(tmp_path) -> Path:
    """vLLM with a module that names ops, and a library for each namespace."""
    (tmp_path / "vllm/layers").mkdir(parents=True)
    (tmp_path / "vllm/layers/router.py").write_text(_NAMES_OPS)
    for space, name in (("_C", "rms_norm"), ("_moe_C", "topk_softmax")):
        text = f'const char *said[] = {{"{space}", "{name}(Tensor! out) -> ()"}};'
        compiled(tmp_path / f"vllm/{space}.so", text)
    return tmp_path


@pytest.mark.parametrize(
    ("left_out", "excused", "lost"),
    [
        ("vllm/benchmarks", {}, ""),
        ("vllm/_moe_C.so", {}, "name 1 ops .*: layers/router.py: torch.ops._moe_C.topk_softmax$"),
        ("vllm/_C.so", {}, "name 1 ops .*: layers/router.py: torch.ops._C.rms_norm$"),
        ("vllm", {}, "name 2 ops "),
        ("vllm/_moe_C.so", {"_moe_C": "layers/"}, ""),
        ("vllm/_moe_C.so", {"_moe_C": "models/"}, "name 1 ops "),
    ],
)
def test_ops_of_a_library_that_is_left_out_are_named(
    left_out, excused, lost, with_ops, monkeypatch
):
    monkeypatch.setattr(make, "_LEFT_OUT", {left_out: ""})
    monkeypatch.setattr(make, "_NOT_CALLED", excused)
    with pytest.raises(BundleError, match=lost) if lost else contextlib.nullcontext():
        make._prove_ops(with_ops)


def test_torchs_symbols_are_read_from_its_wheel_once(tmp_path, monkeypatch):
    library = compiled(
        tmp_path / "libtorch_cpu.so",
        "void *memcpy(void *, void *, long);"
        "void torch_there(char *a, char *b, long n) { memcpy(a, b, n); }",
    )
    downloads = []

    def download(folder: Path, *arguments: str) -> None:
        downloads.append(arguments[-2:])
        with zipfile.ZipFile(folder / "torch-2.11.0-cp312.whl", "w") as archive:
            archive.writestr("torch/version.py", "__version__ = '2.11.0+cu130'\n")
            archive.write(library, "torch/lib/libtorch_cpu.so")

    monkeypatch.setattr(bundles, "download", download)
    for _ in range(2):
        found = symbols.symbols_of_torch("3.12", "2.11.0+cu130", "13.0", tmp_path / "cache")
        assert {"torch_there", "GLIBC_2.14"} <= found and "memcpy" not in found
    assert downloads == [("torch==2.11.0", "nvidia-cuda-runtime==13.0.*")]
    with pytest.raises(BundleError, match=r"torch is 2.11.0\+cu130, not 2.11.0\+cu129"):
        symbols.symbols_of_torch("3.12", "2.11.0+cu129", "12.9", tmp_path / "cache")


def test_what_was_to_be_left_out_and_is_not_there_is_named(tmp_path):
    (tmp_path / "bin").mkdir()
    with pytest.raises(BundleError, match="tests was to be left out and is not in the packages"):
        make._slim(tmp_path, (64,))
