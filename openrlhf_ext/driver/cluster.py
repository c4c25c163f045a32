"""The lifetime of a job's Ray processes: start, report of a death in the process's own words, and a
clean end. Ctrl-C, SIGTERM and errors all leave through ``RaySession.__exit__``, after which no
process of the job is alive; where Ray itself hangs or dies, the driver's parent ends what is left
(``guard``)."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import grpc
import psutil
import ray
import torch
from ray._common.tls_utils import load_certs_from_env
from ray._private import ray_constants
from ray._private.authentication.authentication_token_generator import (
    generate_new_authentication_token,
)
from ray._private.services import canonicalize_bootstrap_address
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from openrlhf_ext.checkpoints import CheckpointError
from openrlhf_ext.driver.guard import END_S, Guard, end_processes
from openrlhf_ext.groups.watchdog import Address, RankState, ask_rank, describe_ranks
from openrlhf_ext.rewards.grading import RewardError, RewardFailureLimit
from openrlhf_ext.rollout.process import machine_id, ray_log_tail
from openrlhf_ext.run.ending import INTERRUPTED, hear_again
from openrlhf_ext.user_code import told, users_part

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_TOKENS = "ray_token_"  # folders in TMPDIR
_FRESH_S = 60.0
_TOKEN_FILE = "RAY_AUTH_TOKEN_PATH"
_TOKEN = "RAY_AUTH_TOKEN"  # counts more than the file
_MODE = "RAY_AUTH_MODE"
_CLUSTER = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
_READ_S = 30.0
_TRIES = 5
_ASK_RANK_S = 0.5
_ASK_RANKS_EVERY_S, _ASK_SILENT_EVERY_S = 2.0, 60.0
_T = TypeVar("_T")


@contextmanager
def private_ray(counted_gpus: int | None) -> Iterator[None]:
    """In the body this process and those that it starts use a Ray of their own: on loopback, with a
    new token, in a file of mode 600 whose name they inherit. ``counted_gpus``: no process gets a
    GPU, and Ray counts so many; None:
    they get them."""
    # No device has this number. Ray takes the k-th entry for its k-th GPU (ray 2.60
    # worker.py:1158), so an empty list would be an IndexError, and no list this machine's GPUs.
    devices = (
        {} if counted_gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(["-1"] * counted_gpus)}
    )
    _remove_left_tokens()
    with (
        tempfile.TemporaryDirectory(prefix=_TOKENS) as folder,
        open(Path(folder) / "token", "x") as token,
    ):
        os.chmod(token.fileno(), 0o600)
        fcntl.flock(token, fcntl.LOCK_SH)  # as long as this process lives
        token.write(generate_new_authentication_token())
        token.flush()
        file = token.name
        # Ray replaces 127.0.0.1 by the address of the network's interface (ray 2.60
        # services.py:799), unless this variable, which the name of other systems is in, says that
        # there is no cluster (services.py:815); its servers take loopback for what listens there
        # only
        with ray_settings(
            {_MODE: "token", _TOKEN_FILE: file, _TOKEN: None, _CLUSTER: "0", **devices}
        ):
            yield


def _remove_left_tokens() -> None:
    """Those of processes that were killed; one that was just made may not be locked yet."""
    for token in Path(tempfile.gettempdir()).glob(f"{_TOKENS}*/token"):
        # somebody else's, or on its way out
        with contextlib.suppress(OSError), token.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(file.fileno()).st_mtime > _FRESH_S:
                shutil.rmtree(token.parent)


@contextmanager
def ray_settings(values: Mapping[str, str | None]) -> Iterator[None]:
    """The body sees these variables of the environment (None: not set), and so does Ray, imported
    or not."""
    before = {name: os.environ.get(name) for name in values}
    try:
        _set(values)
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    # Ray read them when it was imported
    ray_constants.ENABLE_RAY_CLUSTER = ray_constants.env_bool(_CLUSTER, True)
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def loopback_env() -> dict[str, str]:
    """What the processes of a run need whose Ray is on loopback, so that they listen there too;
    empty on clusters."""
    if ray_constants.ENABLE_RAY_CLUSTER:
        return {}
    return {"VLLM_HOST_IP": LOOPBACK, "GLOO_SOCKET_IFNAME": "lo"}


class TokenRefused(ConnectionError):
    """Ray's head asks for a token that this process does not have; with the remedy."""


