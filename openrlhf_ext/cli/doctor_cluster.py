"""The nodes of a Ray cluster, before a run starts on them: what `openrlhf-ext doctor --cluster` looks at.

An actor on each node looks at it and answers; everything that a node must have in common with the others is compared
with this process, which is where the driver will be.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import resource
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import openrlhf_ext
from openrlhf_ext.config import RunConfig
from openrlhf_ext.config.file_rules import SOURCES
from openrlhf_ext.config.files import inputs_of
from openrlhf_ext.driver.cluster import TokenRefused, asks_for_token, check_token, count_gpus, living_nodes, node_label
from openrlhf_ext.patches import status
from openrlhf_ext.patches.base import installed_version

logger = logging.getLogger(__name__)

GIB = 2**30
_POLL_S = 2.0
_SAY_S = 15.0  # between two lines about nodes that are missing
_CONNECT_S = 5.0
_ANSWER_S = 180.0  # a node's first answer: it imports torch, perhaps from shared storage that it has not read before
_SEND_S = 1.0  # of the measurement between nodes
_CHUNK = 1 << 20
_CLOCK_S = 1.0


@dataclass(frozen=True)
class Finding:
    """What keeps a run from working (error) or makes it worse (warning); ``node``: its label, "cluster" for all."""

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


@dataclass(frozen=True)
class Places:
    """Paths of a run: files that it reads, and folders that all nodes and the driver must share."""

    read: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: RunConfig) -> Places:
        """Those of a configuration; names that are no paths here (hubs, servers) are left out."""
        read = [path for name in (*config.model_options, *SOURCES) for path in inputs_of(config, name).split(",")]
        shared = (config.ckpt.output_dir, config.ckpt.path)
        return cls(tuple(path for path in read if path and os.path.exists(path)), tuple(dict.fromkeys(shared)))


def examine_cluster(
    address: str, packages: Sequence[str], config: RunConfig | None, wait_for: Sequence[str], wait_s: float
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
        report.error("cluster", str(error), "docs/operating.md says how a node gets it")
        return report
    if missing is not None:
        remedy = "see what Ray says there: ray_node.sh prints it, launch.sh keeps it in RUN_FOLDER/logs/NODE.log"
        report.error("cluster", missing, remedy)
        return report
    check_access(address, report)
    places = Places.of(config) if config is not None else Places()
    with _tokens(places.shared, report) as tokens:
        probes = _start_probes()
        try:
            report.nodes = _answers(probes, "look", report, list(packages), places.read, tokens)
            _measure(probes, report)
        finally:
            for probe in probes.values():
                ray.kill(probe)
        own = look(list(packages), places.read, tokens)
    compare(report, own)
    _check_gpus(report, config)
    return report


def check_access(address: str, report: ClusterReport) -> None:
    if not asks_for_token(address, _CONNECT_S):
        text = "Ray asks nobody for a token: whoever reaches its ports runs code as its user on every node"
        report.warn("cluster", text, "RAY_AUTH_MODE=token before every node's Ray starts: docs/operating.md")


def compare(report: ClusterReport, own: Mapping[str, Any]) -> None:
    """Adds to the findings what is wrong with a node, or other there than here; ``own``: ``look`` of this machine."""
    for node, seen in report.nodes.items():
        for check in (_check_software, _check_paths, _check_machine):
            check(node, seen, own, report)


# ---- waiting -------------------------------------------------------------------------------------------------------


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
        return f"{len(names) - len(missing)} of {len(names)} nodes", f"; missing: {', '.join(missing)}"
    return None


# ---- on a node ---------------------------------------------------------------------------------------------------


def look(packages: list[str], read: Sequence[str], tokens: Mapping[str, str]) -> dict[str, Any]:
    memory = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shm = shutil.disk_usage("/dev/shm")
    return {
        "gpus": count_gpus(), "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        "shm_gib": round(shm.total / GIB, 1), "tmp_free_gib": round(shutil.disk_usage("/tmp").free / GIB, 1),
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
    }  # fmt: skip


def _code_digest() -> str:
    folder = Path(openrlhf_ext.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _fingerprint(path: Path) -> list | None:
    """Names and bytes of a file, or of the files in a folder; None: it is not there, or cannot be read."""
    try:
        files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
        if not all(os.access(file, os.R_OK) for file in files):
            return None
        return [[file.name, file.stat().st_size] for file in files]
    except OSError:
        return None


def _see(folder: Path, token: str) -> str:
    """What is wrong with a folder that the driver has put a file into; "" = nothing."""
    try:
        if not (folder / token).is_file():
            return "is not there" if not folder.is_dir() else "is another folder than the driver's"
        with NamedTemporaryFile(dir=folder, prefix=".doctor-"):
            return ""
    except OSError as error:
        return f"cannot be written: {error}"


class Probe:
    def look(self, packages: list[str], read: Sequence[str], tokens: Mapping[str, str]) -> dict[str, Any]:
        return look(packages, read, tokens)

    def clock(self) -> float:
        return time.time()

    def listen(self) -> int:
        server = socket.create_server((ray.util.get_node_ip_address(), 0))
        server.settimeout(_ANSWER_S)
        threading.Thread(target=_drain, args=(server,), daemon=True).start()
        return server.getsockname()[1]

    def send(self, host: str, port: int) -> float:
        """Gbit/s of one TCP connection to another node."""
        with socket.create_connection((host, port), timeout=_CONNECT_S) as connection:
            connection.settimeout(_ANSWER_S)
            start, sent, chunk = time.monotonic(), 0, bytes(_CHUNK)
            while (passed := time.monotonic() - start) < _SEND_S:
                connection.sendall(chunk)
                sent += _CHUNK
            return round(sent * 8 / passed / 1e9, 2)


def _drain(server: socket.socket) -> None:
    with server, server.accept()[0] as connection:
        while connection.recv(_CHUNK):
            pass


# ---- asking --------------------------------------------------------------------------------------------------------


def _start_probes() -> dict[str, Any]:
    """A probe on each node, by its label; the node's entry of Ray's table is not kept, nodes may leave."""
    actor = ray.remote(num_cpus=0, max_restarts=0)(Probe)

    def start(node: Any) -> Any:
        return actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote()

    return {node_label(node): start(node) for node in living_nodes()}


def _answers(probes: Mapping[str, Any], method: str, report: ClusterReport, *arguments: Any) -> dict[str, Any]:
    """What each probe answers; a node that does not is an error of the report."""
    return _collect({node: getattr(probe, method).remote(*arguments) for node, probe in probes.items()}, report)


def _collect(refs: Mapping[str, Any], report: ClusterReport) -> dict[str, Any]:
    answers, deadline = {}, time.monotonic() + _ANSWER_S
    for node, ref in refs.items():
        try:
            answers[node] = ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
        except (RayError, TimeoutError, OSError) as error:
            said = str(error).strip().splitlines() or [""]
            report.error(
                node,
                f"does not answer: {type(error).__name__}: {said[-1]}",
                "the same checkout and environment must be there under the same path, and nodes must reach each other "
                "on all ports",
            )
    return answers


def _measure(probes: Mapping[str, Any], report: ClusterReport) -> None:
    """Clocks against this machine's, and the connections between nodes."""
    for node in report.nodes:
        before = time.time()
        theirs = _collect({node: probes[node].clock.remote()}, report).get(node)
        if theirs is None:
            continue
        offset, blur = theirs - (before + time.time()) / 2, (time.time() - before) / 2
        report.nodes[node]["clock_offset_s"] = round(offset, 3)
        if abs(offset) - blur > _CLOCK_S:
            report.warn(node, f"its clock is {offset:+.1f} s from the driver's", "run chrony or ntpd on every node")
    compare_speeds(report, lambda pairs: _speeds(probes, pairs, report))


