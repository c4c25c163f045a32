"""`python -m openrlhf_ext.cli.doctor --cluster`; tests/e2e/test_walkthrough.py runs it on two
nodes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from openrlhf_ext.cli import doctor
from openrlhf_ext.cli.doctor_cluster import ClusterReport, compare, look


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit status, and what is printed."""
    status = doctor.main(["--cluster", *words])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def test_an_address_at_which_nothing_listens_and_options_that_are_wrong(monkeypatch, capsys):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert call(capsys)[0] == 2
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    status, text = call(capsys, "--train.sead", "1")
    assert status == 2 and "unknown option train.sead" in text
    status, text = call(capsys, "--wait_s", "1")
    assert status == 1 and "Ray's head at 127.0.0.1:1 cannot be joined after" in text
    with pytest.raises(SystemExit):
        doctor.main(["--train.seed", "1"])
    assert "options of a run need --cluster" in capsys.readouterr().err


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("shared")
    (folder / "model.safetensors").write_bytes(b"12")
    (folder / "token").touch()
    return look(["torch"], [str(folder)], {str(folder): "token"})


def findings(own: dict, **other) -> list[tuple[str, str, str]]:
    """(severity, node, text) for a node that differs from this machine in these entries."""
    report = ClusterReport(nodes={"n2": copy.deepcopy(own) | other})
    compare(report, own)
    assert all(finding.remedy for finding in report.findings)
    return [(found.severity, found.node, found.text) for found in report.findings]


def test_a_node_like_this_one_has_none(own):
    assert [found for found in findings(own) if found[0] == "error"] == []


def test_what_a_node_has_other_than_this_machine_is_named(own):
    (folder,) = own["files"]
    ((severity, node, text),) = findings(own, versions=own["versions"] | {"torch": "2.0.0"})
    assert (severity, node) == ("error", "n2") and text.startswith(
        "torch is 2.0.0, but the driver has 2."
    )
    ((_, _, text),) = findings(own, versions=own["versions"] | {"torch": None})
    assert text.startswith("torch is missing")
    ((_, _, text),) = findings(own, patches={})
    assert text.startswith("patches are {}")
    ((_, _, text),) = findings(own, refused=["patch x knows version 1"])
    assert text == "patch x knows version 1"
    ((_, _, text),) = findings(own, files={folder: None})
    assert text == f"{folder} is not there, or cannot be read"
    ((_, _, text),) = findings(own, files={folder: [["model.safetensors", 1]]})
    assert "has other sizes" in text
    ((_, _, text),) = findings(own, shared={folder: "is a different folder than the driver's"})
    assert text == f"{folder} is a different folder than the driver's"


@pytest.mark.parametrize(
    ("other", "severity", "words"),
    [
        ({"open_files": 1024}, "error", "may open 1024 files"),
        ({"processes": 100}, "warning", "may have 100 processes"),
        ({"shm_gib": 0.1}, "warning", "/dev/shm has 0.1 GiB"),
        ({"tmp_free_gib": 1.0}, "warning", "/tmp has 1.0 GiB free"),
        ({"gpus": 8, "locked_memory": 65536}, "warning", "which RDMA needs"),
    ],
)
def test_limits_of_a_node(own, other, severity, words):
    plenty = {
        "open_files": 1 << 16,
        "processes": -1,
        "shm_gib": 64.0,
        "tmp_free_gib": 99.0,
        "locked_memory": "unlimited",
    }
    ((found, _, text),) = findings(own, **(plenty | other))
    assert found == severity and words in text


def test_shared_folders_are_told_from_others_by_a_file(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here/token").touch()
    folders = [str(tmp_path / name) for name in ("here", "absent")]
    (tmp_path / "other").mkdir()
    seen = look([], [], {**dict.fromkeys(folders, "token"), str(tmp_path / "other"): "token"})[
        "shared"
    ]
    assert list(seen.values()) == ["", "is not there", "is a different folder than the driver's"]


def test_files_are_compared_by_name_and_size(tmp_path: Path):
    (tmp_path / "a.json").write_text("{}")
    seen = look([], [str(tmp_path), str(tmp_path / "a.json"), str(tmp_path / "none")], {})["files"]
    assert list(seen.values()) == [[["a.json", 2]], [["a.json", 2]], None]


def test_a_node_that_does_not_answer_is_an_error(own):
    report = ClusterReport()
    report.keep({"n1": own, "n2": TimeoutError("Get timed out:\nsome tasks are not ready")})
    assert report.nodes == {"n1": own} and report.has_errors
    ((node, text),) = [(found.node, found.text) for found in report.findings]
    assert (node, text) == ("n2", "does not answer: TimeoutError: some tasks are not ready")
