"""No job outlives its test, however the test ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.jobs import Job


@pytest.fixture(autouse=True)
def stop_jobs() -> Iterator[None]:
    """Stops the jobs that the test has started and not seen the end of."""
    yield
    while Job.started:
        Job.started.pop().stop()
