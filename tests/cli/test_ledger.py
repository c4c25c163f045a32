"""``openrlhf-ext ledger``: its words and its exit status."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from openrlhf_ext.cli.main import main
from tests.run.test_ledger import audited, good


def test_the_exit_status_says_whether_it_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    audited(tmp_path, good())
    assert main(["ledger", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "the ledger holds" and "trained 3, filtered 1, late 0" in said[2]

    lines = good()
    lines[3]["trained"] = []
    audited(tmp_path, lines)
    assert main(["ledger", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert (
        said.startswith("the ledger does not hold, 1 faults")
        and "prompt 3 is lost at step 2" in said
    )

    (tmp_path / "ledger.jsonl").write_text("{}\n" + (tmp_path / "ledger.jsonl").read_text())
    assert main(["ledger", str(tmp_path)]) == 2
    assert "ledger.jsonl, line 1: needs drawn, waiting" in capsys.readouterr().err


def test_a_folder_without_a_ledger_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["ledger", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err
    assert (
        "none/ledger.jsonl is not a file" in said and "runs of earlier releases have none" in said
    )
    os.mkfifo(tmp_path / "ledger.jsonl")
    assert main(["ledger", str(tmp_path)]) == 2, "it does not wait for somebody to write"
