"""A run's own Ray: who reaches it, who may talk to it, and what its processes get of this machine's
GPUs."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import ray
import torch

from openrlhf_ext.driver import cluster
from openrlhf_ext.driver.cluster import RaySession
from tests.e2e.jobs import children
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]

JOIN = """
import ray, sys
ray.init(sys.argv[1], log_to_driver=False)
print("joined", ray.util.get_node_ip_address())
"""
# in a process that has not joined: the threads of one that has would take the wrong token too, and
# end it
CHECK = """
import json, sys
from openrlhf_ext.driver import cluster
for change in json.loads(sys.argv[3]):
    with cluster.ray_settings(change):
        try:
            cluster.check_token(sys.argv[1], float(sys.argv[2]))
            print("taken")
        except cluster.TokenRefused as refused:
            print(str(refused).replace("\\n", " "))
"""
SETTINGS = (
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
    "RAY_AUTH_TOKEN_PATH",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER",
    "CUDA_VISIBLE_DEVICES",
    "RAY_ADDRESS",
)


@ray.remote(num_gpus=1)
class Rank:
    """What a rank sees."""

    def devices(self) -> tuple[str, bool, str]:
        return (
            os.environ["CUDA_VISIBLE_DEVICES"],
            torch.cuda.is_available(),
            os.environ["GLOO_SOCKET_IFNAME"],
        )


class Listener(NamedTuple):
    address: str
    port: int
    process: str


@dataclass
class Run:
    """A local run's Ray with two ranks on it.

    Attributes:
        earlier: sockets that listened before it started; an earlier test may have left some.
        devices: what each rank says.
    """

    address: str
    earlier: set[Listener]
    devices: list[tuple[str, bool, str]]
    token_file: Path
    logs: Path
    before: dict[str, str | None]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def token(self) -> str:
        return self.token_file.read_text()


def processes() -> list[psutil.Process]:
    """This one and all below it."""
    return [psutil.Process(), *children(psutil.Process())]


def said(ask: Callable[[psutil.Process], Any], of: list[psutil.Process]) -> Iterator[Any]:
    """Their answers; one of an earlier test may end meanwhile."""
    for process in of:
        with suppress(psutil.NoSuchProcess):
            yield ask(process)


def listeners() -> set[Listener]:
    found = set()
    for process in processes():
        # one of an earlier test may end meanwhile
        with suppress(psutil.NoSuchProcess):
            name = f"{process.pid} {process.name()}"
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    address = connection.laddr.ip.removeprefix("::ffff:")
                    found.add(Listener(address, connection.laddr.port, name))
    return found


def ports_of_others(address: str) -> set[int]:
    """Where programs beside this one listen, such as the tests of another worker."""
    own = {(listener.address, listener.port) for listener in listeners()}
    return {
        connection.laddr.port
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
        and connection.laddr.ip.removeprefix("::ffff:") in (address, "0.0.0.0", "::")
        and tuple(connection.laddr) not in own
    }


def settings() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in SETTINGS}


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Its user has a token for a cluster elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", "of a cluster elsewhere")
        patch.delenv("RAY_ADDRESS", raising=False)
        before, earlier = settings(), listeners()
        with RaySession(policy_ranks=2, engines=0, env={}, verbose=False):
            ranks = [Rank.remote() for _ in range(2)]
            devices = ray.get([rank.devices.remote() for rank in ranks], timeout=PATIENCE_S)
            logs = Path(ray._private.worker._global_node.get_logs_dir_path())
            address, token = (
                ray.get_runtime_context().gcs_address,
                Path(os.environ["RAY_AUTH_TOKEN_PATH"]),
            )
            yield Run(address, earlier, devices, token, logs, before)
        assert settings() == before and not token.exists(), "what is the run's own ends with it"


def join(address: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program of its own that joins a Ray; one try to find its head instead of twenty."""
    env = os.environ | {"RAY_NUM_REDIS_GET_RETRIES": "1"} | environment
    return subprocess.run(
        [sys.executable, "-c", JOIN, address],
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def other_addresses() -> list[str]:
    """Of this machine: those of its networks, and one of loopback's that nobody names."""
    found = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    ]
    return [*found, "127.0.0.2"]


def test_no_port_of_a_local_run_answers_at_another_address_of_this_machine(run):
    listening = listeners() - run.earlier
    assert [listener for listener in listening if listener.address != "127.0.0.1"] == []
    ports = {listener.port for listener in listening}
    assert run.port in ports and len(ports) > 8
    for address in other_addresses():
        for port in ports - ports_of_others(address):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, port), timeout=PATIENCE_S).close()
    with pytest.raises(ConnectionError, match="does not answer"):
        cluster.check_token(f"{other_addresses()[0]}:{run.port}", PATIENCE_S)


