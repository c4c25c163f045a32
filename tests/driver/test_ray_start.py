from __future__ import annotations

import pytest

from openrlhf_ext.driver.ray_start import patiently


class Starts:
    """Fails with the given messages, one after the other, and then starts."""

    def __init__(self, *failures: str) -> None:
        self.failures, self.calls = list(failures), 0

    def __call__(self) -> str:
        self.calls += 1
        if self.failures:
            raise Exception(self.failures.pop(0))
        return "started"


def test_a_node_that_ray_gave_up_too_early_is_started_again(caplog):
    start = Starts("The current node timed out during startup.", "The current node timed out during startup.")
    assert patiently(start) == "started" and start.calls == 3
    assert "trying again, 3 tries are left" in caplog.text


def test_other_errors_are_not_repeated_and_tries_end():
    start = Starts("no such option", "")
    with pytest.raises(Exception, match="no such option"):
        patiently(start)
    assert start.calls == 1
    start = Starts(*["The current node timed out during startup."] * 9)
    with pytest.raises(Exception, match="timed out during startup"):
        patiently(start)
    assert start.calls == 5
