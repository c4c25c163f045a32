"""docs/report.md: its commands run, its table is that of the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from openrlhf_ext.cli.main import main
from openrlhf_ext.config import option_table
from openrlhf_ext.reporting.lines import EVENTS
from tests.tools.report.runs import make_run

DOCUMENT = Path(__file__).parents[3] / "docs" / "report.md"


def test_the_table_of_events_is_generated():
    """`python tests/tools/report/test_docs.py` writes it."""
    assert DOCUMENT.read_text() == with_table(DOCUMENT.read_text())


def with_table(text: str) -> str:
    head, rest = text.split("| event | when, and its own facts |\n|---|---|\n")
    table = "".join(f"| `{event}` | {meaning} |\n" for event, meaning in EVENTS.items())
    return (
        f"{head}| event | when, and its own facts |\n|---|---|\n"
        f"{table}{rest[rest.index(chr(10) + chr(10)) + 1 :]}"
    )


def test_the_commands_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart", "grpo", "dapo"):
        make_run(tmp_path / "runs" / name, 40)
    commands = [
        shlex.split(line)
        for block in re.findall(r"```bash\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
        for line in block.splitlines()
    ]
    assert len(commands) == 4
    for program, *words in commands:
        if program == "openrlhf-ext":
            assert main(words) == 0, capsys.readouterr().err
        else:  # tests/examples runs the script itself
            assert (DOCUMENT.parents[1] / words[0]).is_file()
            assert [word.removeprefix("--") in option_table() for word in words[1::2]] == [
                True,
                True,
            ]
    assert (tmp_path / "runs/quickstart/report.html").is_file() and (
        tmp_path / "compared.html"
    ).is_file()


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text()))
