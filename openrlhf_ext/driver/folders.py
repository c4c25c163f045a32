"""A run has its folders for itself, from before it moves anything until it has ended, restarts included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from openrlhf_ext.checkpoints import CheckpointStore
from openrlhf_ext.config import ConfigError, RunConfig
from openrlhf_ext.locks import FolderLock, LockError
from openrlhf_ext.options import Violation


@contextmanager
def own_folders(config: RunConfig) -> Iterator[None]:
    """Holds the locks of everything that the run writes into and moves aside; nothing half-written is in ``ckpt.path``.

    Raises:
        ConfigError: another run has one of the folders.
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
        CheckpointStore(config.ckpt.path, config.ckpt.max_num).clean()
        yield


def _folders(config: RunConfig) -> dict[Path, tuple[str, ...]]:
    """The folders, links resolved, and the options that name them."""
    named = {"ckpt.path": Path(config.ckpt.path), "ckpt.output_dir": Path(config.ckpt.output_dir)}
    if config.logger.metrics_path is not None:
        named["logger.metrics_path"] = Path(config.logger.metrics_path).parent
    folders: dict[Path, tuple[str, ...]] = {}
    for option, folder in named.items():
        folders[folder.resolve()] = (*folders.get(folder.resolve(), ()), option)
    return folders
