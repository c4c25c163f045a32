"""Where the Ray processes of this user listen, and whether they ask for a token: a section of the doctor's report."""

from __future__ import annotations

import contextlib
import ipaddress
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

_SERVERS = ("gcs_server", "raylet")


@dataclass(frozen=True)
class Listener:
    """A process of a Ray that runs here: its servers, the program that started them, and all that they started.

    Attributes:
        where: address -> number of ports.
        beyond: whether other machines reach it, as far as no firewall is between.
        token: whether what Ray listens with there asks for a token. Groups of ranks, stores and engines never ask
            (docs/operating.md#security).
    """

    pid: int
    name: str
    where: dict[str, int]
    beyond: bool
    token: bool

    @property
    def row(self) -> tuple[str, ...]:
        ports = ", ".join(f"{address} ({count} ports)" for address, count in self.where.items())
        reach = "other machines reach it" if self.beyond else "this machine only"
        return self.name, str(self.pid), ports, reach, f"Ray asks for {'a token' if self.token else 'NO token'}"


def find_listeners() -> list[Listener]:
    """Those of this user's processes, which nobody else can look into."""
    found: dict[int, Listener] = {}
    for server in [process for process in psutil.process_iter(["name"]) if process.info["name"] in _SERVERS]:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended, or is another user's
            # a Ray has one mode; other processes' titles are written over their environment (setproctitle)
            token = server.environ().get("RAY_AUTH_MODE") == "token"
            parent = server.parent()
            # one that outlived who started it has pid 1 for a parent, whose other children are not Ray's
            root = parent if parent is not None and parent.pid > 1 else server
            found |= {listener.pid: listener for listener in _listeners([root, *root.children(recursive=True)], token)}
    return sorted(found.values(), key=lambda listener: listener.pid)


def _listeners(processes: Sequence[psutil.Process], token: bool) -> Iterator[Listener]:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            listening = [c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
            where = Counter(address.removeprefix("::ffff:") for address in listening)  # IPv4 in IPv6's words
            beyond = not all(ipaddress.ip_address(address).is_loopback for address in where)
            if where:
                yield Listener(process.pid, process.name(), dict(where), beyond, token)
