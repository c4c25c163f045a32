"""Who may talk to a run's Ray: one that the run starts itself listens on loopback, and asks for a token of its own."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import grpc
from ray._common.tls_utils import load_certs_from_env
from ray._private import ray_constants
from ray._private.authentication.authentication_token_generator import generate_new_authentication_token
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError

LOOPBACK = "127.0.0.1"
_TOKEN_FILE = "RAY_AUTH_TOKEN_PATH"
_TOKEN = "RAY_AUTH_TOKEN"  # counts more than the file
_MODE = "RAY_AUTH_MODE"
_CLUSTER = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR


@contextmanager
def private_ray(counted_gpus: int | None) -> Iterator[None]:
    """In the body this process and those that it starts use a Ray of their own: on loopback, with a new token.

    The token is in a file of mode 600, whose name processes inherit.

    Args:
        counted_gpus: no process gets a GPU, also where there are some, and Ray counts so many; None: they get them.
    """
    # No device has this number. Ray takes the k-th entry for its k-th GPU (ray 2.55 worker.py:1126), so an empty list
    # would be an IndexError, and no list this machine's GPUs.
    devices = {} if counted_gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(["-1"] * counted_gpus)}
    with tempfile.TemporaryDirectory(prefix="ray_token_") as folder:
        file = Path(folder) / "token"
        file.touch(mode=0o600)
        file.write_text(generate_new_authentication_token())
        # Ray replaces 127.0.0.1 by the address of the network's interface (ray 2.55 services.py:775), unless this
        # variable, which the name of other systems is in, says that there is no cluster (services.py:791); its servers
        # take loopback for what listens there only
        with ray_settings({_MODE: "token", _TOKEN_FILE: str(file), _TOKEN: None, _CLUSTER: "0", **devices}):
            yield


@contextmanager
def ray_settings(values: Mapping[str, str | None]) -> Iterator[None]:
    """The body sees these variables of the environment (None: not set), and so does Ray, imported or not."""
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
    """What the processes of a run need whose Ray is on loopback, so that they listen there too; empty on clusters."""
    if ray_constants.ENABLE_RAY_CLUSTER:
        return {}
    return {"VLLM_HOST_IP": LOOPBACK, "GLOO_SOCKET_IFNAME": "lo"}


class TokenRefused(ConnectionError):
    """Ray's head asks for a token that this process does not have; with the remedy."""


def asks_for_token(address: str, timeout_s: float) -> bool:
    """Whether the GCS at an address (host:port) refuses who has no token.

    Raises:
        ConnectionError: it did not answer within ``timeout_s`` seconds; with what it said.
    """
    return _is_refused(address, timeout_s, ())


def check_token(address: str, timeout_s: float) -> None:
    """Looks whether the GCS at an address (host:port) takes this process's token. Ray by itself says it after 20 s.

    Raises:
        TokenRefused: it does not.
        ConnectionError: as ``asks_for_token``.
    """
    if not asks_for_token(address, timeout_s):
        return
    where = "RAY_AUTH_MODE=token, and its token in the file RAY_AUTH_TOKEN_PATH (by default ~/.ray/auth_token)"
    try:
        header = AuthenticationTokenLoader.instance().get_token_for_http_header()  # none in another mode
    except AuthenticationError as error:
        raise TokenRefused(f"Ray at {address} asks for a token, which cannot be read: {error}; set {where}") from None
    if not header:
        raise TokenRefused(f"Ray at {address} asks for a token, and this process has none: set {where}")
    if _is_refused(address, timeout_s, tuple(header.items())):
        raise TokenRefused(f"Ray at {address} asks for another token than this process has: set {where}")


def _is_refused(address: str, timeout_s: float, metadata: tuple[tuple[str, str], ...]) -> bool:
    with contextlib.closing(_channel(address)) as channel:
        try:
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")(b"", timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                return True
            raise ConnectionError(f"Ray at {address} does not answer: {error.details()}") from error
    return False


def _channel(address: str) -> grpc.Channel:
    """As Ray makes one (ray 2.55 grpc_utils.py), but with no token of this process's."""
    if not ray_constants.env_bool("RAY_USE_TLS", False):
        return grpc.insecure_channel(address, ray_constants.GLOBAL_GRPC_OPTIONS)
    own, key, authority = load_certs_from_env()
    return grpc.secure_channel(
        address, grpc.ssl_channel_credentials(authority, key, own), ray_constants.GLOBAL_GRPC_OPTIONS
    )
