"""The bundle for a machine without a network: refused when it is damaged or for another machine;
slimmed libraries."""

from __future__ import annotations

import hashlib
import json
import lzma
import re
import struct
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from tests.gpu import bundle as bundles
from tests.gpu import te_build
from tests.gpu.bundle import BundleError, verify, write_manifest
from tests.gpu.fatbin import FatbinError, slim, slim_heads
from tests.gpu.kit import Machine, NotHere

HERE = "{}.{}".format(*sys.version_info)


@pytest.fixture
def made(tmp_path) -> Path:
    """A bundle for this Python and torch, of two files."""
    (tmp_path / "site/package").mkdir(parents=True)
    (tmp_path / "site/package/__init__.py").write_text("VALUE = 1\n")
    (tmp_path / "core.so.xz").write_bytes(lzma.compress(bytes(1000)))
    write_manifest(tmp_path, HERE, torch.__version__, transformer_engine="2.11.0")
    return tmp_path


def test_a_whole_bundle_passes_also_with_files_that_came_later(made):
    (made / "te").mkdir()
    (made / "te/later.so").write_bytes(b"built here")
    manifest = verify(made)
    assert manifest["transformer_engine"] == "2.11.0"
    assert set(manifest["files"]) == {"site/package/__init__.py", "core.so.xz"}
    assert manifest["total_bytes"] == sum(
        (made / name).stat().st_size for name in manifest["files"]
    )


def test_a_changed_file_and_a_missing_one_are_named(made):
    (made / "site/package/__init__.py").write_text("VALUE = 2\n")
    (made / "core.so.xz").unlink()
    with pytest.raises(
        BundleError, match=r"2 of 2 files .* among them core.so.xz, site/package/__init__.py"
    ):
        verify(made)


@pytest.mark.parametrize("entry, other", [("python", "3.10"), ("torch", "2.11.0+cu126")])
def test_a_bundle_for_another_python_or_torch_is_refused_with_the_command_that_makes_the_right_one(
    made, entry, other
):
    manifest = json.loads((made / bundles.MANIFEST).read_text())
    (made / bundles.MANIFEST).write_text(json.dumps(manifest | {entry: other}))
    with pytest.raises(BundleError, match=re.escape(f"made for {entry} {other}")) as refused:
        verify(made)
    assert f"--python {HERE} --torch {torch.__version__}" in str(refused.value)


def test_a_folder_that_is_no_bundle(tmp_path):
    with pytest.raises(BundleError, match="is no bundle"):
        verify(tmp_path)


def test_too_large_names_the_largest(tmp_path, monkeypatch):
    monkeypatch.setattr(bundles, "MOST_BYTES", 1000)
    (tmp_path / "small").write_bytes(bytes(100))
    (tmp_path / "large").write_bytes(bytes(2000))
    with pytest.raises(BundleError, match=r"at most .* the largest are large .*, small"):
        write_manifest(tmp_path, HERE, torch.__version__)
    assert not (tmp_path / bundles.MANIFEST).exists()


def test_versions_are_those_of_the_environment():
    for name in (*bundles.ALONE, *bundles.WITH_REQUIREMENTS):
        if name != "fla-core":  # which has no use without a GPU
            assert bundles.pinned(name) == version(name), name
    assert bundles.pinned("transformer-engine") == "2.11.0"
    with pytest.raises(BundleError, match="pins a version of nothing"):
        bundles.pinned("nothing")


def test_torch_must_be_a_cuda_build():
    assert bundles._cuda_of("2.11.0+cu130") == "13.0" and bundles._cuda_of("2.9.1+cu128") == "12.8"
    with pytest.raises(BundleError, match="must be a CUDA build"):
        bundles._cuda_of("2.11.0")


# ---- the library

CUBIN, PTX = 2, 1


def entry(kind: int, architecture: int, payload: bytes) -> bytes:
    header = bytearray(64)
    struct.pack_into("<HHIQ", header, 0, kind, 0, len(header), len(payload))
    struct.pack_into("<I", header, 28, architecture)
    return bytes(header) + payload


def container(*entries: bytes) -> bytes:
    payload = b"".join(entries)
    whole = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(payload)) + payload
    return whole + bytes(-len(whole) % 8)


