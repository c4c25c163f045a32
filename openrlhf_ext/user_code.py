"""A user's code: importing a file, and telling what went wrong in it by its own lines and words,
without the frames of libraries and of this package."""

from __future__ import annotations

import linecache
import logging
import os
import re
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

logger = logging.getLogger(__name__)
_FRAME = re.compile(r'\s+File "(?P<file>.+?)", line \d+')
_HEAD = "Traceback (most recent call last):"
_PACKAGE = Path(__file__).resolve().parent
_LIBRARIES = (
    *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
    os.path.dirname(os.__file__),
)
_NOT_THE_USERS = tuple(
    f"{folder}{os.sep}" for folder in (*_LIBRARIES, _PACKAGE, _PACKAGE.parent / "patches")
)
_TEMPLATE = "<template>"  # as jinja2 names a chat template's frame


def import_file(name: str, path: str | os.PathLike[str]) -> ModuleType:
    """Runs a user's Python file as the module ``name``, which is in ``sys.modules`` then:
    dataclasses and pickle look it up there. Raises ImportError: it is no .py file; whatever the
    file raises.

    It reads no bytecode. Python takes a file's old bytecode for the new file if both are of one
    second and of one length, so that it may not see an edit of 0.5 into 0.8."""
    # frames of a relative one would not count as the user's (``_is_users``)
    file = os.path.abspath(path)
    if not file.endswith(".py"):
        raise ImportError(f"{file} is not a Python file")
    sys.modules[name] = module = ModuleType(name)
    module.__file__ = file
    linecache.checkcache(file)
    exec(compile(Path(file).read_bytes(), file, "exec", dont_inherit=True), vars(module))
    return module


def import_importable(path: str | os.PathLike[str], instead: str) -> ModuleType:
    """:func:`import_file` under the file's own name, by which processes that its code starts can
    import it, too (spawn, forkserver, pickle): they get ``sys.path``, whose last entry is its
    folder. Where something else has that name it is the module ``instead``, which they cannot
    import, and a warning says so."""
    file, name = os.path.realpath(path), Path(path).stem
    sys.path.append(os.path.dirname(file))  # last, so that a helper file cannot shadow a library
    found = sys.modules.get(name) or PathFinder.find_spec(name)
    place = getattr(found, "__file__", getattr(found, "origin", None))
    if os.path.realpath(place or "") != file:
        logger.warning(
            "%s: its processes cannot import it as %s, which is %s: rename it", file, name, place
        )
        name = instead
    return import_file(name, file)


def users_part(text: str) -> str:
    """A formatted traceback without the frames that are not the user's; '' if none is."""
    kept, is_kept, found = [], True, False
    for line in text.splitlines():
        if frame := _FRAME.match(line):
            is_kept = _is_users(frame["file"])
            found |= is_kept
        # no line of source, and no "[Previous line repeated ...]"
        elif not line.startswith(("    ", "  [")):
            is_kept = True
        if is_kept and line.strip() != _HEAD:
            kept.append(line)
    return "\n".join(kept).strip("\n") if found else ""


def users_frames(text: str) -> str:
    """The user's frames in what ``faulthandler`` wrote of all threads, innermost first."""
    return "\n".join(
        line
        for line in text.splitlines()
        if (frame := _FRAME.match(line)) and _is_users(frame["file"])
    )


def told(error: BaseException) -> str:
    """What happened: the user's frames and the exception's words, or these words alone where no
    frame is the user's."""
    return (
        users_part("".join(traceback.format_exception(error))) or f"{type(error).__name__}: {error}"
    )


def line_of(function: Any, path: str | os.PathLike[str]) -> str:
    """The file, and the line of a function in it; the file alone where it is an object that is
    called."""
    code = getattr(function, "__code__", None)
    return f"{path}, line {code.co_firstlineno}" if code else str(path)


def coroutine_place(coroutine: Any) -> str:
    """The coroutines that it waits in, from the outermost to the innermost."""
    places = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        places.append(f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})")
        coroutine = coroutine.cr_await
    return " -> ".join(places) or "an unknown place"


def thread_place(thread: threading.Thread) -> str:
    """The user's functions that the thread is in, from the outermost to the innermost."""
    frames = (
        traceback.walk_stack(sys._current_frames().get(thread.ident or 0))
        if thread.is_alive()
        else ()
    )
    places = [
        f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{line})"
        for frame, line in frames
        if _is_users(frame.f_code.co_filename)
    ]
    return " -> ".join(reversed(places)) or "an unknown place"


@contextmanager
def time_limit(seconds: float, doing: str) -> Iterator[None]:
    """Raises TimeoutError in what runs for longer; in the main thread only, whose signals these
    are."""

    def stop(_: int, __: FrameType | None) -> None:
        raise TimeoutError(f"{doing} took longer than {seconds:g} s")

    earlier = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)


def _is_users(file: str) -> bool:
    return file == _TEMPLATE or (
        os.path.isabs(file) and not file.startswith(_NOT_THE_USERS) and "-packages/" not in file
    )