def compare_speeds(report: ClusterReport, measure: Callable[[Mapping[str, str]], dict[str, float]]) -> None:
    """Each node's connection to the next one in a circle; ``measure``: Gbit/s from node to node, all at the same time.

    What seems slow is measured once more, alone: a node that was busy for a moment has no slow network.
    """
    circle = list(report.nodes)
    if len(circle) < 2:
        return
    pairs = dict(zip(circle, circle[1:] + circle[:1], strict=True))
    speeds = measure(pairs)
    for node in _slow(speeds):
        speeds[node] = max([speeds[node], *measure({node: pairs[node]}).values()])
    for node, speed in speeds.items():
        report.nodes[node]["gbit_per_s"] = speed
    for node in _slow(speeds):
        report.warn(
            node,
            f"sends {speeds[node]:g} Gbit/s to {pairs[node]}, the fastest node {max(speeds.values()):g}",
            "look at its network interface; an address in the file of hosts says which one Ray takes, "
            "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME which one weights and gradients take",
        )


def _speeds(probes: Mapping[str, Any], pairs: Mapping[str, str], report: ClusterReport) -> dict[str, float]:
    """Without the nodes that do not answer."""
    hosts = {node_label(node): node["NodeManagerAddress"] for node in living_nodes()}
    ports = _answers({node: probes[node] for node in pairs.values()}, "listen", report)
    sending = {n: probes[n].send.remote(hosts[after], ports[after]) for n, after in pairs.items() if after in ports}
    return _collect(sending, report)


def _slow(speeds: Mapping[str, float]) -> list[str]:
    return [node for node, speed in speeds.items() if speed < max(speeds.values()) / 4 or speed < 1]


@contextmanager
def _tokens(folders: Sequence[str], report: ClusterReport) -> Iterator[dict[str, str]]:
    """A file in each shared folder while the nodes look for it: names by folder."""
    names = {}
    with ExitStack() as files:
        for folder in folders:
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
                file = files.enter_context(NamedTemporaryFile(dir=folder, prefix=".doctor-"))
                names[folder] = Path(file.name).name
            except OSError as error:
                report.error("driver", f"{folder} cannot be written: {error}", "name a folder on shared storage")
        yield names


