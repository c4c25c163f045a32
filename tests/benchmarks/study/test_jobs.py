"""Processes of a study end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.patience import PATIENCE_S, until

_STUDY = """
import sys
from pathlib import Path
from benchmarks.study.jobs import Job, run_jobs
folder = Path(sys.argv[1])
code = f"import os, time; open({str(folder / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(3600)"
run_jobs([Job("one", [sys.executable, "-c", code], folder / "log", lambda *_: None)], workers=1)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_study_that_is_told_to_end_ends_its_jobs(tmp_path, number, status):
    study = subprocess.Popen(
        [sys.executable, "-c", _STUDY, str(tmp_path)], stderr=subprocess.PIPE, text=True
    )
    noted: Path = tmp_path / "pid"
    until(lambda: noted.exists() and noted.read_text(), "the job")
    os.kill(study.pid, number)
    assert (study.wait(PATIENCE_S), study.stderr.read()) == (status, "")
    assert not psutil.pid_exists(int(noted.read_text()))