def asks_for_token(address: str, timeout_s: float) -> bool:
    """Whether the GCS at an address (host:port) refuses who has no token. Raises ConnectionError:
    it did not answer within ``timeout_s`` seconds; with what it said."""
    return _is_refused(address, timeout_s, ())


def check_token(address: str, timeout_s: float) -> None:
    """Looks whether the GCS at an address (host:port) takes this process's token. Ray by itself
    says it after 20 s. Raises TokenRefused: it does not; ConnectionError: as ``asks_for_token``."""
    if not asks_for_token(address, timeout_s):
        return
    where = (
        "RAY_AUTH_MODE=token, and its token in the file RAY_AUTH_TOKEN_PATH (by default "
        "~/.ray/auth_token)"
    )
    try:
        # none in another mode
        header = AuthenticationTokenLoader.instance().get_token_for_http_header()
    except AuthenticationError as error:
        raise TokenRefused(
            f"Ray at {address} asks for a token, which cannot be read: {error}; set {where}"
        ) from None
    if not header:
        raise TokenRefused(
            f"Ray at {address} asks for a token, and this process has none: set {where}"
        )
    if _is_refused(address, timeout_s, tuple(header.items())):
        raise TokenRefused(
            f"Ray at {address} asks for another token than this process has: set {where}"
        )


def _is_refused(address: str, timeout_s: float, metadata: tuple[tuple[str, str], ...]) -> bool:
    with contextlib.closing(_channel(address)) as channel:
        try:
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")(
                b"", timeout=timeout_s, metadata=metadata
            )
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                return True
            raise ConnectionError(f"Ray at {address} does not answer: {error.details()}") from error
    return False


def _channel(address: str) -> grpc.Channel:
    """As Ray makes one (ray 2.60 grpc_utils.py), but with no token of this process's."""
    if not ray_constants.env_bool("RAY_USE_TLS", False):
        return grpc.insecure_channel(address, ray_constants.GLOBAL_GRPC_OPTIONS)
    own, key, authority = load_certs_from_env()
    return grpc.secure_channel(
        address,
        grpc.ssl_channel_credentials(authority, key, own),
        ray_constants.GLOBAL_GRPC_OPTIONS,
    )


class MixedCluster(RuntimeError):
    """Nodes with GPUs and nodes that only count them are in one cluster."""


class RayNotStarted(RuntimeError):
    """Ray could not be started, or its cluster could not be joined."""


