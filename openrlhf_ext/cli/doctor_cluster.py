"""The nodes of a Ray cluster, before a run starts on them: what `openrlhf-ext doctor --cluster`
looks at.

A task on each node looks at it and answers; everything that a node must have in common with the
others is compared with this process, which is where the driver will be. What a start says by itself
is not repeated here.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import resource
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Literal

import ray

import openrlhf_ext
from openrlhf_ext.config import RunConfig
from openrlhf_ext.config.files import dataset_refs, inputs_of
from openrlhf_ext.driver.cluster import (
    TokenRefused,
    ask_nodes,
    asks_for_token,
    check_token,
    count_gpus,
    living_nodes,
    node_label,
)
from openrlhf_ext.patches import status
from openrlhf_ext.patches.base import installed_version

logger = logging.getLogger(__name__)

GIB = 2**30
_POLL_S = 2.0
_SAY_S = 15.0  # between two lines about nodes that are missing
_CONNECT_S = 5.0
# a node's first answer: it imports torch, perhaps from shared storage that it has not read before
_ANSWER_S = 180.0
_LIMITS: tuple[tuple[str, int, Literal["error", "warning"], str, str], ...] = (
    (
        "open_files",
        4096,
        "error",
        "a process may open {} files",
        "ulimit -n 65536 before Ray starts",
    ),
    (
        "processes",
        8192,
        "warning",
        "a user may have {} processes",
        "ulimit -u 65536 before Ray starts",
    ),
    (
        "shm_gib",
        1,
        "warning",
        "/dev/shm has {} GiB: Ray keeps objects in files, and weights travel in messages",
        "docker: --shm-size; otherwise remount /dev/shm with more",
    ),
    (
        "tmp_free_gib",
        5,
        "warning",
        "/tmp has {} GiB free, and Ray keeps its logs and spilled objects there",
        "free some, or set RAY_TMPDIR to another folder",
    ),
)
"""Of a node: what `look` calls it, the least, severity, text and remedy of less; negative: without
a limit."""


@dataclass(frozen=True)
class Finding:
    """What keeps a run from working (error) or makes it worse (warning); ``node``: its label,
    "cluster" for all."""

    severity: Literal["error", "warning"]
    node: str
    text: str
    remedy: str


@dataclass
class ClusterReport:
    """What was found; `nodes` has the answers of each node by its label."""

    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def has_errors(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings)

    def error(self, node: str, text: str, remedy: str) -> None:
        self.findings.append(Finding("error", node, text, remedy))

    def warn(self, node: str, text: str, remedy: str) -> None:
        self.findings.append(Finding("warning", node, text, remedy))

    def keep(self, answers: Mapping[str, dict[str, Any] | Exception]) -> None:
        """By node: what ``look`` found there, or why there is no answer, which is an error."""
        remedy = (
            "it needs the same checkout and environment under the same path, and all ports of the "
            "other nodes"
        )
        for node, answer in answers.items():
            if isinstance(answer, Exception):
                *_, said = ["", *str(answer).strip().splitlines()]
                self.error(node, f"does not answer: {type(answer).__name__}: {said}", remedy)
            else:
                self.nodes[node] = answer


def examine_cluster(
    address: str,
    packages: Sequence[str],
    config: RunConfig | None,
    wait_for: Sequence[str],
    wait_s: float,
) -> ClusterReport:
    """Looks at every node of a Ray cluster, of which this machine is one.

    Args:
        packages: distributions whose versions must be equal everywhere.
        config: of the run that is to start; None: only what every run needs is looked at.
        wait_for: names of nodes (``ray start --node-name``) that are waited for, as is the head.
    """
    report = ClusterReport()
    try:
        missing = _wait_for_nodes(address, wait_for, wait_s)
    except TokenRefused as error:
        report.error("cluster", str(error), "docs/operating.md shows how to install it")
        return report
    if missing is not None:
        remedy = (
            "see what Ray says there: ray_node.sh prints it, launch.sh keeps it in "
            "RUN_FOLDER/logs/NODE.log"
        )
        report.error("cluster", missing, remedy)
        return report
    check_access(address, report)
    with _tokens(config, report) as tokens:
        asked = (list(packages), _files_of(config), tokens)
        report.keep(ask_nodes(look, living_nodes(), _ANSWER_S, *asked))
        own = look(*asked)
    compare(report, own)
    _check_gpus(report, config)
    return report


def check_access(address: str, report: ClusterReport) -> None:
    if not asks_for_token(address, _CONNECT_S):
        text = (
            "Ray requires no token: anyone who reaches its ports can run code as its user on every "
            "node"
        )
        report.warn(
            "cluster", text, "RAY_AUTH_MODE=token before every node's Ray starts: docs/operating.md"
        )


def compare(report: ClusterReport, own: Mapping[str, Any]) -> None:
    """Adds to the findings what is wrong with a node, or other there than here; ``own``: ``look``
    of this machine."""
    for node, seen in report.nodes.items():
        for check in (_check_software, _check_paths, _check_machine):
            check(node, seen, own, report)


def _files_of(config: RunConfig | None) -> list[str]:
    """Paths that the run reads; names that are no paths here (hubs, servers) are left out."""
    if config is None:
        return []
    options = (*config.model_options, *config.data_options, *config.code_options)
    found = [ref.path for name in options for ref in dataset_refs(inputs_of(config, name))]
    return [path for path in found if path and os.path.exists(path)]


# ---- waiting


def _wait_for_nodes(address: str, names: Sequence[str], wait_s: float) -> str | None:
    """Joins Ray, and returns when the named nodes are there; what is missing when the time is over.

    TokenRefused ends it: waiting does not help.
    """
    start, said = time.monotonic(), 0.0
    while True:
        problem = _problem(address, names)
        passed = time.monotonic() - start
        if problem is None:
            return None
        text = f"{problem[0]} after {passed:.0f} s{problem[1]}"
        if passed >= wait_s:
            return text
        if passed - said >= _SAY_S:
            logger.warning("%s (waiting up to %.0f s)", text, wait_s)
            said = passed
        time.sleep(min(_POLL_S, wait_s - passed))


def _problem(address: str, names: Sequence[str]) -> tuple[str, str] | None:
    """What is not there yet, the time to be put between both parts; None: nothing."""
    if not ray.is_initialized():
        host, _, port = address.rpartition(":")
        try:  # ray.init of an address where nothing listens takes minutes to say so
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
            check_token(address, _CONNECT_S)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except TokenRefused:
            raise
        except (OSError, RuntimeError) as error:
            return f"Ray's head at {address} cannot be joined", f": {error}"
    there = {node["NodeName"] for node in living_nodes()}
    missing = [name for name in names if name not in there]
    if missing:
        return (
            f"{len(names) - len(missing)} of {len(names)} nodes",
            f"; missing: {', '.join(missing)}",
        )
    return None


# ---- on a node


def look(packages: list[str], read: Sequence[str], tokens: Mapping[str, str]) -> dict[str, Any]:
    memory = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shm = shutil.disk_usage("/dev/shm")
    return {
        "gpus": count_gpus(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        "shm_gib": round(shm.total / GIB, 1),
        "tmp_free_gib": round(shutil.disk_usage("/tmp").free / GIB, 1),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "processes": resource.getrlimit(resource.RLIMIT_NPROC)[0],
        "locked_memory": "unlimited" if memory == resource.RLIM_INFINITY else memory,
        "versions": {
            "python": platform.python_version(),
            "code of openrlhf_ext": _code_digest(),
            **{name: installed_version(name) for name in packages},
        },
        "patches": {patch.name: patch.state for patch in status()},
        "refused": [patch.reason for patch in status() if patch.state == "refused"],
        "files": {path: _fingerprint(Path(path)) for path in read},
        "shared": {folder: _see(Path(folder), token) for folder, token in tokens.items()},
    }


def _code_digest() -> str:
    folder = Path(openrlhf_ext.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _fingerprint(path: Path) -> list | None:
    """Names and bytes of a file, or of the files in a folder; None: it is not there, or cannot be
    read."""
    try:
        files = (
            [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
        )
        if not all(os.access(file, os.R_OK) for file in files):
            return None
        return [[file.name, file.stat().st_size] for file in files]
    except OSError:
        return None


def _see(folder: Path, token: str) -> str:
    """What is wrong with a folder that the driver has put a file into; "" = nothing."""
    try:
        if not (folder / token).is_file():
            return (
                "is not there" if not folder.is_dir() else "is a different folder than the driver's"
            )
        with NamedTemporaryFile(dir=folder, prefix=".doctor-"):
            return ""
    except OSError as error:
        return f"cannot be written: {error}"


@contextmanager
def _tokens(config: RunConfig | None, report: ClusterReport) -> Iterator[dict[str, str]]:
    """A file in each folder that the nodes must share, while they look for it: names by folder."""
    folders = () if config is None else dict.fromkeys((config.ckpt.output_dir, config.ckpt.path))
    names = {}
    with ExitStack() as files:
        for folder in folders:
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
                file = files.enter_context(NamedTemporaryFile(dir=folder, prefix=".doctor-"))
                names[folder] = Path(file.name).name
            except OSError as error:
                report.error(
                    "driver",
                    f"{folder} cannot be written: {error}",
                    "name a folder on shared storage",
                )
        yield names


# ---- comparing


def _check_software(
    node: str, seen: Mapping[str, Any], own: Mapping[str, Any], report: ClusterReport
) -> None:
    for name, version in seen["versions"].items():
        if version != own["versions"][name]:
            text = (
                f"{name} is {version or 'missing'}, but the driver has "
                f"{own['versions'][name] or 'none'}"
            )
            report.error(
                node,
                text,
                "all nodes need one checkout and environment: setup_env.sh, on shared storage",
            )
    if seen["patches"] != own["patches"]:
        text = f"patches are {seen['patches']}, but the driver's are {own['patches']}"
        report.error(
            node, text, "all nodes or none must have GPUs, and all need the same environment"
        )
    for reason in seen["refused"]:
        report.error(
            node,
            reason,
            "bash examples/scripts/setup_env.sh installs the versions that the patches support",
        )


def _check_paths(
    node: str, seen: Mapping[str, Any], own: Mapping[str, Any], report: ClusterReport
) -> None:
    remedy = "put it on storage that all nodes see under the same path"
    for path, files in seen["files"].items():
        if files is None:
            report.error(node, f"{path} is not there, or cannot be read", remedy)
        elif files != own["files"][path]:
            report.error(
                node,
                f"{path} does not have the files that the driver sees, or has other sizes",
                remedy,
            )
    for folder, problem in seen["shared"].items():
        if problem:
            report.error(node, f"{folder} {problem}", remedy)


def _check_machine(
    node: str, seen: Mapping[str, Any], own: Mapping[str, Any], report: ClusterReport
) -> None:
    for name, least, severity, text, remedy in _LIMITS:
        if 0 <= seen[name] < least:
            report.findings.append(Finding(severity, node, text.format(seen[name]), remedy))
    if seen["gpus"] and seen["locked_memory"] != "unlimited":
        text = f"a process may lock {seen['locked_memory']} bytes of memory, which RDMA needs"
        report.warn(
            node, text, "ulimit -l unlimited before Ray starts (docker: --ulimit memlock=-1)"
        )


def _check_gpus(report: ClusterReport, config: RunConfig | None) -> None:
    """What Ray counts as GPUs are there, and there are as many as the run needs."""
    counted = {node_label(node): node["Resources"].get("GPU", 0) for node in living_nodes()}
    with_gpus = any(seen["gpus"] for node, seen in report.nodes.items() if counted.get(node))
    for node, seen in report.nodes.items():
        if seen["gpus"] and seen["gpus"] < counted.get(node, 0):
            text = f"Ray counts {counted[node]:g} GPUs, but torch can use {seen['gpus']}"
            report.error(
                node,
                text,
                "start Ray there with the actual number of GPUs (NODE_GPUS), see nvidia-smi",
            )
    if config is None:
        return
    needed, there = config.gpus if with_gpus else config.training_gpus, sum(counted.values())
    if needed > there:
        text = f"the run needs {needed} GPUs, but Ray counts {there:g}"
        report.error(
            "cluster",
            text,
            "add nodes, or use fewer ranks (actor.num_nodes) or engines (vllm.num_engines)",
        )
    cpus = config.training_ranks + (0 if config.engines_share_gpus else config.engine_workers)
    cpus_there = sum(node["Resources"].get("CPU", 0) for node in living_nodes())
    if cpus > cpus_there:
        text = (
            f"the run needs {cpus} of Ray's CPUs, one for each rank and engine worker, but Ray "
            f"counts {cpus_there:g}"
        )
        report.error("cluster", text, "ray start --num-cpus; Ray does not check that they exist")


# ---- text

_COLUMNS = {
    "gpus": "GPUs",
    "cores": "cores",
    "memory_gib": "memory GiB",
    "shm_gib": "shm GiB",
    "tmp_free_gib": "/tmp free GiB",
    "open_files": "open files",
}


def table(report: ClusterReport) -> list[tuple[str, ...]]:
    rows = [
        (node, *(str(seen.get(key, "-")) for key in _COLUMNS))
        for node, seen in report.nodes.items()
    ]
    return [("node", *_COLUMNS.values()), *rows]
