"""What the weight sync's two ends use of Ray, for machines without it: actors as processes, their
calls as futures.

The checks use it on every machine: Ray would start a cluster, and hide the GPU from actors that ask
for none.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import threading
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from multiprocessing.connection import Connection
from types import ModuleType, SimpleNamespace
from typing import Any


class ActorDied(RuntimeError):
    """The actor's process ended while a call was under way."""


class Actor:
    """A handle: ``actor.method.remote(...)`` returns a future. Calls run one after the other."""

    def __init__(self, module: str, name: str, args: tuple, options: dict[str, Any]) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")  # CUDA cannot be used in a forked process
        self.process = context.Process(
            target=_serve, args=(theirs, module, name, args, options), daemon=True
        )
        self.process.start()
        theirs.close()  # so that the actor's end is the only one: its death closes the connection
        self._turn = threading.Lock()

    def __getattr__(self, method: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *args, **options: self._call(method, args, options))

    def _call(self, method: str, args: tuple, options: dict[str, Any]) -> Future:
        future: Future = Future()
        threading.Thread(
            target=self._ask, args=(future, (method, args, options)), daemon=True
        ).start()
        return future

    def _ask(self, future: Future, call: tuple[str, tuple, dict]) -> None:
        try:
            with self._turn:
                self._connection.send(call)
                error, result = self._connection.recv()
        except (EOFError, OSError):
            error, result = (
                ActorDied(f"the actor died in {call[0]} (process {self.process.pid})"),
                None,
            )
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def _serve(
    connection: Connection, module: str, name: str, args: tuple, options: dict[str, Any]
) -> None:
    from openrlhf_ext import patches

    patches.apply()
    install()
    actor = getattr(importlib.import_module(module), name).actor_class(*args, **options)
    while True:
        try:
            method, args, options = connection.recv()
        except EOFError:
            return
        try:
            answer = (
                None,
                None if method == "__ray_ready__" else getattr(actor, method)(*args, **options),
            )
        except Exception as error:
            answer = (error, None)
        connection.send(answer)


def remote(**_resources: Any) -> Any:
    """``@ray.remote(...)`` of a class: ``Class.remote(...)`` starts an actor."""

    def decorate(actor_class: type) -> SimpleNamespace:
        where = actor_class.__module__, actor_class.__qualname__
        return SimpleNamespace(
            actor_class=actor_class, remote=lambda *args, **options: Actor(*where, args, options)
        )

    return decorate


def get(futures: Any, timeout: float | None = None) -> Any:
    """The result of a future, or of each."""
    if isinstance(futures, Future):
        return futures.result(timeout)
    return [future.result(timeout) for future in futures]


def wait(
    futures: list[Future], num_returns: int = 1, timeout: float | None = None
) -> tuple[list, list]:
    """(done, others), ``num_returns`` done at most; returns at the first."""
    done, _ = wait_for(futures, timeout, FIRST_COMPLETED)
    ready = [future for future in futures if future in done][:num_returns]
    return ready, [future for future in futures if future not in ready]


def install() -> None:
    """``import ray`` means this module from now on, in this process."""
    stand_in = ModuleType("ray")
    stand_in.__dict__.update(remote=remote, get=get, wait=wait)
    stand_in.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")  # type: ignore[attr-defined]
    sys.modules["ray"] = stand_in
