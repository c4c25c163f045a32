"""One process at a time works in a folder: a lock that names its holder."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import psutil

from openrlhf_ext.inputs import INTEGER, TEXT, InputError, check, decode
from openrlhf_ext.outputs import FileDisplaced, require_in_place

logger = logging.getLogger(__name__)

LOCK = ".lock"
_ENDING_S = 30.0  # a holder that was killed leaves processes that hold the file until they end, too
_LOOK_S = 0.2
# Lustre without -o flock, NFS without lockd
_UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


_held: list[FolderLock] = []


class LockError(RuntimeError):
    """The folder is somebody else's; the message, which follows the folder's name, has the holder
    and the remedy."""


@dataclass(frozen=True)
class Holder:
    """Who holds a lock; ``since``: local time of its host."""

    host: str
    pid: int
    since: str

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host} since {self.since}"

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def has_ended(self) -> bool:
        try:
            return self.is_here and psutil.Process(self.pid).status() in (
                psutil.STATUS_ZOMBIE,
                psutil.STATUS_DEAD,
            )
        except (psutil.NoSuchProcess, ValueError):  # ValueError: a number that is no process's
            return True


class FolderLock:
    """Held by this process and its forks until ``close``, or until they have ended: the system lets
    go of it then.

    The file stays in the folder, with the holder's name while there is one. A name that a killed
    process has left is no obstacle on its own host. One of another host is, since not every shared
    file system tells one host what another one has locked.

    LockError: another process holds it, or may hold it. With ``take_over`` the name of a process of
    another host is no obstacle either, if the file is not locked; ``remedy``: of somebody who knows
    that this process has ended.
    """

    def __init__(self, folder: Path, take_over: bool, remedy: str) -> None:
        # completions and prompts are the user's
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self._remedy = folder, remedy
        self._file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take(take_over)
        except BaseException:
            os.close(self._file)
            raise
        _held.append(self)

    def close(self) -> None:
        _held.remove(self)
        os.ftruncate(self._file, 0)
        os.close(self._file)

    def check(self) -> None:
        """Raises FileDisplaced: the folder under this name is another one now, where others may
        be."""
        require_in_place(self._file, self._folder / LOCK)

    def _take(self, take_over: bool) -> None:
        deadline, told = time.monotonic() + _ENDING_S, False
        while not self._is_locked():
            holder = self._holder()
            # without a name: between its first two acts, or its last two
            if (holder is not None and not holder.has_ended) or time.monotonic() > deadline:
                who = holder or "a process that has not given its name"
                raise LockError(f"is in use by {who}: wait until it has ended")
            if not told:
                told = True
                said = "%s: waiting %g s at most for what is left of %s"
                logger.info(said, self._folder, _ENDING_S, holder or "a run")
            time.sleep(_LOOK_S)
        holder = self._holder()
        if holder is not None and not holder.is_here and not take_over:
            raise LockError(
                f"was in use by {holder}, and this host ({socket.gethostname()}) cannot see "
                f"whether that process has ended: if it has, {self._remedy}"
            )
        if holder is not None:
            logger.warning(
                "%s was in use by %s, which has ended: it is taken over", self._folder, holder
            )
        ours = Holder(
            socket.gethostname(), os.getpid(), datetime.now().isoformat(sep=" ", timespec="seconds")
        )
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(asdict(ours)).encode(), 0)

    def _is_locked(self) -> bool:
        """Tries to get the lock; whether this process has it now."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            logger.warning(
                "%s is on a file system without locks (%s): another process is only noticed by "
                "its name in %s",
                self._folder,
                error.strerror,
                LOCK,
            )
            holder = self._holder()
            return holder is None or not holder.is_here or holder.has_ended
        return True

    def _holder(self) -> Holder | None:
        text = os.pread(self._file, 1 << 12, 0)
        if not text:
            return None
        where = str(self._folder / LOCK)
        try:
            named = check(decode(text, where), where, {"host": TEXT, "pid": INTEGER, "since": TEXT})
            return Holder(named["host"], named["pid"], named["since"])
        except InputError as error:
            logger.warning("%s: the name of the lock's last holder is lost", error)
            return None


def check_held() -> None:
    """Looks at every lock that this process, or the one that it was forked from, holds: before each
    act that changes what is in a run's folders. Raises FileDisplaced."""
    for lock in _held:
        lock.check()


def displaced() -> str:
    """What ``check_held`` raises, '' if it does not."""
    try:
        check_held()
    except FileDisplaced as error:
        return str(error)
    return ""