# ---- comparing -----------------------------------------------------------------------------------------------------


def _check_software(node: str, seen: Mapping[str, Any], own: Mapping[str, Any], report: ClusterReport) -> None:
    for name, version in seen["versions"].items():
        if version != own["versions"][name]:
            text = f"{name} is {version or 'missing'}, the driver has {own['versions'][name] or 'none'}"
            report.error(node, text, "all nodes need one checkout and environment: setup_env.sh, on shared storage")
    if seen["patches"] != own["patches"]:
        text = f"patches are {seen['patches']}, the driver's {own['patches']}"
        report.error(node, text, "all nodes must have GPUs, or none, and the same environment")
    for reason in seen["refused"]:
        report.error(node, reason, "bash examples/scripts/setup_env.sh installs the versions that patches know")


def _check_paths(node: str, seen: Mapping[str, Any], own: Mapping[str, Any], report: ClusterReport) -> None:
    remedy = "put it on storage that all nodes see under the same name"
    for path, files in seen["files"].items():
        if files is None:
            report.error(node, f"{path} is not there, or cannot be read", remedy)
        elif files != own["files"][path]:
            report.error(node, f"{path} does not hold the files that the driver sees, or not in their sizes", remedy)
    for folder, problem in seen["shared"].items():
        if problem:
            report.error(node, f"{folder} {problem}", remedy)


def _check_machine(node: str, seen: Mapping[str, Any], own: Mapping[str, Any], report: ClusterReport) -> None:
    if seen["open_files"] < 4096:
        report.error(node, f"a process may open {seen['open_files']} files", "ulimit -n 65536 before Ray starts")
    if 0 <= seen["processes"] < 8192:
        report.warn(node, f"a user may have {seen['processes']} processes", "ulimit -u 65536 before Ray starts")
    if seen["gpus"] and seen["locked_memory"] != "unlimited":
        text = f"a process may lock {seen['locked_memory']} bytes of memory, which RDMA needs"
        report.warn(node, text, "ulimit -l unlimited before Ray starts (docker: --ulimit memlock=-1)")
    if seen["shm_gib"] < 1:
        text = f"/dev/shm has {seen['shm_gib']} GiB: Ray keeps objects in files, and weights go by messages"
        report.warn(node, text, "docker: --shm-size; else remount /dev/shm with more")
    if seen["tmp_free_gib"] < 5:
        text = f"/tmp has {seen['tmp_free_gib']} GiB free, where Ray keeps logs and what its store cannot hold"
        report.warn(node, text, "free some, or name another folder: RAY_TMPDIR")


def _check_gpus(report: ClusterReport, config: RunConfig | None) -> None:
    """What Ray counts as GPUs are GPUs on all nodes or on none, and there are as many as the run needs."""
    counted = {node_label(node): node["Resources"].get("GPU", 0) for node in living_nodes()}
    kinds = {node: seen["gpus"] > 0 for node, seen in report.nodes.items() if counted.get(node)}
    for node, seen in report.nodes.items():
        if seen["gpus"] and seen["gpus"] < counted.get(node, 0):
            text = f"Ray counts {counted[node]:g} GPUs, torch can use {seen['gpus']}"
            report.error(node, text, "start Ray there with as many as there are (NODE_GPUS), see nvidia-smi")
        if len(set(kinds.values())) == 2 and not kinds.get(node, True):
            text = "has no GPU, Ray only counts some, and other nodes have GPUs"
            report.error(node, text, "take one kind of nodes out of the cluster")
    if config is None:
        return
    own_gpus = config.engine_workers if any(kinds.values()) and not config.engines_share_gpus else 0
    needed, there = config.training_gpus + own_gpus, sum(counted.values())
    if needed > there:
        text = f"the run needs {needed} GPUs, Ray counts {there:g}"
        report.error("cluster", text, "add nodes, or use fewer ranks (actor.num_nodes) or engines (vllm.num_engines)")
    cpus = config.training_ranks + (0 if config.engines_share_gpus else config.engine_workers)
    cpus_there = sum(node["Resources"].get("CPU", 0) for node in living_nodes())
    if cpus > cpus_there:
        text = f"the run needs {cpus} of Ray's CPUs, one for each rank and engine worker, Ray counts {cpus_there:g}"
        report.error("cluster", text, "ray start --num-cpus; Ray does not check that they exist")


# ---- text ----------------------------------------------------------------------------------------------------------

_COLUMNS = {
    "gpus": "GPUs", "cores": "cores", "memory_gib": "memory GiB", "shm_gib": "shm GiB", "tmp_free_gib": "/tmp free GiB",
    "open_files": "open files", "clock_offset_s": "clock s", "gbit_per_s": "Gbit/s to next",
}  # fmt: skip


def table(report: ClusterReport) -> list[tuple[str, ...]]:
    rows = [(node, *(str(seen.get(key, "-")) for key in _COLUMNS)) for node, seen in report.nodes.items()]
    return [("node", *_COLUMNS.values()), *rows]