def test_who_has_not_the_token_is_refused_and_who_has_it_joins(run, tmp_path):
    joined = join(run.address)
    assert joined.stdout == "joined 127.0.0.1\n", joined.stderr
    other = tmp_path / "other"
    other.write_text("0" * 64)
    for environment in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN_PATH": str(other)}):
        refused = join(run.address, **environment)
        assert refused.returncode and not refused.stdout
        assert "Authentication token is missing or incorrect" in refused.stderr


def test_a_driver_that_joins_says_at_once_what_is_wrong_with_its_token(run, tmp_path):
    changes: list[dict[str, str]] = [
        {},
        {"RAY_AUTH_MODE": "disabled"},
        {"RAY_AUTH_TOKEN": "0" * 64},
        {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")},
    ]
    words = [sys.executable, "-c", CHECK, run.address, str(PATIENCE_S), json.dumps(changes)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=4 * PATIENCE_S)
    assert done.returncode == 0, done.stderr
    taken, *refused = done.stdout.splitlines()
    assert taken == "taken"
    for said, wanted in zip(
        refused,
        (
            "a token, and this process has none: set RAY_AUTH_MODE",
            "asks for another token than this process has",
            "asks for a token, which cannot be read",
        ),
        strict=True,
    ):
        assert wanted in said


def test_the_token_is_in_one_file_that_only_the_user_reads(run):
    assert (
        run.token_file.stat().st_mode & 0o777 == 0o600
        and run.token_file.parent.stat().st_mode & 0o777 == 0o700
    )
    assert len(run.token) == 64
    words = [" ".join(found) for found in said(psutil.Process.cmdline, processes())]
    logs = [
        path.read_text(errors="replace") for path in run.logs.parent.rglob("*") if path.is_file()
    ]
    environments = [str(found) for found in said(psutil.Process.environ, processes()[1:])]
    assert len(logs) > 8 and not any(run.token in text for text in [*words, *logs, *environments])


def test_ranks_of_a_job_on_cpu_see_no_gpu_wherever_they_run(run):
    """Ray counts two, and gives each rank one: a device of no machine."""
    assert run.devices == [("-1", False, "lo")] * 2


def test_the_doctor_of_a_cluster_says_at_once_that_it_asks_for_another_token(run):
    command = [
        sys.executable,
        "-m",
        "openrlhf_ext.cli.doctor",
        "--cluster",
        "--wait_s",
        str(2 * PATIENCE_S),
    ]
    env = os.environ | {"RAY_ADDRESS": run.address, "RAY_AUTH_TOKEN": "0" * 64}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1 and "asks for another token than this process has" in done.stdout, (
        done.stderr
    )


class Started(Exception):
    """In place of Ray."""


@pytest.mark.parametrize("gpus", [False, True])
def test_a_local_run_is_a_ray_of_its_own_with_the_devices_that_torch_has(monkeypatch, gpus):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1" if gpus else "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    before, given = settings(), {}

    def init(**arguments: object) -> None:
        given.update(
            arguments
            | {"devices": os.environ["CUDA_VISIBLE_DEVICES"], "mode": os.environ["RAY_AUTH_MODE"]}
        )
        raise Started

    monkeypatch.setattr(cluster.ray, "init", init)
    session = RaySession(policy_ranks=2, engines=1, env={}, verbose=False)
    with pytest.raises(cluster.RayNotStarted, match="Started"):
        session.__enter__()
    assert given["address"] == "local" and given["mode"] == "token" and session.use_gpu is gpus
    assert (given.get("num_gpus"), given["devices"]) == ((None, "0,1") if gpus else (2, "-1,-1"))
    assert settings() == before, "a Ray that does not start leaves nothing behind"


def test_the_token_of_a_run_that_was_killed_is_removed_by_the_next_and_that_of_a_living_one_is_not(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (of_a_node,) = re.findall(
        r"mktemp -d .*/(\w*token)_X+", (ROOT / "examples/scripts/ray_node.sh").read_text()
    )
    stays = {"ray_token_just_made", f"{of_a_node}_of_a_cluster"}
    for name in ("ray_token_killed", *stays):
        (tmp_path / name).mkdir()
        (tmp_path / name / "token").touch()
        if name != "ray_token_just_made":
            os.utime(tmp_path / name / "token", (0, 0))
    with cluster.private_ray(counted_gpus=1):
        (own,) = {path.name for path in tmp_path.iterdir()} - stays
        os.utime(tmp_path / own / "token", (0, 0))
        assert (tmp_path / own / "token").stat().st_mode & 0o777 == 0o600
        cluster._remove_left_tokens()
        assert (
            (tmp_path / own / "token").read_text()
            == Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text()
            != ""
        )
    assert {path.name for path in tmp_path.iterdir()} == stays