class RaySession:
    """Starts a local Ray, or joins the cluster that RAY_ADDRESS names; ends what it started."""

    def __init__(
        self,
        *,
        policy_ranks: int,
        engines: int,
        env: dict[str, str],
        verbose: bool,
        guard: Guard | None = None,
    ) -> None:
        """``policy_ranks`` are of all models, ``engines`` workers of all engines; ``env`` is of
        every Ray worker."""
        self.guard = guard or Guard()
        self.policy_ranks, self.engines, self.env, self.verbose = (
            policy_ranks,
            engines,
            env,
            verbose,
        )
        self.processes: dict[str, dict[str, Any]] = {}
        self._groups: dict[str, list[Address]] = {}
        self._ask_ranks_at = 0.0
        self._children: dict[int, psutil.Process] = {}
        # processes that were there before, and are not the session's to end
        self._others = {process.pid for process in psutil.Process().children(recursive=True)}
        self._own_ray = contextlib.ExitStack()
        self.use_gpu = False

    def __enter__(self) -> RaySession:
        """Raises RayNotStarted: it did not; what it had started has ended."""
        handlers = {number: signal.getsignal(number) for number in INTERRUPTED}
        # Ray's processes inherit it: the end of the terminal reaches all of its group, and who
        # saves needs them. Ray itself does so with SIGINT (ray 2.60 _private/services.py).
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            self._start()
        except BaseException as error:
            self.__exit__(None, None, None)
            if not isinstance(error, Exception):
                raise
            raise RayNotStarted(f"Ray did not start: {type(error).__name__}: {error}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        # Ray puts its own in the place of SIGTERM's (ray 2.60 _private/node.py:664)
        hear_again(handlers)
        self.remember_children()
        self.guard.watch(*_ray_processes())
        return self

    def _start(self) -> None:
        if not _joins_cluster():
            self.use_gpu = torch.cuda.is_available()
            self._own_ray.enter_context(
                private_ray(counted_gpus=None if self.use_gpu else self.policy_ranks)
            )
        # ray:// is Ray's client, which says it at once
        elif "://" not in (address := os.environ["RAY_ADDRESS"]):
            check_token(canonicalize_bootstrap_address(address), _READ_S)
        arguments = self._arguments()
        start_with_retries(lambda: ray.init(**arguments))

    def find_gpus(self, timeout_s: float) -> None:
        """Sets ``use_gpu`` on a cluster that was joined: whether what it counts as GPUs are GPUs.
        Ask when Ray has placed the run's bundles: before, nodes may be missing. Raises
        MixedCluster, TimeoutError."""
        if not _joins_cluster():
            return
        nodes = [node for node in living_nodes() if node["Resources"].get("GPU", 0) > 0]
        answers = ask_nodes(count_gpus, nodes, timeout_s)
        failures = {
            name: answer for name, answer in answers.items() if isinstance(answer, Exception)
        }
        if failures:
            described = "; ".join(
                f"{name}: {type(error).__name__}: {error}" for name, error in failures.items()
            )
            raise TimeoutError(
                f"nodes did not say within {round(timeout_s, 1):g} s whether they have GPUs: "
                f"{described}"
            )
        with_gpus = [name for name, count in answers.items() if count]
        if 0 < len(with_gpus) < len(answers):
            without = [name for name, count in answers.items() if not count]
            raise MixedCluster(
                f"nodes of a run must all have GPUs, or none: {', '.join(with_gpus)} have some, "
                f"{', '.join(without)} only count them (ray start --num-gpus). Take one kind out "
                "of the cluster"
            )
        self.use_gpu = bool(with_gpus)

    def _arguments(self) -> dict[str, Any]:
        runtime_env = {
            "env_vars": self.env | loopback_env(),
            "worker_process_setup_hook": "openrlhf_ext.patches.apply",
        }
        common: dict[str, Any] = {"runtime_env": runtime_env, "log_to_driver": self.verbose}
        common["logging_level"] = logging.WARNING
        if _joins_cluster():
            return common
        # "local": not somebody else's Ray that happens to run on this machine
        local: dict[str, Any] = {"address": "local", "include_dashboard": False}
        if not self.use_gpu:
            # OpenRLHF's actor group asks for one GPU per rank: on a CPU they are only numbers. One
            # CPU each, likewise.
            local |= {
                "num_gpus": self.policy_ranks,
                "num_cpus": self.policy_ranks + self.engines + 1,
            }
            local["object_store_memory"] = 256 << 20
            # Ray's idle workers, one per CPU, are not used: they lack the environment of this job's
            # actors
            local["_system_config"] = {"prestart_worker_first_driver": False}
            # of its own default, which it finds there again (ray 2.60 node.py:2244)
            logging.getLogger("ray._private.node").addFilter(
                lambda record: "object spilling" not in str(record.msg)
            )
        return common | local

    def remember(self, name: str, process: Mapping[str, Any]) -> None:
        """Names a process (``own_identity``), so that its log can be shown if it dies."""
        self.processes[name] = dict(process)
        self.remember_children()

    def watch(self, group: str, addresses: list[Address]) -> None:
        """Where the ranks of a group say what they are doing (``groups.watchdog``), for
        reports."""
        self._groups[group] = addresses

    def rank_progress(self) -> str:
        """How far the first rank of every group that works is, asked every few seconds; '' in
        between. One that does not answer at once is left alone for a while: those who wait for it
        must not wait longer for this."""
        now = time.monotonic()
        if now < self._ask_ranks_at or not self._groups:
            return ""
        states = {
            group: ask_rank(addresses[0], _ASK_RANK_S) for group, addresses in self._groups.items()
        }
        silent = any(not isinstance(state, RankState) for state in states.values())
        self._ask_ranks_at = time.monotonic() + (
            _ASK_SILENT_EVERY_S if silent else _ASK_RANKS_EVERY_S
        )
        working = {
            group: s
            for group, s in states.items()
            if isinstance(s, RankState) and s.phase is not None
        }
        return "; ".join(
            f"{group}: " + " > ".join(filter(None, (s.phase, s.work)))
            for group, s in working.items()
        )

    def remember_children(self) -> None:
        """Keeps hold of every descendant that came with Ray, since a dead parent would hide its
        children."""
        for process in psutil.Process().children(recursive=True):
            if process.pid not in self._others:
                self._children.setdefault(process.pid, process)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # a second Ctrl-C must not stop the clean-up
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in INTERRUPTED}
        self.guard.watch({})
        self.guard.expect(END_S, "ending Ray and the run's processes")
        self.remember_children()
        with contextlib.suppress(RayError):
            ray.shutdown()
        end_processes(list(self._children.values()))
        self._own_ray.close()
        hear_again(handlers)

    def describe_failure(self, error: BaseException) -> str:
        """The failing process's own error text and, of every process that died, its name and the
        end of its log. Which process reports a death first is a matter of chance: often it is one
        that waited for the dead process."""
        cause = error.cause if isinstance(error, RayTaskError) else error
        died = cause.actor_id if isinstance(cause, RayActorError) else None
        if isinstance(error, RayTaskError) and isinstance(
            cause, (RewardError, RewardFailureLimit, CheckpointError)
        ):
            error = cause  # its text says all; ours around it, and frames of libraries, say nothing
        of_a_task = isinstance(error, RayTaskError) and died is None
        text = re.sub(r"\x1b\[\d+m", "", str(error))  # Ray's colors
        lines = [users_part(text) or text if of_a_task else told(error)]
        if died is not None or isinstance(error, TimeoutError):
            lines += [
                f"--- ranks of the {group}\n{describe_ranks(where)}"
                for group, where in self._groups.items()
            ]
        dead = {
            f"{name} (pid {process['pid']} on {process['host']})": process
            for name, process in self.processes.items()
            if (died is not None and process["actor"] == died) or not _alive(process)
        }
        if dead:
            lines.append("dead processes: " + ", ".join(dead))
        # a node may have gone with all of its processes
        with ThreadPoolExecutor(max_workers=16) as pool:
            tails = list(pool.map(partial(ask_about, question=ray_log_tail), dead.values()))
        lines += [
            f"--- last output of {name}\n{tail}"
            for name, tail in zip(dead, tails, strict=True)
            if tail
        ]
        return "\n".join(lines)


