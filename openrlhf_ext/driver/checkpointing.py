"""Saving a run's state while it trains: the ranks write their parts, the driver adds its own and completes the folder.

A checkpoint holds

    policy/, critic/    what ``openrlhf_ext.megatron.checkpoint`` writes
    controller.json     the driver's state: place in the data, prompts in flight, KL coefficient, random states, ...
    groups.safetensors  tokens and log-probs of the groups that are finished and not trained
    config.yaml         the resolved configuration
    manifest.json       size and SHA-256 of all of the above
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import ray
import safetensors.numpy

from openrlhf_ext.checkpoints import CheckpointError, CheckpointStore, FileEntry, Manifest, write_file
from openrlhf_ext.checkpoints.files import VISIBLE_S, absent_files
from openrlhf_ext.checkpoints.plain import write_plain

logger = logging.getLogger(__name__)

CONTROLLER = "controller.json"
GROUPS = "groups.safetensors"
CONFIG = "config.yaml"


DriverState = tuple[dict[str, Any], dict[str, np.ndarray]]
"""Plain values, and arrays by name."""


class RanksTimeoutError(TimeoutError):
    """Some ranks did not answer in time; the message names them and what they were doing."""


def ask_ranks(group: Any, who: str, method: str, timeout_s: float, **arguments: Any) -> list:
    """Calls a method on every rank of a group and returns their results; the first error is raised at once.

    Args:
        group: OpenRLHF's ``RayActorGroup``.
        who: what the group is called in messages: policy, critic.

    Raises:
        RanksTimeoutError: not all answered within ``timeout_s`` seconds.
    """
    refs = group.async_run_method(method_name=method, **arguments)
    waiting, deadline = list(refs), time.monotonic() + timeout_s
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            ranks = [i for i, ref in enumerate(refs) if ref in waiting]
            raise RanksTimeoutError(
                f"waited {timeout_s:g} s for {method} on the {who} ranks, {ranks} have not finished; raise "
                "--train.step_timeout_s if this is expected to take longer"
            )
        ray.get(ready)
    return ray.get(refs)


def save_hf(group: Any, who: str, path: str, option: str, timeout_s: float) -> None:
    """Has a group write its model in Hugging Face form, and makes sure that the driver sees what rank 0 wrote.

    Args:
        option: which one names the folder, for messages.

    Raises:
        RanksTimeoutError: not all answered within ``timeout_s`` seconds.
        CheckpointError: rank 0 wrote to storage that the driver does not see.
    """
    sizes, *_ = ask_ranks(group, who, "save_model", timeout_s, path=path)
    if absent := absent_files(Path(path), sizes, VISIBLE_S):
        raise CheckpointError(
            f"rank 0 of the {who} has written {path}, but the driver does not see {', '.join(absent)} there: the "
            f"files are on the disk of rank 0's node. {option} must be on storage that all nodes and the driver share"
        )


@dataclass(frozen=True)
class CheckpointOptions:
    """What is written where.

    Attributes:
        folder: of all checkpoints.
        save_steps: training steps between them; None = none at regular intervals.
        keep, max_bytes: how many are kept besides the best one, and how much space they may take.
        resumable, hf: forms in which a checkpoint is written.
        background: write resumable checkpoints while training goes on.
        best_metric: evaluation metric whose best checkpoint is kept; None = none is.
        timeout_s: longest wait for the ranks.
    """

    folder: str
    save_steps: int | None
    keep: int
    max_bytes: float
    resumable: bool
    hf: bool
    background: bool
    best_metric: str | None
    timeout_s: float

    @classmethod
    def of(cls, config: Any) -> CheckpointOptions:
        """From the options of a run."""
        ckpt = config.ckpt
        return cls(
            folder=ckpt.path,
            save_steps=None if ckpt.save_steps == -1 else ckpt.save_steps,
            keep=ckpt.max_num,
            max_bytes=ckpt.max_mem * 1e9,
            resumable=not ckpt.disable_ds,
            hf=ckpt.save_hf,
            background=ckpt.async_enable,
            best_metric=ckpt.best_metric_key or None,
            timeout_s=config.train.step_timeout_s,
        )

    def store(self) -> CheckpointStore:
        """The folder that they are kept in."""
        return CheckpointStore(self.folder, self.keep, self.max_bytes)


@dataclass
class _Pending:
    """A checkpoint that the ranks are still writing."""

    step: int
    started: float
    entries: list[FileEntry]
    best: tuple[str, float] | None
    waiting: dict[str, Any] = field(default_factory=dict)  # groups by name


class Checkpointer:
    """Writes the checkpoints of one run.

    Args:
        groups: actor groups whose classes are ``CheckpointedRank``, by name; the first one is the policy's.
        config_text: the resolved configuration.
        about: what the manifest says for people.
        constants: added to the driver's state of every checkpoint.
    """

    def __init__(
        self,
        options: CheckpointOptions,
        groups: Mapping[str, Any],
        config_text: str,
        about: Mapping[str, Any],
        constants: Mapping[str, Any],
    ) -> None:
        self.options, self.groups, self.config_text = options, dict(groups), config_text
        self.about = {**about, "versions": {name: version(name) for name in ("torch", "megatron-core", "safetensors")}}
        self.constants = dict(constants)
        self.store = options.store()
        self.best_value: float | None = None
        self._pending: _Pending | None = None

    def after_step(self, step: int, evaluation: Mapping[str, float] | None, state: Callable[[], DriverState]) -> None:
        """Saves if the step is due, or if its evaluation is the best so far.

        Args:
            evaluation: of the weights after the step, if it was evaluated.
            state: makes the driver's state, plain values and arrays; called only if it is saved.
        """
        self.poll()
        best = self._best_of(evaluation)
        if best is None and (self.options.save_steps is None or step % self.options.save_steps):
            return
        if best is not None:
            self.best_value = best[1]
        self.save(step, *state(), best=best)

    def _best_of(self, evaluation: Mapping[str, float] | None) -> tuple[str, float] | None:
        name = self.options.best_metric
        if name is None or evaluation is None:
            return None
        value = float(evaluation[name])
        return (name, value) if self.best_value is None or value > self.best_value else None

    def save(
        self, step: int, state: dict[str, Any], arrays: Mapping[str, np.ndarray], best: tuple[str, float] | None = None
    ) -> None:
        """Writes the checkpoint of a step, in the forms that are asked for."""
        if self.options.resumable:
            self._save_resumable(step, state, arrays, best)
        if self.options.hf:
            self._save_hf(step)
        if best is not None and not self.options.resumable:
            self.store.mark_best(step, *best)
        self.store.rotate()

    def _save_hf(self, step: int) -> None:
        group_name, policy = next(iter(self.groups.items()))
        path = f"{self.store.path_of(step)}_hf"
        save_hf(policy, group_name, path, "ckpt.path", self.options.timeout_s)

    def _save_resumable(
        self, step: int, state: dict[str, Any], arrays: Mapping[str, np.ndarray], best: tuple[str, float] | None
    ) -> None:
        self.finish()
        started, folder = time.monotonic(), self.store.begin(step)
        try:
            entries = [
                write_plain(folder, CONTROLLER, {**state, **self.constants}),
                write_file(folder, GROUPS, [safetensors.numpy.save(dict(arrays))]),
                write_file(folder, CONFIG, [self.config_text.encode()]),
            ]
            pending = _Pending(step, started, entries, best)
            arguments = {"folder": str(folder), "background": self.options.background}
            for name, group in self.groups.items():
                files = ask_ranks(group, name, "save_state", self.options.timeout_s, name=name, **arguments)
                if self.options.background:
                    pending.waiting[name] = group
                else:
                    entries += _flat(files)
        except BaseException:
            self.store.abandon(step)
            raise
        self._pending = pending
        if not self.options.background:
            self._commit()

    def poll(self) -> None:
        """Completes a checkpoint that was written in the background, if all ranks are done."""
        self._collect(wait=False)

    def finish(self) -> None:
        """Waits for a checkpoint that is being written in the background and completes it."""
        self._collect(wait=True)

    def _collect(self, wait: bool) -> None:
        pending = self._pending
        if pending is None:
            return
        try:
            for name, group in [*pending.waiting.items()]:
                files = ask_ranks(group, name, "saved_files", self.options.timeout_s, wait=wait)
                if any(part is None for part in files):
                    return
                pending.entries += _flat(files)
                del pending.waiting[name]
        except BaseException:
            self._pending = None
            self.store.abandon(pending.step)
            raise
        self._commit()

    def _commit(self) -> None:
        pending, self._pending = self._pending, None
        best = self.store.best()
        if pending.best is not None:
            best = {"step": pending.step, "metric": pending.best[0], "value": pending.best[1]}
        manifest = Manifest(pending.step, tuple(pending.entries), {**self.about, "best": best})
        path = self.store.commit(manifest)
        if pending.best is not None:
            self.store.mark_best(pending.step, *pending.best)
            logger.info("step %d is the best so far: %s = %.4f", pending.step, *pending.best)
        self.store.rotate()
        seconds, size = time.monotonic() - pending.started, manifest.size / 2**20
        logger.info("wrote the checkpoint %s (%.1f MiB, %.1f s)", path, size, seconds)


def _flat(parts: Iterable[Iterable[FileEntry]]) -> list[FileEntry]:
    return [entry for part in parts for entry in part]
