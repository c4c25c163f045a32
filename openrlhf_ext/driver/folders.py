"""A run has its folders for itself, from before it moves anything until it has ended, restarts included."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from openrlhf_ext.checkpoints import CheckpointStore
from openrlhf_ext.config import ConfigError, RunConfig
from openrlhf_ext.locks import FolderLock, LockError
from openrlhf_ext.options import Violation

logger = logging.getLogger(__name__)


@contextmanager
def own_folders(config: RunConfig) -> Iterator[None]:
    """Holds the locks of everything that the run writes into and moves aside.

    Nothing half-written is in ``ckpt.path``, and without ``ckpt.load_enable`` no checkpoint of an earlier run: whatever
    is there later was written by this one, and a restart may go on from it.

    Raises:
        ConfigError: another run has one of the folders, or one cannot be written to.
    """
    faults, take_over = [], config.ckpt.take_over_lock
    with ExitStack() as held:
        for folder, options in _folders(config).items():
            names = " and ".join(options)
            try:
                held.enter_context(closing(FolderLock(folder, take_over, "add --ckpt.take_over_lock")))
            except LockError as error:
                faults.append(Violation(options, f"{names} {folder} {error}, or give another {names}"))
            except OSError as error:
                faults.append(Violation(options, f"{names} {folder} cannot be locked: {error}; give another {names}"))
        if faults:
            raise ConfigError(faults)
        try:
            _prepare_checkpoints(CheckpointStore(config.ckpt.path, config.ckpt.max_num), config.ckpt.load_enable)
        except OSError as error:
            fault = Violation(("ckpt.path",), f"ckpt.path cannot be used: {error}; give another")
            raise ConfigError([fault]) from error
        yield


def _prepare_checkpoints(store: CheckpointStore, goes_on: bool) -> None:
    store.clean()
    if not goes_on and (aside := store.set_aside_all()) is not None:
        logger.warning(
            "%s holds checkpoints of an earlier run, and ckpt.load_enable is off: they are moved to %s",
            store.folder, aside,
        )  # fmt: skip


def _folders(config: RunConfig) -> dict[Path, tuple[str, ...]]:
    """The folders, links resolved, and the options that name them."""
    named = {"ckpt.path": Path(config.ckpt.path), "ckpt.output_dir": Path(config.ckpt.output_dir)}
    if config.logger.metrics_path is not None:
        named["logger.metrics_path"] = Path(config.logger.metrics_path).parent
    folders: dict[Path, tuple[str, ...]] = {}
    for option, folder in named.items():
        folders[folder.resolve()] = (*folders.get(folder.resolve(), ()), option)
    return folders