def library(path: Path, *containers: bytes) -> bytes:
    """An ELF64 file with a .nv_fatbin section and the table of names; its content."""
    names, code = b"\0.nv_fatbin\0.shstrtab\0", b"".join(containers)
    code_at = 64
    names_at = code_at + len(code)
    table_at = names_at + len(names)
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", header, 0x28, table_at)
    struct.pack_into("<HHH", header, 0x3A, 64, 3, 2)
    section = struct.Struct("<IIQQQQIIQQ")
    sections = [bytes(64), section.pack(1, 1, 0, 0, code_at, len(code), 0, 0, 8, 0)]
    sections.append(section.pack(12, 3, 0, 0, names_at, len(names), 0, 0, 1, 0))
    content = bytes(header) + code + names + b"".join(sections)
    path.write_bytes(content)
    return content


def test_only_machine_code_of_the_kept_architecture_stays(tmp_path):
    old, new, text, only = (bytes([number]) * 72 for number in (1, 2, 3, 4))
    file = tmp_path / "lib.so"
    before = library(
        file,
        container(entry(CUBIN, 80, old), entry(CUBIN, 90, new), entry(PTX, 90, text)),
        container(entry(CUBIN, 80, only)),  # nothing for 90: it stays whole
    )
    assert slim(file, {90}) == {"containers": 2, "total_bytes": 288, "kept_bytes": 144}
    after = file.read_bytes()
    assert (
        after == before.replace(old, bytes(72)).replace(text, bytes(72))
        and new in after
        and only in after
    )


def test_strictly_nothing_else_stays_and_it_is_said_to_be_for_another_gpu(tmp_path):
    new, text, wrong = (bytes([number]) * 72 for number in (1, 2, 3))
    file = tmp_path / "lib.so"
    before = library(
        file,
        container(entry(CUBIN, 90, new), entry(PTX, 90, text)),
        # a GPU for 90 could compile the first
        container(entry(PTX, 80, text), entry(CUBIN, 75, wrong)),
    )
    assert slim(file, {90}, strict=True) == {"containers": 2, "total_bytes": 288, "kept_bytes": 72}
    gone = entry(PTX, 100, bytes(72)) + entry(CUBIN, 100, bytes(72))
    expected = before.replace(entry(PTX, 80, text) + entry(CUBIN, 75, wrong), gone)
    assert file.read_bytes() == expected.replace(text, bytes(72))


def kernel(head_size: int) -> bytes:
    """What the mangled name of a kernel of FlashAttention 3 has of it."""
    tiles = b"CollectiveMainloopFwdSm90ILi2EN4cute5tupleIJNS_1CILi1EEES4_S4_EEENS3_IJNS_1CILi128EEEEEELi"
    return b"..." + tiles + str(head_size).encode() + b"ENS_10bfloat16_tE..."


def test_kernels_of_other_head_sizes_are_gone_and_said_to_be_for_another_gpu(tmp_path):
    shared, small, large = b"for all" * 9, kernel(64), kernel(256)
    file = tmp_path / "lib.so"
    before = library(file, *(container(entry(CUBIN, 90, code)) for code in (shared, small, large)))
    assert slim_heads(file, {64}) == {
        "total_bytes": len(shared + small + large),
        "kept_bytes": len(shared + small),
    }
    gone = entry(CUBIN, 100, bytes(len(large)))
    assert file.read_bytes() == before.replace(entry(CUBIN, 90, large), gone)
    with pytest.raises(FatbinError, match=r"no kernel for head sizes \[128\]; there are \[64\]"):
        slim_heads(file, {64, 128})


def test_entries_that_do_not_fill_their_container_are_no_fatbin(tmp_path):
    broken = bytearray(container(entry(CUBIN, 80, bytes(64)), entry(CUBIN, 90, bytes(64))))
    # the first entry says that it is larger than all
    struct.pack_into("<Q", broken, 16 + 8, 1 << 20)
    library(tmp_path / "lib.so", bytes(broken))
    with pytest.raises(FatbinError, match="entries end at"):
        slim(tmp_path / "lib.so", {90})


