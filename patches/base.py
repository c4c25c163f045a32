"""What a patch is: what it is for, which versions it knows, whether this environment needs it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

State = Literal["active", "not needed", "not installed", "refused"]


class PatchRefused(ImportError):
    """A dependency needs a patch, but not in a version that the patch was written for."""


@dataclass(frozen=True)
class PatchStatus:
    """One line of the doctor's table of patches.

    Attributes:
        name: file name of the patch, without suffix.
        dependency: distribution that is patched.
        versions: versions of it that the patch was written for.
        installed: its installed version, None if it is absent.
        active: the patch acts, or will act as soon as the dependency is imported.
        state: the same with the reason of inactivity: active, not needed, not installed, refused.
        reason: one sentence on why.
        removal: when the patch can be deleted.
    """

    name: str
    dependency: str
    versions: tuple[str, ...]
    installed: str | None
    active: bool
    state: State
    reason: str
    removal: str


@dataclass(frozen=True)
class Patch:
    """A runtime change to one pinned dependency.

    Attributes:
        name, dependency, versions, removal: see `PatchStatus`.
        problem: what is wrong in the dependency, with file and line.
        change: what the patch does about it.
        install: registers import hooks; cheap, idempotent, imports nothing heavy.
        need: looks at the environment; returns whether the patch is needed here, and why (not).
        optional: a dependency without it is only slower: one of another version is left as it is,
        not refused.
    """

    name: str
    dependency: str
    versions: tuple[str, ...]
    problem: str
    change: str
    removal: str
    install: Callable[[], None]
    need: Callable[[], tuple[bool, str]]
    optional: bool = False

    def apply(self) -> None:
        """Installs it, but for an optional one that was not written for what is installed."""
        if not self.optional or installed_version(self.dependency) in self.versions:
            self.install()

    def require_known_version(self) -> None:
        """Raise `PatchRefused` unless the installed dependency is one that this patch was written
        for."""
        installed = installed_version(self.dependency)
        if installed not in self.versions:
            raise PatchRefused(self._refusal(installed))

    def status(self) -> PatchStatus:
        """What this patch does, or would do, in the present environment."""
        installed = installed_version(self.dependency)
        state, reason = self._judge(installed)
        return PatchStatus(
            name=self.name,
            dependency=self.dependency,
            versions=self.versions,
            installed=installed,
            active=state == "active",
            state=state,
            reason=reason,
            removal=self.removal,
        )

    def _judge(self, installed: str | None) -> tuple[State, str]:
        if installed is None:
            return "not installed", f"{self.dependency} is not installed"
        needed, reason = self.need()
        if not needed:
            return "not needed", reason
        if installed in self.versions:
            return "active", reason
        if self.optional:
            known = f"{self.dependency} {' or '.join(self.versions)}"
            return "not needed", f"written for {known}; another one only starts more slowly"
        return "refused", self._refusal(installed)

    def _refusal(self, installed: str | None) -> str:
        return (
            f"patch {self.name} was written for {self.dependency} {' or '.join(self.versions)}, "
            f"found {installed or 'no version metadata'}: install the pinned version "
            "(requirements/cpu.lock), or check the patch against this version and add it to "
            f"VERSIONS in patches/{self.name}.py"
        )


@cache
def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, None if it is absent. Imports nothing. Looked up once:
    the look-up takes a millisecond, and engines ask in every layer of every step."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