def _ray_processes() -> tuple[dict[str, int], str]:
    """The raylet of this process, the GCS if it is on this machine: their ids by name; and the
    folder of Ray's logs."""
    node = ray._private.worker._global_node
    marks = {"raylet": node.raylet_socket_name, "gcs_server": node.session_name}
    found = {}
    for process in psutil.process_iter(["name", "cmdline"]):
        mark = marks.get(process.info["name"])
        if mark is not None and any(word.endswith(mark) for word in process.info["cmdline"] or ()):
            found[process.info["name"]] = process.pid
    return found, node.get_logs_dir_path()


def _joins_cluster() -> bool:
    # "local" is Ray's word for one of its own
    return os.environ.get("RAY_ADDRESS", "") not in ("", "local")


def living_nodes() -> list[dict[str, Any]]:
    """Ray's table of the nodes that it takes for alive."""
    return [node for node in ray.nodes() if node["Alive"]]


def node_label(node: Mapping[str, Any]) -> str:
    """What messages call a node of Ray's table: names need not differ, the beginnings of ids do.
    The name is that of
    ``ray start --node-name``, which is Ray's own (the address) where nobody gave one."""
    return f"{node['NodeName'] or node['NodeManagerHostname']} ({node['NodeID'][:8]})"


def ask_nodes(
    question: Callable[..., _T],
    nodes: Sequence[Mapping[str, Any]],
    timeout_s: float,
    *arguments: Any,
) -> dict[str, _T | Exception]:
    """What ``question(*arguments)`` returns on each node, by ``node_label``; or why there is no
    answer. A node that Ray finds dead meanwhile is left out: a raylet that was killed stays in
    Ray's table for 15 s (health_check_period_ms times health_check_failure_threshold, ray 2.60)."""
    deadline = time.monotonic() + timeout_s
    task = ray.remote(num_cpus=0, max_retries=0, max_calls=1)(question)
    asked = {
        node["NodeID"]: task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        )
        for node in nodes
    }
    refs = {node: place.remote(*arguments) for node, place in asked.items()}
    answers: dict[str, _T | Exception] = {}
    for node in nodes:
        try:
            answer = ray.get(refs[node["NodeID"]], timeout=max(0.0, deadline - time.monotonic()))
        except (RayError, TimeoutError) as error:
            if node["NodeID"] not in {living["NodeID"] for living in living_nodes()}:
                continue
            answer = error
        answers[node_label(node)] = answer
    return answers


