"""Settings of every test: one thread for each process, no network, Ctrl-C works, hypothesis without
a clock."""

from __future__ import annotations

import atexit
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

# the tests are of CPU code, also where there are GPUs: tests/gpu is for those
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
# as in every job: one kind of server of tests/forks less
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("WANDB_MODE", "disabled")
# Ray ends a process that it has started and that is not there after so long; a loaded machine may
# need longer than 60 s
os.environ.setdefault("RAY_worker_register_timeout_seconds", "600")
# most of a small job's start is imports: Ray's workers are forked (tests/forks)
_FORKS = "OPENRLHF_EXT_TESTS_FORKS"
if _FORKS not in os.environ:  # this process starts the others of a run
    os.environ[_FORKS] = tempfile.mkdtemp(prefix=f"forks-{os.getpid()}-")
    atexit.register(shutil.rmtree, os.environ[_FORKS])
    _paths = [str(Path(__file__).with_name("forks")), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _paths))

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from openrlhf_ext import patches  # noqa: E402
from openrlhf_ext.imports import without_collection  # noqa: E402

patches.apply()
# ignored where the tests were started in the background by a script; processes that tests start
# would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)
# the same examples in every run, and no failure because the machine was busy for a moment
settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def servers_of_workers() -> None:
    """Starts those that Ray's workers of earlier tests have asked for."""
    folder = Path(os.environ[_FORKS])
    for wanted in folder.glob("*.wanted"):
        with suppress(FileNotFoundError):  # another process of pytest's was faster
            started = wanted.rename(wanted.with_suffix(".started"))
            asked = json.loads(started.read_text())
            if asked["network"] != os.readlink("/proc/self/ns/net"):
                continue
            program, tests = (
                Path(__file__).with_name("forks") / "server.py",
                folder.name.split("-")[1],
            )
            command = [sys.executable, str(program), str(started.with_suffix("")), tests]
            with started.with_suffix(".log").open("w") as log:
                subprocess.Popen(
                    command, stdout=log, stderr=log, env=asked["environ"], start_new_session=True
                )


@pytest.fixture(autouse=True)
def same_signals() -> None:
    """A guard in this process ignores them in the end (``Guard.ignore_signals``); processes inherit
    that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """What is random in a test is the same in every run and after every other test: none fails by
    chance."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that ran in this process for another test may have left it as the one rank of its
    group."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The tests' modules import torch, vLLM and Megatron."""
    with without_collection():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole jobs first, then ranks: the short files then fill what they leave free of the workers
    (tests/run.sh)."""

    def place(item: pytest.Item) -> int:
        return 0 if item.get_closest_marker("e2e") else 1 if launches_ranks(item.path) else 2

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files by ``--dist loadfile``, of which those that launch ranks go to one worker, one after
    the other.

    Four ranks wait for each other's messages: beside four others on two cores they take nearly
    twice as long, and a third more of the cores' time, than beside a test of one process.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class RanksTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "ranks" if launches_ranks(config.rootpath / file) else file

    return RanksTogether(config, log)


@cache
def launches_ranks(file: Path) -> bool:
    """Whether its tests are of processes that ``tests.launch`` starts, and no whole jobs."""
    text = file.read_text()
    return "from tests.launch import" in text and "pytest.mark.e2e" not in text


@pytest.fixture(autouse=True)
def import_path() -> Iterator[None]:
    """Files of users are imported from their folders, which reward workers get from this process. A
    fixture of a module comes before this one: what it adds stays for all of its tests."""
    before = [*sys.path]
    yield
    sys.path[:] = before
