from __future__ import annotations

import pytest
from ray._private.node import Node

from openrlhf_ext.patches.base import PatchRefused
from openrlhf_ext.patches.ray_services import without_services

SERVICES = ("start_monitor", "start_api_server", "start_log_monitor")


def methods() -> list[object]:
    return [getattr(Node, name) for name in SERVICES]


@pytest.mark.parametrize("read_logs", [True, False])
def test_ray_s_own_services_come_back_however_the_start_ends(read_logs: bool) -> None:
    usual = methods()
    with pytest.raises(RuntimeError, match="did not start"):
        with without_services(read_logs):
            replaced = [mine is not theirs for mine, theirs in zip(methods(), usual, strict=True)]
            assert replaced == [True, True, not read_logs]
            raise RuntimeError("Ray did not start")
    assert methods() == usual


def test_another_ray_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openrlhf_ext.patches.base.installed_version", lambda _: "2.56.0")
    with pytest.raises(PatchRefused, match="ray 2.55.0, found 2.56.0"):
        with without_services():
            pytest.fail("entered")