def count_gpus() -> int:
    """The GPUs of this node that torch can use. For a task, which Ray shows none of them."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    return torch.cuda.device_count()


def start_with_retries(start: Callable[[], _T]) -> _T:
    """What ``start`` returns, which starts a Ray node. Ray's raylet gives up when its agents, each
    a Python process, take longer than 15 s to start, and no option changes that (ray 2.60,
    https://github.com/ray-project/ray/issues/65983). The next try finds their files in memory."""
    for left in reversed(range(_TRIES)):
        try:
            return start()
        except Exception as error:
            if left == 0 or "timed out during startup" not in str(error):
                raise
            logger.warning("Ray did not start in time: trying again, %d tries are left", left)
    raise AssertionError("unreachable")


def _alive(process: Mapping[str, Any]) -> bool:
    """Whether a process lives; of what is on another machine, Ray knows it."""
    if process["machine"] != machine_id():
        return (
            not ray.is_initialized()
            or ray._private.state.actors(process["actor"]).get("State") != "DEAD"
        )
    try:
        return psutil.Process(process["pid"]).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ask_about(process: Mapping[str, Any], question: Callable[[int], str]) -> str:
    """What ``question`` says of the id of a process, asked on its machine: on another one by a task
    on its node."""
    if process["machine"] == machine_id():
        return question(process["pid"])
    there = NodeAffinitySchedulingStrategy(process["node"], soft=False)
    try:
        reading = ray.remote(num_cpus=0, max_retries=0)(question).options(scheduling_strategy=there)
        return ray.get(reading.remote(process["pid"]), timeout=_READ_S)
    except (RayError, TimeoutError) as error:
        pattern = f"worker-*-{process['pid']}.err"
        return (
            f"(its log is {pattern} in Ray's logs on {process['host']}, and could not be read: "
            f"{error})"
        )