def test_a_library_without_the_architecture_or_without_gpu_code_is_refused(tmp_path):
    library(tmp_path / "lib.so", container(entry(CUBIN, 80, b"x" * 8)))
    with pytest.raises(FatbinError, match=r"no code for sm_\[90\]"):
        slim(tmp_path / "lib.so", {90})
    (tmp_path / "text").write_bytes(b"no library")
    with pytest.raises(FatbinError, match="not an ELF64"):
        slim(tmp_path / "text", {90})


# ---- installing what was built


def wheel(path: Path, name: str, text: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, text)
    return path


def test_a_whole_bundle_has_nothing_to_build(tmp_path, monkeypatch):
    write_manifest(tmp_path, HERE, torch.__version__, kind=bundles.WHOLE_KIND)
    monkeypatch.setattr(te_build, "nvcc", lambda: "nvcc")
    with pytest.raises(NotHere, match="without TransformerEngine"):
        te_build.build(Machine(torch.device("cuda"), tmp_path, 60))


def test_the_build_needs_a_gpu(made):
    with pytest.raises(NotHere, match="GPU"):
        te_build.build(Machine(torch.device("cpu"), made, 60))


def test_what_is_built_is_put_together_and_found_by_processes(tmp_path, monkeypatch):
    source, core = tmp_path / "transformer_engine", tmp_path / "transformer_engine/core"
    (core / "te_core-1.0.dist-info").mkdir(parents=True)
    (core / "te_core-1.0.dist-info/METADATA").write_text("Name: te-core\nVersion: 1.0\n")
    (core / "core.so.xz").write_bytes(lzma.compress(b"the core"))
    wheel(
        source / "transformer_engine-1.0-py3-none-any.whl",
        "transformer_engine/__init__.py",
        "VALUE = 7\n",
    )
    (tmp_path / "built").mkdir()
    built = wheel(
        tmp_path / "built/transformer_engine_torch-1.0.whl",
        "transformer_engine_torch.so",
        "compiled",
    )
    te_build.install(tmp_path, built)
    te = tmp_path / "te"
    assert (
        te / "transformer_engine/wheel_lib/libtransformer_engine.so"
    ).read_bytes() == b"the core"
    assert (te / "transformer_engine_torch.so").exists() and (
        te / "te_core-1.0.dist-info/METADATA"
    ).exists()

    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setattr(sys, "path", list(sys.path))
    te_build.use(tmp_path)
    assert sys.path[0] == str(te)
    code = (
        "import transformer_engine as te, importlib.metadata as m; print(te.VALUE, "
        "m.version('te-core'))"
    )
    lines = te_build._run([sys.executable, "-c", code], tmp_path, float("inf"))
    assert lines == ["7 1.0"]


def test_a_wheel_is_used_again_only_where_it_was_built_for(tmp_path):
    (tmp_path / "built").mkdir()
    built = wheel(tmp_path / "built/te.whl", "a.so", "compiled")
    record = te_build._record(built)
    assert (
        record["sha256"] == hashlib.sha256(built.read_bytes()).hexdigest()
        and record["python"] == HERE
    )
    assert te_build.built_wheel(tmp_path) is None
    for changed, found in [({}, built), ({"torch": "2.9.0+cu130"}, None), ({"sha256": "0"}, None)]:
        (tmp_path / "built/built.json").write_text(json.dumps(record | changed))
        assert te_build.built_wheel(tmp_path) == found


def test_a_build_that_fails_or_takes_too_long_says_so_with_its_log(tmp_path):
    with pytest.raises(RuntimeError, match="ended with 3:\nno cudnn.h"):
        te_build._run(
            [sys.executable, "-c", "print('no cudnn.h'); exit(3)"], tmp_path, float("inf")
        )
    with pytest.raises(TimeoutError, match="not done in time"):
        te_build._run([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path, 0.0)


def test_headers_of_nvidias_wheels(tmp_path):
    for name in ("cudnn", "cu13", "other"):
        (tmp_path / "nvidia" / name / "include").mkdir(parents=True)
    assert [Path(path).parent.name for path in te_build.header_folders(tmp_path)] == [
        "cu13",
        "cudnn",
    ]
