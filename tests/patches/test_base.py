from __future__ import annotations

import dataclasses

import pytest

from openrlhf_ext.patches import base
from openrlhf_ext.patches.base import Patch, PatchRefused

NUMPY = Patch(
    name="some_patch",
    dependency="numpy",
    versions=("2.3.5",),
    problem="p",
    change="c",
    removal="r",
    install=lambda: None,
    need=lambda: (True, "because"),
)


@pytest.fixture
def install_version(monkeypatch: pytest.MonkeyPatch):
    return lambda version: monkeypatch.setattr(
        base, "installed_version", lambda distribution: version
    )


def test_a_known_version_is_active(install_version) -> None:
    install_version("2.3.5")
    NUMPY.require_known_version()
    status = NUMPY.status()
    assert (status.active, status.state, status.installed, status.reason) == (
        True,
        "active",
        "2.3.5",
        "because",
    )


def test_another_version_is_refused_with_both_versions_and_a_remedy(install_version) -> None:
    install_version("2.4.0")
    assert NUMPY.status().state == "refused"
    with pytest.raises(
        PatchRefused, match=r"some_patch.*numpy 2\.3\.5, found 2\.4\.0.*requirements/cpu\.lock"
    ):
        NUMPY.require_known_version()


def test_a_patch_that_is_not_needed_does_not_mind_the_version(install_version) -> None:
    install_version("2.4.0")
    status = dataclasses.replace(NUMPY, need=lambda: (False, "CUDA is here")).status()
    assert (status.active, status.state, status.reason) == (False, "not needed", "CUDA is here")


def test_an_absent_dependency_is_not_installed(install_version) -> None:
    install_version(None)
    assert NUMPY.status().state == "not installed"
