"""Starts a Ray of one run without the services of clusters and dashboards.

Dependency: ray 2.55.0.

Wrong there: _private/node.py:1330 (``start_head_processes``) and :1453 start an autoscaler, an API server and a reader
of logs for every Ray that ``ray.init`` starts, whatever its arguments say: three Python processes, which take 1.7 s of
a processor on a laptop while the run starts, and the start of Ray waits for them.

Changes: nothing in Ray. Whoever starts a Ray of its own on this machine (openrlhf_ext/driver/cluster.py) does so inside
``without_services``. ``ray status``, job submission and the State API do not answer for such a Ray.

Remove when: ``ray.init`` has arguments for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from openrlhf_ext.patches.base import Patch


@contextmanager
def without_services(read_logs: bool = False) -> Iterator[None]:
    """In the body ``ray.init`` starts GCS and raylet only, with the latter's agents, and what prints the workers' logs
    only with ``read_logs``. Raises PatchRefused: Ray is of another version."""
    from ray._private.node import Node

    PATCH.require_known_version()
    names = ["start_monitor", "start_api_server"] + ["start_log_monitor"] * (not read_logs)
    usual = {name: getattr(Node, name) for name in names}
    for name in names:
        setattr(Node, name, _no_address if name == "start_api_server" else _nothing)
    try:
        yield
    finally:
        for name, method in usual.items():
            setattr(Node, name, method)


def _nothing(node: Any) -> None:
    """No process."""


def _no_address(node: Any, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
    node._webui_url = ""  # as where no dashboard is included


PATCH = Patch(
    name="ray_services",
    dependency="ray",
    versions=("2.55.0",),
    problem="_private/node.py:1330 starts an autoscaler, an API server and a reader of logs for every Ray",
    change="a Ray that a run starts for itself gets none of them; the last where it is asked for",
    removal="`ray.init` has arguments for it",
    install=lambda: None,  # called where Ray is started
    need=lambda: (True, "ray.init starts services of clusters"),
)
